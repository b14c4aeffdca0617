"""Ledger: what a policy may know. The past of every page, as arrays over [head, page], and nothing of the future."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

import numpy as np

from wakekv import kernels
from wakekv.errors import InputError
from wakekv.logs.demand import Demand

UNKNOWN = -1
State = TypeVar("State")


class Ledger:
    """All that has been seen up to and including `step` (-1: the prompt alone).

    A page is *known* once it could be resident: from the start if it is in the prompt, from its creation if it was
    decoded; under a cold start (Demand.first_touch, `start="demand"`) from the head's first want of it.

    step     int                   last step seen
    known    bool   [head, page]   could be resident
    born     int32  [head, page]   step at which the page became known (-1: before decoding; meaningless if unknown)
    recency  int64  [head, page]   when it was last wanted or born, no two alike within a scope; -1 if unknown
    reads    int64  [head, page]   wants so far
    weight   float32 [head, page]  weight read at this step
    layer    int32  [head];  created  int32 [page], -1 for the prompt's pages
    prompt_rows  float32 [head, row, page]  page weights of the last prompt rows (None if not logged)
    key_means    float32 [head, page, d]    (None if not logged)

    The budget and what is resident are not here: an order of pages that depended on them would have no exact curve.
    """

    def __init__(self, demand: Demand, start: str = "demand", scope: str = "head", future: bool = False):
        self._demand, self._scope, self._future = demand, scope, future
        shape = demand.n_heads, demand.n_pages
        self.by_want = demand.first_touch == "cold" and start == "demand"  # a page becomes known by being wanted
        self.step, self.layer, self.created = -1, demand.layer, demand.created
        self.page_tokens = demand.page_tokens
        self.prompt_rows, self.key_means = demand.prompt_rows, demand.key_means
        self.reads = np.zeros(shape, np.int64)
        self._recency, self._turned = np.full(shape, UNKNOWN, np.int64), 0
        self.known = np.zeros(shape, bool)
        self.born = np.full(shape, -1, np.int32)
        self._item = np.arange(demand.n_pages) * demand.n_heads + np.arange(demand.n_heads)[:, None]
        self._stamps = 2 * self._item.size  # stamps a step may use: births first, then wants
        if not self.by_want:
            self.known[:] = demand.created < 0
            self._recency[self.known] = self._item[self.known]
        self._next = demand.next_use[1].copy() if future else None
        self._running: dict[Hashable, tuple] = {}

    def observe(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Take in the next step. Returns (heads, entries, births, excused).

        entries, heads  the step's wants;  births  bool [head, page] pages that became known in this step
        excused         bool [want] a first touch: not a miss wherever the page is
        """
        self.step += 1
        t, demand = self.step, self._demand
        heads, entries = demand.at(t)
        pages = demand.page[entries]
        births = np.zeros_like(self.known)
        if demand.first_touch == "cold":
            excused = self.reads[heads, pages] == 0
        else:
            excused = ~self.known[heads, pages]
        if self.by_want:
            births[heads[excused], pages[excused]] = True
        else:
            births[:] = demand.created == t
        stamp = (t + 1) * self._stamps
        self._recency = np.where(births, stamp + self._item, self._recency)
        self._recency[heads, pages] = stamp + self._item.size + demand.turn(self._scope, heads, entries, t)
        self.known |= births
        self.born[births] = t
        self.reads[heads, pages] += 1
        self._turned = t + 1
        if self._next is not None:
            self._next[heads, pages] = demand.next_use[0][entries]
        return heads, entries, births, excused

    def advance(self, stop: int, count, *counting) -> None:
        """Steps up to `stop` at once, with the misses counted on the way by `count`, a kernel of kernels.py."""
        demand, pooled = self._demand, self._scope != "head"
        count(
            self.step + 1, stop, demand.ptr, demand.page, demand.weight, pooled,
            *demand.births, self.by_want, demand.first_touch == "cold", self._stamps,
            np.zeros(0, np.int32) if self._next is None else demand.next_use[0],
            self.reads, self._recency, self.known, self.born,
            np.zeros((0, 0), np.int32) if self._next is None else self._next, *counting,
        )  # fmt: skip
        self.step = stop - 1
        if not pooled:
            self._turned = stop

    @property
    def recency(self) -> np.ndarray:
        if self._turned <= self.step:  # the order among all heads is worked out when it is asked for
            demand, bits = self._demand, self._demand.weight.view(np.uint32)
            kernels.stamp(self._turned, self.step + 1, demand.ptr, demand.page, bits, self._stamps, self._recency)
            self._turned = self.step + 1
        return self._recency

    @property
    def last_read(self) -> np.ndarray:
        """int64 [head, page]: the step of the last want (or birth); -1 before decoding or unknown."""
        return np.where(self.recency == UNKNOWN, -1, self.recency // self._stamps - 1)

    @property
    def weight(self) -> np.ndarray:
        """float32 [head, page]: weight read at this step, 0 where nothing was."""
        return self.recent(1)

    @property
    def prompt_weight(self) -> np.ndarray:
        """float32 [head, page]: weight that the logged last prompt rows gave each page, summed over the rows."""
        return self.prompt(None).sum(1)

    def prompt(self, rows: int | None) -> np.ndarray:
        """float32 [head, row, page]: the last `rows` logged prompt rows (None: all). InputError if not logged."""
        if self.prompt_rows is None:
            raise InputError(
                "this log has no prompt rows, so a policy that reads the prompt's attention cannot run on it"
            )
        return self.prompt_rows if rows is None else self.prompt_rows[:, -rows:]

    def keys(self) -> np.ndarray:
        """float32 [head, page, d]: mean key of each page. InputError if not logged."""
        if self.key_means is None:
            raise InputError("this log has no page key means, so a policy that compares keys cannot run on it")
        return self.key_means

    def newest(self, tokens: int) -> np.ndarray:
        """bool [page]: the pages that hold the last `tokens` tokens, rounded up to whole pages."""
        pages = np.zeros(len(self.created), bool)
        n = -(-tokens // self.page_tokens)
        pages[np.flatnonzero(self.created <= self.step)[-n:]] = True
        return pages

    def wants(self, at: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(heads, pages, weights) of the wants of a step, the present one unless named: head by head, each head's in
        canonical order, the lightest first. InputError for a step that is yet to come."""
        at = self.step if at is None else at
        if at > self.step:
            raise InputError(f"step {at} is yet to come: the last one seen is {self.step}")
        heads, entries = self._demand.at(at)
        return heads, self._demand.page[entries], self._demand.weight[entries]

    def recent(self, steps: int, how: str = "sum", at: int | None = None) -> np.ndarray:
        """float32 [head, page]: weight read in the last `steps` steps, as their "sum" or their "max".

        at  the last of these steps; the present one unless named. InputError for one that is yet to come.
        """
        at = self.step if at is None else at
        if at > self.step:
            raise InputError(f"step {at} is yet to come: the last one seen is {self.step}")
        out = np.zeros(self.known.shape, np.float32)
        gather = {"sum": np.add, "max": np.maximum}[how]
        for t in range(max(0, at - steps + 1), at + 1):
            heads, entries = self._demand.at(t)
            where, weight = (heads, self._demand.page[entries]), self._demand.weight[entries]
            out[where] = gather(out[where], weight)  # a step wants a page once
        return out

    def window(self, rows: int, at: int | None = None) -> np.ndarray:
        """float32 [head, page]: weight from the last `rows` query rows, summed; the prompt's own last rows (InputError
        if not logged) as long as fewer have been decoded."""
        at = self.step if at is None else at
        decoded = self.recent(rows, at=at)
        return decoded if at + 1 >= rows else decoded + self.prompt(rows - at - 1).sum(1)

    def running(
        self, name: Hashable, start: Callable[[], State], update: Callable[[State, int], State] | None = None
    ) -> State:
        """What a policy carries from step to step, kept here so that the policy itself keeps nothing.

        The first time start(), and then state = update(state, t) for every step t that has passed since. Without an
        update: a constant worked out once. Not to be changed by the caller.
        """
        state, upto = self._running[name] if name in self._running else (start(), -1)
        if update is not None:
            for t in range(upto + 1, self.step + 1):
                state = update(state, t)
        self._running[name] = state, self.step
        return state

    def decayed(self, what: str, keep: float) -> np.ndarray:
        """float64 [head, page]: x <- keep * x + now, or for "peak" x <- max(keep * x, now), over all steps so far.

        what  "reads" (now is 1 for a want), "weight" (its weight), "square" (its weight squared), "peak" (its weight;
              a decayed maximum)
        """
        if what not in ("reads", "weight", "square", "peak"):
            raise InputError(f"decayed() takes reads, weight, square or peak, not {what!r}")

        def add(total, t):
            heads, entries = self._demand.at(t)
            where, weight = (heads, self._demand.page[entries]), self._demand.weight[entries].astype(np.float64)
            if keep != 1.0:
                total *= keep
            if what == "peak":
                total[where] = np.maximum(total[where], weight)
            else:
                total[where] += {"reads": 1.0, "weight": weight, "square": weight * weight}[what]
            return total

        view = self.running((what, keep), lambda: np.zeros(self.known.shape), add).view()
        view.flags.writeable = False
        return view

    @property
    def next_use(self) -> np.ndarray:
        """int32 [head, page]: the step of the next want, n_steps if never. InputError unless the policy is offline."""
        if self._next is None:
            raise InputError("only a policy that declares foresight, and is offline, is handed the future")
        return self._next
