"""How much of the optimum's lead is luck? A log drawn by chance from known odds, and what knowing the odds is worth.

The optimum sees which of two equally likely pages will be read; no rule that sees only the past can. To tell how much
of the way that alone costs, a real log is read with `commons`, and at every step each page that a head knows is read
again or not by a draw with just the odds that the order gave it there; first reads stay where they were. In the drawn
log those odds are not estimated, they are the truth, so what the order of true odds does not save there is chance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from wakekv.logs.demand import Demand
from wakekv.policies import Ledger, Policy
from wakekv.policies.pooled import Commons


@dataclass(frozen=True)
class TrueOdds(Policy):
    """The order of odds that are given beforehand: float32 [step, head, page], those of being read at the next step."""

    odds: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0)), repr=False)
    scope: Literal["head", "layer", "model"] = "model"

    def rank(self, seen: Ledger) -> np.ndarray:
        return self.odds[seen.step]


def drawn(wants: Demand, rule: Commons, seed: int = 0) -> tuple[Demand, TrueOdds]:
    """(the drawn log, the rule that knows its odds). A page's weight is the last one that the real log gave it."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    shape, seen = (wants.n_heads, wants.n_pages), Ledger(wants, scope="model")
    odds = np.zeros((wants.n_steps, *shape), np.float32)
    weight, steps = np.zeros(shape, np.float32), []
    for step in range(wants.n_steps):
        known = seen.known.copy()
        seen.observe()
        heads, pages, weights = seen.wants()
        weight[heads, pages] = weights
        now = seen.known & ~known
        if step:
            now |= known & (rng.random(shape) < 1 / (1 + np.exp(-odds[step - 1])))
        head, page = np.nonzero(now)
        order = np.lexsort((page, weight[head, page], head))
        steps.append((head[order], page[order], weight[head, page][order]))
        odds[step] = np.where(seen.known, rule.rank(seen), -60.0)
    counts = np.array([np.bincount(head, minlength=shape[0]) for head, _, _ in steps]).T
    by_head = np.argsort(np.concatenate([head for head, _, _ in steps]), kind="stable")
    page, weight = (np.concatenate([step[i] for step in steps])[by_head] for i in (1, 2))
    ends = np.cumsum(counts).reshape(counts.shape)
    ptr = np.concatenate([np.concatenate([[0], ends[:-1, -1]])[:, None], ends], axis=1)
    log = Demand(ptr, page.astype(np.int32), weight, wants.created, wants.layer, page_tokens=wants.page_tokens)
    return log, TrueOdds(odds=odds)
