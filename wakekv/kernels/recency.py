"""Per-head recency, the paper's rule, at every budget: bit by bit."""

from __future__ import annotations

import numpy as np

from . import jit
from .jit import njit

popcount = jit.popcount if jit.AVAILABLE else None
WORD = np.uint64(63)
ONE = np.uint64(1)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


@njit(cache=True, boundscheck=False)
def recency(ptr, page, weight, created, cold, n_pages, hist, weight_hist, seen_hist, deepest):
    """Per-head recency, reversible, trimmed every step: every budget of the paper's rule, one pass over the wants.

    Each want takes the next bit of a row of 64-bit words; a page's depth is the number of live bits from its own to
    the newest. hist int64 [head, n_pages + 2] counts wants by depth, weight_hist float64 [n_pages + 2] their weight,
    seen_hist int64 [head, n_pages + 2] steps by pages known at their end, deepest int32 [step] the deepest want.
    """
    n_heads, n_steps = ptr.shape[0], ptr.shape[1] - 1
    widest = 0
    for h in range(n_heads):
        for t in range(n_steps):
            widest = max(widest, ptr[h, t + 1] - ptr[h, t] + n_pages * (not cold))
    n_words = (n_pages + 4 * widest) // 64 + 40
    live = np.zeros(n_words, np.uint64)
    newer = np.zeros(n_words + 1, np.int32)
    slot_of = np.empty(n_pages, np.int64)
    page_in = np.empty(n_words * 64, np.int32)
    for h in range(n_heads):
        live[:] = 0
        slot_of[:] = -1
        top, known = 0, 0
        if not cold:
            for p in range(n_pages):
                if created[p] < 0:
                    slot_of[p], page_in[top] = top, p
                    live[top >> 6] |= ONE << (np.uint64(top) & WORD)
                    top, known = top + 1, known + 1
        for t in range(n_steps):
            first, last = ptr[h, t], ptr[h, t + 1]
            words = (top + 63) >> 6
            newer[words] = 0
            for w in range(words - 1, -1, -1):
                newer[w] = newer[w + 1] + np.int32(popcount(live[w]))
            depth_now = 0
            for i in range(first, last):
                slot = slot_of[page[i]]
                if slot >= 0:
                    w = slot >> 6
                    above = live[w] & (ALL << (np.uint64(slot) & WORD))
                    depth = newer[w + 1] + np.int64(popcount(above))
                    hist[h, depth] += 1
                    weight_hist[depth] += weight[i]
                    depth_now = max(depth_now, depth)
            deepest[t] = max(deepest[t], depth_now)
            if top + (last - first) + n_pages * (not cold) > n_words * 64:  # pack the live bits to the bottom
                new = 0
                for slot in range(top):
                    if live[slot >> 6] >> (np.uint64(slot) & WORD) & ONE:
                        page_in[new] = page_in[slot]
                        slot_of[page_in[new]] = new
                        new += 1
                live[:] = 0
                for w in range(new >> 6):
                    live[w] = ALL
                if new & 63:
                    live[new >> 6] = (ONE << np.uint64(new & 63)) - ONE
                top = new
            if not cold:  # pages created in this step come in first, below the step's wants
                for p in range(n_pages):
                    if created[p] == t:
                        slot_of[p], page_in[top] = top, p
                        live[top >> 6] |= ONE << (np.uint64(top) & WORD)
                        top, known = top + 1, known + 1
            for i in range(first, last):
                p = page[i]
                slot = slot_of[p]
                if slot >= 0:
                    live[slot >> 6] &= ~(ONE << (np.uint64(slot) & WORD))
                else:
                    known += 1
                slot_of[p], page_in[top] = top, p
                live[top >> 6] |= ONE << (np.uint64(top) & WORD)
                top += 1
            seen_hist[h, known] += 1
