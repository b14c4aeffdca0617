"""Could one tell beforehand? Alarms of one head, what signals are worth at each lead, and the oracle's mirage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from wakekv.drawing.picture import BLACK, BLUE, GREEN, GREY, ORANGE, Picture, canvas, styled
from wakekv.drawing.pooled import PAPER, bar, legend, logs_stamp, of, panels, signal_style, spelt, stretch
from wakekv.heads.grading import LEADS, METRICS, Tally, grade, hot, oracle, precision_recall
from wakekv.heads.pools import LEAD, Pool, counted, stamp
from wakekv.heads.reads import Reads
from wakekv.heads.wakeups import ALARM, ENSEMBLE, FIRST, REST, SIGNALS, WAKE, events, zscores

NAMES = (*SIGNALS, ENSEMBLE)
BETAS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)  # what the oracle weighs recall by, from precision to recall
PLACE = {"precision": 0, "recall": 1}  # in the rows of published.json
FOREST = {  # metric of a column -> its title
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "f1_above_random": "F1 above as many\nrandom alarms",
    "f1_above_same_heads": "F1 above those on\nthe same heads",
}
RIGHT, FALSE, BEFORE = GREEN, "#9a9a9a", "#fdf0c0"


@styled
def alarms(reads: Reads, head: int, first: int = 0, steps: int | None = None, lead: int = LEAD) -> Picture:
    """One head: its needle score with its wake-ups, and below the alarms of every signal, right or false.

    Right: the head wakes within `lead` steps after it. Shaded: where an alarm would be right. Nobody can alarm before
    step 33.
    """
    window = stretch(reads, head, first, steps)
    score, woke = reads.score[head], events(reads.score)[head]
    right, at = hot(woke[None], lead)[0], np.arange(len(score))
    right[:FIRST] = False
    seen = (at >= max(window.start, FIRST)) & (at < window.stop)
    fired = {name: (z[head] > ALARM) & seen for name, z in zscores(reads).items()}
    figure = canvas(9, 3.4, f"head {head} of {logs_stamp([reads])}")
    upper, lower = figure.subplots(2, 1, height_ratios=[1.5, 1], sharex=True)
    for axes in (upper, lower):
        place = {"transform": axes.get_xaxis_transform(), "step": "mid"}
        axes.fill_between(at, 0, 1, where=right, color=BEFORE, linewidth=0, **place)
        for step in np.flatnonzero(woke):
            axes.axvline(step, color=ORANGE, linewidth=0.7)
    upper.plot(at[window], score[window], color=BLUE, linewidth=1)
    upper.plot(at[woke], score[woke], ">", color=ORANGE, markersize=5)
    for level, word, side in ((REST, "asleep", "top"), (WAKE, "awake", "bottom")):
        upper.axhline(level, color=GREY, linewidth=0.6, linestyle=":")
        upper.text(1.005, level, word, fontsize=6.5, color="0.4", va=side, transform=upper.get_yaxis_transform())
    upper.set(ylabel="needle score", ylim=(0, 1.03), xlim=(window.start - 0.5, window.stop - 0.5))
    n_woke = int(woke[window].sum())
    upper.set_title(f"head {head} (layer {reads.trace.layer[head]}): {n_woke} wake-ups in {len(at[window])} steps")
    for y, alarm in enumerate(fired.values()):
        lower.vlines(at[alarm & right], y - 0.38, y + 0.38, color=RIGHT, linewidth=1)
        lower.vlines(at[alarm & ~right], y - 0.38, y + 0.38, color=FALSE, linewidth=1)
        text = f"{(alarm & right).sum()} of {alarm.sum()} right"
        lower.text(1.005, y, text, transform=lower.get_yaxis_transform(), fontsize=6.5, va="center")
    blind = right[seen].mean() if seen.any() else 0.0
    lower.set(yticks=range(len(fired)), yticklabels=[spelt(name) for name in fired], ylim=(len(fired) - 0.5, -0.5))
    lower.set_xlabel(f"decode step (a blind alarm after step {FIRST} is right with probability {blind:.2f})")
    looks = {"wake-up": {"color": ORANGE, "marker": ">"}, "right alarm": {"color": RIGHT, "linewidth": 2}}
    looks |= {"false alarm": {"color": FALSE, "linewidth": 2}}
    legend(figure, looks | {f"the {lead} steps before a wake-up": {"color": BEFORE, "linewidth": 7}})
    rows = [(name, step, bool(right[step])) for name, alarm in fired.items() for step in at[alarm]]
    table = pd.DataFrame(rows, columns=["signal", "step", "right"])
    return Picture(figure, table, f"{n_woke} wake-ups of head {head}, and the alarms before them")


@styled
def leads(many: Sequence[Pool], numbers: pd.DataFrame, data: Mapping) -> Picture:
    """Precision and recall of each signal (causal z > 2) at each lead, and of as many random alarms (dashed).

    Hollow: published, on other models. numbers: `pools.wakeups`.
    """
    kept = counted(many)
    shown = numbers[(numbers["grading"] == "z") & numbers["metric"].isin(list(PLACE))]
    figure, grid = panels(kept, 2.9, rows=2, sharex=True, sharey="row")
    for both, pool in zip(grid, kept):
        for axes, (metric, place) in zip(both, PLACE.items()):
            own = of(shown, pool)
            for name, line in own[own["metric"] == metric].groupby("signal", sort=False):
                look = signal_style(name)
                none = (metric == "precision") & (line["estimate"] == 0)  # 0 has no place on a logarithmic axis
                axes.plot(line["lead"], line["estimate"].mask(none), markersize=3, **look)
                axes.fill_between(line["lead"], line["lo"], line["hi"], color=look["color"], alpha=0.1, linewidth=0)
                axes.plot(line["lead"], line["random"], color=look["color"], linewidth=0.9, linestyle="--")
                for value in _published(data, pool, name, LEAD):
                    axes.plot(LEAD * 1.25, value[place], markerfacecolor="white", **look)
            axes.set(xscale="log", xlabel="lead (steps)", ylabel=f"{metric}, higher is better")
            axes.xaxis.set(major_locator=FixedLocator(LEADS), minor_locator=NullLocator())
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.label_outer()
        both[0].set_title(f"{pool.name}: {own['n_events'].max()} wake-ups")
    precisions = shown.loc[shown["metric"] == "precision", ["estimate", "random"]].to_numpy()
    for upper, lower in grid:
        upper.set(yscale="log", ylim=(min(precisions[precisions > 0], default=0.1) / 2, 1))
        lower.set_ylim(0, 1.02)
    looks = {name: signal_style(name) for name in NAMES}
    legend(figure, looks | {"as many random alarms": {"color": GREY, "linestyle": "--"}, "published": PAPER}, columns=7)
    columns = ["model", "regime", "signal", "lead", "metric", "estimate", "lo", "hi", "random", "published"]
    return Picture(figure, shown[columns].reset_index(drop=True), "Precision and recall of signals against the lead")


@styled
def forest(many: Sequence[Pool], numbers: pd.DataFrame, data: Mapping, lead: int = LEAD) -> Picture:
    """Every signal at one lead with its interval, beside chance and what was published, and what it has beyond chance.

    numbers: `pools.wakeups`. "Woke recently", which is no signal, is left out of the differences.
    """
    kept, names, drawn = counted(many), [*NAMES, "woke_recently"], []
    at = numbers[(numbers["lead"] == lead) & numbers["grading"].isin(["z", "baseline"])]
    rows = [(pool, name) for pool in kept for name in names]
    figure = canvas(9, 0.9 + 0.165 * len(rows), stamp(kept))
    grid = figure.subplots(1, len(FOREST), sharey=True)
    for axes, (metric, title) in zip(grid, FOREST.items()):
        for y, (pool, name) in enumerate(rows):
            own = of(at, pool)
            row = own[(own["signal"] == name) & (own["metric"] == metric)].iloc[0]
            if name not in NAMES and "above" in metric:
                continue  # it would set the scale
            bar(axes, y, [row["lo"], row["hi"]], row["estimate"], **signal_style(name))
            axes.plot(row["random"], y, "|", color=BLACK, markersize=6)
            for value in _published(data, pool, name, lead) if metric in PLACE else []:
                axes.plot(value[PLACE[metric]], y, **(PAPER | {"markersize": 3.5}))
            cells = {"model": pool.model, "regime": pool.regime, "signal": name, "metric": metric}
            drawn.append(cells | {what: row[what] for what in ("estimate", "lo", "hi", "random", "published")})
        for y in range(len(names), len(rows), len(names)):
            axes.axhline(y - 0.5, color="0.8", linewidth=0.7)
        if "above" in metric:
            axes.axvline(0, color=BLACK, linewidth=0.7)
        axes.set(title=title, ylim=(len(rows) - 0.5, -0.5))
        axes.grid(axis="x", color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
    middle = [len(names) * (i + 0.5) - 0.5 for i in range(len(kept))]
    grid[0].set(yticks=middle, yticklabels=[f"{pool.model}\n{pool.regime}" for pool in kept], ylabel="model, regime")
    grid[0].tick_params(axis="y", length=0)
    grid[len(FOREST) // 2].set_xlabel(f"right is better; an alarm is right if its head wakes within {lead} steps")
    looks = {name: signal_style(name) for name in names}
    legend(
        figure, looks | {"as many random alarms": {"color": BLACK, "marker": "|", "linestyle": ""}, "published": PAPER}
    )
    return Picture(figure, pd.DataFrame(drawn), f"Every signal at lead {lead} with its interval, beside chance")


@styled
def mirage(many: Sequence[Pool], data: Mapping, lead: int = LEAD) -> Picture:
    """Precision against recall: one causal threshold for all, the oracle that knows each head's best, and chance.

    Solid: causal z as its threshold falls, a mark at the paper's 2. Dashed: the oracle, from precision to recall.
    Dotted: the probability that a blind alarm is right. Hollow: published, at 2.
    """
    kept, tables = counted(many), []
    figure, grid = panels(kept, 2.5, sharex=True, sharey=True)
    for (axes,), pool in zip(grid, kept):
        woke = [events(reads.score) for reads in pool.sound]
        z = [zscores(reads) for reads in pool.sound]
        raw = [{name: signal(reads) for name, signal in SIGNALS.items()} for reads in pool.sound]
        total = _total([grade(np.ones(event.shape, bool), event, lead) for event in woke])
        for name in NAMES:
            look, scores = signal_style(name), [one[name] for one in z]
            curve = precision_recall(scores, woke, lead)
            swept = {"threshold": curve.threshold, "precision": curve.precision, "recall": curve.recall}
            here = _total([grade(score > ALARM, event, lead) for score, event in zip(scores, woke)])
            xs = scores if name == ENSEMBLE else [one[name] for one in raw]
            best = [{"beta": beta, **_oracle(xs, woke, lead, beta)} for beta in BETAS]
            parts = {"causal z": pd.DataFrame(swept), "oracle": pd.DataFrame(best), "z > 2": pd.DataFrame([here])}
            for line, part in parts.items():
                cells = {"model": pool.model, "regime": pool.regime, "signal": name, "line": line}
                tables.append(part.assign(**cells, blind=total["precision"]))
            seen = np.where(curve.precision > 0, curve.precision, np.nan)  # 0 has no place on a logarithmic axis
            axes.plot(curve.recall, seen, color=look["color"], linewidth=1.1)
            axes.plot(parts["oracle"]["recall"], parts["oracle"]["precision"], color=look["color"], linestyle="--")
            axes.plot(here["recall"], here["precision"], linestyle="", **look)
            for value in _published(data, pool, name, lead):
                axes.plot(value[1], value[0], markerfacecolor="white", linestyle="", **look)
        axes.axhline(total["precision"], color=GREY, linewidth=1, linestyle=":")
        axes.set(title=f"{pool.name}: {sum(int(event.sum()) for event in woke)} wake-ups", xlim=(-0.02, 1.02))
        axes.set(xlabel="recall", ylabel="precision", yscale="log")
        axes.label_outer()
    table = pd.concat(tables, ignore_index=True)
    known = table.loc[table["line"] != "causal z", ["precision", "blind"]].to_numpy()
    grid[0][0].set_ylim(min(known[known > 0], default=0.1) / 2, 1.2)
    grid[0][0].text(
        0.98, 0.97, "better ↗", transform=grid[0][0].transAxes, fontsize=7, color="0.3", ha="right", va="top"
    )
    looks = {name: signal_style(name) for name in NAMES} | {"published": PAPER}
    looks |= {"oracle: each head's best, after the fact": {"color": GREY, "linestyle": "--"}}
    legend(figure, looks | {"blind alarm": {"color": GREY, "linestyle": ":"}}, columns=4)
    return Picture(figure, table, "Precision and recall: deployable, oracle and chance")


def _published(data: Mapping, pool: Pool, signal: str, lead: int) -> list[list[float]]:
    """[precision, recall, alarms] of a signal in the paper, for each of its models in this regime."""
    lines = data["prediction"]["rows"] if lead == LEAD else []
    return [line[signal] for line in lines if line["regime"] == pool.regime and signal in line]


def _oracle(xs: Sequence[np.ndarray], woke: Sequence[np.ndarray], lead: int, beta: float) -> dict:
    return _total([grade(x >= oracle(x, event, lead, beta=beta)[:, None], event, lead) for x, event in zip(xs, woke)])


def _total(tallies: Sequence[Tally]) -> dict:
    """Precision and recall of all logs together; nan where there was no alarm or nothing to recall."""
    total = Tally(*np.sum(tallies, axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return {name: float(METRICS[name](total)) for name in PLACE}
