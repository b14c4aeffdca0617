"""One want after the other, as in an ordinary cache library: what `replay` does under the sequential convention."""

from __future__ import annotations

import numpy as np

from .jit import njit


@njit(cache=True)
def in_turn(ptr, page, weight, birth_ptr, birth_page, created, cold, reversible, budget, head_misses, held, stalled):
    """Recency with a budget a head, trimmed at every want. Returns (first touches, attention weight missed).

    head_misses int64 [head];  held int64 [step]: pages resident as a step ends, summed over heads;  stalled bool [step]
    """
    n = len(created)
    after, before = np.zeros((2, n + 1), np.int64)  # a ring through page n, which is none: the oldest comes after it
    inside, known = np.zeros((2, n), np.bool_)
    n_cold, missed_weight = 0, 0.0
    for h in range(len(head_misses)):
        after[n] = before[n] = n
        inside[:], known[:], size = False, False, 0
        if not cold:
            for p in range(n):
                if created[p] < 0:
                    known[p] = True
                    size = _enter(p, size, budget, after, before, inside)
        for t in range(ptr.shape[1] - 1):
            if not cold:
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    size = _enter(birth_page[j], size, budget, after, before, inside)
            for i in range(ptr[h, t], ptr[h, t + 1]):
                p = page[i]
                excused = not known[p]
                known[p] = True
                n_cold += excused
                if inside[p]:
                    _leave(p, after, before)
                    _append(p, after, before)
                    continue
                if not excused:
                    head_misses[h] += 1
                    missed_weight += weight[i]
                    stalled[t] = True
                if reversible or excused:
                    size = _enter(p, size, budget, after, before, inside)
            if not cold:
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    known[birth_page[j]] = True
            held[t] += size
    return n_cold, missed_weight


@njit(cache=True)
def _append(p, after, before):
    ring = len(after) - 1
    before[p], after[p] = before[ring], ring
    after[before[p]] = p
    before[ring] = p


@njit(cache=True)
def _leave(p, after, before):
    after[before[p]], before[after[p]] = after[p], before[p]


@njit(cache=True)
def _enter(p, size, budget, after, before, inside):
    """Page p comes in, and the oldest goes where there is no room. Returns how many there are."""
    _append(p, after, before)
    inside[p] = True
    if size < budget:
        return size + 1
    oldest = after[len(after) - 1]
    _leave(oldest, after, before)
    inside[oldest] = False
    return size
