"""Replay a policy over what heads wanted, step by step at one budget: the definition, in plain numpy.

What a step is (batch convention, the default), residency.py says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from wakekv.errors import InputError
from wakekv.logs.demand import Demand
from wakekv.policies import Policy
from wakekv.policies.classic import Recency
from wakekv.simulation.residency import Residency

CONVENTIONS = ("batch", "sequential")


@dataclass(frozen=True)
class Curves:
    """What a policy costs at each budget. All counts are sums over heads and steps.

    budgets        int   [budget]  pages per head
    misses         int   [budget]  wants of known pages that were not resident;  misses / n_wants is the miss rate
    missed_weight  float [budget]  attention weight of those wants
    mean_pages     float [budget]  mean over steps of resident pages, summed over heads, as each step ends
    peak_pages     int   [budget]  the same, at its highest
    fetched        int   [budget]  pages brought back from the reservoir
    stall_steps    int   [budget]  steps in which at least one head missed
    head_misses    int   [head, budget];  head_wants int [head]
    n_cold         wants that were first touches: in n_wants, never misses
    """

    policy: Policy
    unit: str
    first_touch: str
    convention: str
    n_heads: int
    n_steps: int
    n_wants: int
    n_cold: int
    weight: float
    budgets: np.ndarray
    misses: np.ndarray
    missed_weight: np.ndarray
    mean_pages: np.ndarray
    peak_pages: np.ndarray
    fetched: np.ndarray
    stall_steps: np.ndarray
    head_misses: np.ndarray = field(repr=False)
    head_wants: np.ndarray = field(repr=False)

    @property
    def miss_rate(self) -> np.ndarray:
        """float [budget]: missed wants over wants."""
        return self.misses / max(self.n_wants, 1)

    def at(self, budgets) -> Curves:
        """The same curves at some budgets only. InputError for one that was not simulated."""
        budgets = np.atleast_1d(np.asarray(budgets))
        where = np.searchsorted(self.budgets, budgets)
        bad = (where >= len(self.budgets)) | (self.budgets[np.minimum(where, len(self.budgets) - 1)] != budgets)
        if bad.any():
            raise InputError(f"budget {budgets[bad][0]} was not simulated: {self.budgets[0]}..{self.budgets[-1]} were")
        names = ("budgets", "misses", "missed_weight", "mean_pages", "peak_pages", "fetched", "stall_steps")
        cut = {name: getattr(self, name)[where] for name in names}
        return Curves(**self.__dict__ | cut | {"head_misses": self.head_misses[:, where]})


def check_budgets(budgets, n_pages: int) -> np.ndarray:
    """Sorted distinct budgets, int [budget]; None means all. InputError unless each is a whole number in 1..n_pages."""
    if budgets is None:
        return np.arange(1, n_pages + 1)
    asked = np.atleast_1d(np.asarray(budgets))
    if asked.size == 0:
        raise InputError("no budget given: name at least one number of pages per head")
    for b in asked:
        if asked.dtype.kind not in "iuf" or not 1 <= b <= n_pages or b != int(b):
            raise InputError(f"budget {b} is not a whole number between 1 and {n_pages}, the pages of this log")
    return np.unique(asked.astype(np.int64))


def check_convention(policy: Policy, convention: str) -> None:
    if convention not in CONVENTIONS:
        raise InputError(f"convention must be one of {', '.join(CONVENTIONS)}, not {convention!r}")
    plain = type(policy) is Recency and policy.every == 1 and policy.scope == "head" and not policy.sticky
    if convention == "sequential" and not plain:
        raise InputError("the sequential convention is defined for per-head recency (reactive, evict) only")


OnStep = Callable[[int, np.ndarray, np.ndarray], None]


def replay(
    demand: Demand, policy: Policy, budget: int, convention: str = "batch", on_step: OnStep | None = None
) -> Curves:
    """One policy at one budget, page by page: the definition that everything faster is tested against.

    on_step(step, resident, missed) is called as each step ends, with bool [head, page] arrays (not to be changed).
    Raises InputError for a budget outside 1..pages, or a convention the policy has no meaning under.
    """
    check_convention(policy, convention)
    (budget,) = check_budgets([budget], demand.n_pages)
    if convention == "sequential":
        return _replay_in_turn(demand, policy, budget)
    policy = policy.fit(demand)
    host = Residency(demand, policy, budget)
    head_misses = np.zeros(demand.n_heads, np.int64)
    pages, n_cold, fetched, stalls, missed_weight = [], 0, 0, 0, 0.0
    for step in range(demand.n_steps):
        done = host.step()
        missed = done.missed
        head_misses += np.bincount(done.heads[missed], minlength=demand.n_heads)
        missed_weight += float(demand.weight[done.entries][missed].sum(dtype=np.float64))
        n_cold += int(done.excused.sum())
        fetched += done.fetched
        stalls += bool(missed.any())
        pages.append(int(host.resident.sum()))
        if on_step is not None:
            misses = np.zeros_like(host.resident)
            misses[done.heads[missed], done.pages[missed]] = True
            on_step(step, host.resident, misses)
    return counted(
        demand,
        policy,
        "batch",
        n_cold,
        budgets=np.array([budget]),
        misses=np.array([head_misses.sum()]),
        missed_weight=np.array([missed_weight]),
        mean_pages=np.array([np.mean(pages)]),
        peak_pages=np.array([max(pages)]),
        fetched=np.array([fetched]),
        stall_steps=np.array([stalls]),
        head_misses=head_misses[:, None],
    )


def _replay_in_turn(demand: Demand, policy: Policy, budget: int) -> Curves:
    """The sequential convention: each want in turn hits, or makes room and enters, as in any cache library."""
    head_misses = np.zeros(demand.n_heads, np.int64)
    resident_sum = np.zeros(demand.n_steps, np.int64)
    stalled = np.zeros(demand.n_steps, bool)
    n_cold, missed_weight = 0, 0.0
    for h in range(demand.n_heads):
        cache: OrderedDict[int, None] = OrderedDict()
        known = set()
        if demand.first_touch == "warm":
            known.update(int(p) for p in np.flatnonzero(demand.created < 0))
            cache.update((p, None) for p in sorted(known)[-budget:])
        for t in range(demand.n_steps):
            born = [] if demand.first_touch == "cold" else [int(p) for p in np.flatnonzero(demand.created == t)]
            for p in born:
                cache[p] = None
                if len(cache) > budget:
                    cache.popitem(last=False)
            for i in range(demand.ptr[h, t], demand.ptr[h, t + 1]):
                p = int(demand.page[i])
                excused = p not in known
                known.add(p)
                n_cold += excused
                if p in cache:
                    cache.move_to_end(p)
                    continue
                if not excused:
                    head_misses[h] += 1
                    missed_weight += float(demand.weight[i])
                    stalled[t] = True
                if policy.reversible or excused:
                    cache[p] = None
                    if len(cache) > budget:
                        cache.popitem(last=False)
            known.update(born)
            resident_sum[t] += len(cache)
    return counted(
        demand,
        policy,
        "sequential",
        n_cold,
        budgets=np.array([budget]),
        misses=np.array([head_misses.sum()]),
        missed_weight=np.array([missed_weight]),
        mean_pages=np.array([resident_sum.mean()]),
        peak_pages=np.array([resident_sum.max()]),
        fetched=np.array([head_misses.sum() if policy.reversible else 0]),
        stall_steps=np.array([stalled.sum()]),
        head_misses=head_misses[:, None],
    )


def counted(demand: Demand, policy: Policy, convention: str, n_cold: int, **counts) -> Curves:
    return Curves(
        policy=policy,
        unit=demand.unit,
        first_touch=demand.first_touch,
        convention=convention,
        n_heads=demand.n_heads,
        n_steps=demand.n_steps,
        n_wants=demand.n_wants,
        n_cold=n_cold,
        weight=demand.total_weight,
        head_wants=demand.ptr[:, -1] - demand.ptr[:, 0],
        **counts,
    )


def join(points: list[Curves]) -> Curves:
    names = ("budgets", "misses", "missed_weight", "mean_pages", "peak_pages", "fetched", "stall_steps")
    joined = {name: np.concatenate([getattr(p, name) for p in points]) for name in names}
    joined["head_misses"] = np.concatenate([p.head_misses for p in points], axis=1)
    return Curves(**points[0].__dict__ | joined)
