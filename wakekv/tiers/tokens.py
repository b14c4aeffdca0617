"""Some tokens of one layer on the fast tier, as many as each row likes."""

from __future__ import annotations

import torch

from wakekv.cache.layer import PagedLayer
from wakekv.cache.reading import How

NONE = -1


class Tokens:
    """keys, values [row, slot, d]; position int64 [row, slot], NONE where a slot is free; n_tokens of all rows.

    A row is a KV head. What leaves frees its slot for what comes next; once a quarter of the fullest row's slots are
    free the tokens are packed, so that never much more memory is taken than that row needs.
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
        counts, taken = wanted.sum(1), self.position != NONE
        more = int((counts + taken.sum(1)).max()) - taken.shape[1]
        if more > 0:
            self.position = torch.nn.functional.pad(self.position, (0, more), value=NONE)
            self.keys, self.values = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (self.keys, self.values))
            taken = self.position != NONE
        turn = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        slots = taken.to(torch.uint8).argsort(dim=1, stable=True)[rows, turn]  # free ones come first
        self.position[rows, slots] = positions
        held, reservoir = (rows.to("cpu"), positions.to("cpu")), self.layer.reservoir
        for here, source in ((self.keys, reservoir.keys), (self.values, reservoir.values)):
            here[rows, slots] = source.flatten(1, 2)[held].to(here.device)
        self.n_tokens += len(rows)
        return len(rows) * self.token_bytes

    def keep(self, kept: torch.Tensor) -> None:
        """Give up the tokens that are not `kept`, bool [row, slot]."""
        kept = kept & (self.position != NONE)
        self.position = torch.where(kept, self.position, NONE)
        counts = kept.sum(1)
        self.n_tokens, most = int(counts.sum()), int(counts.max())
        if 4 * most > 3 * kept.shape[1]:
            return
        order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
        self.position = self.position.gather(1, order)
        self.keys, self.values = (
            x.gather(1, order[..., None].expand(-1, -1, x.shape[2])) for x in (self.keys, self.values)
        )

    def scores(self, query: torch.Tensor, how: How) -> torch.Tensor:
        """float32 [row, query, slot and then token of the open page]: logits, -inf where a slot is free."""
        scores = [how.scores(query, self.keys), how.scores(query, self.layer.pool.open[0][:, : self.layer.n_open + 1])]
        if self.n_tokens < self.position.numel():
            scores[0].masked_fill_((self.position == NONE)[:, None], -torch.inf)
        return torch.cat(scores, -1)

    def mixture(self, weights: torch.Tensor) -> torch.Tensor:
        """[row, query, d]: the values under weights that are as `scores`."""
        n, values = self.values.shape[1], self.layer.pool.open[1][:, : self.layer.n_open + 1]
        weights = weights.to(values.dtype)
        return torch.bmm(weights[..., :n], self.values) + torch.bmm(weights[..., n:], values)

    def attend(self, query: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [row, query, d], weights float32 as `scores`) over these tokens and then the open page."""
        weights = torch.softmax(self.scores(query, how), -1)
        return self.mixture(weights), weights

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
        """Of the tokens that are here; free slots are not counted."""
        return self.n_tokens * self.token_bytes
