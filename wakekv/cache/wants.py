"""What a cache was asked for, as it is asked: a Demand that is still being written."""

from __future__ import annotations

import numpy as np

from wakekv.errors import CacheError
from wakekv.logs.demand import Demand

NEVER = np.iinfo(np.int32).max  # step at which a page that does not exist yet comes to be


class Wants:
    """The wants of one sequence, step by step; what a Ledger reads of a Demand, it finds here too.

    layer        int32 [head]: layer of each KV head that has pages;  n_pages: the most pages there can be
    created      int32 [page]: step in which a page was closed; -1 before the first step, NEVER if it is not yet
    page, weight of each want; a weight is the share of all pages' scores that the page's bound has at this step (an
                 estimate from digests, as a page that is not there can be read by no one)
    prompt_rows  float32 [head, row, page], from attention itself;  key_means float32 [head, page, d]
    """

    first_touch, unit = "warm", "kv_head"

    def __init__(self, layer: np.ndarray, page_tokens: int, prompt_rows: np.ndarray, key_means: np.ndarray):
        self.layer, self.page_tokens = layer, page_tokens
        self.prompt_rows, self.key_means = prompt_rows, key_means
        self.created = np.full(self.n_pages, NEVER, np.int32)
        self.page, self.weight = np.zeros(1024, np.int32), np.zeros(1024, np.float32)
        self._counts: list[np.ndarray] = []
        self._starts = [0]

    @property
    def n_heads(self) -> int:
        return len(self.layer)

    @property
    def n_pages(self) -> int:
        return self.prompt_rows.shape[2]

    @property
    def n_steps(self) -> int:
        return len(self._counts)

    def add(self, counts: np.ndarray, page: np.ndarray, weight: np.ndarray) -> None:
        """The next step: counts int [head]; page and weight head by head, each head's in ascending order."""
        start, stop = self._starts[-1], self._starts[-1] + len(page)
        if stop > len(self.page):
            self.page = np.concatenate([self.page, np.zeros(max(stop, len(self.page)), np.int32)])
            self.weight = np.concatenate([self.weight, np.zeros(max(stop, len(self.weight)), np.float32)])
        self.page[start:stop], self.weight[start:stop] = page, weight
        self._counts.append(counts)
        self._starts.append(stop)

    def drop(self) -> None:
        """Forget the last step."""
        self._counts.pop()
        self._starts.pop()

    def at(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """As Demand.at."""
        return np.repeat(np.arange(self.n_heads), self._counts[step]), np.arange(*self._starts[step : step + 2])

    def turn(self, scope: str, heads: np.ndarray, entries: np.ndarray, step: int) -> np.ndarray:
        """As Demand.turn."""
        if scope == "head":
            counts = self._counts[step]
            return entries - self._starts[step] - (np.cumsum(counts) - counts)[heads]
        order = np.empty(len(entries), np.int64)
        order[np.lexsort((heads, self.page[entries], self.weight[entries]))] = np.arange(len(entries))
        return order

    def demand(self) -> Demand:
        """All of it as a Demand, to be replayed. CacheError before the first step."""
        if not self._counts:
            raise CacheError("nothing has been decoded yet, so nothing was wanted: decode a step first")
        counts = np.array(self._counts, np.int64).T
        ends = np.cumsum(counts).reshape(counts.shape)
        starts = np.concatenate([[0], ends[:-1, -1]])[:, None]
        heads = np.concatenate([self.at(t)[0] for t in range(self.n_steps)])
        by_head = np.argsort(heads, kind="stable")
        return Demand(
            ptr=np.concatenate([starts, ends], axis=1),
            page=self.page[: len(heads)][by_head],
            weight=self.weight[: len(heads)][by_head],
            created=self.created.copy(),
            layer=self.layer,
            first_touch=self.first_touch,
            prompt_rows=self.prompt_rows.copy(),
            key_means=self.key_means.copy(),
            unit=self.unit,
            page_tokens=self.page_tokens,
        )
