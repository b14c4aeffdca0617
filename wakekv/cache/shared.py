"""The fast tier where heads hold different numbers of pages: one store for the layers of a model, and in it a table of
what is where."""

from __future__ import annotations

import numpy as np
import torch

from wakekv.cache.loops import Views, hosted, words
from wakekv.cache.pool import EMPTY
from wakekv.cache.reservoir import Reservoir


class Store:
    """Blocks that hold a page each, of any head of any layer: keys, values [block, token, d].

    slot_of  int64 [layer, row, page]: the block that a page is in; EMPTY if in none
    It grows where a step brings more than is free, and is packed again once much is free (`fit`).
    """

    def __init__(self, n_layers: int, n_pages: int, like: tuple[torch.Tensor, ...]):
        """like: keys and values [row, token, d] of the pages to be held."""
        self.keys, self.values = (x.new_empty(0, *x.shape[1:]) for x in like)
        self.slot_of = torch.full((n_layers, len(like[0]), n_pages), EMPTY, device=like[0].device)
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
            both = (self.keys, self.values)
            self.keys, self.values = (torch.cat([x, x.new_empty(lacking, *x.shape[1:])]) for x in both)
            self._free += range(old, old + lacking)

    def take(self, n: int) -> torch.Tensor:
        """int64 [n]: blocks that were free and are so no more."""
        if n > len(self._free):
            self.room(max(n, self.n_blocks // 16))  # seldom, since all of it is copied
        first = len(self._free) - n
        taken, self._free = self._free[first:], self._free[:first]
        return torch.tensor(taken, dtype=torch.int64, device=self.keys.device)

    def free(self, gone: torch.Tensor) -> None:
        """The blocks of these resident pages are free from now on; bool [layer, row, page], of the first pages."""
        where = torch.nonzero(gone, as_tuple=True)
        self._free += self.slot_of[where].tolist()
        self.slot_of[where] = EMPTY

    def fit(self, spare: int) -> None:
        """No more than n_held // 8 + spare free blocks."""
        n, n_free = self.n_held, self.n_held // 8 + spare
        if len(self._free) <= n_free:
            return
        held = self.slot_of != EMPTY
        packed = [x.new_empty(n + n_free, *x.shape[1:]) for x in (self.keys, self.values)]
        for new, old in zip(packed, (self.keys, self.values)):
            torch.index_select(old, 0, self.slot_of[held], out=new[:n])
        (self.keys, self.values), self._free = packed, list(range(n, n + n_free))
        self.slot_of[held] = torch.arange(n, device=held.device)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of every layer, in this order; a row that is there twice has its pages twice."""
        blocks = self.slot_of[:, rows.to(self.slot_of.device)]
        held = blocks != EMPTY
        self.keys, self.values = (x[blocks[held]] for x in (self.keys, self.values))
        self.slot_of = torch.full_like(blocks, EMPTY)
        self.slot_of[held], self._free = torch.arange(self.n_blocks, device=held.device), []


class Shared:
    """One layer's part of a store; stands where a Pool does, and a row can have as many pages as it likes.

    open  keys and values [row, token, d] of the page being written
    """

    def __init__(self, store: Store, layer: int, open_page: tuple[torch.Tensor, torch.Tensor]):
        self.store, self.layer, self.open = store, layer, tuple(x.clone() for x in open_page)
        self.views = Views()

    @property
    def slot_of(self) -> torch.Tensor:
        """int64 [row, page], itself: the layer's part of the table."""
        return self.store.slot_of[self.layer]

    def enter(self, rows: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """int64 [n]: a block for each of n pages that are in none, to write them to."""
        blocks = self.store.take(len(rows))
        self.slot_of[rows, pages] = blocks
        return blocks

    def place(self, rows, pages, keys: torch.Tensor, values: torch.Tensor, stamps=None) -> None:
        """Put n pages [n, token, d] into blocks. stamps: as Pool.place has them; nobody has to leave here."""
        blocks = self.enter(rows, pages)
        self.store.keys[blocks], self.store.values[blocks] = keys, values

    def bring(self, reservoir: Reservoir, rows: torch.Tensor, pages: torch.Tensor) -> None:
        """Have n pages come from the slow tier. Where that fails, their blocks have no pages in them yet: go back to
        the tables before."""
        if not hosted(pages):
            self.place(rows, pages, *reservoir.read(rows, pages))
            return
        blocks = self.enter(rows, pages)
        reservoir.move(*(x.numpy() for x in (rows, pages, blocks)), self.words())

    def take(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [row, n, token, d] in blocks [row, n]; anything for EMPTY."""
        return self.store.keys[blocks], self.store.values[blocks]

    def arrays(self) -> tuple[np.ndarray, ...]:
        """keys and values of the store, slot_of, keys and values of the open page, themselves, as numpy arrays."""
        of = self.views.of
        keys, values = of("keys", self.store.keys), of("values", self.store.values)
        return keys, values, self.slot_of.numpy(), of("open keys", self.open[0]), of("open values", self.open[1])

    def words(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the store as `loops.words`."""
        of = self.views.of
        return of("key words", self.store.keys, words), of("value words", self.store.values, words)

    def tables(self) -> tuple[torch.Tensor]:
        """A copy of the table, to go back to."""
        return (self.slot_of.clone(),)

    def restore(self, tables: tuple[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Go back to that table, from which pages have only come since. As Pool.restore: what must be placed again,
        which is nothing."""
        came = torch.zeros_like(self.store.slot_of, dtype=torch.bool)
        came[self.layer] = (self.slot_of != EMPTY) & (tables[0] == EMPTY)
        self.store.free(came)
        return (tables[0].new_empty(0),) * 3

    def select(self, index: torch.Tensor) -> None:
        """Keep the rows of `index`, in its order; of the open page alone, as the store does so for all layers."""
        self.open = tuple(x[index.to(x.device)] for x in self.open)

    @property
    def n_bytes(self) -> int:
        """Bytes of the open page; those of the store are the store's."""
        return sum(x.numel() * x.element_size() for x in self.open)

    @property
    def n_table_bytes(self) -> int:
        """Bytes of the layer's part of the table."""
        return self.slot_of.numel() * self.slot_of.element_size()
