"""The fast tier of one layer: slots that hold pages, the tables that say which, and the page being written."""

from __future__ import annotations

import numpy as np
import torch

from wakekv.cache.loops import Views, places, tokens

EMPTY = -1


class Pool:
    """Slots of one layer, each with room for a page's keys and values, alike for all rows (sequences * KV heads).

    keys, values  [row, slot + 1, token, d]; the last place holds the open page, so that attention runs straight over
                  slots and open page without a gather
    page_of       int64 [row, slot]: the page in a slot;  slot_of int64 [row, page]: where a page is; EMPTY if nowhere
    stamp         int64 [row, slot]: who leaves first, the lowest; EMPTY for a slot with nothing in it
    """

    def __init__(self, rows: int, n_pages: int, page: int, like: tuple[torch.Tensor, ...]):
        self.page = page
        self.keys, self.values = (x.new_zeros(rows, 1, page, x.shape[-1]) for x in like)
        device = self.keys.device
        self.page_of = torch.full((rows, 0), EMPTY, device=device)
        self.stamp = torch.full((rows, 0), EMPTY, device=device)
        self.slot_of = torch.full((rows, n_pages), EMPTY, device=device)
        self.views = Views()
        self.gaps = False  # some slot is empty, so attention needs a mask

    @property
    def n_slots(self) -> int:
        return self.page_of.shape[1]

    @property
    def open(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [row, token, d] of the open page, themselves."""
        return self.keys[:, -1], self.values[:, -1]

    def take(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [row, n, token, d] in slots [row, n]; anything for EMPTY."""
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        return self.keys[rows, slots], self.values[rows, slots]

    def room(self, n: int) -> None:
        """At least n empty slots in every row, in new memory if need be."""
        lacking = n - int((self.page_of == EMPTY).sum(1).min()) if self.n_slots else n
        if lacking <= 0:
            return
        rows, old = len(self.page_of), self.n_slots
        for name in ("keys", "values"):
            x = getattr(self, name)
            new = x.new_zeros(rows, old + lacking + 1, *x.shape[2:])
            new[:, :old], new[:, -1] = x[:, :old], x[:, -1]
            setattr(self, name, new)
        blank = torch.full((rows, lacking), EMPTY, device=self.page_of.device)
        self.page_of, self.stamp = torch.cat([self.page_of, blank], 1), torch.cat([self.stamp, blank], 1)
        self.gaps = True

    def place(
        self, rows: torch.Tensor, pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, stamps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put n pages [n, token, d] into the slots of lowest stamp, the empty ones first; int64 [n] rows (ascending),
        pages, stamps. Returns (rows, pages) of what had to leave."""
        counts = torch.bincount(rows, minlength=len(self.page_of))
        turn = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        slots = self.stamp.topk(int(counts.max()), largest=False, sorted=True).indices[rows, turn]
        left = self.page_of[rows, slots]
        out = left != EMPTY
        left_rows, left = rows[out], left[out]
        self.slot_of[left_rows, left] = EMPTY
        self.slot_of[rows, pages], self.page_of[rows, slots], self.stamp[rows, slots] = slots, pages, stamps
        flat = rows * (self.n_slots + 1) + slots
        self.keys.flatten(0, 1).index_copy_(0, flat, keys)
        self.values.flatten(0, 1).index_copy_(0, flat, values)
        if self.gaps:
            self.gaps = bool((self.page_of == EMPTY).any())
        return left_rows, left

    def arrays(self) -> tuple[np.ndarray, ...]:
        """The tables page_of, slot_of, stamp themselves, as numpy arrays, where they are in host memory."""
        of = self.views.of
        return of("page_of", self.page_of), of("slot_of", self.slot_of), of("stamp", self.stamp)

    def words(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values as `loops.places`; the place of a slot is row * (n_slots + 1) + slot."""
        return self.views.of("key words", self.keys, places), self.views.of("value words", self.values, places)

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values as `loops.tokens`: slots, then the open page."""
        return self.views.of("keys", self.keys, tokens), self.views.of("values", self.values, tokens)

    def tables(self) -> tuple[torch.Tensor, ...]:
        """A copy of the tables, slot_of first, to go back to."""
        return self.slot_of.clone(), self.page_of.clone(), self.stamp.clone()

    def restore(self, tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Go back to those tables, but for slots whose page was overwritten since: they are left empty, and returned as
        (rows, pages, stamps), to be placed again."""
        slot_of, page_of, stamp = tables
        grown = self.n_slots - page_of.shape[1]
        blank = page_of.new_full((len(page_of), grown), EMPTY)
        page_of, stamp = torch.cat([page_of, blank], 1), torch.cat([stamp, blank], 1)
        rows, slots = torch.nonzero((page_of != EMPTY) & (page_of != self.page_of), as_tuple=True)
        lost, stamps = page_of[rows, slots], stamp[rows, slots]
        self.page_of, self.slot_of, self.stamp = page_of, slot_of.clone(), stamp
        self.page_of[rows, slots], self.stamp[rows, slots], self.slot_of[rows, lost] = EMPTY, EMPTY, EMPTY
        self.gaps = bool((self.page_of == EMPTY).any())
        return rows, lost, stamps

    def select(self, index: torch.Tensor) -> None:
        """Keep the rows of `index`, in its order."""
        index = index.to(self.page_of.device)
        for name in ("keys", "values", "page_of", "slot_of", "stamp"):
            setattr(self, name, getattr(self, name)[index])

    @property
    def n_bytes(self) -> int:
        """Bytes of slots and open page."""
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values))

    @property
    def n_table_bytes(self) -> int:
        """Bytes of the tables."""
        return sum(x.numel() * x.element_size() for x in (self.page_of, self.slot_of, self.stamp))
