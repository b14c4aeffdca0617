"""SpindleKV's eviction, as published and as retold. What it merges, pages do not show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .allocate import PyramidKV
from .ledger import Ledger
from .policy import Policy

MERGES = dict.fromkeys(("mean_pages", "peak_pages"), "it also merges tokens: pages do not tell its memory")


@dataclass(frozen=True)
class SpindleKV(PyramidKV):
    """SpindleKV: a pyramid of budgets by depth, and in each head the pages of highest mean weight from the prompt's
    last rows. Its codebook merges in every layer."""

    source = "arXiv 2507.06517"
    withheld = MERGES


@dataclass(frozen=True)
class SpindleMax(Policy):
    """SpindleKV as it is also told: the page goes first whose largest weight in the last `steps` steps is smallest, but
    for the first third of the layers, which merge and keep everything here. Not the published rule (SpindleKV is)."""

    source = "arXiv 2507.06517, as retold"
    withheld = MERGES
    reversible: bool = False
    steps: int = 32

    def rank(self, seen: Ledger) -> np.ndarray:
        return seen.recent(self.steps, "max")

    def share(self, seen: Ledger) -> np.ndarray:
        return np.where(3 * seen.layer < seen.layer.max() + 1, np.inf, 1.0)
