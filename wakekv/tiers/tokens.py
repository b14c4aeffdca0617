"""Some tokens of one layer on the fast tier, as many as each row likes."""

from __future__ import annotations

import torch

from wakekv.cache.layer import PagedLayer
from wakekv.cache.reading import How, over_slots

NONE = -1


class Tokens:
    """keys, values [row, slot, d]; position int64 [row, slot], NONE where a row has fewer than the others; n_tokens of
    all rows.

    A row is a KV head. Slots are packed after every move, so that no more memory is taken than the fullest row needs.
    """

    def __init__(self, layer: PagedLayer):
        self.layer = layer
        self.keys, self.values = (x[:, :0] for x in layer.pool.open)
        self.n_tokens = 0
        self.position = torch.zeros(layer.n_rows, 0, dtype=torch.int64, device=self.keys.device)

    def fetch(self, wanted: torch.Tensor) -> int:
        """Bring tokens from the reservoir, none of which is here: bool [row, position]. Returns their bytes."""
        rows, positions = torch.nonzero(wanted, as_tuple=True)
        if not len(rows):
            return 0
        counts = wanted.sum(1)
        turn = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        reservoir, wide = self.layer.reservoir, int(counts.max())
        place = self.position.new_full((len(counts), wide), NONE)
        place[rows, turn] = positions
        self.position = torch.cat([self.position, place], 1)
        for name in ("keys", "values"):
            old, source = getattr(self, name), getattr(reservoir, name).flatten(1, 2)
            new = old.new_zeros(len(counts), wide, old.shape[2])
            new[rows, turn] = source[rows.to(source.device), positions.to(source.device)].to(old.device)
            setattr(self, name, torch.cat([old, new], 1))
        self.keep(self.position != NONE)
        return len(rows) * self.token_bytes

    def keep(self, kept: torch.Tensor) -> None:
        """Give up the tokens that are not `kept`, bool [row, slot]."""
        kept = kept & (self.position != NONE)
        counts = kept.sum(1)
        self.n_tokens = int(counts.sum())
        order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(counts.max())]
        self.position = torch.where(kept, self.position, NONE).gather(1, order)
        for name in ("keys", "values"):
            x = getattr(self, name)
            setattr(self, name, x.gather(1, order[..., None].expand(-1, -1, x.shape[2])))

    def with_open(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values [row, token, d] of these tokens and then of the open page, and `hidden` bool [row, token] or
        None."""
        n = self.layer.n_open + 1
        keys, values = (torch.cat([a, b[:, :n]], 1) for a, b in zip((self.keys, self.values), self.layer.pool.open))
        if self.n_tokens == self.position.numel():
            return keys, values, None
        return keys, values, torch.nn.functional.pad(self.position == NONE, (0, n))

    def attend(self, query: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [row, query, d], scores float32 [row, query, token]) over these tokens and then the open page."""
        return over_slots(query, *self.with_open(), how)

    @property
    def key_bytes(self) -> int:
        """Of one token of one row."""
        return self.keys.shape[2] * self.keys.element_size()

    @property
    def token_bytes(self) -> int:
        """Key and value of one token of one row."""
        return self.key_bytes + self.values.shape[2] * self.values.element_size()

    @property
    def n_bytes(self) -> int:
        """Of the tokens that are here; the holes of rows with fewer are not counted."""
        return self.n_tokens * self.token_bytes
