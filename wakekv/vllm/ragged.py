"""The compiled loops of a decode step where the heads of a layer share a budget, so that each has as many pages as it
comes to: a ranking, the trim, tables of rows that differ in length. One layer at a time.

Rows, pages and moves as in kernels.py. Arrays over layers are
  where int32 [layer, row, page]      the block that holds the page; WANTED: it has none and was wanted; ABSENT
  heat  float64 [layer, row, page]    reads, fading with every step
  last  int64 [layer, row, page]      step and weight of its last read, or its birth: who leaves first of equal heat
  held  int64 [layer, sequence slot]  blocks in use
  free  int32 [block], n_free int64 [1]: a stack of blocks without a page
"""

from __future__ import annotations

import numpy as np
from numba import njit

from wakekv.vllm.kernels import OPEN, RESERVOIR
from wakekv.vllm.scoring import nth_largest, wanted

ABSENT, WANTED = -1, -2


@njit(cache=True)
def admit(layer, seq, table, n, budget, heads, where, heat, last, held, free, n_free, moves):
    """Decoding begins: each head has the last `budget` of the n closed pages. Returns the number of moves."""
    n_moves, first = 0, max(0, n - budget)
    for h in range(heads):
        row = seq * heads + h
        where[layer, row, :], heat[layer, row, :], last[layer, row, :] = ABSENT, 0.0, 0
        for p in range(first, n):
            n_moves = _bring(layer, row, p, RESERVOIR, table[p] * heads + h, where, free, n_free, moves, n_moves)
    held[layer, seq] = n_moves
    return n_moves


@njit(cache=True)
def rank(
    layer, seqs, tables, closed, base, queries, digests, given, k, least, brings, where, heat, last, held, free,
    n_free, scale, wants, n_wants, shares, bits, moves, counts,
):  # fmt: skip
    """Rank the pages of some sequences and note what is read; arguments as those of kernels.rank.

    brings: what is absent comes now, beside all else, and the trim is later; or it is WANTED until the trim
    bits uint32 [i, KV head, k]: the same memory as shares. Returns the number of moves.
    """
    heads = digests.shape[1]
    n_moves, longest = 0, 0
    for i in range(len(seqs)):
        longest = max(longest, closed[i])
    parts = np.empty((queries.shape[1] // heads, 2, queries.shape[2]), np.float32)
    score, scratch = np.empty(longest, np.float32), np.empty(longest, np.float32)
    for i in range(len(seqs)):
        for h in range(heads):
            row = seqs[i] * heads + h
            found = wanted(
                i, h, closed[i], tables, queries, digests, given, k, least, scale, parts, score, scratch,
                wants[i, h], shares[i, h],
            )  # fmt: skip
            n_wants[i, h] = found
            counts[0] += found
            for j in range(found):
                page = wants[i, h, j]
                heat[layer, row, page] += 1.0
                last[layer, row, page] = (base[i] << 32) | np.int64(bits[i, h, j])
                if where[layer, row, page] != ABSENT:
                    continue
                counts[1] += 1
                if not brings:
                    where[layer, row, page] = WANTED
                    continue
                place = tables[i, page] * heads + h
                n_moves = _bring(layer, row, page, RESERVOIR, place, where, free, n_free, moves, n_moves)
                held[layer, seqs[i]] += 1
                counts[2] += 1
    return n_moves


@njit(cache=True)
def settle(
    layer, seqs, tables, closed, newborn, base, quota, heads, where, heat, last, held, free, n_free, moves, counts
):  # fmt: skip
    """The step ends for a layer: the page that closed, `newborn` (or -1), joins the others, and of all there are and
    all WANTED the `quota` int64 [i] of most heat stay or come. Returns the number of moves."""
    n_moves = 0
    most = 0
    for i in range(len(seqs)):
        most = max(most, closed[i] + 1)
    heats, lasts = np.empty(most * heads, np.float64), np.empty(most * heads, np.int64)
    for i in range(len(seqs)):
        n, first = closed[i] + (newborn[i] >= 0), seqs[i] * heads
        if newborn[i] >= 0:
            for h in range(heads):
                where[layer, first + h, newborn[i]] = WANTED
                heat[layer, first + h, newborn[i]], last[layer, first + h, newborn[i]] = 0.0, base[i] << 32
        count = 0
        for h in range(heads):
            for p in range(n):
                if where[layer, first + h, p] != ABSENT:
                    heats[count], count = heat[layer, first + h, p], count + 1
        if count > quota[i]:
            bar, latest, spare = _bars(layer, first, heads, n, quota[i], count, where, heat, last, heats, lasts)
            for p in range(n - 1, -1, -1):
                for h in range(heads - 1, -1, -1):
                    block = where[layer, first + h, p]
                    if block == ABSENT or heat[layer, first + h, p] > bar:
                        continue
                    if heat[layer, first + h, p] == bar:
                        if last[layer, first + h, p] > latest:
                            continue
                        if last[layer, first + h, p] == latest and spare > 0:
                            spare -= 1
                            continue
                    where[layer, first + h, p] = ABSENT
                    if block >= 0:
                        free[n_free[0]] = block
                        n_free[0] += 1
                        held[layer, seqs[i]] -= 1
        for h in range(heads):
            for p in range(n):
                if where[layer, first + h, p] == WANTED:
                    new = p == newborn[i]
                    place = 0 if new else tables[i, p] * heads + h
                    n_moves = _bring(
                        layer, first + h, p, OPEN if new else RESERVOIR, place, where, free, n_free, moves, n_moves
                    )
                    held[layer, seqs[i]] += 1
                    counts[2] += not new
    return n_moves


@njit(cache=True)
def _bars(layer, first, heads, n, quota, count, where, heat, last, heats, lasts):
    """(bar, latest, spare): of `count` pages those above the bar in heat stay, of those at it the ones last read after
    `latest`, and of those at both the `spare` last ones of the text."""
    if quota == 0:
        return np.inf, np.int64(0), 0
    bar = nth_largest(heats, count, quota)
    above, level = 0, 0
    for h in range(heads):
        for p in range(n):
            if where[layer, first + h, p] != ABSENT:
                if heat[layer, first + h, p] > bar:
                    above += 1
                elif heat[layer, first + h, p] == bar:
                    lasts[level], level = last[layer, first + h, p], level + 1
    latest, spare = nth_largest(lasts, level, quota - above), quota - above
    for h in range(heads):
        for p in range(n):
            if where[layer, first + h, p] != ABSENT and heat[layer, first + h, p] == bar:
                spare -= last[layer, first + h, p] > latest
    return bar, latest, spare


@njit(cache=True)
def share(seqs, n_known, total, equal, heads, heat, last, quota):
    """quota int64 [layer, sequence slot] of some sequences anew: how many of the `total` pages of most heat, of all
    n_known int64 [i] pages of every head, each layer has; or `equal`, while there is room for all."""
    n_layers = len(heat)
    for i in range(len(seqs)):
        n, count, first = n_known[i], 0, seqs[i] * heads
        if n_layers * heads * n <= total:
            quota[:, seqs[i]] = equal
            continue
        heats, lasts = np.empty(n_layers * heads * n, np.float64), np.empty(n_layers * heads * n, np.int64)
        for layer in range(n_layers):
            for h in range(heads):
                for p in range(n):
                    heats[count], count = heat[layer, first + h, p], count + 1
        bar, above, level = nth_largest(heats, count, total), 0, 0
        for layer in range(n_layers):
            for h in range(heads):
                for p in range(n):
                    above += heat[layer, first + h, p] > bar
                    if heat[layer, first + h, p] == bar:
                        lasts[level], level = last[layer, first + h, p], level + 1
        latest, spare = nth_largest(lasts, level, total - above), total - above
        for j in range(level):
            spare -= lasts[j] > latest
        quota[:, seqs[i]] = 0
        for p in range(n - 1, -1, -1):
            for layer in range(n_layers - 1, -1, -1):
                for h in range(heads - 1, -1, -1):
                    hot, when = heat[layer, first + h, p], last[layer, first + h, p]
                    level = hot == bar and when == latest and spare > 0
                    spare -= level
                    quota[layer, seqs[i]] += hot > bar or (hot == bar and when > latest) or level


@njit(cache=True)
def _bring(layer, row, page, source, place, where, free, n_free, moves, n_moves):
    """A block for a page that has none, and the move that fills it. Returns the number of moves."""
    n_free[0] -= 1
    block = free[n_free[0]]
    where[layer, row, page] = block
    moves[n_moves, 0], moves[n_moves, 1], moves[n_moves, 2] = row, block, page
    moves[n_moves, 3], moves[n_moves, 4] = source, place
    return n_moves + 1


@njit(cache=True)
def fade(layer, seqs, closed, keep, heads, heat):
    """A step has passed: every read of these sequences counts `keep` times as much."""
    for i in range(len(seqs)):
        for h in range(heads):
            for p in range(closed[i] + 1):
                heat[layer, seqs[i] * heads + h, p] *= keep


@njit(cache=True)
def tables(layer, seqs, closed, tokens, page, heads, open_at, where, out, lengths):
    """Where attention finds the pages of each row, in the order of the text and the open one last: out int32
    [i * KV heads + h, place]; lengths int32 [i * KV heads + h]: tokens it sees. tokens int64 [i]: in the open page."""
    for i in range(len(seqs)):
        for h in range(heads):
            row, n = seqs[i] * heads + h, 0
            for p in range(closed[i]):
                if where[layer, row, p] >= 0:
                    out[i * heads + h, n], n = where[layer, row, p], n + 1
            out[i * heads + h, n] = open_at[row]
            lengths[i * heads + h] = n * page + tokens[i]
