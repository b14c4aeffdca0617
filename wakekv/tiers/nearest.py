"""Sentences that are on the fast tier because they resemble what is asked, and for no other reason.

Eviction by similarity alone, to be held against eviction by attention: as many sentences as there is room for, those
whose mean key has the largest product with the mean query of the sentence that is being written (SentenceKV, arXiv
2504.00970, section 3). What resembles it again returns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wakekv.cache.layer import PagedLayer
from wakekv.cache.reading import How
from wakekv.errors import InputError
from wakekv.tiers.cache import TierBooks
from wakekv.tiers.sentences import Sentences, SentenceShelf


@dataclass(frozen=True)
class Nearest(Sentences):
    """room: closed tokens that a KV head keeps, those of the sentence that is being written among them.

    threshold: of what `audit` counts as missed, and of nothing else.
    """

    recall: str = "none"
    room: int = 512
    returns = True

    def __post_init__(self):
        super().__post_init__()
        if not (isinstance(self.room, int) and self.room >= 1):
            raise InputError(f"room counts tokens from 1, not {self.room!r}")

    def shelf(self, layer: PagedLayer, ids: list[int], books: TierBooks) -> NearestShelf:
        return NearestShelf(self, layer, ids, books)


class NearestShelf(SentenceShelf):
    """near bool [row, sentence]: those that there is room for, at this step."""

    tier: Nearest

    def attend(self, query: torch.Tensor, how: How) -> torch.Tensor:
        self._catch_up()
        self._query = query
        score = torch.bmm(self.mean_query, self.means.transpose(1, 2)).amax(1)
        order = score.argsort(1, descending=True)
        fits = self.sizes[order].cumsum(1) <= self.tier.room - (self.n_tokens - int(self.sizes.sum()))
        self.near = torch.zeros_like(self.resident).scatter_(1, order, fits)
        self._send(self.resident & ~self.near)
        return super().attend(query, how)

    def _recalled(self, query: torch.Tensor, how: How) -> torch.Tensor:
        return self.near

    def _due(self) -> torch.Tensor:
        return torch.zeros_like(self.resident)

    def tiers(self) -> dict[str, int]:
        """As a SentenceShelf, but the vectors of all sentences are kept."""
        return super().tiers() | {"index": self.means.numel() * self.means.element_size()}
