"""Any order of pages that does not look at the budget, at every budget: one stack a group (the theorem of simulate.py).

Words used here. *depth* int32 [head, page]: where a page stands in its budget's stack, 1 on top; 0: in the fast tier
at every budget until the next trim. *bucket*: the smallest nominal budget at which a page of that depth is resident;
0 at all, n + 1 at none of 1..n. A want in bucket b misses exactly at budgets below b.
"""

from __future__ import annotations

import numpy as np

from .jit import njit


@njit(cache=True, boundscheck=False)
def advance(
    t0, t1, ptr, page, weight, order, created, by_want, cold, stamps, following,  # the demand
    reads, stamp_of, known, born, next_use,  # the ledger
    depth, bucket, group_of, demand_fetch, sticky, worst,  # the policy
    hist, weight_hist, fetch_hist, deepest, held, held_time, peak,  # the results
):  # fmt: skip
    """Steps t0..t1-1 for all heads, with no trim between: count misses by bucket, bring the ledger up to date.

    `held` int64 [n + 2] counts resident pages by bucket; every step but the last (which a trim follows) is added to
    `held_time` and `peak` here, the last by `account`. Births and, under demand fetching, wants go to depth 0.
    """
    n_heads, n_pages = known.shape
    n = len(held) - 2
    for t in range(t0, t1):
        base = (t + 1) * stamps
        if not by_want:
            for p in range(n_pages):
                if created[p] == t:
                    for h in range(n_heads):
                        known[h, p], born[h, p] = True, t
                        stamp_of[h, p] = base + p * n_heads + h
                        depth[h, p] = -1  # born, not yet in the fast tier: set below, after the wants are counted
        for h in range(n_heads):
            lut = bucket[group_of[h]]
            for i in range(ptr[h, t], ptr[h, t + 1]):
                p = page[i]
                if cold:
                    excused = reads[h, p] == 0
                else:
                    excused = not known[h, p] or depth[h, p] == -1
                birth = (by_want and excused) or depth[h, p] == -1
                b = 0 if birth else lut[depth[h, p]]
                if b > 0 and demand_fetch:
                    fetch_hist[min(b, n + 1)] += 1
                if sticky:
                    b = max(b, worst[h, p])
                    if not excused:
                        worst[h, p] = b
                if not excused:
                    hist[h, b] += 1
                    weight_hist[b] += weight[i]
                    deepest[t] = max(deepest[t], b)
                if by_want and excused:
                    known[h, p], born[h, p] = True, t
                    depth[h, p] = 0
                    held[0] += 1
                elif demand_fetch and depth[h, p] > 0:
                    held[lut[depth[h, p]]] -= 1
                    held[0] += 1
                    depth[h, p] = 0
                reads[h, p] += 1
                stamp_of[h, p] = base + n_heads * n_pages + (order[i] if len(order) else i - ptr[h, t])
                if len(following):
                    next_use[h, p] = following[i]
        if not by_want:
            for p in range(n_pages):
                if created[p] == t:
                    for h in range(n_heads):
                        depth[h, p] = 0
                        held[0] += 1
        if t < t1 - 1:
            account(held, held_time, peak)


@njit(cache=True)
def account(held, held_time, peak):
    """Add one step's resident pages, by bucket, to the time held and to the highest total at each budget."""
    total = 0
    for b in range(len(held)):
        held_time[b] += held[b]
        total += held[b]
        peak[b] = max(peak[b], total)


@njit(cache=True)
def _before(a, b, rank, stamp):
    """Does item a outrank item b? By rank, then by recency."""
    return rank[a] > rank[b] or (rank[a] == rank[b] and stamp[a] > stamp[b])


@njit(cache=True)
def _sift(heap, size, i, rank, stamp):
    item = heap[i]
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and _before(heap[child + 1], heap[child], rank, stamp):
            child += 1
        if not _before(heap[child], item, rank, stamp):
            break
        heap[i] = heap[child]
        i = child
    heap[i] = item


@njit(cache=True)
def restack(rank, stamp, known, depth, heads, group_start, stack, size, start, rerank, bucket, fetch_hist, held):
    """Trim every budget at once. The theorem's sweep: S'[k] is the best of the pool and S[k], the loser joins the pool.

    The pool is what lies at depth 0 (all known pages with rerank). rank float64, stamp int64, depth int32, known bool,
    all flat [head * page]; group g owns heads[group_start[g]:group_start[g + 1]] and stack[start[g]:start[g + 1]], of
    which size[g] are in use. Rewrites depth, stack, size and held; with rerank, counts pages brought back by bucket.
    """
    n_pages = len(rank) // len(heads)
    held[:] = 0
    heap = np.empty(np.max(np.diff(start)), np.int32)
    for g in range(len(size)):
        S = stack[start[g] : start[g + 1]]
        lut = bucket[g]
        n = 0
        for j in range(group_start[g], group_start[g + 1]):
            for item in range(heads[j] * n_pages, (heads[j] + 1) * n_pages):
                if known[item] and (rerank or depth[item] == 0):
                    heap[n] = item
                    n += 1
        for i in range(n // 2 - 1, -1, -1):
            _sift(heap, n, i, rank, stamp)
        old = 0 if rerank else size[g]
        k = 0
        while n > 0:
            if k < old and depth[S[k]] != 0 and _before(S[k], heap[0], rank, stamp):
                k += 1
                continue
            best = heap[0]
            if k < old and depth[S[k]] != 0:
                heap[0] = S[k]
            else:  # a hole (its page moved to the pool) or the end of the stack
                n -= 1
                heap[0] = heap[n]
            if n > 0:
                _sift(heap, n, 0, rank, stamp)
            S[k] = best
            k += 1
        if rerank:
            for i in range(k):
                was, now = lut[depth[S[i]]], lut[i + 1]
                if now < was:
                    fetch_hist[was] += 1
                    fetch_hist[now] -= 1
        size[g] = max(old, k)
        for i in range(size[g]):
            depth[S[i]] = i + 1
            held[lut[i + 1]] += 1
