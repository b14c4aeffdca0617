"""Policies that keep what they demote and rank all pages again at intervals: FlexiCache and its relatives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import kernels
from ..demand import Demand
from .ledger import Ledger
from .policy import Policy


def adjacent_jaccard(demand: Demand) -> np.ndarray:
    """float [head]: mean Jaccard overlap of the wants of adjacent steps; 0 for a log of one step, pairs of empty
    steps left out."""
    common = np.zeros((demand.n_heads, demand.n_steps - 1), np.int64)
    kernels.adjacent_common(demand.ptr, demand.page, demand.n_pages, common)
    size = np.diff(demand.ptr, axis=1)
    union = size[:, :-1] + size[:, 1:] - common
    n = (union > 0).sum(1)
    return np.where(union > 0, common / np.maximum(union, 1), 0.0).sum(1) / np.maximum(n, 1)


@dataclass(frozen=True)
class Frozen(Policy):
    """The paper's frozen foil (section 5.1): FlexiCache's defaults at page level, classified on the log it runs on.

    The `dense` quarter of heads with the lowest adjacent-step Jaccard of page sets keep every page; the others hold
    the B pages most often wanted so far, refreshed every 16 steps; between refreshes nothing comes back, and pages
    that come to be stay until the next one. The profile is taken from the same log, which favours it.
    """

    every: int = 16
    fetch: str = "trim"
    offline: bool = True
    dense: float = 0.25
    profile: tuple[int, ...] | None = None

    def fit(self, demand: Demand) -> Policy:
        if self.profile is not None:
            return self
        unstable = np.argsort(adjacent_jaccard(demand), kind="stable")[: round(self.dense * demand.n_heads)]
        return self.but(profile=tuple(int(h) for h in np.sort(unstable)))

    def rank(self, seen: Ledger) -> np.ndarray:
        return seen.reads

    def share(self, seen: Ledger) -> np.ndarray:
        share = np.ones(len(seen.layer))
        share[list(self.profile or ())] = np.inf
        return share
