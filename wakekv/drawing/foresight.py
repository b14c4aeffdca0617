"""What foresight there is: wake-ups in bursts, tokens that announce them, and what acting on alarms would save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter

from wakekv import stats
from wakekv.drawing.labels import place
from wakekv.drawing.picture import BLACK, BLUE, GREY, ORANGE, PINK, Picture, canvas, styled
from wakekv.drawing.pooled import PAPER, bar, colours_of, legend, of, panels, signal_style
from wakekv.heads.bursts import NULLS, SHARES, top_steps
from wakekv.heads.markers import ALPHA, SEEN
from wakekv.heads.pools import Pool, counted, find, stamp
from wakekv.heads.wakeups import QUIET, events

NULL_COLOURS = dict(zip(NULLS, ("0.72", "0.45")))
SAVED = {"misses_saved": "misses saved", "misses_saved_at_wakeups": "of those at wake-ups"}


@styled
def burst_steps(many: Sequence[Pool], numbers: pd.DataFrame, data: Mapping) -> Picture:
    """When heads wake, all together, in the log with most wake-ups; and what the busiest steps hold in every pool.

    numbers: `pools.bursts`. The nulls are drawn as their mean and two standard deviations to each side.
    """
    kept = counted(many)
    log = max((reads for pool in kept for reads in pool.sound), key=lambda reads: int(events(reads.score).sum()))
    per_step = events(log.score).sum(0)
    figure = canvas(9, 2.6 + 0.3 * len(kept), f"above: one log; below: {stamp(kept)}")
    upper, lower = figure.subplots(2, 1, height_ratios=[1.5, 0.6 + 0.3 * len(kept)])
    _busiest(upper, per_step, log.name)
    colours, ticks, rows = colours_of(pool.model for pool in kept), {}, []
    for i, pool in enumerate(kept):
        for y, share in zip((i - 0.17, i + 0.17), SHARES):
            row = find(of(numbers, pool), quantity="coarse_recall", share=share)
            cells = {name: row[name] for name in ("model", "regime", "share", "n_events", "estimate", "lo", "hi")}
            for shift, (name, colour) in zip((-0.07, 0.07), NULL_COLOURS.items()):
                mean, z = row[f"{name}_mean"], row[f"{name}_z"]
                sd = (row["estimate"] - mean) / z if np.isfinite(z) and z else 0.0
                ends = [mean - 2 * sd, mean + 2 * sd]
                lower.plot(ends, [y + shift] * 2, color=colour, linewidth=3, solid_capstyle="butt")
                cells |= {f"{name}_mean": mean, f"{name}_sd": sd}
            size = 5 if share == SHARES[0] else 3.5
            look = {"color": colours[pool.model], "marker": "o", "markersize": size}
            bar(lower, y, [row["lo"], row["hi"]], row["estimate"], **look)
            signal = find(of(numbers, pool), quantity="signal_trigger", share=share)["estimate"]
            lower.plot(share, y, "|", color=BLACK)
            lower.plot(signal, y, "x", color=PINK)
            paper = data["prediction"]["burstiness"]
            if pool.regime == paper["regime"]:
                lower.plot(paper["coarse_trigger"][f"top_{100 * share:.0f}pct_recall"], y, **PAPER)
            ticks[y] = f"{pool.name}, {share:.0%}"
            rows.append(cells | {"signal_trigger": signal, "published": row["published"]})
    lower.set(yticks=list(ticks), yticklabels=list(ticks.values()), ylim=(len(kept) - 0.5, -0.5), xlim=(-0.02, 1.02))
    lower.set_xlabel("share of all wake-ups caught by a trigger that fires for all heads at 2% (5%) of the steps")
    looks = {"busiest steps, after the fact": {"color": BLACK, "marker": "o"}, "published": PAPER}
    looks |= {"shuffled": {"color": "0.72", "linewidth": 3}, "each head shifted": {"color": "0.45", "linewidth": 3}}
    looks |= {"after most alarms": {"color": PINK, "marker": "x", "linestyle": ""}}
    legend(figure, looks | {"blind": {"color": BLACK, "marker": "|", "linestyle": ""}}, columns=6)
    return Picture(figure, pd.DataFrame(rows), "Wake-ups per step, and the share of them that the busiest steps hold")


@styled
def token_markers(many: Sequence[Pool], numbers: pd.DataFrame, named: int = 4, most: int = 12) -> Picture:
    """Every token id tested: how often it was emitted, and how often a head woke right after it.

    numbers: `pools.tokens`. Above the curve the two-proportion test with Bonferroni calls a token a marker; markers are
    written out, at `most` that many of a panel, and of other tokens the likeliest up to `named` words.
    """
    kept, labels = counted(many), {}
    figure, grid = panels(kept, 2.4)
    for (axes,), pool in zip(grid, kept):
        own = of(numbers, pool)
        axes.set(xlabel="times emitted", ylabel="share after which a head woke")
        axes.yaxis.label.set_visible(axes is grid[0][0])
        axes.set_title(f"{pool.name}: {int(own['marker'].sum())} of {len(own)} survive")
        if not len(own):
            axes.text(0.5, 0.5, f"no token was emitted {SEEN} times", transform=axes.transAxes, ha="center", fontsize=7)
            axes.set(xticks=[], yticks=[])
            continue
        first, found = own.iloc[0], own[own["marker"]]
        axes.axhline(first["base_rate"], color=GREY, linewidth=0.8, linestyle=":")
        axes.plot(*_needed(*first[["n_discovery", "base_rate", "family"]], own["n"].max()), color=BLACK, linewidth=0.9)
        axes.plot(own["n"], own["rate"], "o", color=BLUE, alpha=0.5, markeredgewidth=0)
        axes.plot(found["n"], found["rate"], "o", color=ORANGE)
        others = own[~own["marker"] & (own["hits"] > 0)].head(max(0, named - len(found)))
        best = pd.concat([found.head(most), others])
        labels[axes] = [(seen(row.said), row.n, row.rate) for row in best.itertuples()]
        axes.set(xscale="log", ylim=(-0.04, None))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else ""))
    looks = {"token": {"color": BLUE, "marker": "o", "alpha": 0.5, "linestyle": ""}}
    looks |= {"marker": {"color": ORANGE, "marker": "o", "linestyle": ""}}
    looks |= {f"rate needed at this count (Bonferroni, {ALPHA:g})": {"color": BLACK, "linewidth": 0.9}}
    looks |= {"rate after any token": {"color": GREY, "linestyle": ":"}}
    blanks = any("␣" in text for some in labels.values() for text, *_ in some)
    legend(figure, looks | ({"␣: a space": {"linestyle": ""}} if blanks else {}))
    place(figure, labels, size=7)
    says = f"Tokens and how often a head wakes after them: {int(numbers['marker'].sum())} markers"
    return Picture(figure, numbers, says)


def seen(said: str) -> str:
    """A token as a label: in quotes, each space as a sign that can be seen, other blanks as they are escaped."""
    return f"“{repr(said)[1:-1].replace(' ', '␣')}”"


@styled
def prefetch_yield(many: Sequence[Pool], numbers: pd.DataFrame) -> Picture:
    """Misses saved against pages moved in vain, for a prefetcher that acts on each signal.

    numbers: `pools.prefetching`. Below, only the misses of heads in the step in which they wake. Small and hollow:
    random alarms at the same rate. The dashed line is a predictor that knows the next step's wants.
    """
    kept, drawn = counted(many), []
    names = [name for name in numbers["predictor"].unique() if name != "perfect_what"]
    figure, grid = panels(kept, 3.4, rows=2, sharex=True, sharey="row")
    widest = numbers.loc[numbers["metric"] == "pages_in_vain_per_step", "estimate"].max()
    for both, pool in zip(grid, kept):
        own = of(numbers, pool).set_index(["predictor", "metric"])
        vain = {name: own.loc[(name, "pages_in_vain_per_step"), "estimate"] for name in names}
        for axes, metric in zip(both, SAVED):
            ceiling = own.loc[("perfect_what", metric), "estimate"]
            if not np.isfinite(ceiling):
                axes.text(0.5, 0.5, "no misses to save", transform=axes.transAxes, ha="center", fontsize=7)
            axes.axhline(ceiling, color=BLACK, linewidth=0.9, linestyle="--")
            axes.axhline(0, color=GREY, linewidth=0.7)
            for name in names:
                row, look = own.loc[(name, metric)], signal_style(name)
                bar(axes, vain[name], [row["lo"], row["hi"]], row["estimate"], upright=True, **look)
                cells = {"model": pool.model, "regime": pool.regime, "predictor": name, "metric": metric}
                cells |= {"in_vain_per_step": vain[name], "ceiling": ceiling}
                drawn.append(cells | {what: row[what] for what in ("estimate", "lo", "hi")})
                if (name, f"{metric}_by_random") in own.index:
                    drawn[-1]["by_random"] = twin = own.loc[(name, f"{metric}_by_random"), "estimate"]
                    axes.plot(vain[name], twin, linestyle="", **(look | {"markerfacecolor": "white", "markersize": 3}))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0%}"))
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xlim(-0.15, 3 * max(1, widest))
            axes.set_xlabel("pages moved in vain, a step (all heads)")
            axes.label_outer()
        both[0].set_title(f"{pool.name}, B = {own['budget'].iloc[0]}")
    for axes, text in zip(grid[0], SAVED.values()):
        axes.set_ylabel(text)
    grid[0][0].text(0.02, 0.95, "↖ better", transform=grid[0][0].transAxes, fontsize=7, color="0.3", va="top")
    looks = {name: {"linestyle": "", **signal_style(name)} for name in names}
    looks |= {"random, same rate": {"color": GREY, "marker": "o", "markerfacecolor": "white", "linestyle": ""}}
    legend(figure, looks | {"perfect what: the ceiling": {"color": BLACK, "linestyle": "--"}})
    return Picture(
        figure, pd.DataFrame(drawn), "Misses saved by prefetching on each signal, against pages moved in vain"
    )


def _busiest(axes, per_step: np.ndarray, name: str) -> None:
    """Heads that wake at each step of one log, its busiest steps marked."""
    fires = np.ceil(SHARES[0] * len(per_step[QUIET:])).astype(int)
    top = np.sort(np.argsort(-per_step[QUIET:], kind="stable")[:fires]) + QUIET
    held = top_steps(per_step[QUIET:], SHARES[0]) / max(1, per_step.sum())
    axes.vlines(np.arange(len(per_step)), 0, per_step, color=BLUE, linewidth=1)
    axes.vlines(top, 0, per_step[top], color=ORANGE, linewidth=1.6)
    axes.set(xlabel="decode step", ylabel="heads that wake", xlim=(-0.5, len(per_step) - 0.5), ylim=(0, None))
    axes.set_title(
        f"{name}: its busiest {SHARES[0]:.0%} of steps (orange) hold {held:.0%} of {per_step.sum()} wake-ups"
    )


def _needed(n_steps: int, base_rate: float, family: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, the smallest rate that the test calls a marker in a token emitted n times), for each n where one would do."""
    hits, shown = round(base_rate * n_steps), []
    for n in range(SEEN, int(most) + 1):
        mine = np.arange(min(n, hits) + 1)
        enough = np.flatnonzero(stats.two_proportions(mine, n, hits - mine, n_steps - n) * family <= ALPHA)
        shown += [(n, mine[enough[0]] / n)] if enough.size else []
    return tuple(np.array(shown, float).reshape(-1, 2).T)
