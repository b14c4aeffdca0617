"""Orders by what a page's past reads were like: tried beside `commons`, and kept to show what they are worth.

With a reservoir the history of pages that are not resident is known, which caches have to guess at with ghost entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .ledger import Ledger
from .policy import Policy


@dataclass(frozen=True)
class Faded(Policy):
    """Reads and weight together, each fading by `keep` a step: (1 - blend) * reads + blend * weight, or the peak."""

    keep: float = 0.6
    blend: float = 1.0
    peak: bool = False
    scope: Literal["head", "layer", "model"] = "model"

    def rank(self, seen: Ledger) -> np.ndarray:
        weight = seen.decayed("peak" if self.peak else "weight", self.keep)
        return (
            weight if self.blend == 1.0 else (1 - self.blend) * seen.decayed("reads", self.keep) + self.blend * weight
        )


@dataclass(frozen=True)
class Twice(Policy):
    """The page whose last read but one is longest ago goes first; those read once go before (LRU-2: O'Neil, O'Neil and
    Weikum, SIGMOD 1993, with the history of every page)."""

    scope: Literal["head", "layer", "model"] = "model"

    def rank(self, seen: Ledger) -> np.ndarray:
        return _gaps(seen)[1].astype(np.float64)


@dataclass(frozen=True)
class Rhythm(Policy):
    """The page with the longest expected wait goes first: the mean of its gaps between reads (fading by 0.7 a read), or
    the time since its last read where that is longer."""

    scope: Literal["head", "layer", "model"] = "model"

    def rank(self, seen: Ledger) -> np.ndarray:
        last, _, gap = _gaps(seen)
        return -np.maximum(gap, seen.step - last).astype(np.float64)


def _gaps(seen: Ledger) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(step of the last read, of the last but one, mean gap), [head, page]; -1, -1 and 64 before there are any."""

    def start():
        last, second = np.full((2, *seen.known.shape), -1, np.int32)
        return last, second, np.full(seen.known.shape, 64.0, np.float32)

    def add(state, step):
        last, second, gap = state
        heads, pages, _ = seen.wants(step)
        old = last[heads, pages]
        again = old >= 0
        own = heads[again], pages[again]
        gap[own] = 0.7 * gap[own] + np.float32(0.3) * (step - old[again])
        second[heads, pages] = old
        last[heads, pages] = step
        return state

    return seen.running("gaps", start, add)
