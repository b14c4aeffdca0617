"""Demand: what heads ask of the cache, page by page. The one input of every policy, simulated or real.

A log (trace.py) says which positions a head read; a policy moves pages. Here positions become *wants*: the distinct
pages of a head's logged positions at a step, each with the weight read from it, in the canonical order that all
policies share (ascending weight, ties by page), so that the heaviest read of a step is its most recent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from wakekv.errors import InputError, TraceError
from wakekv.logs.trace import Trace

UNITS = ("head", "kv_head")
FIRST_TOUCH = ("cold", "warm")
READS = 1 << 18  # logged weights at a time: what they become stays in a processor's cache
VERIFY = "`python -m wakekv verify` says where; record it again"


@dataclass(frozen=True)
class Demand:
    """Wants of every head at every step, as one CSR table, head-major.

    ptr            int64   [head, step + 1]  wants of head h at step t are the entries ptr[h, t]:ptr[h, t + 1]
    page           int32   [want]            page wanted
    weight         float32 [want]            attention weight read from it (summed over the group for KV heads)
    created        int32   [page]            decode step at which the page comes into existence; -1: in the prompt
    layer          int32   [head]            layer of each head
    first_touch    "cold": the cache starts empty and a head's first want of a page is never a miss (the paper's rule);
                   "warm": every page exists for every head from the moment its first token does
    prompt_rows    float32 [head, row, page] page weights of the last prompt rows, or None if not logged
    key_means      float32 [head, page, d]   mean key of each page, or None if not logged
    unit           "head" (query heads) or "kv_head";  page_tokens  tokens per page
    """

    ptr: np.ndarray
    page: np.ndarray
    weight: np.ndarray
    created: np.ndarray
    layer: np.ndarray
    first_touch: str = "cold"
    prompt_rows: np.ndarray | None = None
    key_means: np.ndarray | None = None
    unit: str = "head"
    page_tokens: int = 16

    def __post_init__(self):
        from wakekv import kernels  # here, as a serving engine starts before numba is loaded

        for name, known in (("first_touch", FIRST_TOUCH), ("unit", UNITS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.ptr.ndim != 2 or len(self.layer) != self.ptr.shape[0] or self.ptr.shape[1] < 2:
            raise InputError("ptr must be [head, step + 1] with a step or more, and layer must have an entry a head")
        if np.any(np.diff(self.ptr, axis=1) < 0) or self.ptr[0, 0] != 0 or self.ptr[-1, -1] != len(self.page):
            raise InputError("ptr must rise from 0 to the number of wants")
        if len(self.page) and not (0 <= self.page.min() and self.page.max() < len(self.created)):
            raise InputError(f"a want names a page outside 0..{len(self.created) - 1}")
        if (head := kernels.repeated(self.ptr, self.page, len(self.created))) >= 0:  # no compiled loop has room for it
            raise InputError(f"head {head} wants a page twice in a step: name each page once, with all of its weight")
        if not np.isfinite(self.total_weight) or (len(self.weight) and self.weight.min() < 0):
            raise InputError("a want has a weight that is negative, infinite or not a number")
        if self.first_touch == "warm" and np.any(self.created[self.page] > self.step_of):
            raise InputError("a page is wanted before it is created")

    @property
    def n_heads(self) -> int:
        return self.ptr.shape[0]

    @property
    def n_steps(self) -> int:
        return self.ptr.shape[1] - 1

    @property
    def n_pages(self) -> int:
        return len(self.created)

    @property
    def n_wants(self) -> int:
        return len(self.page)

    @cached_property
    def total_weight(self) -> float:
        """The weight of all wants; not finite where one is not."""
        return float(self.weight.sum(dtype=np.float64))

    @cached_property
    def head_of(self) -> np.ndarray:
        """int32 [want]: the head of each want."""
        return np.repeat(np.arange(self.n_heads, dtype=np.int32), self.ptr[:, -1] - self.ptr[:, 0])

    @cached_property
    def step_of(self) -> np.ndarray:
        """int32 [want]: the step of each want."""
        steps = np.tile(np.arange(self.n_steps, dtype=np.int32), self.n_heads)
        return np.repeat(steps, np.diff(self.ptr, axis=1).ravel())

    @cached_property
    def order(self) -> np.ndarray:
        """int32 [want]: rank of each want among all heads' wants of its step, by weight, then page, then head. For
        `replay`; one pass does without it (kernels.stamp)."""
        rank = np.empty(self.n_wants, np.int32)
        packed = self.n_pages <= 1 << 20 and self.n_heads <= 1 << 12
        for t in range(self.n_steps):
            heads, entries = self.at(t)
            weight, page = self.weight[entries], self.page[entries]
            if packed:  # weights are not negative, so their bits are in their order: one sort of whole numbers
                bits = (weight + np.float32(0)).view(np.uint32).astype(np.uint64) << np.uint64(32)
                best = np.argsort(bits | (page.astype(np.uint64) << np.uint64(12)) | heads.astype(np.uint64))
            else:
                best = np.lexsort((heads, page, weight))
            rank[entries[best]] = np.arange(len(entries))
        return rank

    @cached_property
    def next_use(self) -> tuple[np.ndarray, np.ndarray]:
        """The future, for the optimum alone: int32 [want] the step of the same page's next want (n_steps: never),
        and int32 [head, page] the step of the first want."""
        first, following = (np.full(n, self.n_steps, np.int32) for n in ((self.n_heads, self.n_pages), self.n_wants))
        for h, (start, stop) in enumerate(self.ptr[:, [0, -1]]):  # a stable sort leaves steps in their order
            by_page = start + np.argsort(self.page[start:stop].astype(np.min_scalar_type(self.n_pages)), kind="stable")
            page, step = self.page[by_page], self.step_of[by_page]
            new = np.diff(page, prepend=-1) > 0
            first[h, page[new]], following[by_page[:-1][~new[1:]]] = step[new], step[1:][~new[1:]]
        return following, first

    @cached_property
    def births(self) -> tuple[np.ndarray, np.ndarray]:
        """(ptr int64 [step + 1], page int32): the pages created at step t are page[ptr[t]:ptr[t + 1]], in order."""
        page = np.argsort(self.created, kind="stable").astype(np.int32)
        ptr = np.searchsorted(self.created[page], np.arange(self.n_steps + 1))
        return ptr - ptr[0], page[ptr[0] : ptr[-1]]

    def at(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(heads, entries): who wants something at `step`, and where in `page` and `weight` it stands."""
        starts, stops = self.ptr[:, step], self.ptr[:, step + 1]
        n = stops - starts
        heads = np.repeat(np.arange(self.n_heads), n)
        return heads, np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n) + np.repeat(starts, n)

    def turn(self, scope: str, heads: np.ndarray, entries: np.ndarray, step: int) -> np.ndarray:
        """int64 [want]: the place of each want of `step` in the canonical order, among its head's or, if the scope is
        wider, among all heads'."""
        return entries - self.ptr[heads, step] if scope == "head" else self.order[entries].astype(np.int64)

    def until(self, step: int) -> Demand:
        """The same demand cut off before `step`: what a policy could have seen by then."""
        return self.select(steps=slice(step))

    def select(self, heads: Sequence[int] | slice = slice(None), steps: Sequence[int] | slice = slice(None)) -> Demand:
        """The wants of some heads at some steps, in the order given; a step may come again."""
        counts, first = np.diff(self.ptr[heads], axis=1)[:, steps], self.ptr[heads, :-1][:, steps]
        ends = np.cumsum(counts).reshape(counts.shape)
        at = np.repeat((first - ends + counts).ravel(), counts.ravel()) + np.arange(counts.sum())
        ptr = np.concatenate([np.append(0, ends[:-1, -1])[:, None], ends], axis=1)
        cut = {n: None if getattr(self, n) is None else getattr(self, n)[heads] for n in ("prompt_rows", "key_means")}
        return replace(self, ptr=ptr, page=self.page[at], weight=self.weight[at], layer=self.layer[heads], **cut)

    @classmethod
    def from_lists(cls, wants: Sequence[Sequence[Iterable]], created=None, layer=None, **options) -> Demand:
        """A demand written out by hand: wants[head][step] is a list of pages, or a dict page -> weight.

        In a list the last page is the heaviest, as it is the most recent. created: [page], default -1 (all prompt).
        """
        ptr, page, weight = [], [], []
        for steps in wants:
            row = [len(page)]
            for step in steps:
                pairs = step.items() if isinstance(step, dict) else ((p, i + 1.0) for i, p in enumerate(step))
                for p, w in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
                    page.append(p)
                    weight.append(w)
                row.append(len(page))
            ptr.append(row)
        n_pages = max(page, default=-1) + 1
        return cls(
            ptr=np.array(ptr, np.int64),
            page=np.array(page, np.int32),
            weight=np.array(weight, np.float32),
            created=np.full(n_pages, -1, np.int32) if created is None else np.asarray(created, np.int32),
            layer=np.zeros(len(wants), np.int32) if layer is None else np.asarray(layer, np.int32),
            **options,
        )


def demand(
    trace: Trace, unit: str = "head", first_touch: str = "cold", page_tokens: int = 16, k: int | None = None
) -> Demand:
    """The wants of a log (definitions: a page is 16 tokens; wants are the pages of the k largest weights).

    unit         "head": one cache per query head, as the paper counts; "kv_head": what a real cache can do, the union
                 of the group's wants with their weights added
    first_touch  see Demand
    page_tokens  tokens a page; prompt rows and key means are logged at 16 and carried to its multiples only
    k            how many of the logged weights of each row to use, the heaviest first; None: all (64 by default)
    Raises InputError for an unknown unit or rule, or k outside 1..the log's own; TraceError for positions that do not
    rise or lie beyond the context. A shipped log (shipped.py) answers for itself.
    """
    if not isinstance(trace, Trace):
        return trace.demand(unit, first_touch, page_tokens, k)
    if unit not in UNITS:
        raise InputError(f"unit must be one of {', '.join(UNITS)}, not {unit!r}")
    k = trace.k if k is None else k
    if not 1 <= k <= trace.k:
        raise InputError(f"k must be between 1 and {trace.k}, the number of weights this log holds, not {k}")
    if page_tokens < 1:
        raise InputError(f"page_tokens must be at least 1, not {page_tokens}")
    n_steps, group = trace.n_steps, trace.group if unit == "kv_head" else 1
    n_units, n_pages = trace.n_heads // group, -(-(trace.n_prompt + n_steps) // page_tokens)
    padding = np.iinfo(trace.positions.dtype).max

    counts, pages, weights = np.zeros((n_units, n_steps), np.int64), [], []
    at_once = max(1, READS // (group * trace.k))
    for u, first in itertools.product(range(n_units), range(0, n_steps, at_once)):
        heads, steps = slice(u * group, (u + 1) * group), slice(first, first + at_once)
        position = np.asarray(trace.positions[heads, steps]).astype(np.int64)  # [group, step, k]
        weight = np.asarray(trace.weights[heads, steps]).astype(np.float64)
        if k < trace.k:
            top = np.argsort(-weight, axis=-1, kind="stable")[..., :k]
            position, weight = np.take_along_axis(position, top, -1), np.take_along_axis(weight, top, -1)
        rows = np.broadcast_to(np.arange(position.shape[1])[None, :, None], position.shape)
        real = position != padding
        if position[real].max(initial=0) >= trace.n_prompt + n_steps:
            raise TraceError(f"heads {heads.start} to {heads.stop - 1} read positions beyond the context: {VERIFY}")
        item = rows[real] * n_pages + position[real] // page_tokens
        if group == 1 and k == trace.k:  # positions are logged in ascending order, so the items are sorted already
            rise = np.diff(item, prepend=-1)
            if rise.min(initial=0) < 0:
                raise TraceError(f"head {u} has positions that do not rise: {VERIFY}")
            new = rise != 0
            distinct, where = item[new], np.cumsum(new) - 1
        else:
            distinct, where = np.unique(item, return_inverse=True)
        total = np.bincount(where, weights=weight[real], minlength=len(distinct)).astype(np.float32)
        step, page = np.divmod(distinct, n_pages)
        canonical = _canonical(total, step)
        counts[u, steps] = np.bincount(step, minlength=position.shape[1])
        pages.append(page[canonical].astype(np.int32))
        weights.append(total[canonical])

    ends = np.cumsum(counts).reshape(n_units, n_steps)
    starts = np.concatenate([[0], ends[:-1, -1]])[:, None]
    born = np.arange(n_pages) * page_tokens - (trace.n_prompt - 1)  # step 0 feeds the prompt's last token
    return Demand(
        ptr=np.concatenate([starts, ends], axis=1),
        page=np.concatenate(pages),
        weight=np.concatenate(weights),
        created=np.maximum(born, -1).astype(np.int32),
        layer=trace.layer[::group].astype(np.int32),
        first_touch=first_touch,
        prompt_rows=_prompt_rows(trace, group, page_tokens, n_pages),
        key_means=_key_means(trace, unit, page_tokens, n_pages),
        unit=unit,
        page_tokens=page_tokens,
    )


def _canonical(weight: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Order by step, then weight, ties as they come: three radix sorts, which numpy's stable sort of 16 bits is.

    The bits of a float32 that is not negative sort as it does.
    """
    bits = (weight + np.float32(0)).view(np.uint32)
    order = np.argsort((bits & 0xFFFF).astype(np.uint16), kind="stable")
    order = order[np.argsort((bits >> 16).astype(np.uint16)[order], kind="stable")]
    return order[np.argsort(step.astype(np.min_scalar_type(step.max(initial=0)))[order], kind="stable")]


def _prompt_rows(trace: Trace, group: int, page_tokens: int, n_pages: int) -> np.ndarray | None:
    if page_tokens % 16:
        return None
    logged = np.asarray(trace.prompt_pages).astype(np.float32)  # [head, row, page of 16]
    heads, rows, n = logged.shape
    logged, merge = logged.reshape(heads // group, group, rows, n).sum(1), page_tokens // 16
    out = np.zeros((heads // group, rows, n_pages), np.float32)
    for place in range(merge):  # of a logged page within its own
        part = logged[:, :, place::merge]
        out[:, :, : part.shape[2]] += part
    return out


def _key_means(trace: Trace, unit: str, page_tokens: int, n_pages: int) -> np.ndarray | None:
    if page_tokens % 16:
        return None
    merge = page_tokens // 16
    logged = np.asarray(trace.key_means[:, : n_pages * merge]).astype(np.float32)  # [kv_head, page of 16, d]
    whole, held = np.zeros((len(logged), n_pages, logged.shape[2]), np.float32), np.zeros((n_pages, 1), np.float32)
    for place in range(merge):
        part = logged[:, place::merge]
        whole[:, : part.shape[1]] += part
        held[: part.shape[1]] += 1
    whole /= np.maximum(held, 1)
    return whole if unit == "kv_head" else np.repeat(whole, trace.group, axis=0)
