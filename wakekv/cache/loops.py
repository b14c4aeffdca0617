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
    """[..., word] over the memory of pages [..., token, d]: words of 8 bytes if those make a page, else of one."""
    x = x.flatten(-2)
    whole = x.shape[-1] * x.element_size() % 8 == 0
    return x.view(torch.int64 if whole else torch.uint8).numpy()


def places(x: torch.Tensor) -> np.ndarray:
    """[place, word] over the memory of pages [row, slot, token, d], row by row."""
    return words(x.flatten(0, 1))


@njit(cache=True, fastmath=True, error_model="numpy")
def _product(query, keys, n, scaling, out, at):
    """out [query, at + token]: scaled products of queries [query, d] and the first n keys [token, d]."""
    n_queries, d = query.shape
    for t in range(n):
        for g in range(n_queries):
            total = np.float32(0)
            for i in range(d):
                total += query[g, i] * keys[t, i]
            out[g, at + t] = total * scaling


@njit(cache=True, fastmath=True, error_model="numpy")
def _mix(weights, at, values, n, out):
    """out [query, d] gains the first n values [token, d] under weights [query, at + token]."""
    n_queries, d, even = len(weights), values.shape[1], n // 4 * 4
    for t in range(0, even, 4):
        for g in range(n_queries):
            a, b, c, e = weights[g, at + t], weights[g, at + t + 1], weights[g, at + t + 2], weights[g, at + t + 3]
            for i in range(d):
                out[g, i] += a * values[t, i] + b * values[t + 1, i] + c * values[t + 2, i] + e * values[t + 3, i]
    for t in range(even, n):
        for g in range(n_queries):
            for i in range(d):
                out[g, i] += weights[g, at + t] * values[t, i]


@njit(cache=True, fastmath=True, error_model="numpy")
def products(query, keys, n, scaling, out):
    """out [row, query, token]: scaled products of queries [row, query, d] and the first n keys [row, token, d]."""
    for r in range(len(query)):
        _product(query[r], keys[r], n, scaling, out[r], 0)


@njit(cache=True, fastmath=True, error_model="numpy")
def mixtures(weights, values, out):
    """out [row, query, d]: values [row, token, d], of which there may be more, under weights [row, query, token]."""
    for r in range(len(weights)):
        out[r] = 0
        _mix(weights[r], 0, values[r], weights.shape[2], out[r])


@njit(cache=True)
def most(slot_of, n):
    """The most of the first n pages that a row of slot_of [row, page] has somewhere."""
    found = 0
    for r in range(len(slot_of)):
        here = 0
        for p in range(n):
            here += slot_of[r, p] != NOWHERE
        found = max(found, here)
    return found


@njit(cache=True)
def block_products(query, keys, slot_of, n, open_keys, n_open, pads, scaling, out):
    """As products, over those of a row's first n pages that are in a block of keys [block, token, d], in the order of
    the text, and then n_open tokens of open_keys [row, token, d]; -inf for a row's first pads [row] tokens, which are
    padding, and where a row has no more."""
    page = keys.shape[1]
    for r in range(len(query)):
        at = 0
        for p in range(n):
            if slot_of[r, p] != NOWHERE:
                _product(query[r], keys[slot_of[r, p]], page, scaling, out[r], at)
                out[r, :, at : at + max(0, min(page, pads[r] - p * page))] = -np.inf
                at += page
        _product(query[r], open_keys[r], n_open, scaling, out[r], at)
        out[r, :, at : at + max(0, min(n_open, pads[r] - n * page))] = -np.inf
        out[r, :, at + n_open :] = -np.inf


@njit(cache=True)
def block_mixtures(weights, values, slot_of, n, open_values, n_open, out):
    """As mixtures, over values [block, token, d] and open_values [row, token, d] in the order of block_products."""
    page = values.shape[1]
    for r in range(len(weights)):
        at = 0
        out[r] = 0
        for p in range(n):
            if slot_of[r, p] != NOWHERE:
                _mix(weights[r], at, values[slot_of[r, p]], page, out[r])
                at += page
        _mix(weights[r], at, open_values[r], n_open, out[r])


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
def choose(best, share, floor, slot_of, page, weight, real, absent):
    """host.choose: best and share int32 [row, page], bits of scores and of weights; floor int32 [row], of the least
    weight; slot_of [row, page]; the rest [row, want], written."""
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
            real[r, j] = ascending(best[r, t]) > LEAST and share[r, t] >= floor[r]
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
def copy(source, into, rows, pages, places):
    """Pages, [row, page, word], from one tier into places, [place, word], of another."""
    for j in range(len(rows)):
        r, a, b = rows[j], pages[j], places[j]
        for i in range(source.shape[2]):
            into[b, i] = source[r, a, i]


@njit(cache=True)
def enter(rows, pages, slots, stamps, page_of, slot_of, stamp):
    """Pages are in their slots now, in place of those there; True if some slot is still empty."""
    for j in range(len(rows)):
        r, slot = rows[j], slots[j]
        if page_of[r, slot] != NOWHERE:
            slot_of[r, page_of[r, slot]] = NOWHERE
        page_of[r, slot], slot_of[r, pages[j]], stamp[r, slot] = pages[j], slot, stamps[j]
    return (page_of == NOWHERE).any()
