"""The rule of residency: what a step of wants does to the pages that are resident.

One rule for two hosts: replay.py counts by it, cache/ moves bytes by it.

The step:
  1. a want is a miss if its page is known and not resident as the step begins;
  2. all wants move to the front, new pages enter at the front and are never misses;
  3. the resident set is trimmed once, at the end of the step, to the budget.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wakekv.errors import InputError
from wakekv.logs.demand import Demand
from wakekv.policies import Ledger, Policy


class Step(NamedTuple):
    """What a step did. entries: its wants in the demand; heads, pages, missed, excused: of each want;
    fetched: how many pages came back from the reservoir."""

    heads: np.ndarray
    entries: np.ndarray
    pages: np.ndarray
    missed: np.ndarray
    excused: np.ndarray
    fetched: int


class Residency:
    """Which pages are resident, bool [head, page], as a policy has them at one budget; `step` takes the next step in.

    demand  a Demand, or one that is still being written; policy: fitted, if it is one that is fitted.
    """

    def __init__(self, demand: Demand, policy: Policy, budget: int):
        self._demand, self._policy, self._budget = demand, policy, budget
        self.seen = Ledger(demand, policy.start, policy.scope, policy.foresight)
        self.share = np.asarray(policy.share(self.seen), np.float64)
        self._groups = budget_groups(policy, demand.layer, self.share)
        self.resident, self._dead = self.seen.known.copy(), np.zeros_like(self.seen.known)
        if self.resident.any():
            self.resident = self._trimmed(self.resident)

    def step(self) -> Step:
        """Take in the demand's next step."""
        policy, resident = self._policy, self.resident
        heads, entries, births, excused = self.seen.observe()
        wanted = self._demand.page[entries]
        absent = ~resident[heads, wanted]
        missed, fetched = absent & ~excused, 0
        resident |= births
        if policy.reversible and policy.fetch == "miss":
            resident[heads, wanted] = True
            fetched += int((absent & ~births[heads, wanted]).sum())
        if policy.sticky:
            missed |= self._dead[heads, wanted] & ~excused
            self._dead[heads[missed], wanted[missed]] = True
        if policy.every and (self.seen.step + 1) % policy.every == 0:
            self.resident = self._trimmed(self.seen.known if policy.fetch == "trim" else resident)
            if policy.fetch == "trim":
                fetched += int((self.resident & ~resident).sum())
        return Step(heads, entries, wanted, missed, excused, fetched)

    def _trimmed(self, candidates: np.ndarray) -> np.ndarray:
        rank = ranked(self._policy, self.seen)
        return trim(candidates, rank, self.seen.recency, self._budget, self._groups, self.share, self._policy.floor)


def ranked(policy: Policy, seen: Ledger) -> np.ndarray:
    rank = np.broadcast_to(np.asarray(policy.rank(seen)), seen.known.shape)
    if rank.dtype.kind == "f" and np.isnan(rank[seen.known]).any():
        raise InputError(f"{policy!r} ranks a page as not-a-number at step {seen.step}")
    return rank


def budget_groups(policy: Policy, layer: np.ndarray, share: np.ndarray) -> np.ndarray:
    """int [head]: which budget each head draws on. A head with an unlimited share draws on nobody's."""
    scopes = {"head": np.arange(len(layer)), "layer": layer.astype(np.int64), "model": np.zeros(len(layer), np.int64)}
    own = len(layer) + layer.max() + 1 + np.arange(len(layer))
    return np.unique(np.where(np.isinf(share), own, scopes[policy.scope]), return_inverse=True)[1]


def trim(candidates, rank, recency, budget: int, groups, share, floor: float) -> np.ndarray:
    """bool [head, page]: which of the candidates stay within the budget. The one place that decides it.

    Each group (a head, a layer, the model) keeps the top B * (sum of its heads' shares) of its pages together; a head
    with an unlimited share keeps all. With a floor, head h of a shared group keeps its own top
    floor * share * B + (1 - floor) * c_h, where c_h is how many pages it has among the group's top (Ada-KV's form),
    the fractions settled by largest remainder.
    """
    keep = np.zeros_like(candidates)
    for g in range(groups.max() + 1):
        members = np.flatnonzero(groups == g)
        head, page = np.nonzero(candidates[members])
        head = members[head]
        best = np.lexsort((-recency[head, page], -rank[head, page].astype(np.float64)))
        head, page = head[best], page[best]
        total = limit(budget, share[members].sum(), len(head))
        if floor == 0.0 or len(head) <= total:
            keep[head[:total], page[:total]] = True
            continue
        count = np.bincount(head[:total], minlength=len(groups))[members]
        exact = floor * share[members] * budget + (1.0 - floor) * count
        quota = np.floor(exact + 1e-9).astype(np.int64)
        rest = np.argsort(-(exact - quota), kind="stable")
        quota[rest[: total - quota.sum()]] += 1
        for m, n in zip(members, quota, strict=True):
            own = np.flatnonzero(head == m)[:n]
            keep[head[own], page[own]] = True
    return keep


def limit(budget, share, n_pages):
    """Pages that `budget` times `share` allows, at most n_pages; a whole number, also for an unlimited share."""
    return np.floor(np.minimum(budget * share + 1e-9, n_pages)).astype(np.int64)
