"""Figure 1b from a real head: where each of its pages is, under a policy that fetches and one that destroys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from wakekv.drawing.picture import BLACK, BLUE, ORANGE, Picture, canvas, policy_style, styled
from wakekv.drawing.reading import log_stamp
from wakekv.errors import InputError, lookup
from wakekv.logs.demand import Demand, demand
from wakekv.logs.trace import Trace
from wakekv.policies import POLICIES
from wakekv.simulation.replay import replay

# What a page is to its head at one step; the index is the value in the grid.
STATES = {
    "not seen yet": "#ffffff",
    "resident": "#cfe3f3",
    "read": BLUE,
    "first read": "#56B4E9",
    "in reservoir": "#eeeeee",
    "missed, fetched": ORANGE,
    "destroyed": "#c4c4c4",
    "missed, gone": BLACK,
}
UNSEEN, RESIDENT, READ, FIRST, RESERVOIR, FETCHED, DESTROYED, LOST = range(len(STATES))


@styled
def mechanism(
    trace: Trace,
    head: int,
    budget: int,
    first: int = 0,
    steps: int = 60,
    pages: int = 60,
    policies: Sequence[str] = ("reactive", "evict"),
    **options,
) -> Picture:
    """One head's pages over `steps` steps from `first`, as `replay` moves them: a panel a policy, misses a step below.

    pages: at most so many are drawn, those it wants most often in these steps. options: as for `demand`.
    """
    if not (0 <= head < trace.n_heads and first >= 0 and steps >= 1 and first + steps <= trace.n_steps):
        asked = f"head {head}, steps {first}..{first + steps - 1}"
        raise InputError(f"{asked} is not in this log of {trace.n_heads} heads and {trace.n_steps} steps")
    wants = only(demand(trace, **options), head)
    window = slice(first, first + steps)
    grids = {name: states(wants, name, budget)[:, window] for name in policies}
    often = np.bincount(wants.page[(wants.step_of >= first) & (wants.step_of < first + steps)], minlength=wants.n_pages)
    shown = np.sort(np.argsort(-often, kind="stable")[: min(pages, (often > 0).sum())])
    figure = canvas(9, 4.6, f"replayed on head {head} of {log_stamp(trace)}")
    panels = figure.subplots(2, len(policies), height_ratios=[6, 1], sharex=True, sharey="row", squeeze=False)
    tables = []
    for (upper, lower), (name, grid) in zip(panels.T, grids.items()):
        extent = (first - 0.5, first + steps - 0.5, -0.5, len(shown) - 0.5)
        cmap = ListedColormap(list(STATES.values()))
        upper.imshow(
            grid[shown], cmap=cmap, vmin=-0.5, vmax=len(STATES) - 0.5, origin="lower", aspect="auto", extent=extent
        )
        missed = (grid == FETCHED) | (grid == LOST)
        upper.set_title(f"{name}, B = {budget}: {missed.sum()} misses in {steps} steps, all pages")
        lower.bar(range(first, first + steps), missed.sum(0), width=1, color=policy_style(name)["color"])
        lower.set_xlabel("decode step")
        tables.append(_runs(grid[shown], shown, first).assign(policy=name))
    ticks = range(0, len(shown), max(1, len(shown) // 8))
    panels[0, 0].set_yticks(ticks, shown[ticks])
    panels[0, 0].set_ylabel(f"page: the {len(shown)} it wants most, oldest below")
    panels[1, 0].set_ylabel("misses")
    met = np.unique(np.concatenate([grid[shown].ravel() for grid in grids.values()]))
    patches = [
        Patch(facecolor=c, edgecolor="0.7", linewidth=0.5, label=s)
        for i, (s, c) in enumerate(STATES.items())
        if i in met
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), handlelength=1, columnspacing=1.2)
    says = f"Pages of head {head} at B = {budget} under {' and '.join(policies)}: resident, read, missed, gone"
    return Picture(figure, pd.concat(tables, ignore_index=True), says)


def states(wants: Demand, policy: str, budget: int) -> np.ndarray:
    """int8 [page, step]: the state (index into STATES) of every page of a demand of one head, from `replay`."""
    rule = lookup(policy, POLICIES, "policy")
    away, lost = (RESERVOIR, FETCHED) if rule.reversible else (DESTROYED, LOST)
    grid, seen = np.zeros((wants.n_pages, wants.n_steps), np.int8), np.zeros(wants.n_pages, bool)
    seen |= (wants.created < 0) & (wants.first_touch == "warm")  # under a cold start a page is met by being wanted

    def note(step: int, resident: np.ndarray, missed: np.ndarray) -> None:
        wanted = np.zeros(wants.n_pages, bool)
        wanted[wants.page[wants.at(step)[1]]] = True
        now = np.where(resident[0], RESIDENT, np.where(seen, away, UNSEEN))
        now[wanted] = np.where(seen[wanted], READ, FIRST)
        now[missed[0]] = lost
        grid[:, step] = now
        seen[:] |= wanted | resident[0]

    replay(wants, rule, budget, on_step=note)
    return grid


def only(wants: Demand, head: int) -> Demand:
    """The demand of one head alone."""
    part = slice(wants.ptr[head, 0], wants.ptr[head, -1])
    own = {
        "ptr": wants.ptr[head : head + 1] - wants.ptr[head, 0],
        "page": wants.page[part],
        "weight": wants.weight[part],
    }
    rows = {name: getattr(wants, name) for name in ("layer", "prompt_rows", "key_means")}
    own |= {name: None if value is None else value[head : head + 1] for name, value in rows.items()}
    return dataclasses.replace(wants, **own)


def _runs(grid: np.ndarray, pages: np.ndarray, first: int) -> pd.DataFrame:
    """page, state, from_step, to_step: the grid as runs of one state, what was not seen left out."""
    rows = []
    for page, row in zip(pages, grid):
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        stops = np.append(starts[1:], len(row)) - 1
        rows += [(page, list(STATES)[row[a]], first + a, first + b) for a, b in zip(starts, stops) if row[a] != UNSEEN]
    return pd.DataFrame(rows, columns=["page", "state", "from_step", "to_step"])
