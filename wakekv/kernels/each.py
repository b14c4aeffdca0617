"""Every budget written out side by side: for floors, under which what two budgets keep need not nest."""

from __future__ import annotations

import numpy as np

from .jit import njit


@njit(cache=True, error_model="numpy")
def advance_each(
    t0, t1, ptr, page, weight, order, birth_ptr, birth_page, by_want, cold, stamps, following,  # the demand
    reads, stamp_of, known, born, next_use,  # the ledger
    resident, demand_fetch, sticky, dead,  # the policy
    misses, missed_weight, fetched, stalled, held, held_time, peak,  # the results
):  # fmt: skip
    """As `advance`, with what is resident written out at each budget: for orders whose budgets no stack can hold.

    resident, dead  uint8 [head, page, budget];  misses int64 [head, budget];  stalled uint8 [step, budget]
    """
    n_heads, n_pages = known.shape
    n = resident.shape[2]
    moved = np.zeros((t1 - t0, n), np.int64)
    for h in range(n_heads):
        for t in range(t0, t1):
            base = (t + 1) * stamps
            for i in range(ptr[h, t], ptr[h, t + 1]):
                p = page[i]
                excused = reads[h, p] == 0 if cold else not known[h, p]
                birth = (by_want and excused) or (not by_want and not known[h, p])
                for b in range(n):
                    if not excused and (not resident[h, p, b] or (sticky and dead[h, p, b])):
                        misses[h, b] += 1
                        missed_weight[b] += weight[i]
                        stalled[t, b] = 1
                        if sticky:
                            dead[h, p, b] = 1
                    if not resident[h, p, b] and (birth or demand_fetch):
                        fetched[b] += not birth
                        moved[t - t0, b] += 1
                        resident[h, p, b] = 1
                if by_want and excused:
                    known[h, p], born[h, p] = True, t
                reads[h, p] += 1
                stamp_of[h, p] = base + n_heads * n_pages + (order[i] if len(order) else i - ptr[h, t])
                if len(following):
                    next_use[h, p] = following[i]
            if not by_want:
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    p = birth_page[j]
                    if stamp_of[h, p] < base:  # born without being wanted
                        stamp_of[h, p] = base + p * n_heads + h
                    known[h, p], born[h, p] = True, t
                    for b in range(n):
                        moved[t - t0, b] += not resident[h, p, b]
                        resident[h, p, b] = 1
    for t in range(t1 - t0):
        for b in range(n):
            held[b] += moved[t, b]
            if t < t1 - t0 - 1:
                held_time[b] += held[b]
                peak[b] = max(peak[b], held[b])


@njit(cache=True, error_model="numpy")
def trim_each(items, start, n_pages, members, member_start, resident, rerank, total, equal, floor, fetched, held):
    """`replay.trim` at every budget, for one order.

    items int64 [item], best first in each group's start[g]:start[g + 1];
    total int64 [group, budget] what a group may keep; equal float64 [head, budget] a head's own share of it.
    """
    n_heads, n = equal.shape
    count, kept = np.zeros((2, n_heads), np.int64)
    quota, rest = np.zeros(n_heads, np.int64), np.zeros(n_heads)
    held[:] = 0
    for b in range(n):
        for g in range(len(start) - 1):
            own = members[member_start[g] : member_start[g + 1]]
            count[own], kept[own] = 0, 0
            there = 0
            for i in range(start[g], start[g + 1]):
                h, p = items[i] // n_pages, items[i] % n_pages
                if rerank or resident[h, p, b]:
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
                if rerank or resident[h, p, b]:
                    keep = everything or kept[h] < quota[h]
                    kept[h] += keep
                    held[b] += keep
                    fetched[b] += keep and not resident[h, p, b]
                    resident[h, p, b] = keep
