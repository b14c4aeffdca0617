"""Beyond the paper's rule: how far towards the optimum one budget for all heads goes, and where its memory is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from wakekv.drawing.picture import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, Picture, canvas, styled
from wakekv.drawing.pooled import bar, colours_of
from wakekv.errors import InputError
from wakekv.simulation.beyond import GOAL, OURS, PAPER, RANGE, Counted, Flow, gap, groups, pick, splits
from wakekv.tables.gained import IN_CACHE, IN_TIME, SPLITS
from wakekv.tables.twins import ALL, estimated

LOWEST = -0.6  # where the picture of the way ends; what is lower is said at its foot
LINES = {
    OURS: {"color": ORANGE, "label": "commons"},
    "pooled": {"color": GREEN, "label": "pooled (reads, untuned)"},
    "own": {"color": BLUE, "linestyle": "--", "label": SPLITS["own"]},
    "other_regime": {"color": SKY, "linestyle": "--", "label": SPLITS["other_regime"]},
}


@styled
def gap_closed(
    cases: Sequence[Counted], part: str = "heldout", within: tuple[int, int] = RANGE, resamples: int = 1000
) -> Picture:
    """How much of the way from reactive to the optimum of the same scope each rule goes, against the total budget.

    A row a head unit, a column a model and regime; bands: 95 % over prompts; dotted: the goal. Where the paper's rule
    misses hardly more than the optimum (a gap below 0.001 of the wants) nothing is drawn: there is nothing to close.
    What lies below the axis is a triangle at its foot, and a note says how many there are and how deep the lowest lies.
    """
    if not any(case.part == part for case in cases):
        raise InputError(f"no {part} prompt to draw: count logs of prompts that the split says are {part}")
    units = list(dict.fromkeys(case.unit for case in cases))
    names = list(dict.fromkeys(case.name for case in cases if case.part == part))
    n = {name: sum(case.name == name for case in pick(cases, units[0], part)) for name in names}
    figure = canvas(max(5, 1 + 1.75 * len(names)), 1.1 + 1.8 * len(units), _stamp(pick(cases, units[0], part), part))
    grid = figure.subplots(len(units), len(names), squeeze=False, sharex="col", sharey=True)
    at = np.unique(np.linspace(within[0], within[1], 13).round().astype(int))
    fixed, drawn = splits([case for case in cases if case.part], at), []
    for (model, regime, of, unit), group in groups(cases).items():
        if of == part:
            axes = grid[units.index(unit), names.index(f"{model} / {regime}")]
            own = fixed[(fixed["model"] == model) & (fixed["regime"] == regime) & (fixed["unit"] == unit)]
            drawn.append(_lines(axes, group, own[own["part"] == part], at, resamples))
            _beneath(axes, drawn[-1])
    for axes, name in zip(grid[0], names):
        axes.set_title(f"{name.replace(' / ', chr(10))}, {n[name]} prompts")
    for axes, unit in zip(grid[:, 0], units):
        axes.set_ylabel(f"of the way, {unit.replace('_', ' ')}s")
        axes.set_ylim(LOWEST, 1.02)
    for axes in grid[-1]:
        axes.set_xlabel("budget B, pages a head")
    handles = [Line2D([], [], **style) for style in LINES.values()]
    handles.append(Line2D([], [], color=BLACK, linestyle=":", label=f"goal, {GOAL:.0%}"))
    if (pd.concat(drawn)["estimate"] < LOWEST).any():
        handles.append(Line2D([], [], color=GREY, marker="v", markersize=4, ls="", label="below the axis"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=7)
    says = (
        f"Share of the gap between reactive and the optimum that pooled budgets and fixed splits close, {part} prompts"
    )
    return Picture(figure, pd.concat(drawn, ignore_index=True), says)


def _beneath(axes, table: pd.DataFrame) -> None:
    """Say what the axis cuts off: a triangle where a point lies below it, how many do, and where the lowest lies."""
    height = 0.025
    for line, style in LINES.items():
        low = table[(table["policy"] == SPLITS.get(line, line)) & (table["estimate"] < LOWEST)]
        if len(low):
            look = {"color": style["color"], "marker": "v", "linestyle": "", "markersize": 4}
            axes.plot(low["budget"], [height] * len(low), transform=axes.get_xaxis_transform(), **look)
            said = f"{len(low)} below, down to {low['estimate'].min():.2g}".replace("-", "−")
            axes.text(0.57, height, said, transform=axes.transAxes, ha="center", va="center", fontsize=6.5)
            height += 0.07


def _stamp(cases: Sequence[Counted], part: str) -> str:
    models = ", ".join(dict.fromkeys(case.model for case in cases))
    return f"simulated from logs of {len(cases)} prompts, {part}: {models}"


def _lines(axes, group: Sequence[Counted], fixed: pd.DataFrame, at: np.ndarray, resamples: int) -> pd.DataFrame:
    axes.axhline(GOAL, color=BLACK, linestyle=":", linewidth=0.8)
    axes.axhline(0, color=GREY, linewidth=0.6)
    first, n = group[0], min(case.n_pages for case in group)
    paper, best = (sum(case.misses[name][:n] for case in group) for name in (PAPER, "optimum"))
    least = 0.001 * sum(case.wants.sum() for case in group)
    at, rows = [int(b) for b in at if b <= n and paper[b - 1] - best[b - 1] >= least], []
    for rule in (OURS, "pooled"):
        found = [gap(group, rule, b, resamples=resamples)[2] for b in at]
        rows += [{"policy": rule, "budget": b, **one.row()} for b, one in zip(at, found)]
        axes.plot(at, [one.value for one in found], **LINES[rule])
        axes.fill_between(at, [f.lo for f in found], [f.hi for f in found], color=LINES[rule]["color"], alpha=0.2, lw=0)
    total = fixed.groupby("budget")[["own", "other_regime"]].sum(min_count=len(group))
    for kind in total:
        if at and total[kind].notna().any():
            closed = [(paper[b - 1] - total.loc[b, kind]) / (paper[b - 1] - best[b - 1]) for b in at]
            rows += [{"policy": SPLITS[kind], "budget": b, "estimate": c, "n": len(group)} for b, c in zip(at, closed)]
            axes.plot(at, closed, **LINES[kind], linewidth=1)
    table = pd.DataFrame(rows, columns=["policy", "budget", "estimate", "lo", "hi", "n"])
    return table.assign(model=first.model, regime=first.regime, split=first.part, unit=first.unit)


def _origin(flow: Flow) -> str:
    return f"simulated, a panel one log: {flow.model}, {flow.unit.replace('_', ' ')}s, B = {flow.budget}"


@styled
def pool_map(flows: Sequence[Flow]) -> Picture:
    """Where the pool's memory is: pages a head, layer by layer (up) and step by step (across), a panel a log; on the
    right the mean over steps. The dashed line is what each head would have if all had the same."""
    if not flows:
        raise InputError("nothing to draw: follow a pooled rule through a log first")
    figure = canvas(9, 3.1, _origin(flows[0]))
    grid = figure.subplots(1, len(flows) + 1, width_ratios=[3] * len(flows) + [2], sharey=True)
    top, colour = max(flow.by_layer().max() for flow in flows), colours_of(flow.regime for flow in flows)
    rows = []
    for axes, flow in zip(grid, flows):
        held, layers = flow.by_layer(), np.unique(flow.layer)
        image = axes.imshow(held, aspect="auto", origin="lower", cmap="cividis", vmin=0, vmax=top,
                            extent=(0, held.shape[1], layers[0] - 0.5, layers[-1] + 0.5))  # fmt: skip
        axes.set_title(flow.regime)
        axes.set_xlabel("decode step")
        grid[-1].plot(held.mean(1), layers, color=colour[flow.regime], label=flow.regime)
        parts = np.array_split(
            np.arange(held.shape[1]), min(32, held.shape[1])
        )  # the numbers: means of parts of the log
        own = {"model": flow.model, "regime": flow.regime, "unit": flow.unit, "budget": flow.budget}
        for part in parts:
            cells = zip(layers, held[:, part].mean(1))
            rows += [own | {"from_step": part[0], "layer": layer, "pages_a_head": pages} for layer, pages in cells]
    grid[0].set_ylabel("layer")
    equal = {"color": BLACK, "linestyle": "--", "linewidth": 0.8, "label": f"all the same: {flows[0].budget}"}
    grid[-1].axvline(flows[0].budget, **equal)
    grid[-1].set_xlabel("pages a head, mean")
    handles, labels = grid[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(handles), fontsize=7)
    figure.colorbar(image, ax=list(grid[:-1]), label="pages a head", fraction=0.03)
    return Picture(figure, pd.DataFrame(rows), "Pages a head that the pool holds, by layer and decode step")


@styled
def pool_price(rows: Sequence[Mapping], about: str, resamples: int = 1000) -> Picture:
    """What the rules cost in a real cache, a row of panels a budget: misses, waiting, a whole step in CPU time, and KL
    to the full cache. A point an arm, mean over prompts with 95 %; small: the prompts. The times are timed."""
    if not rows:
        raise InputError("nothing to draw: measure at least one prompt first")
    arms, budgets = (list(dict.fromkeys(row[name] for row in rows)) for name in ("arm", "budget"))
    whats = {"misses": IN_CACHE["misses"], "stall_ms": IN_TIME["stall_ms"], "step_cpu_ms": IN_TIME["step_cpu_ms"],
             "kl_mean": IN_CACHE["kl_mean"]}  # fmt: skip
    numbers, each = estimated(rows, whats, arms, resamples), pd.DataFrame(rows)
    figure = canvas(9, 0.6 + (0.5 + 0.19 * len(arms)) * len(budgets), about)
    grid = figure.subplots(len(budgets), len(whats), squeeze=False, sharey=True, sharex="col")
    colour = {PAPER: BLACK} | {rule: LINES[rule]["color"] for rule in (OURS, "pooled")}
    for line, budget in zip(grid, budgets):
        for axes, (what, (number, *_)) in zip(line, whats.items()):
            of = numbers[(numbers["regime"] == ALL) & (numbers["budget"] == budget) & (numbers["what"] == what)]
            for y, arm in enumerate(arms):
                some, row = each[(each["arm"] == arm) & (each["budget"] == budget)], of[of["arm"] == arm].iloc[0]
                look = {"color": colour[arm.split(",")[0]], "marker": "X" if "destructive" in arm else "o"}
                axes.plot(number(some), [y] * len(some), ".", color=look["color"], alpha=0.4, markersize=3)
                bar(axes, y, (row["lo"], row["hi"]), row["estimate"], **look)
            axes.set_xlim(0, None)
            axes.grid(axis="x", color="0.9", linewidth=0.6)
        line[0].set_yticks(range(len(arms)), arms)
        line[0].set_ylim(len(arms) - 0.5, -0.5)
        line[0].set_title(f"B = {budget} pages a KV head")
        line[0].set_ylabel("rule")
    for axes, (_, label, _) in zip(grid[-1], whats.values()):
        axes.set_xlabel(label + (", nats a token" if label == IN_CACHE["kl_mean"][1] else ""))
    return Picture(figure, numbers, "Misses, waiting, time of a step and KL of a budget for all heads in a real cache")
