"""One budget for all heads: pages of every head compete for the same room, and it follows the heads as they change.

Ours. In an operating system's terms it is global instead of local page replacement (P. J. Denning, Computing Surveys
2(3), 1970). Allocators of the literature share a budget among heads too, but settle the split, at prefill or at a
pruning, by how much attention pages got, and destroy what is outside it (PyramidKV, Ada-KV, CAKE, DynamicKV, LAVa,
ReasonAlloc: allocate.py, compress.py). Where what is given up can come back, nothing need be settled: the split is
whatever the order of pages makes it at each step, so it is right again one miss after a head has changed its mind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .classic import Frequency


@dataclass(frozen=True)
class Pooled(Frequency):
    """Reads, each counting 0.6 times as much with every step that passes, over all heads' pages. Nothing is tuned."""

    source = "this project"
    keep: float = 0.6
    scope: Literal["head", "layer", "model"] = "model"
