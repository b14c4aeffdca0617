"""Per-head recency, the paper's rule, at every budget: bit by bit."""

from __future__ import annotations

import numpy as np

from .jit import njit, popcount, trailing_zeros

U = np.uint64  # unsigned throughout: signed indices cost a test for negative ones
ONE, SIX, WORD, ALL = U(1), U(6), U(63), U(0xFFFFFFFFFFFFFFFF)
NOWHERE = U(0xFFFFFFFF)


@njit(cache=True, error_model="numpy")
def recency(ptr, page, weight, birth_ptr, birth_page, start_known, cold, hist, weight_hist, seen_hist, deepest):
    """Per-head recency, reversible, trimmed every step: every budget of the paper's rule, one pass over the wants.

    Each want takes the next bit of a row of 64-bit words; a page's depth is the number of live bits from its own to
    the newest: whole words by their running sum, its own word by a population count. A full row is packed.

    hist int64 [head, n_pages + 2] counts wants by depth, weight_hist float64 [n_pages + 2] their weight,
    seen_hist int64 [head, n_pages + 2] steps by pages known at their end, deepest int32 [step] the deepest want.
    """
    n_heads, n_steps, n_pages = ptr.shape[0], ptr.shape[1] - 1, len(start_known)
    widest = 0
    for h in range(n_heads):
        for t in range(n_steps):
            widest = max(widest, ptr[h, t + 1] - ptr[h, t])
    extra = 0 if cold else n_pages
    n_words = (n_pages + 4 * (widest + extra)) // 64 + 24
    full = n_words * 64
    live = np.zeros(n_words, np.uint64)
    newer = np.zeros(n_words + 1, np.uint32)
    slot_of = np.empty(n_pages, np.uint32)
    page_in = np.empty(full, np.uint32)
    for h in range(n_heads):
        live[:] = U(0)
        slot_of[:] = np.uint32(NOWHERE)
        top = U(0)
        known = 0
        if not cold:
            for p in range(n_pages):
                if start_known[p]:
                    slot_of[p] = top
                    page_in[top] = p
                    live[top >> SIX] |= ONE << (top & WORD)
                    top += ONE
                    known += 1
        row = hist[h]
        for t in range(n_steps):
            first, last = U(ptr[h, t]), U(ptr[h, t + 1])
            w = (top + WORD) >> SIX
            running = np.uint32(0)
            newer[w] = running
            while w > U(0):
                w -= ONE
                running += np.uint32(popcount(live[w]))
                newer[w] = running
            deep = U(0)
            for i in range(first, last):
                slot = U(slot_of[np.uint32(page[i])])
                if slot != NOWHERE:
                    w = slot >> SIX
                    depth = U(newer[w + ONE]) + popcount(live[w] >> (slot & WORD))
                    row[depth] += 1
                    weight_hist[depth] += weight[i]
                    if depth > deep:
                        deep = depth
            if deep > U(deepest[t]):
                deepest[t] = deep
            if top + (last - first) + U(extra) > U(full):  # pack the live bits to the bottom
                new = U(0)
                for w in range(U(0), (top + WORD) >> SIX):
                    bits = live[w]
                    live[w] = U(0)
                    while bits:
                        p = page_in[(w << SIX) + trailing_zeros(bits)]
                        bits &= bits - ONE
                        page_in[new] = p
                        slot_of[p] = new
                        new += ONE
                for w in range(U(0), new >> SIX):
                    live[w] = ALL
                if new & WORD:
                    live[new >> SIX] = (ONE << (new & WORD)) - ONE
                top = new
            if not cold:  # pages created in this step come in first, below the step's wants
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    p = birth_page[j]
                    slot_of[p] = top
                    page_in[top] = p
                    live[top >> SIX] |= ONE << (top & WORD)
                    top += ONE
                    known += 1
            for i in range(first, last):
                p = np.uint32(page[i])
                slot = U(slot_of[p])
                if slot != NOWHERE:
                    live[slot >> SIX] ^= ONE << (slot & WORD)
                else:
                    known += 1
                slot_of[p] = top
                page_in[top] = p
                live[top >> SIX] |= ONE << (top & WORD)
                top += ONE
            seen_hist[h, known] += 1
