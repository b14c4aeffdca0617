"""The compiled loops of a decode step, first part: the bounds of pages, their scores, the choice among them.

Rows are (sequence slot, KV head). Pages are numbered by their place in the text; `table[i, p]` is the block in the
reservoir that holds page p of the i-th sequence, for all of its KV heads. 16-bit keys come as the uint16 of bfloat16.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload


@intrinsic
def _widened(typing_context, bits):
    """uint16 -> float32: the value of a bfloat16."""

    def generate(context, builder, signature, arguments):
        word = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())

    return types.float32(types.uint16), generate


def wide(x):
    """float32 of a key's element, stored as float32 or as the bits of a bfloat16."""
    return x if x.dtype == np.float32 else (x.astype(np.uint32) << 16).view(np.float32)


@overload(wide, inline="always")
def _wide(x):
    if isinstance(x, types.Float):
        return lambda x: x
    return lambda x: _widened(x)


@njit(cache=True)
def note_keys(keys, slots, page, digests):
    """Keep each block's largest and smallest key: keys [token, KV head, d] go to places `slots` int64 [token] of the
    cache (block * page + offset; negative: nowhere), digests [block, KV head, 2, d]. A page's first token starts it."""
    n, heads, d = keys.shape
    for t in range(n):
        if slots[t] < 0:
            continue
        block, offset = slots[t] // page, slots[t] % page
        for h in range(heads):
            if offset == 0:
                for j in range(d):
                    digests[block, h, 0, j] = keys[t, h, j]
                    digests[block, h, 1, j] = keys[t, h, j]
                continue
            for j in range(d):
                x = keys[t, h, j]
                if wide(x) > wide(digests[block, h, 0, j]):
                    digests[block, h, 0, j] = x
                if wide(x) < wide(digests[block, h, 1, j]):
                    digests[block, h, 1, j] = x


@njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, cache=True)
def score_pages(parts, digests, blocks, head, n, out):
    """out[p] for pages 0..n-1: the largest over the group of sum_d max(q kmax, q kmin), Quest's bound; parts float32
    [group, 2, d] holds the positive and the negative part of each query. digests [block, KV head, 2, d]."""
    group, _, d = parts.shape
    for p in range(n):
        block = blocks[p]
        best, g = np.float32(-np.inf), 0
        while g + 3 <= group:
            a = np.float32(0)
            b = np.float32(0)
            c = np.float32(0)
            for side in range(2):
                for j in range(d):
                    w = wide(digests[block, head, side, j])
                    a += parts[g, side, j] * w
                    b += parts[g + 1, side, j] * w
                    c += parts[g + 2, side, j] * w
            best, g = max(best, a, b, c), g + 3
        while g < group:
            a = np.float32(0)
            for side in range(2):
                for j in range(d):
                    a += parts[g, side, j] * wide(digests[block, head, side, j])
            best, g = max(best, a), g + 1
        out[p] = best


@njit(cache=True)
def nth_largest(x, n, k):
    """The k-th largest (from 1) of x[:n], which is put out of order."""
    low, high, target = 0, n - 1, k - 1
    while low < high:
        pivot = x[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while x[i] > pivot:
                i += 1
            while x[j] < pivot:
                j -= 1
            if i <= j:
                x[i], x[j] = x[j], x[i]
                i, j = i + 1, j - 1
        if target <= j:
            high = j
        elif target >= i:
            low = i
        else:
            break
    return x[target]


@njit(cache=True)
def choose(score, n, k, scratch, out):
    """The k pages of highest score (ties: the first pages), by ascending score, ties by page; how many there are."""
    k = min(k, n)
    if k == 0:
        return 0
    scratch[:n] = score[:n]
    bar, count, level = nth_largest(scratch, n, k), 0, 0
    for p in range(n):
        if score[p] > bar:
            level += 1
    level = k - level  # how many at the bar itself are still to be taken
    for p in range(n):
        if score[p] > bar or (score[p] == bar and level > 0):
            if score[p] == bar:
                level -= 1
            at = count
            while at > 0 and score[out[at - 1]] > score[p]:
                out[at] = out[at - 1]
                at -= 1
            out[at] = p
            count += 1
    return k


@njit(cache=True)
def wanted(i, h, n, tables, queries, digests, given, k, least, scale, parts, score, scratch, wants, shares):
    """What KV head h of the i-th sequence wants of its first n pages: the k of highest bound, of these only pages that
    would have `least` times the mean weight or more, were bounds logits. Returns how many these are.

    queries float32 [i, head, d]; given float32 [i, KV head, page]: scores that are there already, or [0, 0, 0]: score
    here, by digests. Writes wants int32 [k] by ascending score and, where it has room, shares float32 [k]: of the
    softmax of bounds. parts [group, 2, d], score and scratch [page] are room to work in.
    """
    group, _, d = parts.shape
    if len(given):
        score[:n] = given[i, h, :n]
    else:
        for g in range(group):
            for j in range(d):
                q = queries[i, h * group + g, j]
                parts[g, 0, j] = max(q, np.float32(0))
                parts[g, 1, j] = min(q, np.float32(0))
        score_pages(parts, digests, tables[i], h, n, score)
    found = choose(score, n, k, scratch, wants)
    if len(shares) == 0 or found == 0:
        return found
    top, total = score[wants[found - 1]], 0.0
    for p in range(n):
        total += np.exp(scale * (score[p] - top))
    few = 0  # of the wants, those that would have too little; they come first
    for j in range(found):
        shares[j] = np.exp(scale * (score[wants[j]] - top)) / total
        if shares[j] * n < least:
            few = j + 1
    for j in range(few, found):
        wants[j - few], shares[j - few] = wants[j], shares[j]
    return found - few
