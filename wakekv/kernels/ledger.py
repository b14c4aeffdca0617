"""What a want or a birth adds to what is known of a page (policies/ledger.py), in compiled loops."""

from __future__ import annotations

import numpy as np

from .jit import njit

U = np.uint64


@njit(cache=True, error_model="numpy")
def bear(h, p, t, base, stamp_of, known, born):
    """Page p comes to be at step t, whose stamps begin at `base`; one that was wanted at once keeps that stamp."""
    known[h, p], born[h, p] = True, t
    stamp_of[h, p] = max(stamp_of[h, p], base + np.int64(p) * known.shape[0] + h)


@njit(cache=True, error_model="numpy")
def want(h, p, i, first, base, pooled, following, reads, stamp_of, next_use):
    """Want i, page p, of the step whose stamps begin at `base` and whose wants at `first`."""
    reads[h, p] += 1
    if not pooled:  # else `stamp` does it
        stamp_of[h, p] = base + reads.size + np.int64(i - first)
    if len(following):
        next_use[h, p] = following[i]


@njit(cache=True, error_model="numpy")
def stamp(t0, t1, ptr, page, bits, stamps, stamp_of):
    """Give the wants of steps t0..t1-1 their place in the canonical order among all heads, as `Demand.order` has it.

    From the last step back, as a page keeps only its last stamp; a step none of whose wants is a page's last is passed
    over. Sorted by page, then by eleven bits of the weight at a time; heads stand in order already.

    bits uint32 [want]: the weights' own bits, which sort as they do; stamp_of int64 [head, page]
    """
    n_heads, n_pages = stamp_of.shape
    widest = 0
    for t in range(t0, t1):
        n = 0
        for h in range(n_heads):
            n += ptr[h, t + 1] - ptr[h, t]
        widest = max(widest, n)
    one, other = np.empty((2, widest), np.uint64)
    at = np.empty(max(n_pages, 2048) + 1, np.int64)
    flat = stamp_of.reshape(-1)
    for t in range(t1 - 1, t0 - 1, -1):
        base, n, late = (t + 1) * stamps + stamp_of.size, 0, False
        at[: n_pages + 1] = 0
        for h in range(n_heads):
            for i in range(U(ptr[h, t]), U(ptr[h, t + 1])):
                p = U(np.uint32(page[i]))
                late |= stamp_of[h, p] < base
                at[p + U(1)] += 1
                n += 1
        if not late:
            continue
        at[: n_pages + 1] = np.cumsum(at[: n_pages + 1])
        for h in range(n_heads):
            for i in range(U(ptr[h, t]), U(ptr[h, t + 1])):
                p = U(np.uint32(page[i]))
                item = U(h) * U(n_pages) + p
                one[U(at[p])] = U(bits[i] & np.uint32(0x7FFFFFFF)) << U(32) | item
                at[p] += 1
        for shift in (U(32), U(43), U(54)):
            at[:2049] = 0
            for i in range(U(0), U(n)):
                at[(one[i] >> shift & U(2047)) + U(1)] += 1
            at[:2049] = np.cumsum(at[:2049])
            for i in range(U(0), U(n)):
                digit = one[i] >> shift & U(2047)
                other[U(at[digit])] = one[i]
                at[digit] += 1
            one, other = other, one
        for i in range(U(0), U(n)):
            item = one[i] & U(0xFFFFFFFF)
            if flat[item] < base:
                flat[item] = base + np.int64(i)
