"""The compiled loops behind a decoded token whose pages are in host memory, in float32; each has a twin in plain torch
(`reading.py`, `host.py`, `pool.py`) that it must equal, and that serves every other device and type.

Arrays are numpy views of the tensors they write to. numba is optional: without it the twins do everything.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from wakekv.kernels import AVAILABLE
from wakekv.kernels.jit import njit

NOWHERE = -1  # pool.EMPTY
LEAST = np.int32(-2139095041)  # the bits of -inf, in the order of `ascending`


def hosted(x: torch.Tensor) -> bool:
    """The loops that move bytes can be used for this tensor."""
    return AVAILABLE and x.device.type == "cpu"


def serves(*tensors: torch.Tensor) -> bool:
    """The loops that reckon can be used for these tensors."""
    return AVAILABLE and all(x.dtype == torch.float32 and x.device.type == "cpu" and not x.requires_grad
                             for x in tensors)  # fmt: skip


class Views:
    """numpy views of tensors in host memory, each made once for as long as the tensor is the same."""

    def __init__(self):
        self._made: dict[str, tuple[torch.Tensor, np.ndarray]] = {}

    def of(self, name: str, tensor: torch.Tensor, shaped: Callable[[torch.Tensor], np.ndarray] = torch.Tensor.numpy):
        """The view that `shaped` makes of a tensor, which goes by a name."""
        made = self._made.get(name)
        if made is None or made[0] is not tensor:
            made = self._made[name] = tensor, shaped(tensor)
        return made[1]

    def __deepcopy__(self, memo: dict) -> Views:
        return Views()  # the copy has tensors of its own


def tokens(x: torch.Tensor) -> np.ndarray:
    """[row, token, d] over the memory of pages [row, page, token, d]."""
    return x.flatten(1, 2).numpy()


def words(x: torch.Tensor) -> np.ndarray:
    """[row, page, word] over the memory of pages [row, page, token, d]: words of 8 bytes if those make a page, else
    of one."""
    x = x.flatten(2)
    whole = x.shape[2] * x.element_size() % 8 == 0
    return x.view(torch.int64 if whole else torch.uint8).numpy()


@njit(cache=True, fastmath=True, error_model="numpy")
def products(query, keys, n, scaling, out):
    """out [row, query, token]: scaled products of queries [row, query, d] and the first n keys [row, token, d]."""
    n_rows, n_queries, d = query.shape
    for r in range(n_rows):
        for t in range(n):
            for g in range(n_queries):
                total = np.float32(0)
                for i in range(d):
                    total += query[r, g, i] * keys[r, t, i]
                out[r, g, t] = total * scaling


@njit(cache=True, fastmath=True, error_model="numpy")
def mixtures(weights, values, out):
    """out [row, query, d]: values [row, token, d], of which there may be more, under weights [row, query, token]."""
    n_rows, n_queries, n = weights.shape
    d, even = values.shape[2], n // 4 * 4
    for r in range(n_rows):
        out[r] = 0
        for t in range(0, even, 4):
            for g in range(n_queries):
                a, b, c, e = weights[r, g, t], weights[r, g, t + 1], weights[r, g, t + 2], weights[r, g, t + 3]
                for i in range(d):
                    out[r, g, i] += (
                        a * values[r, t, i]
                        + b * values[r, t + 1, i]
                        + c * values[r, t + 2, i]
                        + e * values[r, t + 3, i]
                    )
        for t in range(even, n):
            for g in range(n_queries):
                for i in range(d):
                    out[r, g, i] += weights[r, g, t] * values[r, t, i]


@njit(cache=True, fastmath=True, error_model="numpy")
def best_bounds(query, digests, scaling, out):
    """out [row, page]: the largest of the queries' bounds; query [row, query, 2 d] in parts, digests [row, page, 2 d],
    of which there may be more."""
    n_rows, n_queries, d = query.shape
    for r in range(n_rows):
        for t in range(out.shape[1]):
            for g in range(n_queries):
                total = np.float32(0)
                for i in range(d):
                    total += query[r, g, i] * digests[r, t, i]
                out[r, t] = max(out[r, t], total * scaling) if g else total * scaling


@njit(cache=True)
def ascending(bits):
    """int32 bits of a float32, as a whole number in the order of the floats."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(cache=True)
def choose(best, share, slot_of, page, weight, real, absent):
    """host.choose: best and share int32 [row, page], bits of scores and of weights; the rest [row, want], written."""
    n_rows, n = best.shape
    k = page.shape[1]
    order, chosen = np.empty(n, np.int64), np.empty(k, np.int64)
    for r in range(n_rows):
        for t in range(n):
            order[t] = (np.int64(ascending(best[r, t])) << 32) | t
        top = np.partition(order, n - k)[n - k :] if k < n else order
        for j in range(k):
            t = top[j] & 0xFFFFFFFF
            chosen[j] = (np.int64(share[r, t]) << 32) | t
        chosen.sort()
        for j in range(k):
            t = chosen[j] & 0xFFFFFFFF
            page[r, j], weight[r, j] = t, share[r, t]
            real[r, j] = ascending(best[r, t]) > LEAST
            absent[r, j] = real[r, j] and slot_of[r, t] == NOWHERE


@njit(cache=True)
def assign(page, real, come, base, slot_of, stamp, rows, pages, slots, stamps):
    """Swapping's turn, but for what can fail. Wants [row, want] that are resident move to the front, the stamp of the
    j-th being base + j; those that `come` are given the slots of lowest stamp. Written to rows, pages, slots, stamps:
    which page is to go where. Returns how many.
    """
    n_rows, k = page.shape
    n_slots, n = stamp.shape[1], 0
    order = np.empty(n_slots, np.int64)
    for r in range(n_rows):
        first = n
        for j in range(k):
            slot = slot_of[r, page[r, j]]
            if slot != NOWHERE and real[r, j]:
                stamp[r, slot] = max(stamp[r, slot], base + j)
            if come[r, j]:
                rows[n], pages[n], stamps[n] = r, page[r, j], base + j
                n += 1
        m = n - first
        if m == 0:
            continue
        for s in range(n_slots):
            order[s] = (stamp[r, s] + 1) * n_slots + s
        least = np.partition(order, m - 1) if m < n_slots else order
        for j in range(m):
            slots[first + j] = least[j] % n_slots
    return n


@njit(cache=True)
def copy(source, into, rows, pages, slots):
    """Pages, [row, page, word], from one tier into the slots of another."""
    for j in range(len(rows)):
        r, a, b = rows[j], pages[j], slots[j]
        for i in range(source.shape[2]):
            into[r, b, i] = source[r, a, i]


@njit(cache=True)
def enter(rows, pages, slots, stamps, page_of, slot_of, stamp):
    """Pages are in their slots now, in place of those there; True if some slot is still empty."""
    for j in range(len(rows)):
        r, slot = rows[j], slots[j]
        if page_of[r, slot] != NOWHERE:
            slot_of[r, page_of[r, slot]] = NOWHERE
        page_of[r, slot], slot_of[r, pages[j]], stamp[r, slot] = pages[j], slot, stamps[j]
    return (page_of == NOWHERE).any()
