"""Replay a policy over what heads wanted, step by step at one budget: the definition, in plain numpy.

The step (batch convention, the default):
  1. a want is a miss if its page is known and not resident as the step begins;
  2. all wants move to the front, new pages enter at the front and are never misses;
  3. the resident set is trimmed once, at the end of the step, to the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .demand import Demand
from .errors import InputError
from .policies import Ledger, Policy
from .policies.classic import Recency

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
    head_misses    int   [head, budget]
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
        if b != int(b) or not 1 <= b <= n_pages:
            raise InputError(f"budget {b} is not a whole number between 1 and {n_pages}, the pages of this log")
    return np.unique(asked.astype(np.int64))


def check_convention(policy: Policy, convention: str) -> None:
    if convention not in CONVENTIONS:
        raise InputError(f"convention must be one of {', '.join(CONVENTIONS)}, not {convention!r}")
    plain = type(policy) is Recency and policy.every == 1 and policy.scope == "head" and not policy.sticky
    if convention == "sequential" and not plain:
        raise InputError("the sequential convention is defined for per-head recency (reactive, evict) only")


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
    seen = Ledger(demand, policy.start, policy.scope, policy.offline)
    share = np.asarray(policy.share(seen), np.float64)
    groups = budget_groups(policy, demand.layer, share)
    resident, dead = seen.known.copy(), np.zeros_like(seen.known)
    if resident.any():
        resident = trim(resident, ranked(policy, seen), seen.recency, budget, groups, share, policy.floor)
    head_misses = np.zeros(demand.n_heads, np.int64)
    pages, n_cold, fetched, stalls, missed_weight = [], 0, 0, 0, 0.0
    for step in range(demand.n_steps):
        heads, entries, births, excused = seen.observe()
        wanted = demand.page[entries]
        absent = ~resident[heads, wanted]
        missed = absent & ~excused
        resident |= births
        if policy.reversible and policy.fetch == "miss":
            resident[heads, wanted] = True
            fetched += int((absent & ~births[heads, wanted]).sum())
        if policy.sticky:
            missed |= dead[heads, wanted] & ~excused
            dead[heads[missed], wanted[missed]] = True
        if policy.every and (step + 1) % policy.every == 0:
            candidates = seen.known if policy.fetch == "trim" else resident
            after = trim(candidates, ranked(policy, seen), seen.recency, budget, groups, share, policy.floor)
            if policy.fetch == "trim":
                fetched += int((after & ~resident).sum())
            resident = after
        head_misses += np.bincount(heads[missed], minlength=demand.n_heads)
        missed_weight += float(demand.weight[entries][missed].sum(dtype=np.float64))
        n_cold += int(excused.sum())
        stalls += bool(missed.any())
        pages.append(int(resident.sum()))
        if on_step is not None:
            misses = np.zeros_like(resident)
            misses[heads[missed], wanted[missed]] = True
            on_step(step, resident, misses)
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
        weight=float(demand.weight.sum(dtype=np.float64)),
        **counts,
    )


def join(points: list[Curves]) -> Curves:
    names = ("budgets", "misses", "missed_weight", "mean_pages", "peak_pages", "fetched", "stall_steps")
    joined = {name: np.concatenate([getattr(p, name) for p in points]) for name in names}
    joined["head_misses"] = np.concatenate([p.head_misses for p in points], axis=1)
    return Curves(**points[0].__dict__ | joined)
