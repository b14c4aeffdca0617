"""The compiled loops behind `simulate.curves`. Each has a plain twin in `replay.replay` that it must equal."""

from __future__ import annotations

from .each import advance_each, trim_each
from .jit import AVAILABLE
from .ledger import stamp
from .overlap import adjacent_common, repeated
from .recency import recency
from .stack import advance, recency_by_head, restack
from .turn import in_turn

__all__ = [
    "AVAILABLE",
    "adjacent_common",
    "advance",
    "advance_each",
    "in_turn",
    "recency",
    "recency_by_head",
    "repeated",
    "restack",
    "stamp",
    "trim_each",
]
