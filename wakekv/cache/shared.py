"""The fast tier where heads hold different numbers of pages: one store for all, and for each layer a table of what is
where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from wakekv.cache.loops import Views, words
from wakekv.cache.pool import EMPTY


class Store:
    """Blocks that hold a page each, of any head of any layer: keys, values [block, token, d].

    It grows where a step brings more than is free, and is packed again once much is free (`fit`).
    """

    def __init__(self, like: tuple[torch.Tensor, ...]):
        self.keys, self.values = (x.new_empty(0, *x.shape[-2:]) for x in like)
        self._free: list[int] = []

    @property
    def n_blocks(self) -> int:
        return len(self.keys)

    @property
    def n_held(self) -> int:
        """Blocks with a page in them."""
        return self.n_blocks - len(self._free)

    @property
    def n_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values))

    def room(self, n: int) -> None:
        """At least n free blocks, in new memory if need be."""
        lacking, old = n - len(self._free), self.n_blocks
        if lacking > 0:
            self.keys, self.values = (torch.cat([x, x.new_empty(lacking, *x.shape[1:])]) for x in self._both)
            self._free += range(old, old + lacking)

    def take(self, n: int) -> torch.Tensor:
        """int64 [n]: blocks that were free and are so no more."""
        if n > len(self._free):
            self.room(max(n, self.n_blocks // 16))  # seldom, since all of it is copied
        first = len(self._free) - n
        taken, self._free = self._free[first:], self._free[:first]
        return torch.tensor(taken, dtype=torch.int64, device=self.keys.device)

    def give(self, blocks: torch.Tensor) -> None:
        """These blocks are free again."""
        self._free += blocks.tolist()

    def fit(self, pools: Sequence[Shared], spare: int) -> None:
        """No more than n_held // 8 + spare free blocks; pools: all that have pages here."""
        n_free = self.n_held // 8 + spare
        if len(self._free) <= n_free:
            return
        held = [pool.slot_of != EMPTY for pool in pools]
        blocks = torch.cat([pool.slot_of[there] for pool, there in zip(pools, held, strict=True)])
        n = len(blocks)
        both = [x.new_empty(n + n_free, *x.shape[1:]) for x in self._both]
        for new, old in zip(both, self._both, strict=True):
            torch.index_select(old, 0, blocks, out=new[:n])
        (self.keys, self.values), self._free = both, list(range(n, n + n_free))
        at = torch.arange(n, device=blocks.device).split([int(there.sum()) for there in held])
        for pool, there, new in zip(pools, held, at, strict=True):
            pool.slot_of[there] = new

    @property
    def _both(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values


class Shared:
    """A layer's pages in a store that other layers use too; stands where a Pool does.

    slot_of  int64 [row, page]: the block that a page is in; EMPTY if in none.  A row can have as many as it likes
    open     keys and values [row, token, d] of the page being written
    """

    def __init__(self, store: Store, n_pages: int, open_page: tuple[torch.Tensor, torch.Tensor]):
        self.store, self.open = store, tuple(x.clone() for x in open_page)
        self.slot_of = torch.full((len(open_page[0]), n_pages), EMPTY, device=open_page[0].device)
        self.views = Views()

    def enter(self, rows: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """int64 [n]: a block for each of n pages that are in none; its bytes are the caller's to write."""
        blocks = self.store.take(len(rows))
        self.slot_of[rows, pages] = blocks
        return blocks

    def place(self, rows, pages, keys: torch.Tensor, values: torch.Tensor, stamps=None) -> None:
        """Put n pages [n, token, d] into blocks. stamps: as Pool.place has them; nobody has to leave here."""
        blocks = self.enter(rows, pages)
        self.store.keys[blocks], self.store.values[blocks] = keys, values

    def take(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [row, n, token, d] in blocks [row, n]; anything for EMPTY."""
        return self.store.keys[blocks], self.store.values[blocks]

    def free(self, rows: torch.Tensor, pages: torch.Tensor) -> None:
        """The blocks of these resident pages are free from now on; int64 [n] each."""
        self.store.give(self.slot_of[rows, pages])
        self.slot_of[rows, pages] = EMPTY

    def arrays(self) -> tuple[np.ndarray, ...]:
        """keys and values of the store, slot_of, keys and values of the open page, themselves, as numpy arrays."""
        named = {"store keys": self.store.keys, "store values": self.store.values, "slot_of": self.slot_of}
        named |= dict(zip(("open keys", "open values"), self.open))
        return tuple(self.views.of(*one) for one in named.items())

    def words(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the store as `loops.words`."""
        return tuple(self.views.of(name, getattr(self.store, name), words) for name in ("keys", "values"))

    def tables(self) -> tuple[torch.Tensor]:
        """A copy of the table, to go back to."""
        return (self.slot_of.clone(),)

    def restore(self, tables: tuple[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Go back to that table, from which pages have only come since. As Pool.restore: what must be placed again,
        which is nothing."""
        self.free(*torch.nonzero((self.slot_of != EMPTY) & (tables[0] == EMPTY), as_tuple=True))
        return (self.slot_of.new_empty(0),) * 3

    def select(self, index: torch.Tensor) -> None:
        """Keep the rows of `index`, in its order; a row that is there twice has its pages twice."""
        index = index.to(self.slot_of.device)
        blocks = self.slot_of[index]
        rows, pages = torch.nonzero(blocks != EMPTY, as_tuple=True)
        got = [x[blocks[rows, pages]] for x in (self.store.keys, self.store.values)]
        self.store.give(self.slot_of[self.slot_of != EMPTY])
        self.open, self.slot_of = tuple(x[index] for x in self.open), torch.full_like(blocks, EMPTY)
        self.place(rows, pages, *got)

    @property
    def n_bytes(self) -> int:
        """Bytes of the open page; those of the store are the store's."""
        return sum(x.numel() * x.element_size() for x in self.open)

    @property
    def n_table_bytes(self) -> int:
        """Bytes of the table."""
        return self.slot_of.numel() * self.slot_of.element_size()
