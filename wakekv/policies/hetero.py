"""HeteroCache: heads in four roles, of which one watches for drift on behalf of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from wakekv.logs.demand import Demand

from .ledger import Ledger
from .policy import Policy
from .roles import per_head

ALONE = -1  # leader of a head that follows nobody and is compressed: an anchor


def overlaps(demand: Demand, n_steps: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """(steady float [head], alike float [head, head]): over up to n_steps steps spread over the log, the median part of
    a head's wants in the prompt that the prompt's last row weighed most, and the mean overlap of two heads' wants."""
    prompt = demand.created < 0
    last = np.where(prompt, Ledger(demand).prompt(1)[:, 0], -1.0)
    place = np.argsort(np.argsort(-last, axis=1, kind="stable"), axis=1)
    kept, alike = [], np.zeros((demand.n_heads, demand.n_heads))
    steps = np.unique(np.linspace(0, demand.n_steps - 1, n_steps).astype(int))
    for t in steps:
        heads, entries = demand.at(t)
        wanted = np.zeros(last.shape, np.float32)
        wanted[heads, demand.page[entries]] = 1
        wanted *= prompt
        size = wanted.sum(1)
        kept.append((wanted * (place < size[:, None])).sum(1) / np.maximum(size, 1))
        alike += wanted @ wanted.T / np.maximum(np.maximum(size, size[:, None]), 1)
    return np.median(kept, axis=0), alike / len(steps)


def leaders(steady: np.ndarray, alike: np.ndarray, layer: np.ndarray, volatile: float, similar: float) -> np.ndarray:
    """int [head]: the head a head follows: itself (a pivot, or a volatile head), its pivot (a satellite), or ALONE.

    Greedy stars in each layer: the head with most unclaimed neighbours leads them, until no head has one; of the heads
    left over those steadier than `volatile` are anchors, the others volatile.
    """
    near = (alike >= similar) & (layer[:, None] == layer)
    np.fill_diagonal(near, False)
    lead, free = np.where(steady < volatile, np.arange(len(layer)), ALONE), np.ones(len(layer), bool)
    while True:
        n = np.where(free, (near & free).sum(1), 0)
        pivot = int(n.argmax())
        if not n[pivot]:
            return lead
        star = near[pivot] & free
        lead[star], lead[pivot] = pivot, pivot
        free &= ~star
        free[pivot] = False


@dataclass(frozen=True)
class HeteroCache(Policy):
    """HeteroCache: volatile heads and pivots keep every page; anchors and satellites keep the prompt pages its last row
    weighed most, and every 5 steps the satellites of a pivot whose wants have moved away from where they were
    (median overlap below 0.5) take over the pages their pivot now weighs most. Decoded pages count within B and come
    first.

    Shares of the compressed heads go by one over their steadiness, as published. Simplified: sets are wants (its sets,
    the 1024 heaviest tokens); stars are looked for within a layer (our reading); a pivot's first reference is what it
    wants at the first step; a new order takes effect at the next step. Roles and shares: `held_out` fits them.
    """

    source = "arXiv 2601.13684"
    roles = "offline"
    every: int = 5
    fetch: Literal["miss", "trim"] = "trim"
    offline: bool = True
    drift: float = 0.5
    similar: float = 0.5
    leader: tuple[int, ...] | None = field(default=None, repr=False)
    steady: tuple[float, ...] | None = field(default=None, repr=False)

    def fit(self, *demands: Demand) -> HeteroCache:
        if self.leader is not None:
            return self
        found = [overlaps(d) for d in demands]
        steady, alike = (np.mean(part, axis=0) for part in zip(*found, strict=True))
        lead = leaders(steady, alike, demands[0].layer, self.drift, self.similar)
        return self.but(leader=tuple(lead.tolist()), steady=tuple(steady.tolist()))

    def share(self, seen: Ledger) -> np.ndarray:
        lead = per_head(self.leader, seen)
        need = 1.0 / np.maximum(np.asarray(self.steady), 0.05)
        small = lead != np.arange(len(lead))
        return np.where(small, need / need[small].mean() if small.any() else 1.0, np.inf)

    def rank(self, seen: Ledger) -> np.ndarray:
        lead = per_head(self.leader, seen).astype(np.int64)
        follows = (lead != ALONE) & (lead != np.arange(len(lead)))
        prompt = seen.created < 0

        def watch(state, t):
            score, reference, overlap = state
            now = np.where(prompt, seen.recent(1, at=t), 0.0)
            wanted = now > 0
            if reference is None:
                reference = wanted.copy()
            size = wanted.sum(1)
            overlap = [*overlap, np.where(size, (wanted & reference).sum(1) / np.maximum(size, 1), 1.0)]
            if not self.every or (t + 1) % self.every:
                return score, reference, overlap
            moved = np.median(overlap, axis=0) < self.drift
            reloaded = follows & moved[lead]
            score = np.where(reloaded[:, None], now[lead], score)
            return score, np.where(moved[:, None], wanted, reference), []

        score = seen.running("hetero", lambda: (seen.prompt(1)[:, 0], None, []), watch)[0]
        return np.where(prompt, score, np.inf)
