"""Per-head recency, the paper's rule, at every budget: bit by bit."""

from __future__ import annotations

import numpy as np

from .jit import add_pair, njit, popcount

U = np.uint64  # unsigned throughout: signed indices cost a test for negative ones
ONE, TWO, FOUR, SIX, WORD, ALL = U(1), U(2), U(4), U(6), U(63), U(0xFFFFFFFFFFFFFFFF)


@njit(cache=True, error_model="numpy")
def recency(ptr, page, weight, birth_ptr, birth_page, start_known, cold, count, seen_hist, seen, deepest):
    """Per-head recency, reversible, trimmed every step: every budget of the paper's rule, one pass over the wants.

    Each want takes the next bit of a row of 64-bit words; a page's depth is the number of live bits from its own to
    the newest: whole words by their running sum, its own word by a population count. A full row is packed.

    count float64 [head, n_pages + 2, 2]: wants by depth, and their weight; seen_hist int64 [n_pages + 2]: steps of
    heads by pages known at their end; seen int64 [head]: pages known at the end of the last; deepest int32 [step].
    """
    n_heads, n_steps, n_pages = ptr.shape[0], ptr.shape[1] - 1, len(start_known)
    widest = 0
    for h in range(n_heads):
        for t in range(n_steps):
            widest = max(widest, ptr[h, t + 1] - ptr[h, t])
    spare = 8 + np.int64(np.sqrt(n_pages * widest)) // 6  # more words: packed less often, but summed at every step
    full = U((2 * n_pages + widest) // 64 + 1 + spare) << SIX
    # four entries a word, side by side in memory: live bits as the step begins, live bits in newer words, live bits
    # once the wants so far have moved, nothing. The last word stays empty: an unknown page's bit is there, at depth 0.
    words = np.zeros(FOUR * ((full >> SIX) + ONE), np.uint64)
    bit_of = np.empty(n_pages, np.uint32)
    for h in range(n_heads):
        words[:], bit_of[:] = U(0), np.uint32(full)
        table, top = count[h], U(0)
        for p in range(n_pages):
            if start_known[p]:
                bit_of[p] = top
                top += ONE
        _fill(words, U(0), top)
        for t in range(n_steps):
            first, last = U(ptr[h, t]), U(ptr[h, t + 1])
            n_born = U(0) if cold else U(birth_ptr[t + 1] - birth_ptr[t])
            known = U(0)
            w = (top + WORD) >> SIX << TWO
            while w > U(0):
                w -= FOUR
                live = words[w + TWO]
                words[w], words[w + ONE] = live, known
                known += popcount(live)
            if t > 0:
                seen_hist[known] += 1
            if top + n_born + (last - first) > full:  # pack the live bits to the bottom
                for p in range(U(0), U(n_pages)):
                    bit = U(bit_of[p])
                    w = bit >> SIX << TWO
                    depth = words[w + ONE] + popcount(words[w] >> (bit & WORD))
                    bit_of[p] = full if bit == full else known - depth
                words[:] = U(0)
                _fill(words, U(0), known)
                top, below = known, known
                for w in range(U(0), (known + WORD) >> SIX):
                    words[w << TWO] = words[(w << TWO) + TWO]
                    below -= popcount(words[w << TWO])
                    words[(w << TWO) + ONE] = below
            born, top = top, top + n_born  # pages created in this step come in first, below the step's wants
            start, deep = top, U(deepest[t])
            for i in range(first, last):
                p = U(np.uint32(page[i]))
                bit = U(bit_of[p])
                w = bit >> SIX << TWO
                depth = words[w + ONE] + popcount(words[w] >> (bit & WORD))
                add_pair(table, depth, weight[i])
                if depth > deep:  # deeper than any head before in this step: rare
                    deep = depth
                words[w + TWO] &= ~(ONE << (bit & WORD))
                bit_of[p] = top
                top += ONE
            deepest[t] = deep
            _fill(words, start, top)
            if not cold:
                for j in range(birth_ptr[t], birth_ptr[t + 1]):
                    if U(bit_of[birth_page[j]]) == full:  # a page that was wanted at once has its bit already
                        bit_of[birth_page[j]] = born
                        _fill(words, born, born + ONE)
                    born += ONE
        known = U(0)
        for w in range(U(0), full >> SIX):
            known += popcount(words[(w << TWO) + TWO])
        seen_hist[known] += 1
        seen[h] = known
        table[0] = 0.0  # first touches: they had no depth


@njit(cache=True, error_model="numpy")
def _fill(words, start, stop):
    """Make bits start..stop-1 live."""
    while start < stop:
        bit = start & WORD
        n = min(stop - start, U(64) - bit)
        words[(start >> SIX << TWO) + TWO] |= (ALL >> (U(64) - n)) << bit
        start += n
