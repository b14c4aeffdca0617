"""One layer's pages in both tiers, and the lengths that only a whole pass through the model moves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from wakekv.cache import loops
from wakekv.cache.pool import EMPTY, Pool
from wakekv.cache.reading import (
    Block,
    How,
    best_bounds,
    bounds,
    digest,
    in_blocks,
    over_arrays,
    over_blocks,
    over_slots,
    page_weights,
)
from wakekv.cache.reservoir import Reservoir
from wakekv.cache.shared import Shared
from wakekv.errors import CacheError
from wakekv.logs.trace import PROMPT_ROWS


class Sizes(NamedTuple):
    """page: tokens a page; n_pages: the most there can be; block: pages of a block in a pass of many tokens;
    folder: where the slow tier's file lies, None for memory."""

    page: int
    n_pages: int
    block: int
    folder: Path | None


class PagedLayer(CacheLayerMixin):
    """Pages of one layer; a row is a KV head of a sequence, row = sequence * n_kv_heads + kv_head.

    A pass through the model first *holds* its tokens (`update`), which attention sees, and then *advances* over them;
    until then it can be dropped, and the layer is as it was. Of every closed page there are
    digests  [row, page, 2 d] the bounds of its keys, on the fast tier;  reach float32 [row, page] its longest value
    means    float32 [row, page, d] its mean key
    and before the first step prompt_rows float32 [row, 32, page]: page weights of the last prompt rows.
    """

    is_sliding = False

    def __init__(self, index: int, sizes: Sizes) -> None:
        super().__init__()
        self.index, self.sizes = index, sizes
        self.n_closed = self.n_open = self.n_rows = 0
        self.n_pad: torch.Tensor | None = None  # int64 [row]: tokens of padding on the left
        self.held: tuple[torch.Tensor, torch.Tensor] | None = None  # the pass's keys and values
        self._coming: tuple | None = None
        self.views = loops.Views()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, n_kv, _, d = key_states.shape
        self.n_kv, self.n_rows = n_kv, batch * n_kv
        like, n_pages = (key_states, value_states), self.sizes.n_pages
        self.pool: Pool | Shared = Pool(self.n_rows, n_pages, self.sizes.page, like)
        self.reservoir = Reservoir(self.n_rows, n_pages, self.sizes.page, like, self.sizes.folder)
        self.digests = key_states.new_zeros(self.n_rows, n_pages, 2 * d)
        self.reach = torch.zeros(self.n_rows, n_pages, device=key_states.device)
        self.means = torch.zeros(self.n_rows, n_pages, d)
        self.prompt_rows = torch.zeros(self.n_rows, PROMPT_ROWS, n_pages)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] * key_states.shape[1] != self.n_rows:
            raise CacheError(
                f"layer {self.index} holds {self.n_rows // self.n_kv} sequences and got {key_states.shape[0]}: "
                "call reset() before another batch"
            )
        if self.get_seq_length() + key_states.shape[2] > self.get_max_length():
            raise CacheError(
                f"the cache has room for {self.get_max_length()} tokens and is asked to hold "
                f"{self.get_seq_length() + key_states.shape[2]}: make it with a larger max_tokens"
            )
        self.held = key_states, value_states
        if key_states.shape[2] == 1:
            for written, new in zip(self.pool.open, self.held):
                written[:, self.n_open] = new[:, :, 0].flatten(0, 1)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.n_closed * self.sizes.page + self.n_open

    def get_max_length(self) -> int:
        return self.sizes.n_pages * self.sizes.page

    @property
    def closing(self) -> bool:
        """This step's token fills the open page."""
        return self.n_open + 1 == self.sizes.page

    def scores(self, query: torch.Tensor, how: How) -> torch.Tensor:
        """float32 [row, query, page]: bounds of the closed pages' logits; -inf for pages that are all padding."""
        score = bounds(query, self.digests[:, : self.n_closed], how)
        if self.n_pad is not None:
            score.masked_fill_(~self.real_pages(0, self.n_closed)[:, None], -torch.inf)
        return score

    def best(self, query: torch.Tensor, how: How) -> torch.Tensor:
        """float32 [row, page]: the largest of `scores` over the queries."""
        if loops.serves(query, self.digests):
            best = best_bounds(query, self.views.of("digests", self.digests), self.n_closed, how)
        else:
            best = bounds(query, self.digests[:, : self.n_closed], how).amax(1)
        return best if self.n_pad is None else best.masked_fill_(~self.real_pages(0, self.n_closed), -torch.inf)

    def real_pages(self, first: int, last: int) -> torch.Tensor:
        """bool [row, last - first]: pages that hold more than padding."""
        pages = torch.arange(first, last, device=self.digests.device)
        if self.n_pad is None:
            return torch.ones(self.n_rows, last - first, dtype=torch.bool, device=pages.device)
        return pages >= (self.n_pad // self.sizes.page)[:, None]

    def over_slots(self, query: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of this step's queries [row, group, d] over resident pages and the open one: (out, scores)."""
        pool = self.pool
        if isinstance(pool, Shared):
            if loops.serves(query, *pool.open):
                pads = np.zeros(self.n_rows, np.int64) if self.n_pad is None else self.n_pad.numpy()
                return over_blocks(query, pool.arrays(), self.n_closed, self.n_open + 1, pads, how)
            keys, values, seen = self.in_order()
            return over_slots(query, keys, values, None if seen is None else ~seen, how)
        n = pool.n_slots * self.sizes.page + self.n_open + 1
        if loops.serves(query, pool.keys):
            return over_arrays(query, *pool.tokens(), n, self._hidden(n), how)
        return over_slots(query, *(x.flatten(1, 2)[:, :n] for x in (pool.keys, pool.values)), self._hidden(n), how)

    def _hidden(self, n: int) -> torch.Tensor | None:
        pool, page = self.pool, self.sizes.page
        if not pool.gaps and self.n_pad is None:
            return None
        hidden = (pool.page_of == EMPTY)[:, :, None].expand(-1, -1, page)
        if self.n_pad is None:
            return torch.cat([hidden.flatten(1), hidden.new_zeros(self.n_rows, page)], 1)[:, :n]
        offset = torch.arange(page, device=hidden.device)
        hidden = hidden | (pool.page_of[:, :, None] * page + offset < self.n_pad[:, None, None])
        written = (self.n_closed * page + offset).expand(self.n_rows, -1) < self.n_pad[:, None]
        return torch.cat([hidden.flatten(1), written], 1)[:, :n]

    def in_order(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values [row, token, d] of resident pages and the open one in the order of the text, and a mask
        [row, token], True where there is something; None if there is everywhere."""
        pool, page = self.pool, self.sizes.page
        there = pool.slot_of[:, : self.n_closed] != EMPTY
        pages = (~there).byte().argsort(dim=1, stable=True)[:, : int(there.sum(1).max())]
        where = pool.slot_of.gather(1, pages)
        n = pages.shape[1] * page + self.n_open + 1
        keys, values = (
            torch.cat([x.flatten(1, 2), y], 1)[:, :n] for x, y in zip(pool.take(where), pool.open, strict=True)
        )
        seen = torch.nn.functional.pad(where != EMPTY, (0, 1), value=True).repeat_interleave(page, 1)[:, :n]
        if self.n_pad is not None:
            pages = torch.nn.functional.pad(pages, (0, 1), value=self.n_closed)
            at = pages[:, :, None] * page + torch.arange(page, device=pages.device)
            seen &= (at >= self.n_pad[:, None, None]).flatten(1)[:, :n]
        return keys, values, None if bool(seen.all()) else seen

    def attend_all(self, query: torch.Tensor, how: How) -> torch.Tensor:
        """Attention of a pass of many tokens, queries [row, group, query, d], over every page not destroyed and the
        pass itself, a block at a time."""
        return in_blocks(query, self._blocks, how)

    def _blocks(self, first: int, last: int) -> Iterator[Block]:
        """What the pass's queries first..last see."""
        page, device = self.sizes.page, self.digests.device
        for at in range(0, self.n_closed, self.sizes.block):
            stop = min(at + self.sizes.block, self.n_closed)
            here = self.reservoir.held[:, at:stop]
            visible = None if bool(here.all()) else here.to(device).repeat_interleave(page, 1)[:, None, None]
            yield self._unpadded(*self.reservoir.block(at, stop), visible, at * page)
        keys, values = self._tail()
        size = self.sizes.block * page
        for at in range(0, self.n_open + last, size):
            token = torch.arange(at, min(at + size, self.n_open + last), device=device)
            visible = token <= self.n_open + torch.arange(first, last, device=device)[:, None]
            some = slice(at, at + len(token))
            yield self._unpadded(keys[:, some], values[:, some], visible[None, None], self.n_closed * page + at)

    def _unpadded(self, keys, values, visible, first: int) -> Block:
        if self.n_pad is not None:
            at = first + torch.arange(keys.shape[1], device=keys.device)
            real = (at >= self.n_pad[:, None])[:, None, None]
            visible = real if visible is None else visible & real
        return Block(keys, values, visible)

    def _tail(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The open page's tokens and those of this pass, [row, token, d]."""
        return tuple(torch.cat([x[:, : self.n_open], y.flatten(0, 1)], 1) for x, y in zip(self.pool.open, self.held))

    def keep(self, query: torch.Tensor, how: How, note_rows: bool) -> None:
        """Write the full pages of a pass of many tokens to the reservoir, where they count once it advances."""
        page, (keys, values) = self.sizes.page, self._tail()
        n = keys.shape[1] // page
        rows = None
        if note_rows:
            last = min(PROMPT_ROWS, query.shape[2])
            skip = query.shape[2] - last
            seen = page_weights(
                query[:, :, skip:], lambda a, b: self._blocks(skip + a, skip + b), how, page, self.sizes.n_pages
            )
            rows = torch.cat([self.prompt_rows[:, last:], seen.cpu()], 1)
        if n:
            full = (x[:, : n * page].unflatten(1, (n, page)) for x in (keys, values))
            self._write(self.n_closed, *full)
        self._coming = n, keys[:, n * page :], values[:, n * page :], rows
        self.held = None

    def _write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        n, page = keys.shape[1:3]
        there = slice(first, first + n)
        self.reservoir.write(first, keys, values, self.real_pages(first, first + n))
        if self.n_pad is None or not bool((self.n_pad > first * page).any()):
            self.digests[:, there], self.means[:, there] = digest(keys), keys.float().mean(2).cpu()
            self.reach[:, there] = values.float().norm(dim=-1).amax(2)
            return
        at = first * page + torch.arange(n * page, device=keys.device).view(n, page)
        real = (at >= self.n_pad[:, None, None])[..., None]
        some = real.any(2)  # [row, page, 1]
        high, low = (torch.where(real, keys, end) for end in (-torch.inf, torch.inf))
        bound = torch.cat([high.amax(2), low.amin(2)], -1)
        self.digests[:, there] = torch.where(some, bound, 0).to(bound.dtype)
        total = torch.where(real, keys, 0).float().sum(2) / real.sum(2).clamp(min=1)
        self.means[:, there] = total.cpu()
        self.reach[:, there] = torch.where(real, values, 0).float().norm(dim=-1).amax(2)

    def advance(self) -> None:
        """Count the pass's tokens in. A page that fills goes to the reservoir; its bytes stay in the open place."""
        if self._coming is not None:
            n, keys, values, rows = self._coming
            self.n_closed, self.n_open = self.n_closed + n, keys.shape[1]
            for written, new in zip(self.pool.open, (keys, values)):
                written[:, : self.n_open] = new
            self.prompt_rows = self.prompt_rows if rows is None else rows
        elif self.closing:
            self._write(self.n_closed, *(x[:, None] for x in self.pool.open))
            self.n_closed, self.n_open = self.n_closed + 1, 0
        else:
            self.n_open += 1
        self.drop()

    def drop(self) -> None:
        """Forget the pass."""
        self.held = self._coming = None

    def unload(self) -> None:
        """Nothing but the open page is on the fast tier."""
        old = self.pool.open
        self.pool = Pool(self.n_rows, self.sizes.n_pages, self.sizes.page, old)
        for mine, its in zip(self.pool.open, old):
            mine.copy_(its)

    def reset(self) -> None:
        """As new."""
        self.__init__(self.index, self.sizes)

    def copy_from(self, other: PagedLayer) -> None:
        """Hold what another layer holds, in memory of one's own, under one's own block and folder."""
        sizes, reservoir = self.sizes, copy.copy(other.reservoir) if other.is_initialized else None
        self.__dict__.update(copy.deepcopy(other, {id(getattr(other, "reservoir", None)): reservoir}).__dict__)
        self.sizes = sizes
        if reservoir is not None:
            reservoir.folder = sizes.folder
            reservoir.select(torch.arange(self.n_rows))

    def select(self, index: torch.Tensor) -> None:
        """Keep the sequences of `index`, in its order."""
        if not self.is_initialized:
            return
        rows = (index.cpu()[:, None] * self.n_kv + torch.arange(self.n_kv)).flatten()
        self.pool.select(rows)
        self.reservoir.select(rows)
        for name in ("digests", "reach", "means", "prompt_rows"):
            x = getattr(self, name)
            setattr(self, name, x[rows.to(x.device)])
        self.n_pad = None if self.n_pad is None else self.n_pad[rows.to(self.n_pad.device)]
        self.n_rows = len(rows)
