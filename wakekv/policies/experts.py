"""Two experts and their regrets: recency and frequency, mixed by which of them was wrong lately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .ledger import Ledger
from .order import interleave
from .policy import Policy


@dataclass(frozen=True)
class LeCaR(Policy):
    """LRU and LFU share the room in the ratio of their weights; an expert loses weight by what it alone would miss.

    As published but for three things: regret is taken a step at a time (as the share of its wants), not a want at a
    time; it is not discounted by the time since the eviction; and both experts' orders are interleaved by weight where
    LeCaR draws one for each eviction. `budget`, in pages a head, says what the experts would hold, which the host's
    budget should equal: the policy is not told.
    """

    source = "LeCaR, HotStorage 2018"
    scope: Literal["head", "layer", "model"] = "model"
    budget: int = 32
    rate: float = 0.45

    def rank(self, seen: Ledger) -> np.ndarray:
        weights, places, _ = seen.running("lecar", lambda: self._now(seen, np.full(2, 0.5)), self._learn(seen))
        return interleave(*zip(places, weights))

    def _learn(self, seen: Ledger):
        def update(state, step):
            weights, _, held = state
            heads, pages, _ = seen.wants(step)
            lost = ~held[:, heads, pages] & (seen.reads[heads, pages] > 1)
            regret = (lost & ~lost[::-1]).sum(1) / max(len(heads), 1)
            weights = np.maximum(weights * np.exp(-self.rate * regret), 1e-3)
            return self._now(seen, weights / weights.sum())

        return update

    def _now(self, seen: Ledger, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(weights, places [expert, head, page], what each expert holds)."""
        orders = [np.where(seen.known, score, -1) for score in (seen.recency, seen.reads)]
        if self.scope == "model":
            places = np.stack([_places(order.reshape(1, -1)).reshape(order.shape) for order in orders])
            return weights, places, (places < self.budget * len(seen.layer)) & seen.known
        places = np.stack([_places(order) for order in orders])
        return weights, places, (places < self.budget) & seen.known


def _places(score: np.ndarray) -> np.ndarray:
    """float [row, item]: place of each item in its row by falling score, 0 first, ties to the later item."""
    order = np.argsort(score, axis=1, kind="stable")[:, ::-1]
    place = np.empty(score.shape)
    np.put_along_axis(place, order, np.arange(score.shape[1], dtype=float)[None], axis=1)
    return place
