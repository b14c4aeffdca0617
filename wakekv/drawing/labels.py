"""Where labels stand so that they hide nothing: beside their points, off the lines, the marks and each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

REACHES = (4, 6, 10, 15, 22, 30, 40)  # points from the mark to its label
NEAR = 6  # farther ones have a thin line to it
SIDES = tuple(product(("right", "left"), ("above", "below"))) + (("right", "at"), ("left", "at"))
SIDES += (("centre", "above"), ("centre", "below"))
Label, Box = tuple[str, float, float], tuple[float, float, float, float]
FINE = 0.75  # points between the places at which a line is looked at


def place(figure: Figure, labels: Mapping[Axes, Sequence[Label]], size: float = 6, sides: Sequence = SIDES) -> None:
    """Write each label beside its point, where it covers least of what its panel shows and of the labels before it.

    sides: where it may stand, the most wanted first.

    To be called last of all: the figure is laid out first, and its lines, marks and error bars are looked at.
    """
    figure.draw_without_rendering()
    for axes, some in labels.items():
        shown, taken = np.concatenate([np.empty((0, 2)), *_shown(axes, figure.dpi / 72)]), []
        for text, x, y in some:
            taken.append(_write(axes, text, (x, y), size, sides, shown, taken))


def _write(axes: Axes, text: str, at, size: float, sides: Sequence, shown: np.ndarray, taken: Sequence[Box]) -> Box:
    """One label, and where it stands in pixels."""
    figure = axes.get_figure()
    renderer, unit = FigureCanvasAgg(figure).get_renderer(), figure.dpi / 72
    halo = [withStroke(linewidth=1.5, foreground="white")]
    note = axes.annotate(text, at, (0, 0), textcoords="offset points", fontsize=size, path_effects=halo, zorder=6)
    wide, high = (round(length, 1) for length in note.get_window_extent(renderer).size)
    (x, y), frame, best = axes.transData.transform(at), axes.get_window_extent(renderer), None
    for reach, (i, side) in product(REACHES, enumerate(sides)):
        dx, dy = _corner(side, reach * unit, wide, high)
        box = (x + dx - unit, y + dy - unit, x + dx + wide + unit, y + dy + high + unit)
        outside = box[0] < frame.x0 or box[1] < frame.y0 or box[2] > frame.x1 or box[3] > frame.y1 + 4 * unit
        cost = _within(shown, box) + 50 * sum(_overlap(box, other) for other in taken) + 1000 * outside
        cost += reach / 3 + i / 2
        if best is None or cost < best[0] - 1e-6:
            best = (cost, reach, dx, dy, box)
    _, reach, dx, dy, box = best
    note.set_position((dx / unit, dy / unit))
    note.set_in_layout(False)
    if reach > NEAR:
        near = (min(max(0.0, dx), dx + wide) / unit, min(max(0.0, dy), dy + high) / unit)
        line = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
        axes.annotate("", at, near, textcoords="offset points", arrowprops=line, zorder=5).set_in_layout(False)
    return box


def _corner(side: tuple[str, str], reach: float, wide: float, high: float) -> tuple[float, float]:
    """From the point to the lower left corner of its label, in pixels."""
    across, up = side
    straight = across == "centre" or up == "at"
    gap = reach if straight else 0.75 * reach
    dx = {"right": gap, "left": -gap - wide, "centre": -wide / 2}[across]
    return dx, {"above": gap, "below": -gap - high, "at": -high / 2}[up]


def _shown(axes: Axes, unit: float) -> Iterator[np.ndarray]:
    """Points, in pixels, along everything drawn: lines close by close, marks by their middle and their edge."""
    for line in axes.get_lines():
        at = line.get_transform().transform(line.get_xydata())
        at = at[np.isfinite(at).all(axis=1)]
        if line.get_linestyle() != "None":
            yield from _along(at, unit)
        if line.get_marker() not in ("", "None", None):
            half = line.get_markersize() * unit / 2
            edge = half * np.array([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (0.7, 0.7), (0.7, -0.7), (-0.7, 0.7),
                                    (-0.7, -0.7)])  # fmt: skip
            yield (at[:, None] + edge).reshape(-1, 2)
    for many in axes.collections:
        if hasattr(many, "get_segments"):
            for segment in many.get_segments():
                yield from _along(many.get_transform().transform(segment), unit)


def _along(at: np.ndarray, unit: float) -> Iterable[np.ndarray]:
    """Points close by close on the way through `at`."""
    for start, end in zip(at, at[1:]):
        n = int(np.hypot(*(end - start)) / (FINE * unit)) + 1
        yield start + np.linspace(0, 1, n, endpoint=False)[:, None] * (end - start)


def _within(points: np.ndarray, box: Sequence[float]) -> int:
    inside = (points[:, 0] > box[0]) & (points[:, 0] < box[2]) & (points[:, 1] > box[1]) & (points[:, 1] < box[3])
    return int(inside.sum())


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
