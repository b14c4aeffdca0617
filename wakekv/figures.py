"""The figures and tables, by name. To add one: a function in drawing/ (a picture) or tables.py, and a line below.

Each figure function draws one Picture and each table function makes one Table; both save themselves as files that are
equal bytes on every run, the numbers as CSV beside them. Nothing is drawn on a screen: no backend is chosen or changed.
"""

from __future__ import annotations

from collections.abc import Callable

from wakekv.drawing.mechanism import mechanism
from wakekv.drawing.picture import POLICY_STYLE, Picture
from wakekv.drawing.policies import miss_curves, miss_map
from wakekv.drawing.reading import needle_scores, one_head
from wakekv.tables import Table, logs, sweep, variants

__all__ = [
    "FIGURES", "POLICY_STYLE", "TABLES", "Picture", "Table",
    "logs", "mechanism", "miss_curves", "miss_map", "needle_scores", "one_head", "sweep", "variants",
]  # fmt: skip

FIGURES: dict[str, Callable[..., Picture]] = {
    "one_head": one_head,  # what a page is, and a want
    "needle_scores": needle_scores,  # all heads asleep and awake
    "mechanism": mechanism,  # Figure 1b, from a real head
    "miss_curves": miss_curves,  # Figure 2
    "miss_map": miss_map,  # where in the model the misses fall
}
TABLES: dict[str, Callable[..., Table]] = {
    "logs": logs,  # what was recorded
    "sweep": sweep,  # Table 3
    "variants": variants,  # how much the open choices matter
}
