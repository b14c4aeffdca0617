"""The compiled loops of a decode step, second part: what a ranking moves, and moving it. One layer at a time.

Rows are (sequence slot, KV head). Pages are numbered by their place in the text; `table[i, p]` is the block in the
reservoir that holds page p of the i-th sequence, for all of its KV heads. Arrays over layers are
  page_of int32 [layer, row, slot]    which page a slot holds (dense rows: which page is attended)
  stamp   int64 [layer, row, slot]    who leaves first, the lowest
  where   int32 [layer, row, page]    the page's slot, or -1
"""

from __future__ import annotations

import numpy as np
from numba import njit

from wakekv.vllm.scoring import wanted

RESERVOIR, OPEN, SLOT = 0, 1, 2  # where a page to be moved comes from


@njit(cache=True)
def rank(
    layer, seqs, tables, closed, newborn, base, queries, digests, given, k, least, budget, reversible, trims, dense,
    page_of, stamp, where, scale, wants, n_wants, shares, moves, counts,
):  # fmt: skip
    """Rank the pages of some sequences in one layer and plan what moves.

    seqs int64 [i]: slots of sequences; closed int64 [i]: pages to rank; newborn: the page that closes in this step, or
    -1; base int64 [i]: the first stamp of this step's wants; queries float32 [i, head, d]; dense bool [KV head]
    given float32 [i, KV head, page], k, least, wants [i, KV head, k], shares: as `scoring.wanted`
    trims: FlexiCache's rule (what is resident afterwards is the newest page and the best wants), else recency's
    Writes wants, n_wants, shares and moves int64 [n, 5]: row, slot, page, source, block or slot it comes from. Adds
    wants, misses, fetches to counts. Returns the number of moves.
    """
    heads = digests.shape[1]
    group, d = queries.shape[1] // heads, queries.shape[2]
    n_moves, slots = 0, page_of.shape[2]
    parts = np.empty((group, 2, d), np.float32)
    longest = 0
    for i in range(len(seqs)):
        longest = max(longest, closed[i])
    score, scratch = np.empty(longest, np.float32), np.empty(longest, np.float32)
    stay, target = np.zeros(slots, np.bool_), np.empty(slots + 1, np.int32)
    for i in range(len(seqs)):
        n = closed[i]
        for h in range(heads):
            row = seqs[i] * heads + h
            found = wanted(
                i, h, n, tables, queries, digests, given, k, least, scale, parts, score, scratch,
                wants[i, h], shares[i, h],
            )  # fmt: skip
            n_wants[i, h] = found
            counts[0] += found
            if trims:
                newest = newborn[i] if newborn[i] >= 0 else n - 1
                size, n_target = min(budget, newest + 1), 0
                if newest >= 0:
                    target[0], n_target = newest, 1
                for j in range(found - 1, -1, -1):
                    if n_target == size:
                        break
                    if wants[i, h, j] != newest:
                        target[n_target], n_target = wants[i, h, j], n_target + 1
                if dense[h]:
                    for j in range(n_target):
                        page_of[layer, row, j] = target[j]
                    if newborn[i] >= 0:  # it has its own place, as all pages have
                        where[layer, row, newest] = newest
                        moves[n_moves, 0], moves[n_moves, 1], moves[n_moves, 2] = row, newest, newest
                        moves[n_moves, 3], moves[n_moves, 4] = OPEN, 0
                        n_moves += 1
                    continue
                for j in range(found):
                    if where[layer, row, wants[i, h, j]] < 0:
                        counts[1] += 1
                n_moves = _arrange(
                    layer, row, h, target, n_target, newborn[i], tables[i], heads,
                    page_of, where, stay, moves, n_moves, counts,
                )  # fmt: skip
                continue
            for j in range(found):
                slot = where[layer, row, wants[i, h, j]]
                if slot >= 0:
                    stamp[layer, row, slot] = base[i] + j
            held = min(budget, n)
            for j in range(found):
                page = wants[i, h, j]
                if where[layer, row, page] >= 0:
                    continue
                counts[1] += 1
                if not reversible:
                    continue
                slot = 0
                for s in range(1, held):
                    if stamp[layer, row, s] < stamp[layer, row, slot]:
                        slot = s
                where[layer, row, page_of[layer, row, slot]] = -1
                page_of[layer, row, slot], where[layer, row, page], stamp[layer, row, slot] = page, slot, base[i] + j
                moves[n_moves, 0], moves[n_moves, 1], moves[n_moves, 2] = row, slot, page
                moves[n_moves, 3], moves[n_moves, 4] = RESERVOIR, tables[i, page] * heads + h
                n_moves += 1
                counts[2] += 1
    return n_moves


@njit(cache=True)
def _arrange(layer, row, h, target, n_target, newborn, table, heads, page_of, where, stay, moves, n_moves, counts):
    """Have exactly the target's pages in slots 0..n_target-1 of a row: those there stay, others fill the gaps."""
    slots = page_of.shape[2]
    stay[:] = False
    for j in range(n_target):
        slot = where[layer, row, target[j]]
        if 0 <= slot < n_target:
            stay[slot] = True
    gap = 0
    for j in range(n_target):
        page = target[j]
        slot = where[layer, row, page]
        if 0 <= slot < n_target:
            continue
        while stay[gap]:
            gap += 1
        stay[gap] = True
        moves[n_moves, 0], moves[n_moves, 1], moves[n_moves, 2] = row, gap, page
        if page == newborn:
            moves[n_moves, 3], moves[n_moves, 4] = OPEN, 0
        elif slot >= 0:
            moves[n_moves, 3], moves[n_moves, 4] = SLOT, slot
        else:
            moves[n_moves, 3], moves[n_moves, 4] = RESERVOIR, table[page] * heads + h
            counts[2] += 1
        n_moves += 1
    for s in range(slots):
        if page_of[layer, row, s] >= 0:
            where[layer, row, page_of[layer, row, s]] = -1
    first = n_moves
    while first > 0 and moves[first - 1, 0] == row:
        first -= 1
    for m in range(first, n_moves):
        page_of[layer, row, moves[m, 1]] = moves[m, 2]
    for s in range(slots):
        if s >= n_target:
            page_of[layer, row, s] = -1
        else:
            where[layer, row, page_of[layer, row, s]] = s
    return n_moves


@njit(cache=True)
def move(moves, n, first, open_at, reservoir, pool):
    """Copy n pages, as opaque words, into the slots that `rank` planned: pool [place, word], reservoir [block * KV
    heads + head, word]; first int64 [row]: the pool's first place of a row; open_at int64 [row]: its open page's."""
    words = pool.shape[1]
    for m in range(n):
        row, to, source, place = moves[m, 0], moves[m, 1], moves[m, 3], moves[m, 4]
        into = pool[first[row] + to]
        if source == RESERVOIR:
            for w in range(words):
                into[w] = reservoir[place, w]
        else:
            at = open_at[row] if source == OPEN else first[row] + place
            for w in range(words):
                into[w] = pool[at, w]


@njit(cache=True)
def admit(layer, seq, table, n, held, dense, page_of, stamp, where, moves):
    """Fill a sequence's rows as decoding begins: dense rows get all of the n closed pages, in their order, the others
    the last `held`, which is what recency keeps of a prompt. Returns the number of moves."""
    heads, n_moves = len(dense), 0
    for h in range(heads):
        row = seq * heads + h
        page_of[layer, row, :], stamp[layer, row, :], where[layer, row, :] = -1, -1, -1
        for j in range(held):
            page_of[layer, row, j] = n - held + j
            stamp[layer, row, j] = n - held + j
        for p in range(0 if dense[h] else n - held, n):
            slot = p if dense[h] else p - (n - held)
            where[layer, row, p] = slot
            moves[n_moves, 0], moves[n_moves, 1], moves[n_moves, 2] = row, slot, p
            moves[n_moves, 3], moves[n_moves, 4] = RESERVOIR, table[p] * heads + h
            n_moves += 1
    return n_moves


@njit(cache=True)
def copy_open(seqs, blocks, heads, open_at, reservoir, pool):
    """The open page of each sequence, with the token just written, as the engine's cache has it."""
    words = pool.shape[1]
    for i in range(len(seqs)):
        for h in range(heads):
            into, out = open_at[seqs[i] * heads + h], blocks[i] * heads + h
            for w in range(words):
                pool[into, w] = reservoir[out, w]


@njit(cache=True)
def close(layer, seqs, pages, held, base, trims, dense, page_of, stamp, where, moves):
    """The open page of these sequences is full and becomes page `pages` int64 [i]; held int64 [i]: slots in use. Under
    recency it takes the slot of the lowest stamp if that is older than itself, base[i] + page; else a new slot.
    Returns the number of moves."""
    heads, n_moves = len(dense), 0
    for i in range(len(seqs)):
        for h in range(heads):
            row, page, slot = seqs[i] * heads + h, pages[i], held[i]
            if where[layer, row, page] >= 0:  # a ranking in this same step has placed it
                continue
            if dense[h]:
                page_of[layer, row, slot], slot = page, page
            else:
                if not trims and held[i] == page_of.shape[2]:
                    slot = 0
                    for s in range(1, held[i]):
                        if stamp[layer, row, s] < stamp[layer, row, slot]:
                            slot = s
                    if stamp[layer, row, slot] >= base[i] + page:
                        continue
                    where[layer, row, page_of[layer, row, slot]] = -1
                page_of[layer, row, slot], stamp[layer, row, slot] = page, base[i] + page
            where[layer, row, page] = slot
            moves[n_moves, 0], moves[n_moves, 1], moves[n_moves, 2] = row, slot, page
            moves[n_moves, 3], moves[n_moves, 4] = OPEN, 0
            n_moves += 1
    return n_moves


@njit(cache=True)
def tables(layer, seqs, held, dense, first, open_at, page_of, out):
    """out int32 [i * KV heads + h, slot]: where attention finds the pages of each row, the open one last."""
    heads = len(dense)
    for i in range(len(seqs)):
        for h in range(heads):
            row = seqs[i] * heads + h
            for j in range(held[i]):
                out[i * heads + h, j] = first[row] + (page_of[layer, row, j] if dense[h] else j)
            out[i * heads + h, held[i]] = open_at[row]
