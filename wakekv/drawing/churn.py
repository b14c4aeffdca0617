"""Do heads change their minds? Heads that sleep and wake, one head that drifts, Table 4, and how long spells last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator

from wakekv.drawing.picture import BLACK, BLUE, GREY, ORANGE, Picture, canvas, styled
from wakekv.drawing.pooled import PAPER, bar, colours_of, legend, logs_stamp, of, panels, stretch
from wakekv.drawing.reading import SCORE_COLOURS, SCORE_EDGES
from wakekv.errors import InputError
from wakekv.heads.churn import drift_sweep, survival
from wakekv.heads.churn import spells as spells_of
from wakekv.heads.pools import TABLE_4, Pool, counted, stamp
from wakekv.heads.reads import DRIFT_BELOW, DRIFT_WINDOW, Reads
from wakekv.heads.wakeups import WAKE, events

WINDOWS = {4: "#c6dbef", DRIFT_WINDOW: "#6baed6", 16: "#2171b5", 32: "#08306b"}
THRESHOLDS = tuple(np.arange(1, 20) / 20)
OURS_HERE = {"color": ORANGE, "marker": "o", "linestyle": "", "markersize": 7, "zorder": 4, "clip_on": False}
PLAIN = FuncFormatter(lambda x, _: f"{x:g}")
READ_COLOURS = {"not read": "#ffffff", "read, not in the baseline": "#f0a868", "read, as in the baseline": "#2171b5"}
QUANTITIES = {  # Table 4's columns, and what else stands in the same panel
    "adjacent_jaccard_continuous": ("adjacent Jaccard,\ncontinuous score", "random_pair_jaccard_continuous"),
    "adjacent_jaccard_binary": ("adjacent Jaccard,\nbinary score", "random_pair_jaccard_binary"),
    "unstable_fraction": ("unstable fraction", "unstable_fraction_first"),
    "drift_fraction": ("drift fraction", None),
}


@styled
def wakers(logs: Sequence[Reads], most: int = 60) -> Picture:
    """The heads that wake, a row each, from the first to wake to the last, over all steps; a panel a log.

    A triangle is a wake-up (section 2.2). Heads without one, always asleep or always reading, are left out; of more
    than `most` heads those that wake most often are drawn.
    """
    if not logs:
        raise InputError("no log to draw: give the reads of at least one")
    woke = [events(reads.score) for reads in logs]
    chosen = [np.sort(np.argsort(-event.sum(1), kind="stable")[: min(most, event.any(1).sum())]) for event in woke]
    heights = [max(10, len(heads)) for heads in chosen]
    figure = canvas(9, 0.8 + sum(0.6 + 0.08 * n for n in heights), logs_stamp(logs))
    grid = figure.subplots(len(logs), 1, squeeze=False, height_ratios=heights)[:, 0]
    colours = {"cmap": ListedColormap(SCORE_COLOURS), "norm": BoundaryNorm(SCORE_EDGES, len(SCORE_COLOURS))}
    tables = []
    for axes, reads, event, heads in zip(grid, logs, woke, chosen):
        heads = heads[np.lexsort((heads, event[heads].argmax(1)))] if len(heads) else heads
        n_steps, layer = event.shape[1], reads.trace.layer[heads]
        shown = reads.score[heads] if len(heads) else np.zeros((1, n_steps))
        extent = (-0.5, n_steps - 0.5, len(shown) - 0.5, -0.5)
        image = axes.imshow(shown, extent=extent, aspect="auto", **colours)
        row, step = np.nonzero(event[heads])
        axes.scatter(step - 0.5, row, marker=">", s=8, color=ORANGE, linewidths=0)
        axes.set_yticks(range(len(heads)), layer)
        axes.tick_params(axis="y", labelsize=5.5, length=0, pad=1)
        rest = ~event.any(1)
        unslept = int((rest & (reads.score > WAKE).any(1)).sum())
        axes.set_title(
            f"{reads.name}: {event.sum()} wake-ups of {(~rest).sum()} heads; of the other {rest.sum()}, {unslept} read "
            f"the needle without having slept"
        )
        cells = {"log": reads.name, "place": row, "head": heads[row], "layer": layer[row], "step": step}
        tables.append(pd.DataFrame(cells))
    grid[-1].set_xlabel("decode step")
    grid[len(logs) // 2].set_ylabel("heads that wake, the first to do so above (number: layer)")
    scale = figure.colorbar(image, ax=list(grid), location="top", aspect=60, shrink=0.6, pad=0.02, ticks=SCORE_EDGES)
    scale.set_label("needle score: asleep below 0.05, awake above 0.2, triangle: a wake-up", fontsize=7)
    table = pd.concat(tables, ignore_index=True)
    return Picture(figure, table, f"The heads that wake, and when: {len(table)} wake-ups in {len(logs)} logs")


@styled
def head_pages(reads: Reads, head: int, first: int = 0, steps: int | None = None) -> Picture:
    """The pages that one head reads, step by step, and how far they are from those it began with.

    Blue: in the baseline, the page set that the head had at the last drift event (or at the first step). Below: the
    overlap with it, the median over 8 steps; a drift event where that falls below one half.
    """
    window = stretch(reads, head, first, steps)
    n_steps, at = reads.size.shape[1], np.arange(window.start, window.stop)
    words = np.ascontiguousarray(reads.pages[head])
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    event, median = reads.drift.event[head], reads.drift.median[head]
    began = np.maximum.accumulate(np.where(event, np.arange(n_steps), 0))
    known = bits & bits[began]
    grid = (bits.astype(int) + known)[window].T
    used = np.flatnonzero(grid.any(1))
    figure = canvas(9, 3.6, f"head {head} of {logs_stamp([reads])}")
    upper, lower = figure.subplots(2, 1, height_ratios=[3.4, 1], sharex=True)
    extent = (at[0] - 0.5, at[-1] + 0.5, -0.5, len(used) - 0.5)
    colours = ListedColormap(list(READ_COLOURS.values()))
    upper.imshow(grid[used], origin="lower", aspect="auto", extent=extent, cmap=colours, vmin=0, vmax=2)
    drifts = at[event[window]]
    for axes in (upper, lower):
        for step in drifts:
            axes.axvline(step - 0.5, color=BLACK, linewidth=0.8, linestyle=":")
    upper.set(ylabel=f"the {len(used)} pages it reads,\noldest below")
    upper.set_title(f"head {head} (layer {reads.trace.layer[head]}): drift events: {len(drifts)} in {len(at)} steps")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    lower.plot(at, median[window], color=BLUE)
    lower.axhline(DRIFT_BELOW, color=GREY, linewidth=0.8)
    lower.set(ylabel="overlap\n(median of 8)", xlabel="decode step", ylim=(0, 1.03), xlim=extent[:2])
    looks = {name: {"color": c, "marker": "s", "linestyle": ""} for name, c in list(READ_COLOURS.items())[:0:-1]}
    legend(figure, looks | {"drift event: a new baseline": {"color": BLACK, "linestyle": ":", "linewidth": 0.8}})
    table = pd.DataFrame({"step": at, "pages": reads.size[head, window], "in_baseline": known[window].sum(1)})
    table["overlap_median"], table["drift_event"] = np.round(median[window], 4), event[window]
    return Picture(figure, table, f"Pages read by head {head}, and its {len(drifts)} drifts away from a baseline")


@styled
def table_4(many: Sequence[Pool], numbers: pd.DataFrame, data: Mapping) -> Picture:
    """Table 4 as points with intervals, ours (`pools.churn`) above what the paper printed for the same regime."""
    kept, paper = counted(many), data["table4_churn"]
    regimes = list(dict.fromkeys([*(pool.regime for pool in kept), *(line["regime"] for line in paper)]))
    rows = sorted([*kept, *paper], key=lambda row: regimes.index(row["regime"] if row in paper else row.regime))
    names = [f"{r['regime']}: {r['model']} (published)" if r in paper else f"{r.regime}: {r.model}" for r in rows]
    figure = canvas(9, 0.9 + 0.23 * len(rows), stamp(kept))
    grid = figure.subplots(1, len(QUANTITIES), sharey=True)
    colours, drawn = colours_of(pool.model for pool in kept), []
    for axes, (quantity, (title, second)) in zip(grid, QUANTITIES.items()):
        column, score = TABLE_4[quantity]
        for y, row in enumerate(rows):
            if row in paper:
                if score in (None, row["score"]):
                    axes.plot(row[column], y, **PAPER)
                    drawn.append((quantity, row["regime"], row["model"], "published", row[column], np.nan, np.nan))
                continue
            own = of(numbers, row).set_index("quantity")
            looks = {second: {"marker": "|", "color": GREY}, quantity: {"marker": "o", "color": colours[row.model]}}
            for name, look in looks.items():
                if name:
                    estimate, *ends = own.loc[name, ["estimate", "lo", "hi"]].astype(float)
                    bar(axes, y, ends, estimate, **look)
                    drawn.append((name, row.regime, row.model, "ours", estimate, *ends))
        for y in np.flatnonzero([a.split(":")[0] != b.split(":")[0] for a, b in zip(names, names[1:])]):
            axes.axhline(y + 0.5, color="0.85", linewidth=0.7)
        whose = "active" if "jaccard" in quantity else "all"
        axes.set(title=title, xlabel=f"share of {whose} heads", xlim=(-0.02, None if "unstable" in quantity else 1.05))
        axes.grid(axis="x", color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
    grid[0].set(yticks=range(len(rows)), yticklabels=names, ylim=(len(rows) - 0.5, -0.5), ylabel="regime: model")
    grey = "random pairs of steps (Jaccard); against the first step of each window (unstable)"
    looks = {"ours, interval over prompts": {"color": BLACK, "marker": "o"}, "published": PAPER}
    legend(figure, looks | {grey: {"color": GREY, "marker": "|"}})
    table = pd.DataFrame(drawn, columns=["quantity", "regime", "model", "source", "estimate", "lo", "hi"])
    return Picture(figure, table, "Table 4 with intervals beside the published points")


@styled
def drift_settings(
    many: Sequence[Pool],
    data: Mapping,
    thresholds: Sequence[float] = THRESHOLDS,
    windows: Mapping[int, str] | None = None,
) -> Picture:
    """The drift fraction at other thresholds than 0.5 and windows than 8, a panel a model and regime.

    Published: at 0.5 and 8, on other models in the same regime. windows: steps -> colour.
    """
    kept, windows, tables = counted(many), windows or WINDOWS, []
    hollow = PAPER | {"markerfacecolor": "none", "zorder": 5}  # over the dot, which shows through
    figure, grid = panels(kept, 2.0, sharex=True, sharey=True)
    for (axes,), pool in zip(grid, kept):
        sweep = pd.DataFrame(drift_sweep(pool.sound, thresholds, list(windows)))
        tables.append(sweep.assign(model=pool.model, regime=pool.regime).drop(columns=["unit", "method"]))
        for window, line in sweep.groupby("window", sort=False):
            axes.plot(line["threshold"], line["estimate"], color=windows[window])
            if window == DRIFT_WINDOW:
                axes.fill_between(line["threshold"], line["lo"], line["hi"], color=windows[window], alpha=0.25, lw=0)
                here = line[np.isclose(line["threshold"], DRIFT_BELOW)]
                axes.plot(here["threshold"], here["estimate"], **OURS_HERE)
        for line in data["table4_churn"]:
            if line["regime"] == pool.regime:
                axes.plot(DRIFT_BELOW, line["drift_fraction"], **hollow)
        axes.axvline(DRIFT_BELOW, color=GREY, linewidth=0.6, linestyle=":")
        axes.set(title=f"{pool.name}, {len(pool.sound)} prompts", ylim=(-0.02, 1.02))
        axes.set(xlabel="threshold of the overlap", ylabel="heads that drift")
        axes.label_outer()
    looks = {f"median of {window} steps": {"color": colour} for window, colour in windows.items()}
    looks |= {"the paper's setting": OURS_HERE, "published": hollow}
    legend(figure, looks, columns=6)
    table = pd.concat(tables, ignore_index=True)
    return Picture(figure, table, "Drift fraction against threshold and window")


@styled
def spells(many: Sequence[Pool]) -> Picture:
    """How long heads go on reading the needle, and how long they rest: Kaplan-Meier over spells, a line a regime.

    A spell that the end of a log cuts off counts as longer than what was seen; one under way at the first step is left
    out. Bands resample prompts. Reading: needle score above 0.1.
    """
    kept, tables = counted(many), []
    models = list(dict.fromkeys(pool.model for pool in kept))
    figure = canvas(9, 0.7 + 2.3 * len(models), stamp(kept))
    grid = figure.subplots(len(models), 2, squeeze=False, sharex=True, sharey=True)
    colours = colours_of(pool.regime for pool in kept)
    for row, model in zip(grid, models):
        for axes, reading in zip(row, (True, False)):
            state = "reading" if reading else "resting"
            for pool in [pool for pool in kept if pool.model == model]:
                found = survival([spells_of(reads.active("continuous")) for reads in pool.sound], reading=reading)
                time, share = np.append(1, found.time), np.append(1.0, found.share)
                middle = f"{found.median.value:g}" if np.isfinite(found.median.value) else "not reached"
                label = f"{pool.regime}: {found.n_spells:,} spells, {found.n_censored:,} cut off, median {middle}"
                axes.step(time, share, where="post", color=colours[pool.regime], label=label)
                ends = [np.append(1.0, end) for end in (found.lo, found.hi)]
                axes.fill_between(time, *ends, step="post", color=colours[pool.regime], alpha=0.2, linewidth=0)
                cells = {"model": pool.model, "regime": pool.regime, "state": state, "step": found.time}
                tables.append(pd.DataFrame({**cells, "share": found.share, "lo": found.lo, "hi": found.hi}))
            axes.set(xscale="log", xlim=(1, None), yscale="log", ylim=(0.003, 1.1), title=f"{model}: spells of {state}")
            axes.set(xlabel="steps", ylabel="share that lasts longer")
            axes.xaxis.set_major_formatter(PLAIN)
            axes.yaxis.set_major_formatter(PLAIN)
            axes.legend(fontsize=6.5, loc="upper right" if reading else "lower left")
            axes.label_outer()
    return Picture(figure, pd.concat(tables, ignore_index=True), "Survival of spells of reading and of resting")
