"""Every budget written out side by side: for floors, under which what two budgets keep need not nest."""

from __future__ import annotations

import numpy as np

from .jit import njit, trailing_zeros
from .ledger import bear, want

U = np.uint64
ONE, WORD = U(1), U(63)


@njit(cache=True, error_model="numpy")
def advance_each(
    t0, t1, ptr, page, weight, pooled, birth_ptr, birth_page, by_want, cold, stamps, following,  # the demand
    reads, stamp_of, known, born, next_use,  # the ledger
    resident, everywhere, demand_fetch, sticky, dead,  # the policy
    misses, missed_weight, fetched, stalled, held, held_time, peak,  # the results
):  # fmt: skip
    """As `advance`, with what is resident written out at each budget: for orders whose budgets no stack can hold.

    Budgets are bits of words: resident, dead  uint64 [head, page, word]; stalled  uint64 [step, word]; everywhere
    uint64 [word] has the bit of every budget. misses int64 [head, budget + 1], first touches in the last column.
    """
    n_heads, n = misses.shape[0], misses.shape[1] - 1
    moved = np.zeros((t1 - t0, n), np.int64)
    for h in range(n_heads):
        for t in range(t0, t1):
            base, first = (t + 1) * stamps, U(ptr[h, t])
            for i in range(first, U(ptr[h, t + 1])):
                p = U(np.uint32(page[i]))
                excused = reads[h, p] == 0 if cold else not known[h, p]
                birth = excused if by_want else not known[h, p]
                misses[h, n] += excused
                for k in range(len(everywhere)):
                    absent = everywhere[k] & ~resident[h, p, k]
                    missed = absent
                    if sticky:
                        missed |= dead[h, p, k]
                    if missed and not excused:
                        stalled[t, k] |= missed
                        if sticky:
                            dead[h, p, k] = missed
                        while missed:
                            b = (U(k) << U(6)) + trailing_zeros(missed)
                            missed &= missed - ONE
                            misses[h, b] += 1
                            missed_weight[b] += weight[i]
                    if absent and (birth or demand_fetch):
                        resident[h, p, k] = everywhere[k]
                        _add(absent, k, moved[t - t0])
                        if not birth:
                            _add(absent, k, fetched)
                if by_want and excused:
                    known[h, p], born[h, p] = True, t
                want(h, p, i, first, base, pooled, following, reads, stamp_of, next_use)
            if not by_want:
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    p = birth_page[j]
                    bear(h, p, t, base, stamp_of, known, born)
                    for k in range(len(everywhere)):
                        _add(everywhere[k] & ~resident[h, p, k], k, moved[t - t0])
                        resident[h, p, k] = everywhere[k]
    for t in range(t1 - t0):
        for b in range(n):
            held[b] += moved[t, b]
            if t < t1 - t0 - 1:
                held_time[b] += held[b]
                peak[b] = max(peak[b], held[b])


@njit(cache=True, error_model="numpy")
def _add(bits, k, count):
    """One more at each budget whose bit of word k is set."""
    while bits:
        count[(U(k) << U(6)) + trailing_zeros(bits)] += 1
        bits &= bits - ONE


@njit(cache=True, error_model="numpy")
def trim_each(items, start, n_pages, members, member_start, resident, rerank, total, equal, floor, fetched, held):
    """`replay.trim` at every budget, for one order.

    items int64 [item], best first in each group's start[g]:start[g + 1]; resident as in `advance_each`;
    total int64 [group, budget] what a group may keep; equal float64 [head, budget] a head's own share of it.
    """
    n_heads, n = equal.shape
    count, kept = np.zeros((2, n_heads), np.int64)
    quota, rest = np.zeros(n_heads, np.int64), np.zeros(n_heads)
    held[:] = 0
    for b in range(n):
        k, bit = b >> 6, ONE << (U(b) & WORD)
        for g in range(len(start) - 1):
            own = members[member_start[g] : member_start[g + 1]]
            count[own], kept[own] = 0, 0
            there = 0
            for i in range(start[g], start[g + 1]):
                h, p = items[i] // n_pages, items[i] % n_pages
                if rerank or resident[h, p, k] & bit:
                    there += 1
                    if there <= total[g, b]:
                        count[h] += 1
            everything = there <= total[g, b]
            given = 0
            for h in own:
                exact = floor * equal[h, b] + (1.0 - floor) * count[h]
                quota[h] = np.int64(np.floor(exact + 1e-9))
                rest[h] = exact - quota[h]
                given += quota[h]
            if not everything:
                for h in own[np.argsort(-rest[own], kind="mergesort")][: total[g, b] - given]:
                    quota[h] += 1
            for i in range(start[g], start[g + 1]):
                h, p = items[i] // n_pages, items[i] % n_pages
                if rerank or resident[h, p, k] & bit:
                    keep = everything or kept[h] < quota[h]
                    kept[h] += keep
                    held[b] += keep
                    fetched[b] += keep and not resident[h, p, k] & bit
                    resident[h, p, k] = resident[h, p, k] | bit if keep else resident[h, p, k] & ~bit
