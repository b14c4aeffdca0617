"""Any order of pages that does not look at the budget, at every budget: one stack a group (the theorem of simulate.py).

Words used here. *depth* int32 [head, page]: where a page stands in its budget's stack, 1 on top; 0: in the fast tier
at every budget until the next trim. *bucket*: the smallest nominal budget at which a page of that depth is resident;
0 at all, n + 1 at none of 1..n. A want in bucket b misses exactly at budgets below b.
"""

from __future__ import annotations

import numpy as np

from .jit import njit


@njit(cache=True, error_model="numpy")
def advance(
    t0, t1, ptr, page, weight, order, birth_ptr, birth_page, by_want, cold, stamps, following,  # the demand
    reads, stamp_of, known, born, next_use,  # the ledger
    depth, bucket, group_of, demand_fetch, sticky, worst,  # the policy
    hist, weight_hist, fetch_hist, deepest, held, held_time, peak,  # the results
):  # fmt: skip
    """Steps t0..t1-1, head by head, with no trim between: count misses by bucket, bring the ledger up to date.

    `held` int64 [n + 2] counts resident pages by bucket; every step but the last (which a trim may follow) is added to
    `held_time` and `peak` here, the last by `account`. Births and, under demand fetching, wants go to depth 0.
    """
    n_heads, n_pages = known.shape
    n = len(held) - 2
    moved = np.zeros((t1 - t0, n + 2), np.int64)
    for h in range(n_heads):
        lut = bucket[group_of[h]]
        for t in range(t0, t1):
            base = (t + 1) * stamps
            change = moved[t - t0]
            if not by_want:
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    p = birth_page[j]
                    known[h, p], born[h, p] = True, t
                    stamp_of[h, p] = base + p * n_heads + h
                    depth[h, p] = -1  # born, not yet in the fast tier: set below, after the wants are counted
            for i in range(ptr[h, t], ptr[h, t + 1]):
                p = page[i]
                new = depth[h, p] == -1
                excused = reads[h, p] == 0 if cold else new
                birth = new or (by_want and excused)
                b = 0 if birth else lut[depth[h, p]]
                if b > 0 and demand_fetch:
                    fetch_hist[b] += 1
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
                    change[0] += 1
                elif demand_fetch and depth[h, p] > 0:
                    change[lut[depth[h, p]]] -= 1
                    change[0] += 1
                    depth[h, p] = 0
                reads[h, p] += 1
                stamp_of[h, p] = base + n_heads * n_pages + (order[i] if len(order) else i - ptr[h, t])
                if len(following):
                    next_use[h, p] = following[i]
            if not by_want:
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    depth[h, birth_page[j]] = 0
                    change[0] += 1
    for t in range(t1 - t0):
        held += moved[t]
        if t < t1 - t0 - 1:
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


@njit(cache=True, error_model="numpy")
def _insert(S, size, rank, stamp):
    """Sort S[:size] best first by insertion, as the last order is nearly this one; False (half done) if it is not."""
    patience = 16 * size
    for i in range(1, size):
        item, j = S[i], i
        while j > 0 and _before(item, S[j - 1], rank, stamp):
            S[j] = S[j - 1]
            j -= 1
        S[j] = item
        patience -= i - j
        if patience < 0:
            return False
    return True


@njit(cache=True, error_model="numpy")
def restack(rank, stamp, known, depth, heads, group_start, stack, size, start, rerank, bucket, fetch_hist, held):
    """Trim every budget at once. The theorem's sweep: S'[k] is the best of the pool and S[k], the loser joins the pool.

    The pool is what lies at depth 0; with rerank, where pages come back at trims only, all known pages are sorted
    anew. rank float64, stamp int64, depth int32, known bool, all flat [head * page]; group g owns
    heads[group_start[g]:group_start[g + 1]] and stack[start[g]:start[g + 1]], of which size[g] are in use.
    Rewrites depth, stack, size and held; with rerank, counts pages brought back by bucket.
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
                if known[item] and depth[item] == 0:
                    heap[n] = item
                    n += 1
        if rerank:
            S[size[g] : size[g] + n] = heap[:n]
            size[g] += n
            if not _insert(S, size[g], rank, stamp):
                _sort(S, size[g], rank, stamp)
            for i in range(size[g]):
                was, now = lut[depth[S[i]]], lut[i + 1]
                if now < was:
                    fetch_hist[was] += 1
                    fetch_hist[now] -= 1
        else:
            size[g] = _merge(S, size[g], heap, n, depth, rank, stamp)
        for i in range(size[g]):
            depth[S[i]] = i + 1
            held[lut[i + 1]] += 1


@njit(cache=True, error_model="numpy")
def _sort(S, size, rank, stamp):
    """Sort S[:size] best first through a heap: first the worst on top, then each to the end."""
    heap = S[:size].copy()
    for i in range(size // 2 - 1, -1, -1):
        _sift(heap, size, i, rank, stamp)
    n = size
    for k in range(size):
        S[k] = heap[0]
        n -= 1
        heap[0] = heap[n]
        if n > 0:
            _sift(heap, n, 0, rank, stamp)


@njit(cache=True, error_model="numpy")
def _merge(S, old, heap, n, depth, rank, stamp):
    """The sweep proper, over S[:old] with the n pages in `heap` as its pool. Returns how long S is then."""
    for i in range(n // 2 - 1, -1, -1):
        _sift(heap, n, i, rank, stamp)
    k = 0
    while n > 0:
        there = k < old and depth[S[k]] != 0
        if there and _before(S[k], heap[0], rank, stamp):
            k += 1
            continue
        best = heap[0]
        if there:
            heap[0] = S[k]
        else:  # a hole, whose page moved to the pool, or the end of the stack
            n -= 1
            heap[0] = heap[n]
        if n > 0:
            _sift(heap, n, 0, rank, stamp)
        S[k] = best
        k += 1
    return max(old, k)


@njit(cache=True, error_model="numpy")
def recency_by_head(
    ptr, page, weight, birth_ptr, birth_page, start_known, by_want, cold, demand_fetch, sticky,
    hist, weight_hist, fetch_hist, deepest, held_end, held_time,
):  # fmt: skip
    """Per-head recency trimmed every step, in any variant, each head from first step to last before the next.

    start_known bool [page]: what every head knows before the first step. held_end int64 [n + 2]: resident pages by
    bucket after the last step, which with a trim every step is also the most there ever are.
    """
    n_heads, n_pages = hist.shape[0], len(start_known)
    bucket = np.arange(n_pages + 1).astype(np.int32).reshape(1, -1)
    zero, bounds = np.zeros(1, np.int64), np.array([0, 1])
    space, span = np.array([0, n_pages]), 2 * n_pages
    no_order, no_future, no_next = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
    unused = np.zeros(n_pages + 2, np.int64)
    for h in range(n_heads):
        reads, stamp = np.zeros((1, n_pages), np.int64), np.full((1, n_pages), -1, np.int64)
        known, born = start_known.copy().reshape(1, -1), np.zeros((1, n_pages), np.int32)
        depth, worst = np.zeros((1, n_pages), np.int32), np.zeros((1, n_pages), np.int32)
        stack, size = np.zeros(n_pages, np.int32), np.zeros(1, np.int64)
        held = np.zeros(n_pages + 2, np.int64)
        for p in range(n_pages):
            if start_known[p]:
                stamp[0, p] = p
        flat = stamp.reshape(-1)
        if start_known.any():
            restack(flat, flat, known.reshape(-1), depth.reshape(-1), zero, bounds, stack, size, space, False, bucket,
                    unused, held)  # fmt: skip
        for t in range(ptr.shape[1] - 1):
            advance(t, t + 1, ptr[h : h + 1], page, weight, no_order, birth_ptr, birth_page, by_want, cold, span,
                    no_future, reads, stamp, known, born, no_next, depth, bucket, zero, demand_fetch, sticky, worst,
                    hist[h : h + 1], weight_hist, fetch_hist, deepest, held, held_time, unused)  # fmt: skip
            if held[0]:
                restack(flat, flat, known.reshape(-1), depth.reshape(-1), zero, bounds, stack, size, space, False,
                        bucket, unused, held)  # fmt: skip
            held_time += held
        held_end += held
