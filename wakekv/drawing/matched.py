"""Reactive against the others at equal memory: every system on Figure 1a's axes, and the margin at every budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from wakekv import stats
from wakekv.drawing.picture import BLACK, BLUE, GREY, ORANGE, Picture, canvas, styled
from wakekv.drawing.policies import BUDGETS, stamp
from wakekv.errors import InputError
from wakekv.simulation import match
from wakekv.simulation.study import Study
from wakekv.tables.contests import MATCHED, NAMES, OURS, contest, method_of, short, survey

WHEN = {"offline": "offline, before any text", "prefill": "at prefill", "decode": "while decoding"}
GIVES_UP = {"recoverable": "given up: recoverable", "destroyed": "given up: destroyed"}
MARKERS = "os^Dv"
WIN, LOSS, TIE = ORANGE, BLUE, GREY
POINTS = 40  # budgets, spread over the range, at which a margin is drawn


@styled
def figure_1a(
    studies: Sequence[Study],
    budgets: Sequence[int] = BUDGETS,
    numbers: pd.DataFrame | None = None,
    resamples: int = stats.RESAMPLES,
) -> Picture:
    """Figure 1a with numbers: where each system stands (when it decides, across; what becomes of what it gives up,
    down), and in each corner how many points of miss rate it has above reactive with the same memory.

    A mark a regime, with its interval over prompts: the mean over `budgets`. Orange: reactive misses less; blue: the
    system does. Hollow: no number, for the reason that the table gives. numbers: `survey` of the studies, if at hand.
    """
    if not studies:
        raise InputError("no study to draw: record logs of at least one model and regime")
    table = survey(studies, budgets, resamples) if numbers is None else numbers
    groups = {(up, when): _sorted(table, up, when) for up in GIVES_UP for when in WHEN}
    tall = [max(len(groups[up, when]) for when in WHEN) for up in GIVES_UP]
    figure = canvas(10.5, 1.2 + 0.21 * sum(tall), stamp(studies))
    grid = figure.subplots(len(GIVES_UP), len(WHEN), sharex=True, squeeze=False, height_ratios=np.maximum(tall, 3))
    shape = dict(zip(dict.fromkeys(study.regime for study in studies), MARKERS))
    for (up, when), axes in zip(groups, grid.flat):
        _corner(axes, table, groups[up, when], shape, tall[list(GIVES_UP).index(up)])
    for axes, words in zip(grid[0], WHEN.values()):
        axes.set_title(f"decides {words}", fontsize=9)
    for axes, words in zip(grid[:, 0], GIVES_UP.values()):
        axes.set_ylabel(words, fontsize=9)
    figure.align_ylabels(grid[:, 0])
    grid[-1, 1].set_xlabel("points of miss rate above reactive's at the same memory (left is better)")
    handles = [Line2D([], [], color=GREY, marker=marker, ls="", label=name) for name, marker in shape.items()]
    handles += [Line2D([], [], color=c, marker="o", ls="-", label=f"{who} misses less") for c, who in _WHO.items()]
    handles.append(Line2D([], [], label="no number (see table)", **_HOLLOW))
    place = {"loc": "outside upper center", "ncols": len(handles), "fontsize": 7, "columnspacing": 1.2}
    says = "in bold: its heads have roles.   *: it knows this very log beforehand"
    figure.legend(handles=handles, title=says, title_fontsize=7, **place)
    says = f"{len(table['policy'].unique())} systems on the two axes of Figure 1a, with miss rates at equal memory"
    return Picture(figure, table, says)


_WHO = {WIN: "reactive", LOSS: "the system"}
_HOLLOW = {"color": GREY, "markerfacecolor": "white", "marker": "o", "ls": ""}


def _sorted(table: pd.DataFrame, up: str, when: str) -> list[str]:
    """The policies of a corner: those with a number first, the one that reactive beats by most on top."""
    corner = table[(table["gives_up"] == up) & (table["when"] == when)]
    mean = corner.groupby("policy", sort=False)["margin"].mean()
    return list(mean.sort_values(ascending=False, na_position="last", kind="stable").index)


def _corner(axes, table: pd.DataFrame, policies: Sequence[str], shape: Mapping[str, str], rows: int) -> None:
    axes.axvline(0, color=ORANGE, linewidth=0.8)
    for y, policy in enumerate(policies):
        at = table[table["policy"] == policy]
        axes.axhline(y, color="0.93", linewidth=0.7, zorder=0)
        if policy == OURS:
            axes.plot(0, y, marker="*", color=ORANGE, markersize=9)
            continue
        if at["margin"].isna().all():
            axes.plot(0, y, **_HOLLOW)
            axes.annotate("no number", (0, y), (5, 0), textcoords="offset points", fontsize=6, va="center", color=GREY)
        for place, row in enumerate(at.dropna(subset="margin").to_dict("records")):
            colour, dy = _colour(row["margin"]), 0.22 * (place - (len(at) - 1) / 2)
            if np.isfinite(row["lo"]):
                axes.plot([100 * row["lo"], 100 * row["hi"]], [y + dy] * 2, color=colour, linewidth=1, alpha=0.7)
            axes.plot(100 * row["margin"], y + dy, marker=shape[row["regime"]], color=colour, ls="", markersize=4)
    names = [NAMES.get(policy, policy) for policy in policies]
    offline = [(table.loc[table["policy"] == policy, "calibrated"] == "this prompt").any() for policy in policies]
    axes.set_yticks(range(len(policies)), [f"{name} *" if own else name for name, own in zip(names, offline)])
    for label, policy in zip(axes.get_yticklabels(), policies):
        roles = table.loc[table["policy"] == policy, "roles"].iloc[0]
        label.set_fontweight("bold" if roles else "normal")
    axes.set_ylim(max(rows, 3) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    if not policies:
        axes.text(0.5, 0.5, "none of them", transform=axes.transAxes, ha="center", color=GREY)


def _colour(margin: float) -> str:
    return WIN if margin > 0 else LOSS if margin < 0 else TIE


@styled
def margins(
    studies: Sequence[Study],
    published: Mapping | None = None,
    budgets: Sequence[int] = BUDGETS,
    policies: Sequence[str] = tuple(MATCHED),
    resamples: int = 1000,
) -> Picture:
    """The other's miss rate less reactive's, at equal memory, over all budgets: a row a policy, a column a study.

    Above zero reactive misses less. Line and band: mean over prompts, 95 % bootstrap; dots: `budgets`; thin lines:
    prompts. Diamonds: the paper's tables under linear matching, other models in the same regime. Crosses at the foot:
    budgets at which nothing matches. Rings: losses of the prompts' pooled curves at `budgets`, which Table 1 counts.
    Prompt by prompt such a point can be a tie: a pooled curve of reactive ends at the last budget that all prompts
    have, where it holds less than a policy that keeps everything. published: the content of artifact/published.json;
    None leaves the diamonds out.
    """
    if not studies:
        raise InputError("no study to draw: record logs of at least one model and regime")
    figure = canvas(max(6, 0.9 + 2.1 * len(studies)), 0.9 + 1.5 * len(policies), stamp(studies))
    grid = figure.subplots(len(policies), len(studies), squeeze=False, sharex="col", sharey="row")
    drawn = []
    for line, policy in zip(grid, policies):
        for axes, study in zip(line, studies):
            found = contest(study.curves[OURS], study.curves[policy], method_of(policy))
            drawn.append(_margin(axes, study, policy, found, budgets, resamples))
            if published is not None:
                drawn.append(_paper(axes, published, study.regime, policy))
        line[0].set_ylabel(f"against\n{short(policy)}")
    for axes, study in zip(grid[0], studies):
        axes.set_title(f"{study.model}\n{study.regime}, {study.n_prompts} prompts")
    for axes in grid[-1]:
        axes.set_xlabel("the other's budget B (pages a head)")
    figure.supylabel("miss rate above reactive's at equal memory", fontsize=8)
    figure.align_ylabels(grid[:, 0])
    handles = [Line2D([], [], color=c, marker="o", ls="", label=words) for c, words in _MARGIN.items()]
    handles += [Line2D([], [], color=c, label=words) for c, words in (("0.3", "mean"), ("0.75", "one prompt"))]
    handles += [Line2D([], [], color=BLACK, marker="x", ls="", label="nothing matches")]
    handles += [Line2D([], [], label="pooled (Table 1), the other misses less", **_RING)]
    if published is not None:
        handles.append(Line2D([], [], label="published (other models)", **_DIAMOND))
    figure.legend(handles=handles, loc="outside upper center", ncols=3 if len(studies) < 5 else -(-len(handles) // 2))
    says = f"Miss rate of {', '.join(policies)} above reactive's at equal memory, over all budgets"
    return Picture(figure, pd.concat(drawn, ignore_index=True), says)


_MARGIN = {WIN: "reactive misses less", LOSS: "the other misses less", TIE: "both the same"}
_RING = {"color": LOSS, "marker": "o", "markerfacecolor": "none", "ls": "", "markersize": 7}
_DIAMOND = {"color": BLACK, "marker": "D", "markerfacecolor": "white", "ls": "", "markersize": 4}


def _margin(axes, study: Study, policy: str, found, budgets: Sequence[int], resamples: int) -> pd.DataFrame:
    axes.axhline(0, color=BLACK, linewidth=0.7)
    axes.set_xscale("log", base=2)
    _ticks(axes, study.n_pages)
    if found.reason:
        axes.text(0.5, 0.7, "no number:\nit never gave up a page", transform=axes.transAxes, ha="center", color=GREY)
        return pd.DataFrame({"model": [study.model], "regime": study.regime, "policy": policy, "reason": found.reason})
    at = sorted({p.budget for tally in found.prompts for p in tally.points})
    if len(at) > POINTS:
        near = np.geomspace(at[0], at[-1], POINTS).round().astype(int)
        at = sorted(set(near.tolist()) | {b for b in budgets if b in at})
    each = np.full((len(found.prompts), len(at)), np.nan)  # [prompt, budget]
    for row, tally in zip(each, found.prompts):
        margin = {p.budget: p.margin for p in tally.points if p.verdict != "excluded"}
        row[:] = [margin.get(b, np.nan) for b in at]
    for row in each if len(each) > 1 else []:
        axes.plot(at, row, color="0.75", linewidth=0.5, zorder=1)
    cells = [stats.mean(column, resamples=resamples) for column in each.T]
    table = pd.DataFrame([cell.row() for cell in cells]).drop(columns=["unit", "method", "descriptive"])
    table.insert(0, "budget", at)
    mean, lo, hi = (table[name].to_numpy() for name in ("estimate", "lo", "hi"))
    for sign, colour in (1, WIN), (-1, LOSS):
        axes.fill_between(at, 0, mean, where=sign * mean >= 0, interpolate=True, color=colour, alpha=0.25, linewidth=0)
        marked = np.isin(at, budgets) & (sign * mean > 1e-12)
        axes.plot(np.array(at)[marked], mean[marked], "o", color=colour, markersize=4, zorder=4)
    same = np.isin(at, budgets) & np.isclose(mean, 0, atol=1e-12)
    axes.plot(np.array(at)[same], mean[same], "o", color=TIE, markersize=4, zorder=4)
    axes.plot(at, mean, color="0.3", linewidth=1, zorder=3)
    axes.fill_between(at, lo, hi, color=GREY, alpha=0.3, linewidth=0, zorder=2)
    lost = np.isnan(mean)
    floor = axes.get_xaxis_transform()
    axes.plot(np.array(at)[lost], np.full(lost.sum(), 0.04), "x", color=BLACK, markersize=3, transform=floor)
    reasons = {p.budget: p.reason for tally in found.prompts for p in tally.points if p.verdict == "excluded"}
    table["reason"] = [reasons.get(b, "") for b in at]
    pooled = {p.budget: p for p in found.pooled.points if p.verdict != "excluded"}
    table["pooled"] = [pooled[b].margin if b in pooled else np.nan for b in at]
    less = [b for b in at if b in budgets and b in pooled and pooled[b].verdict == "loss"]
    axes.plot(less, [pooled[b].margin for b in less], zorder=5, **_RING)
    return table.assign(source="simulated", model=study.model, regime=study.regime, policy=policy)


def _ticks(axes, n_pages: int) -> None:
    axes.xaxis.set_major_locator(FixedLocator([2**i for i in range(12) if 2**i <= n_pages]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _paper(axes, data: Mapping, regime: str, policy: str) -> pd.DataFrame:
    """The published points of a policy in a regime; only those with a published memory can be matched."""
    method, rows = "budget" if policy == "evict" else "linear", []
    for combination in data["table3_sweep"]["rows"]:
        model, of = combination.split("/")
        known = policy == "evict" or policy in data["realised_memory_pages"].get(combination, {})
        if of == regime and known:
            points = match.METHODS[method](*(match.published(data, combination, name) for name in (OURS, policy)))
            points = [p for p in points if p.verdict != "excluded"]
            axes.plot([p.budget for p in points], [p.margin for p in points], zorder=5, **_DIAMOND)
            rows += [{"source": "published", "model": model, "budget": p.budget, "estimate": p.margin} for p in points]
    return pd.DataFrame(rows).assign(regime=regime, policy=policy)
