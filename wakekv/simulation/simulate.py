"""Every budget in one pass.

`replay` is the definition. `curves` gives the same numbers at every integer budget, by this theorem: if pages are
ordered by anything that does not depend on the budget B, and E_t^B is the top B of E_{t-1}^B and the wants (reversible)
or the births (destructive), then E_t^B and E_t^{B+1} differ by at most one page, at every t. (In C and C' with C in C'
and one page between them, a page of rank r in C has rank r or r + 1 in C'.) So one stack, whose k-th page is the one
in E^k and not in E^{k-1}, holds all budgets at once, and a want at depth d misses exactly at budgets below d.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from wakekv import kernels
from wakekv.errors import InputError
from wakekv.logs.demand import Demand
from wakekv.policies import Ledger, Policy
from wakekv.policies.classic import Recency
from wakekv.simulation.replay import Curves, check_budgets, check_convention, counted, join, replay
from wakekv.simulation.residency import budget_groups, limit, ranked

__all__ = ["Curves", "curves", "replay", "streamed", "streams"]


def curves(demand: Demand, policy: Policy, budgets=None, convention: str = "batch") -> Curves:
    """One policy at every budget (or at `budgets`), equal to `replay` at each of them.

    One pass over the wants, whatever the number of budgets; one a budget for the sequential convention, and one replay
    where numba is missing. Raises what `replay` raises.
    """
    check_convention(policy, convention)
    budgets = check_budgets(budgets, demand.n_pages)
    if not kernels.AVAILABLE:
        return join([replay(demand, policy, b, convention) for b in budgets])
    if convention == "sequential":
        return join([_in_turn(demand, policy, b) for b in budgets])
    policy = policy.fit(demand)
    if not policy.nested:
        return _each(demand, policy, budgets)
    return _one_pass([demand], policy, budgets)


def _in_turn(demand: Demand, policy: Policy, budget: int) -> Curves:
    misses, held = np.zeros(demand.n_heads, np.int64), np.zeros(demand.n_steps, np.int64)
    stalled, cold = np.zeros(demand.n_steps, bool), demand.first_touch == "cold"
    n_cold, missed_weight = kernels.in_turn(
        demand.ptr, demand.page, demand.weight, *demand.births, demand.created, cold, policy.reversible, budget,
        misses, held, stalled,
    )  # fmt: skip
    points = {"misses": misses.sum(), "missed_weight": missed_weight, "mean_pages": held.mean()}
    points |= {"peak_pages": held.max(), "fetched": misses.sum() * policy.reversible, "stall_steps": stalled.sum()}
    arrays = {name: np.array([value]) for name, value in points.items()}
    return counted(
        demand, policy, "sequential", n_cold, budgets=np.array([budget]), **arrays, head_misses=misses[:, None]
    )


def streamed(blocks: Iterable[Demand], policy: Policy, budgets=None) -> Curves:
    """`curves` of a log whose wants are never in memory all at once: of blocks of its heads, one after the other.

    For policies under which no head looks at another (Policy.alone), by the compiled kernels: InputError for others,
    without numba, and as for `curves`.
    """
    if not streams(policy):
        raise InputError(f"{policy!r} needs all heads at once, or numba is missing: use curves")
    return _one_pass(blocks, policy, budgets)


def streams(policy: Policy) -> bool:
    """Can heads be simulated block by block? Only if the policy's own class says so: a subclass may rank otherwise."""
    return kernels.AVAILABLE and vars(type(policy)).get("alone", False) and policy.scope == "head"


def _one_pass(blocks: Iterable[Demand], policy: Policy, budgets) -> Curves:
    plain = type(policy) is Recency and policy.every == 1 and policy.scope == "head"
    tally = None
    for demand in blocks:
        if tally is None:
            budgets, tally = check_budgets(budgets, demand.n_pages), _Tally(demand)
        (_recency if plain else _sweep)(demand, policy, tally)
    if tally is None:
        raise InputError("no block of heads to simulate: give one at least")
    whole = tally.curves()
    return whole if len(budgets) == len(whole.budgets) else whole.at(budgets)


class _Tally:
    """What one pass counts, over blocks of heads one after the other."""

    def __init__(self, demand: Demand):
        self.deepest = np.zeros(demand.n_steps, np.int32)  # of the wants of each step
        self.held, self.peak = np.zeros((2, demand.n_pages + 2), np.int64)  # by budget: over all steps, and at most
        self.held_at: np.ndarray | None = None  # int32 [step, n + 2]: pages resident as a step ends, by bucket
        self.total: Curves | None = None  # of the blocks so far, less what needs all of them
        self.by_head: dict[str, list[np.ndarray]] = {"head_misses": [], "head_wants": []}

    def add(self, demand: Demand, policy: Policy, count: np.ndarray, fetch_hist: np.ndarray | None) -> None:
        """A block of heads. count float64 [head, n + 2, 2]: wants by bucket, and their weight; fetch_hist int64 [n + 2]
        (None: what was missed)."""
        hist = count[:, :, 0].astype(np.int64)
        misses = _above(hist)
        missed, later = misses.sum(0), ("mean_pages", "peak_pages", "stall_steps")
        found = counted(
            demand,
            policy,
            "batch",
            demand.n_wants - int(hist.sum()),
            budgets=np.arange(1, demand.n_pages + 1),
            misses=missed,
            missed_weight=_above(count[None, :, :, 1].sum(1))[0],
            fetched=missed if fetch_hist is None else _above(fetch_hist[None])[0],
            head_misses=misses,
            **dict.fromkeys(later, hist[0, 1:-1]),
        )
        for name, kept in self.by_head.items():
            kept.append(getattr(found, name))
        summed = ("n_heads", "n_wants", "n_cold", "weight", "misses", "missed_weight", "fetched")
        so_far = {name: getattr(self.total, name) + getattr(found, name) for name in summed} if self.total else {}
        self.total = replace(self.total or found, **so_far)

    def curves(self) -> Curves:
        """All blocks together, at every budget."""
        held, peak = self.held, self.peak
        if self.held_at is not None:
            held = np.cumsum(self.held_at.sum(0, dtype=np.int64))
            for some in np.array_split(self.held_at, -(-len(self.held_at) // 256)):
                peak = np.maximum(peak, np.cumsum(some, axis=1, dtype=np.int64).max(0))
        return replace(
            self.total,
            mean_pages=held[1:-1] / len(self.deepest),
            peak_pages=peak[1:-1],
            stall_steps=_above(np.bincount(self.deepest, minlength=len(held))[None])[0],
            **{name: np.concatenate(kept) for name, kept in self.by_head.items()},
        )


def _recency(demand: Demand, policy: Policy, tally: _Tally) -> None:
    """Recency with a budget a head, trimmed every step: head by head, with no ledger to keep."""
    n, cold = demand.n_pages, demand.first_touch == "cold"
    by_want = cold and policy.start == "demand"
    known = np.zeros(n, bool) if by_want else demand.created < 0
    count, fetch_hist, seen_hist = np.zeros((demand.n_heads, n + 2, 2)), *np.zeros((2, n + 2), np.int64)
    seen = np.zeros(demand.n_heads, np.int64)
    wants = demand.ptr, demand.page, demand.weight, *demand.births, known
    if policy.reversible and not policy.sticky and by_want == cold:  # the paper's rule, where the bits apply
        kernels.recency(*wants, cold, count, seen_hist, seen, tally.deepest)
        fetch_hist = None
    else:
        variant = by_want, cold, policy.reversible, policy.sticky
        kernels.recency_by_head(*wants, *variant, count, fetch_hist, seen_hist, seen, tally.deepest)
    held_time, peak = np.cumsum(seen_hist[::-1])[::-1], np.cumsum(np.bincount(seen, minlength=n + 2)[::-1])[::-1]
    held_time[0] = peak[0] = 0  # of a bucket: steps of heads, and heads, that know at least so many pages
    tally.held += np.cumsum(held_time)
    tally.peak += np.cumsum(peak)
    tally.add(demand, policy, count, fetch_hist)


def _above(hist: np.ndarray) -> np.ndarray:
    """[row, bucket 0..n + 1] -> [row, budget 1..n]: what stands in the buckets above each budget."""
    return np.cumsum(hist[:, :1:-1], axis=1)[:, ::-1]


def _buckets(share: np.ndarray, groups: np.ndarray, n_pages: int) -> np.ndarray:
    """int32 [group, depth]: the smallest budget in 1..n_pages that reaches a depth, n_pages + 1 if none does; 0 where
    the share is unlimited."""
    deepest = np.bincount(groups).max() * n_pages
    depth, nominal = np.arange(deepest + 1), np.arange(n_pages + 1)
    total = np.bincount(groups, weights=share)
    limits = [limit(nominal, s, deepest) if np.isfinite(s) else np.full(n_pages + 1, deepest) for s in total]
    return np.array([np.searchsorted(limit, depth) for limit in limits], np.int32)


def _stretches(n_steps: int, every: int) -> Iterator[tuple[int, bool]]:
    """(stop, trims): steps are taken up to `stop` at once, 512 at most, and then there is a trim or there is none."""
    step = 0
    while step < n_steps:
        step = min(n_steps, step + 512, (step // every + 1) * every if every else n_steps)
        yield step, every > 0 and step % every == 0


def _sweep(demand: Demand, policy: Policy, tally: _Tally) -> None:
    """Any order of pages that does not look at the budget, at every budget (the theorem above)."""
    n, shape = demand.n_pages, (demand.n_heads, demand.n_pages)
    seen = Ledger(demand, policy.start, policy.scope, policy.foresight)
    share = np.asarray(policy.share(seen), np.float64)
    groups = budget_groups(policy, demand.layer, share)
    bucket = _buckets(share, groups, n)
    heads = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    group_start = np.concatenate([[0], np.cumsum(sizes)])
    stack, size = np.zeros(demand.n_heads * n, np.int32), np.zeros(len(sizes), np.int64)
    depth, worst = np.zeros((2, *shape), np.int32)
    count, (fetch_hist, held) = np.zeros((demand.n_heads, n + 2, 2)), np.zeros((2, n + 2), np.int64)
    if tally.held_at is None:
        tally.held_at = np.zeros((demand.n_steps, n + 2), np.int32)
    demand_fetch, rerank = policy.reversible and policy.fetch == "miss", policy.fetch == "trim"

    def trim_all():
        rank = np.ascontiguousarray(ranked(policy, seen), np.float64).reshape(-1)
        kernels.restack(
            rank, seen.recency.reshape(-1), seen.known.reshape(-1), depth.reshape(-1), heads, group_start,
            stack, size, group_start * n, rerank, bucket, fetch_hist, held,
        )  # fmt: skip

    if seen.known.any():
        trim_all()
        fetch_hist[:] = 0
    for stop, trims in _stretches(demand.n_steps, policy.every):
        seen.advance(stop, kernels.advance, depth, bucket, groups, demand_fetch, policy.sticky, worst,
                     count, fetch_hist, tally.deepest, held, tally.held_at)  # fmt: skip
        if trims and (rerank or held[0]):  # else nothing has moved
            trim_all()
        tally.held_at[stop - 1] += held
    tally.add(demand, policy, count, fetch_hist)


def _each(demand: Demand, policy: Policy, budgets: np.ndarray) -> Curves:
    """One replay a budget, all compiled and in step: for floors, under which the resident sets need not nest."""
    shape, n = (demand.n_heads, demand.n_pages), len(budgets)
    seen = Ledger(demand, policy.start, policy.scope, policy.foresight)
    share = np.asarray(policy.share(seen), np.float64)
    groups = budget_groups(policy, demand.layer, share)
    members = np.argsort(groups, kind="stable")
    member_start = np.searchsorted(groups[members], np.arange(groups.max() + 2))
    everything = np.bincount(groups) * shape[1]
    total = np.array([limit(budgets, s, n) for s, n in zip(np.bincount(groups, share), everything, strict=True)])
    equal = np.where(np.isinf(share), 0.0, share)[:, None] * budgets
    everywhere = np.full(-(-n // 64), np.uint64(2**64 - 1))  # the bits of all budgets
    everywhere[-1] >>= np.uint64(-n % 64)
    resident = seen.known[:, :, None] * everywhere
    dead = np.zeros_like(resident) if policy.sticky else resident
    rerank = policy.fetch == "trim"
    demand_fetch = policy.reversible and policy.fetch == "miss"
    misses, stalled = np.zeros((shape[0], n + 1), np.int64), np.zeros((demand.n_steps, len(everywhere)), np.uint64)
    missed_weight, fetched, held, held_time, peak = np.zeros(n), *np.zeros((4, n), np.int64)

    def trim_all():
        head, page = np.nonzero(seen.known)
        rank = ranked(policy, seen)[head, page].astype(np.float64)
        best = np.lexsort((-seen.recency[head, page], -rank, groups[head]))
        start = np.searchsorted(groups[head[best]], np.arange(groups.max() + 2))
        items = (head * shape[1] + page)[best]
        kernels.trim_each(items, start, shape[1], members, member_start, resident, rerank, total, equal, policy.floor,
                          fetched, held)  # fmt: skip

    if seen.known.any():
        trim_all()
        fetched[:] = 0
    settled = held.copy()  # resident pages when the last trim was done
    for stop, trims in _stretches(demand.n_steps, policy.every):
        seen.advance(stop, kernels.advance_each, resident, everywhere, demand_fetch, policy.sticky, dead,
                     misses, missed_weight, fetched, stalled, held, held_time, peak)  # fmt: skip
        if trims and (rerank or (held != settled).any()):  # else nothing has moved
            trim_all()
            settled = held.copy()
        held_time += held
        np.maximum(peak, held, out=peak)
    stalls = [np.count_nonzero(stalled[:, b // 64] & np.uint64(1 << b % 64)) for b in range(n)]
    return counted(
        demand,
        policy,
        "batch",
        int(misses[:, n].sum()),
        budgets=budgets,
        misses=misses[:, :n].sum(0),
        missed_weight=missed_weight,
        mean_pages=held_time / demand.n_steps,
        peak_pages=peak,
        fetched=fetched,
        stall_steps=np.array(stalls),
        head_misses=misses[:, :n],
    )
