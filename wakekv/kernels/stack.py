"""Any order of pages that does not look at the budget, at every budget: one stack a group (the theorem of simulate.py).

Words used here. *depth* int32 [head, page]: where a page stands in its budget's stack, 1 on top; 0: in the fast tier
at every budget until the next trim. *bucket*: the smallest nominal budget at which a page of that depth is resident;
0 at all, n + 1 at none of 1..n. A want in bucket b misses exactly at budgets below b.
"""

from __future__ import annotations

import numpy as np

from .jit import add_pair, njit
from .ledger import bear, want

U = np.uint64


@njit(cache=True, error_model="numpy")
def advance(
    t0, t1, ptr, page, weight, pooled, birth_ptr, birth_page, by_want, cold, stamps, following,  # the demand
    reads, stamp_of, known, born, next_use,  # the ledger
    depth, bucket, group_of, demand_fetch, sticky, worst,  # the policy
    count, fetch_hist, deepest, held, held_at,  # the results
):  # fmt: skip
    """Steps t0..t1-1, head by head, with no trim between: count misses by bucket, bring the ledger up to date.

    `count` float64 [head, n + 2, 2]: wants and their weight by bucket. `held` int64 [n + 2] counts resident pages by
    bucket; it is added to `held_at` int32 [step, n + 2] for every step but the last, which a trim may follow. Births
    and, under demand fetching, wants go to depth 0.
    """
    n = len(held) - 2
    moved = np.zeros((t1 - t0, n + 2), np.int64)
    for h in range(known.shape[0]):
        lut, table = bucket[group_of[h]], count[h]
        for t in range(t0, t1):
            base, first, deep = (t + 1) * stamps, U(ptr[h, t]), deepest[t]
            if not by_want:
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    bear(h, birth_page[j], t, base, stamp_of, known, born)
                    depth[h, birth_page[j]] = -1  # not yet in the fast tier: set below, after the wants are counted
            for i in range(first, U(ptr[h, t + 1])):
                p = U(np.uint32(page[i]))
                at = depth[h, p]
                excused = reads[h, p] == 0 if cold else at == -1
                b = lut[at] if at > 0 else np.int32(0)
                if b > 0 and demand_fetch:
                    fetch_hist[b] += 1
                if sticky:
                    b = max(b, worst[h, p])
                    if not excused:
                        worst[h, p] = b
                if not excused:
                    add_pair(table, U(b), weight[i])
                    if b > deep:
                        deep = b
                if by_want and excused:
                    known[h, p], born[h, p] = True, t
                    moved[t - t0, 0] += 1
                elif demand_fetch and at > 0:
                    moved[t - t0, lut[at]] -= 1
                    moved[t - t0, 0] += 1
                    depth[h, p] = 0
                want(h, p, i, first, base, pooled, following, reads, stamp_of, next_use)
            deepest[t] = deep
            if not by_want:
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    depth[h, birth_page[j]] = 0
                    moved[t - t0, 0] += 1
    for t in range(t1 - t0):
        held += moved[t]
        if t < t1 - t0 - 1:
            for b in range(n + 2):
                held_at[t0 + t, b] += held[b]


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
def _insert(S, size, rank, stamp, ranks, stamps):
    """Sort S[:size] best first by insertion, as the last order is nearly this one; False (half done) if it is not.

    ranks, stamps  room for as many: their keys, side by side with them
    """
    patience = 16 * size
    for i in range(size):
        item, r, s, j = S[i], rank[S[i]], stamp[S[i]], i
        while j > 0 and (r > ranks[j - 1] or (r == ranks[j - 1] and s > stamps[j - 1])):
            S[j], ranks[j], stamps[j] = S[j - 1], ranks[j - 1], stamps[j - 1]
            j -= 1
        S[j], ranks[j], stamps[j] = item, r, s
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
    ranks, stamps = np.empty(len(heap)), np.empty(len(heap), np.int64)
    for g in range(len(size)):
        S = stack[start[g] : start[g + 1]]
        lut = bucket[g]
        n = 0
        if lut[1] == 0:  # no limit: all that is known stays at depth 0
            for j in range(group_start[g], group_start[g + 1]):
                held[0] += np.count_nonzero(known[heads[j] * n_pages : (heads[j] + 1) * n_pages])
            continue
        for j in range(group_start[g], group_start[g + 1]):
            for item in range(heads[j] * n_pages, (heads[j] + 1) * n_pages):
                if known[item] and depth[item] == 0:
                    heap[n] = item
                    n += 1
        if rerank:
            S[size[g] : size[g] + n] = heap[:n]
            size[g] += n
            if not _insert(S, size[g], rank, stamp, ranks, stamps):
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
    count, fetch_hist, seen_hist, seen, deepest,
):  # fmt: skip
    """Per-head recency trimmed every step, in any variant: as `recency`, with the stack written out.

    start_known bool [page]: what every head knows before the first step. All that is known has a depth as a step ends,
    so the pages resident at B are the smaller of B and the pages known.
    """
    n_heads, n_pages = ptr.shape[0], len(start_known)
    stack, pool = np.empty((2, n_pages), np.int32)
    depth, worst = np.empty((2, n_pages), np.int32)  # depth 0: unknown, or in the pool
    stamp, unwanted = np.empty(n_pages, np.int64), np.empty(n_pages, np.bool_)
    for h in range(n_heads):
        table = count[h]
        depth[:], worst[:], stamp[:], unwanted[:] = 0, 0, -1, True
        size = 0
        for p in range(n_pages - 1, -1, -1):
            if start_known[p]:
                stack[size] = p
                size += 1
                depth[p], stamp[p] = size, p
        for t in range(ptr.shape[1] - 1):
            base, deep, n = (t + 1) * 2 * n_pages, deepest[t], 0
            first = U(ptr[h, t])
            for i in range(first, U(ptr[h, t + 1])):
                p = U(np.uint32(page[i]))
                b = depth[p]
                excused = unwanted[p] if cold else b == 0
                unwanted[p] = False
                stamp[p] = base + n_pages + np.int64(i - first)
                if b > 0 and demand_fetch:
                    fetch_hist[b] += 1
                    depth[p] = 0
                    pool[n] = p
                    n += 1
                elif by_want and b == 0:
                    pool[n] = p
                    n += 1
                if sticky:
                    b = max(b, worst[p])
                    if not excused:
                        worst[p] = b
                if not excused:
                    add_pair(table, U(b), weight[i])
                    if b > deep:
                        deep = b
            deepest[t] = deep
            if not by_want:
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    p = birth_page[j]
                    pool[n] = p
                    n += 1
                    stamp[p] = max(stamp[p], base + p)  # one that is wanted at once came in by that want
            if n:
                size = _merge(stack, size, pool, n, depth, stamp, stamp)
                for k in range(size):
                    depth[stack[k]] = k + 1
            seen_hist[size] += 1
        seen[h] = size
