"""Several requests on one server, and orders of pages that were taught, in pictures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

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
)
from wakekv.errors import InputError
from wakekv.scheduling.schedulers import SCHEDULERS
from wakekv.scheduling.server import Served
from wakekv.scheduling.study import ENOUGH, attainment

LOOK = dict(zip(SCHEDULERS, (
    {"color": BLACK, "marker": "D", "linestyle": ":"}, {"color": ORANGE, "marker": "o"}, {"color": BLUE, "marker": "s"},
    {"color": SKY, "marker": "v"}, {"color": GREEN, "marker": "X"}, {"color": PINK, "marker": "P"},
    {"color": GREY, "marker": "", "linestyle": "--"},
)))  # fmt: skip
TAUGHT = {"learned": ORANGE, "imitated": SKY, "commons": GREEN, "decayed reads": BLUE}


@styled
def load_curves(cases: Mapping[str, pd.DataFrame], stamp: str) -> Picture:
    """Above, the share of requests that keep both objectives against load, a column a set of costs; below, requests a
    second that do. Bands: 95 % over streams of requests; dotted: nine in ten."""
    if not cases:
        raise InputError("nothing to draw: study the schedulers at some loads first")
    figure, drawn = canvas(9, 5.4, stamp), []
    grid = figure.subplots(2, len(cases), squeeze=False, sharex="col")
    for column, (case, found) in zip(grid.T, cases.items()):
        for name, own in attainment(found).groupby("scheduler", sort=False):
            for axes, what in zip(column, (("estimate", "lo", "hi"), ("effective", "effective_lo", "effective_hi"))):
                middle, low, high = (own[part] for part in what)
                axes.plot(own["load"], middle, label=name, **LOOK[name])
                axes.fill_between(own["load"], low, high, color=LOOK[name]["color"], alpha=0.12, lw=0)
            drawn.append(own.assign(case=case))
        column[0].set(title=case, ylim=(-0.02, 1.02))
        column[0].axhline(ENOUGH, color=BLACK, linestyle=":", linewidth=0.8)
        column[1].set(xlabel="load (1: as much work as the server can do)", ylim=(0, None))
    grid[0, 0].set_ylabel("keep both objectives")
    grid[1, 0].set_ylabel("kept, requests a second")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4, fontsize=7)
    says = "Share of requests that keep their objectives against load, and how many a second, by scheduler"
    return Picture(figure, pd.concat(drawn, ignore_index=True), says)


@styled
def request_waits(runs: Mapping[str, Served], stamp: str) -> Picture:
    """How long users wait under each scheduler, at one load: share of requests with a first token within so many
    milliseconds (left), and of tokens that follow the one before within so many (right)."""
    if not runs:
        raise InputError("nothing to draw: run a scheduler first")
    figure, rows = canvas(9, 3.4, stamp), []
    for axes, what, title in zip(
        figure.subplots(1, 2), ("first token", "gap"), ("to the first token", "between tokens")
    ):
        for name, done in runs.items():
            values = np.sort(done.requests["ttft_s"].to_numpy() if what == "first token" else done.gaps)
            share = np.arange(1, len(values) + 1) / len(values)
            axes.plot(1e3 * values, share, label=name, **LOOK[name] | {"marker": ""})
            at = np.unique(np.linspace(0, len(values) - 1, 50).round().astype(int))
            rows += [{"scheduler": name, "of": what, "seconds": values[i], "share": share[i]} for i in at]
        axes.set(xscale="log", xlabel=f"ms {title}", ylabel="share within", ylim=(0, 1.02))
        round_numbers(axes.xaxis)
    figure.axes[0].text(0.02, 0.97, "↖ better", transform=figure.axes[0].transAxes, fontsize=7, color="0.3", va="top")
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4, fontsize=7)
    return Picture(figure, pd.DataFrame(rows), "Times to the first token and between tokens, by scheduler")


@styled
def said_and_came(reliability: pd.DataFrame, scores: pd.DataFrame, stamp: str) -> Picture:
    """Is the miss model right as often as it says (left; circles as large as the steps are many), and is it better than
    knowing less (right; Brier score, lower is better, bars over prompts)?"""
    figure = canvas(7.5, 3.1, stamp)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.2])
    left.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    size = 8 + 160 * reliability["steps"] / reliability["steps"].max()
    left.scatter(reliability["said"], reliability["came"], s=size, color=ORANGE, alpha=0.8, linewidths=0, clip_on=False)
    left.set(xlabel="said: probability of a heavy step", ylabel="came: share of heavy steps", xlim=(0, 1), ylim=(0, 1))
    y = np.arange(len(scores))[::-1]
    spread = [scores["estimate"] - scores["lo"], scores["hi"] - scores["estimate"]]
    right.errorbar(scores["estimate"], y, xerr=spread, fmt="o", color=BLUE, capsize=2)
    right.set(
        yticks=y,
        yticklabels=scores["predictor"],
        xlabel="Brier score (lower is better)",
        xlim=(0, None),
        ylim=(-0.5, len(y) - 0.5),
    )
    both = pd.concat([reliability.assign(part="reliability"), scores.assign(part="Brier")], ignore_index=True)
    return Picture(figure, both, "Predicted against observed frequency of heavy steps, and Brier scores")


@styled
def fairness(found: pd.DataFrame, stamp: str) -> Picture:
    """What each agent keeps of its objectives under each rule (dots: streams of requests; bars: their mean)."""
    figure = canvas(7.5, 3.0, stamp)
    axes = figure.subplots()
    rules, agents = list(dict.fromkeys(found["rule"])), sorted(found["agent"].unique())
    for i, (agent, colour) in enumerate(zip(agents, (ORANGE, BLUE, GREEN, YELLOW, PINK, SKY))):
        for j, rule in enumerate(rules):
            kept = found[(found["rule"] == rule) & (found["agent"] == agent)]["attainment"]
            x = j + (i - (len(agents) - 1) / 2) * 0.8 / len(agents)
            axes.bar(x, kept.mean(), 0.7 / len(agents), color=colour, alpha=0.6, label=agent if j == 0 else None)
            axes.scatter(np.full(len(kept), x), kept, color=colour, s=10, zorder=3)
    axes.set(xticks=range(len(rules)), xticklabels=rules, xlabel="how the pool is shared")
    axes.set(ylabel="keep both objectives", ylim=(0, 1.02))
    figure.legend(loc="outside upper center", ncols=len(agents))
    return Picture(figure, found, "Share of each agent's requests that keep their objectives, by rule")


@styled
def taught_orders(closed: pd.DataFrame, stamp: str) -> Picture:
    """Of the way from recency to the optimum, how much each order goes on held-out prompts: a panel a model and regime,
    bars over prompts; thick: from the least to the most of the seeds."""
    if closed.empty:
        raise InputError("nothing to draw: hold a contest on held-out prompts first")
    groups = list(closed.groupby(["model", "regime"], sort=False))
    figure = canvas(max(5, 1.5 + 2.0 * len(groups)), 3.6, stamp)
    grid = figure.subplots(1, len(groups), squeeze=False, sharey=True)[0]
    for axes, ((model, regime), own) in zip(grid, groups):
        budgets, names = sorted(own["budget"].unique()), list(own["policy"].unique())
        axes.axhline(0, color=GREY, linewidth=0.6)
        for i, name in enumerate(names):
            at = own[own["policy"] == name].set_index("budget").loc[budgets]
            x = np.arange(len(budgets)) + (i - (len(names) - 1) / 2) * 0.75 / len(names)
            colour = TAUGHT.get(name, (YELLOW, PINK, BLACK)[i % 3])
            spread = np.abs(np.array([at["estimate"] - at["lo"], at["hi"] - at["estimate"]]))
            axes.errorbar(
                x, at["estimate"], yerr=np.nan_to_num(spread), fmt="o", ms=3, lw=0.8, color=colour, label=name
            )
            axes.vlines(x, at["seed_lo"], at["seed_hi"], color=colour, linewidth=3, alpha=0.4)
        axes.set(xticks=range(len(budgets)), xticklabels=budgets, xlabel="B, pages a head")
        axes.set_title(f"{model}\n{regime}, n = {own['n'].max()}")
    grid[0].set_ylabel("of the way from recency to the optimum")
    bottom = closed["estimate"].min()
    grid[0].set_ylim(max(-1.0, min(-0.1, bottom - 0.1)), 1.02)
    handles, names = grid[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=min(7, len(names)), fontsize=7)
    return Picture(
        figure, closed, "Share of the gap between recency and the optimum that learned and other orders close"
    )
