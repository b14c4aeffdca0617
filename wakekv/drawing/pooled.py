"""What the pictures of section 2 share: a look for every signal and published point, and a panel for every pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from wakekv.drawing.picture import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, canvas
from wakekv.drawing.reading import log_stamp
from wakekv.errors import InputError
from wakekv.heads.pools import Pool, stamp
from wakekv.heads.reads import Reads
from wakekv.simulation.study import machine

COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY)  # of models or regimes, in order of appearance
PAPER = {"marker": "D", "markerfacecolor": "white", "color": BLACK, "linestyle": "", "markersize": 4.5}  # as published
SIGNAL_STYLE = {
    "online_rco": {"color": BLUE, "marker": "o"},
    "drift": {"color": ORANGE, "marker": "s"},
    "entropy_trend": {"color": GREEN, "marker": "^"},
    "needle_mass_delta": {"color": PINK, "marker": "v"},
    "ensemble": {"color": BLACK, "marker": "X"},
    "woke_recently": {"color": GREY, "marker": "P"},
    "always": {"color": SKY, "marker": "h"},
    "perfect_when": {"color": YELLOW, "marker": "*", "markersize": 8},
}


def spelt(name: str) -> str:
    """The name of a signal or predictor for people."""
    return name.replace("_", " ").replace("rco", "RCO")


def signal_style(name: str) -> dict:
    return SIGNAL_STYLE.get(name, {"color": SKY, "marker": "."})


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, in order of appearance."""
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys(names))}


def panels(kept: Sequence[Pool], height: float, rows: int = 1, **how) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a panel (or `rows` of them, one below the other) for every pool, models one below the other.

    height: inches of a model. how: as for `subplots`. The second value lists each pool's panels, in the pools' order.
    """
    models = list(dict.fromkeys(pool.model for pool in kept))
    beside = [sum(other.model == pool.model for other in kept[:i]) for i, pool in enumerate(kept)]
    figure = canvas(9, 0.8 + height * len(models), stamp(kept))
    grid = figure.subplots(rows * len(models), max(beside) + 1, squeeze=False, **how)
    for axes in grid.flat:
        axes.set_visible(False)
    own = [list(grid[rows * models.index(pool.model) :, column][:rows]) for pool, column in zip(kept, beside)]
    for axes in (axes for many in own for axes in many):
        axes.set_visible(True)
    return figure, own


def of(numbers: pd.DataFrame, pool: Pool) -> pd.DataFrame:
    """The rows of one pool."""
    here = (numbers["model"] == pool.model) & (numbers["regime"] == pool.regime) & (numbers["text"] == pool.text)
    return numbers[here]


def stretch(reads: Reads, head: int, first: int, steps: int | None) -> slice:
    """Steps first .. first + steps - 1 of a log (None: to its end). InputError if it lacks them, or the head."""
    n_heads, n_steps = reads.size.shape
    steps = n_steps - first if steps is None else steps
    if not (0 <= head < n_heads and 0 <= first and 1 <= steps <= n_steps - first):
        asked = f"head {head}, steps {first}..{first + steps - 1}"
        raise InputError(f"{asked} is not in this log of {n_heads} heads and {n_steps} steps")
    return slice(first, first + steps)


def logs_stamp(logs: Sequence[Reads]) -> str:
    """Which logs a picture shows, each apart."""
    if len(logs) == 1:
        return log_stamp(logs[0].trace)
    models = dict.fromkeys(reads.trace.manifest["model"]["name"] for reads in logs)
    machines = dict.fromkeys(machine(reads.trace) for reads in logs)
    return f"logs of {len(logs)} prompts: {', '.join(models)}, recorded in {', '.join(machines)}"


def bar(axes: Axes, across: float, ends: Sequence[float], value: float, *, upright: bool = False, **look) -> None:
    """A point with its interval, lying (or upright); nothing where the interval is undefined but the point."""
    line, point = (ends, [across] * 2), (value, across)
    if upright:
        line, point = line[::-1], point[::-1]
    if np.isfinite(ends).all():
        axes.plot(*line, color=look["color"], linewidth=1.5, alpha=0.7)
    axes.plot(*point, **{"linestyle": "", **look})


def legend(figure: Figure, looks: dict[str, dict], columns: int = 5) -> None:
    """One legend for all panels, above them. looks: label -> Line2D's properties."""
    handles = [Line2D([], [], **({"label": spelt(label)} | look)) for label, look in looks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(columns, len(handles)), columnspacing=1.4)
