"""The real cache in pictures: one head's pages and bytes, the twins at equal memory, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from wakekv import stats
from wakekv.drawing.mechanism import DESTROYED, FETCHED, LOST, READ, RESERVOIR, RESIDENT, STATES, UNSEEN
from wakekv.drawing.picture import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    YELLOW,
    Picture,
    canvas,
    round_numbers,
    styled,
    thousands,
)
from wakekv.errors import InputError
from wakekv.tables import twins

LOOK = {  # of an arm
    "reversible": {"color": ORANGE, "marker": "o"},
    "destructive": {"color": GREEN, "marker": "X"},
    "destructive, wider": {"color": GREEN, "marker": "P", "linestyle": "--", "markerfacecolor": "white"},
    "snapkv, wider": {"color": PINK, "marker": "v", "linestyle": "--"},
}
PART_COLOUR = dict(zip(twins.PARTS, (YELLOW, ORANGE, BLUE, PINK, "#d9d9d9", "#f0f0f0")))


@styled
def ten_steps(watched: Mapping[str, Mapping], about: str) -> Picture:
    """One head's pages over some steps of a real cache, a panel an arm; below, the bytes that each step moved.

    watched: arm -> what `witness.watch` returns, of one head.  about: for the foot.
    """
    first = next(iter(watched.values()))
    shown = sorted({page for head in watched.values() for one in head["steps"] for page in _met(one)})
    figure = canvas(9, 2.4 + 0.11 * len(shown), about)
    panels = figure.subplots(2, len(watched), height_ratios=[5, 1], sharex=True, sharey="row", squeeze=False)
    tables, met = [], set()
    for (upper, lower), (arm, head) in zip(panels.T, watched.items()):
        grid, leaves = _grid(head, shown, arm)
        span = (head["first_step"] - 0.5, head["first_step"] + len(head["steps"]) - 0.5)
        cmap = ListedColormap(list(STATES.values()))
        extent = (*span, -0.5, len(shown) - 0.5)
        upper.imshow(grid, cmap=cmap, vmin=-0.5, vmax=len(STATES) - 0.5, origin="lower", aspect="auto", extent=extent)
        for edge in np.arange(span[0] + 1, span[1]):
            upper.axvline(edge, color="white", linewidth=1)
        row, column = np.nonzero(leaves)
        upper.plot(head["first_step"] + column, row, "v", color=BLACK, markersize=3)
        _bytes(lower, head, LOOK[arm]["color"])
        n_missed = sum(len(one["missed"]) for one in head["steps"])
        n_wanted = sum(len(one["wanted"]) for one in head["steps"])
        upper.set_title(f"{arm}, B = {head['budget']}: {n_missed} misses of {n_wanted} wants")
        lower.set_xlabel("decode step")
        lower.set_xticks([one["step"] for one in head["steps"]])
        tables.append(_states(grid, leaves, shown, head).assign(cache=arm))
        met |= set(np.unique(grid).tolist())
    where = f"KV head {first['kv_head']} of layer {first['layer']}"
    panels[0, 0].set_yticks(range(0, len(shown), 2), shown[::2])
    panels[0, 0].set_ylabel(f"page: all that {where} meets")
    panels[1, 0].set_ylabel("KiB moved")
    patches = [Patch(facecolor=STATES[name], edgecolor="0.7", linewidth=0.5, label=name)
               for i, name in enumerate(STATES) if i in met - {UNSEEN}]  # fmt: skip
    patches.append(Line2D([], [], marker="v", ls="", color=BLACK, label="leaves as the step ends"))
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), handlelength=1, columnspacing=1.2)
    return Picture(figure, pd.concat(tables, ignore_index=True), f"Pages and bytes of {where} over ten decode steps")


def _met(one: Mapping) -> set[int]:
    return {*one["resident"], *one["wanted"]} | ({one["closed"]} - {None})


def _grid(head: Mapping, shown: Sequence[int], arm: str) -> tuple[np.ndarray, np.ndarray]:
    """int8 [page, step] of STATES, and bool [page, step]: it leaves as the step ends."""
    grid = np.full((len(shown), len(head["steps"])), RESERVOIR if arm == "reversible" else DESTROYED, np.int8)
    leaves = np.zeros(grid.shape, bool)
    place = {page: i for i, page in enumerate(shown)}
    n_known = head["n_pages"]
    for step, one in enumerate(head["steps"]):
        for pages, state in (one["resident"], RESIDENT), (one["wanted"], READ), (one["missed"], LOST):
            grid[[place[page] for page in pages], step] = state
        grid[[place[page] for page in one["fetched"]], step] = FETCHED
        grid[[i for page, i in place.items() if page >= n_known], step] = UNSEEN
        leaves[[place[page] for page in one["demoted"]], step] = True
        n_known += one["closed"] is not None
    return grid, leaves


def _bytes(axes, head: Mapping, colour: str) -> None:
    at = [one["step"] for one in head["steps"]]
    axes.bar(at, [one["bytes_in"] / 1024 for one in head["steps"]], width=0.8, color=colour)
    axes.bar(at, [-one["bytes_out"] / 1024 for one in head["steps"]], width=0.8, color=GREY)
    axes.axhline(0, color=BLACK, linewidth=0.7)
    for x, one in zip(at, head["steps"]):
        if one["closed"] is not None:
            axes.annotate("written", (x, 0), (0, -2), textcoords="offset points", ha="center", va="top", fontsize=6)


def _states(grid, leaves, shown, head) -> pd.DataFrame:
    row, column = np.nonzero(grid != UNSEEN)
    table = {"step": head["first_step"] + column, "page": np.array(shown)[row]}
    table |= {"state": [list(STATES)[state] for state in grid[row, column]], "leaves": leaves[row, column]}
    return pd.DataFrame(table)


@styled
def equal_memory(rows: Sequence[Mapping], about: str, resamples: int = stats.RESAMPLES) -> Picture:
    """Reversible and destructive at equal memory: KL to the full cache, top-1 agreement and misses a step against the
    budget, a column a regime. Lines: means over prompts, bands: 95 % bootstrap; thin lines: prompts."""
    numbers = twins.at_equal_memory(rows, resamples).numbers
    regimes = [name for name in dict.fromkeys(numbers["regime"]) if name != twins.ALL]
    whats = ("kl_mean", "agreement", "misses_per_step")
    figure = canvas(max(5, 3.4 * len(regimes)), 1 + 1.7 * len(whats), about)
    grid = figure.subplots(len(whats), len(regimes), squeeze=False, sharex=True, sharey="row")
    for column, regime in zip(grid.T, regimes):
        mine = pd.DataFrame([row for row in rows if row["regime"] == regime])
        for axes, what in zip(column, whats):
            number, label, _ = twins.COUNTED[what]
            of = numbers[(numbers["regime"] == regime) & (numbers["what"] == what)]
            for (arm, _), one in mine.assign(it=number(mine)).groupby(["arm", "seed"]):
                axes.plot(one["budget"], one["it"], color=LOOK[arm]["color"], linewidth=0.4, alpha=0.4)
            for arm, line in of.groupby("arm", sort=False):
                axes.plot(line["budget"], line["estimate"], **LOOK[arm])
                axes.fill_between(line["budget"], line["lo"], line["hi"], color=LOOK[arm]["color"], alpha=0.12, lw=0)
            _logarithmic(axes) if what == "kl_mean" else axes.set_ylim(0, None)
            _budgets(axes, sorted(set(numbers["budget"])))
            if axes in grid[:, 0]:
                axes.set_ylabel(label + (", nats a token" if what == "kl_mean" else ""))
        n = int(numbers[numbers["regime"] == regime]["n"].max())
        column[0].set_title(f"{regime}, {n} prompt{'s' if n > 1 else ''}")
        column[-1].set_xlabel("B, pages a KV head")
    figure.align_ylabels(grid[:, 0])
    _arms(figure)
    return Picture(
        figure, numbers, "KL, agreement and misses of a reversible cache and its destructive twins by budget"
    )


def _logarithmic(axes) -> None:
    axes.set_yscale("log")
    round_numbers(axes.yaxis, between=False)


def _budgets(axes, budgets: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _arms(figure) -> None:
    handles = [Line2D([], [], label=twins.SAYS.get(arm, arm), **look) for arm, look in LOOK.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)


@styled
def stall_price(rows: Sequence[Mapping], about: str) -> Picture:
    """What return buys, and its price: from each destructive point (as many bytes) an arrow to the reversible one.
    Across: milliseconds a step spent waiting for pages; down: KL to the full cache. Means over prompts. Timed."""
    table = pd.DataFrame(rows).assign(stall_ms=lambda t: 1e3 * t["stall_s"] / t["n_steps"])
    means = table.groupby(["regime", "budget", "arm"], sort=False)[["stall_ms", "kl_mean"]].mean().reset_index()
    regimes = list(dict.fromkeys(means["regime"]))
    figure = canvas(max(5, 3.6 * len(regimes)), 3.2, about)
    grid = figure.subplots(1, len(regimes), squeeze=False, sharey=True, sharex=True)[0]
    for axes, regime in zip(grid, regimes):
        for budget, some in means[means["regime"] == regime].groupby("budget"):
            points = some.set_index("arm")[["stall_ms", "kl_mean"]]
            pair = [tuple(points.loc[arm]) for arm in (twins.FAIR, twins.OURS)]
            axes.annotate("", pair[1], pair[0], arrowprops={"arrowstyle": "->", "color": "0.6", "linewidth": 0.8})
            for arm, point in points.iterrows():
                axes.plot(*point, **LOOK[arm] | {"linestyle": ""})
            axes.annotate(f"B = {budget}", pair[1], (4, 3), textcoords="offset points", fontsize=6.5)
        axes.set(title=regime, xlabel="waiting for pages, ms a step")
        _logarithmic(axes)
    grid[0].set_ylabel("KL to full, nats a token")
    _arms(figure)
    return Picture(figure, means, "Stall time paid against KL to the full cache, by budget")


@styled
def step_parts(rows: Sequence[Mapping], about: str) -> Picture:
    """Where the time of a step goes, a bar a way to decide: stacked milliseconds, mean over steps. Timed."""
    table = twins.split(rows)
    names = list(dict.fromkeys(table["settings"]))
    figure = canvas(8, 0.9 + 0.32 * len(names), about)
    axes = figure.subplots()
    for y, name in enumerate(names):
        left = 0.0
        for part, ms in table[table["settings"] == name][["part", "ms"]].to_numpy():
            axes.barh(y, ms, left=left, color=PART_COLOUR[part], edgecolor="0.6", linewidth=0.4, height=0.7)
            left += ms
        axes.annotate(f"{left:.0f} ms", (left, y), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set(xlabel="milliseconds a decode step", ylabel="cache")
    used = [part for part in twins.PARTS if part in set(table["part"])]
    handles = [Patch(facecolor=PART_COLOUR[p], edgecolor="0.6", linewidth=0.4, label=twins.PARTS[p]) for p in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return Picture(figure, table, "Time of a decode step, split into scoring, moving, attention and the rest")


@styled
def needle_map(rows: Sequence[Mapping], about: str) -> Picture:
    """Needles found, by the length of the text and their depth in it: a row a budget, a column a cache; full first."""
    table = twins.needles(rows)
    arms, budgets = list(dict.fromkeys(table["arm"])), sorted(set(table["budget"].dropna()))
    lengths, depths = (sorted(set(table[name])) for name in ("length", "depth"))
    figure = canvas(max(5, 0.6 + 1.8 * len(arms)), 0.8 + 1.6 * len(budgets), about)
    grid = figure.subplots(len(budgets), len(arms), squeeze=False, sharey=True, sharex=True)
    for line, budget in zip(grid, budgets):
        for axes, arm in zip(line, arms):
            mine = table[(table["arm"] == arm) & ((table["budget"] == budget) | table["budget"].isna())]
            cells = mine.pivot(index="depth", columns="length", values="found").reindex(index=depths, columns=lengths)
            image = axes.imshow(cells, cmap="cividis", vmin=0, vmax=1, aspect="auto")
            for (y, x), share in np.ndenumerate(cells.to_numpy()):
                axes.text(x, y, f"{share:.0%}", ha="center", va="center", color="w" if share < 0.5 else "k", fontsize=7)
            axes.set_xticks(range(len(lengths)), lengths)
            axes.set_yticks(range(len(depths)), depths)
            axes.tick_params(length=0)
        line[0].set_ylabel(f"B = {budget:.0f}\ndepth of the needle")
    for axes, arm in zip(grid[0], arms):
        axes.set_title(twins.SAYS.get(arm, arm).replace(", ", ",\n"), fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("tokens")
    figure.colorbar(image, ax=grid, pad=0.01, label="needles found", ticks=[0, 0.5, 1])
    return Picture(figure, table, "Needles found by length and depth, with and without return of pages")


GROWTH = (BLACK, GREY, ORANGE, SKY, GREEN, BLUE, PINK)


@styled
def cost_growth(rows: Sequence[Mapping], about: str) -> Picture:
    """How a step's time, and the memory on the fast tier, grow with the context: a line a cache. The left is timed.

    Lines of equal memory lie on each other, the first widest, and one label at their end names them all."""
    table = twins.costs(rows).numbers
    if table["context"].nunique() < 2:
        raise InputError("growth needs at least two contexts")
    figure = canvas(8, 3.2, about)
    time, memory = figure.subplots(1, 2)
    lines = list(table.groupby("settings", sort=False))
    held = {name: tuple(line["fast_mb"].round(6)) for name, line in lines}
    for colour, (name, line) in zip(GROWTH, lines):
        style = {"color": colour, "marker": "o", "label": name, "linestyle": "--" if "destructive" in name else "-"}
        time.plot(line["context"], line["step_ms"], **style)
        equal = [other for other in held if held[other] == held[name]]
        above = len(equal) - 1 - equal.index(name)  # lines that are drawn on this one
        memory.plot(line["context"], line["fast_mb"], **style, linewidth=1.4 + 2 * above, markersize=4.5 + 3.5 * above)
        if name == equal[0]:
            flat = held[name][-1] < 1.5 * held[name][0]
            place = {"textcoords": "offset points", "ha": "right", "va": "bottom" if flat else "top", "fontsize": 7}
            end = (line["context"].iloc[-1], held[name][-1])
            memory.annotate("\n".join(equal), end, (0, 9) if flat else (-42, 8), **place)
    memory.margins(y=0.08)
    for axes, label in (time, "ms a decode step (median)"), (memory, "MB on the fast tier"):
        axes.set(xlabel="tokens of context", ylabel=label, ylim=(0, None), xticks=sorted(set(table["context"])))
        thousands(axes.xaxis)
    handles, labels = time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return Picture(figure, table, "Time of a step and memory on the fast tier by context")
