"""Which sentences come back before a token attends: five ways to be reminded of what is away.

Each is asked with the shelf as it is and answers bool [row, sentence]; only those that are away count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from wakekv.cache.reading import How, bounds

if TYPE_CHECKING:
    from wakekv.tiers.sentences import SentenceShelf


class Recall(Protocol):
    digests: bool  # the bounds of a sentence's keys are kept on the fast tier
    vectors: bool  # its mean key is

    def __call__(self, shelf: SentenceShelf, query: torch.Tensor, how: How) -> torch.Tensor: ...


@dataclass(frozen=True)
class Never:
    """Nothing comes back: permanent eviction."""

    digests = vectors = False

    def __call__(self, shelf: SentenceShelf, query: torch.Tensor, how: How) -> torch.Tensor:
        return torch.zeros_like(shelf.resident)


@dataclass(frozen=True)
class Similar:
    """The one sentence of each KV head whose mean key is most like what is asked, if that is by more than `least`.

    asks     "query": this token's queries, the best of the group; "mean query": their means since the sentence that is
             being written began (SentenceKV, section 3); "key": this token's own key
    unit     by cosine; else by the plain product
    centred  mean keys less their mean over the prompt's sentences, which all keys of a head have in common
    """

    asks: Literal["query", "mean query", "key"] = "query"
    unit: bool = False
    centred: bool = False
    least: float = -math.inf
    digests, vectors = False, True

    def __call__(self, shelf: SentenceShelf, query: torch.Tensor, how: How) -> torch.Tensor:
        found = torch.zeros_like(shelf.resident)
        asked = {"query": query, "mean query": shelf.mean_query, "key": shelf.layer.held[0][0]}[self.asks].float()
        if self.unit:
            asked = torch.nn.functional.normalize(asked, dim=-1)
        score, unit = (x[..., 0] for x in shelf.index.search(asked, 1))  # [row, question]
        score, at = score.max(1)
        unit = unit.gather(1, at[:, None])[:, 0]
        fires = (unit >= 0) & (score > self.least)
        shelf.books.told(score[unit >= 0], int(fires.sum()))
        found[fires, unit[fires]] = True
        return found

    def vector(self, means: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        """What the index is given of mean keys [n, d]; centre [n, d]."""
        x = means - centre if self.centred else means
        return torch.nn.functional.normalize(x, dim=-1) if self.unit else x


@dataclass(frozen=True)
class Exact:
    """The reactive rule: what this token would weigh by the threshold or more, if it were here. To know, the keys of
    what is away are read where they are, and counted (Books: probed_bytes)."""

    digests = vectors = False

    def __call__(self, shelf: SentenceShelf, query: torch.Tensor, how: How) -> torch.Tensor:
        away = shelf.layer.n_rows * shelf.n_tokens - shelf.there.n_tokens
        shelf.books.probed_bytes += away * shelf.there.key_bytes
        return shelf.true_weight(query, how) >= shelf.tier.threshold


@dataclass(frozen=True)
class Bounded:
    """The same, without reading what is away: what this token *could* weigh so much, by the bounds of each sentence's
    keys (Quest's, arXiv 2406.10774) and the sum over what is here. Never less than Exact brings."""

    digests, vectors = True, False

    def __call__(self, shelf: SentenceShelf, query: torch.Tensor, how: How) -> torch.Tensor:
        scores = shelf.there.scores(query, how)
        most = bounds(query, shelf.digests, how)  # [row, query, sentence]
        share = torch.sigmoid(most - torch.logsumexp(scores, -1, keepdim=True))
        return share.amax(1) >= shelf.tier.threshold


RECALLS: dict[str, Recall] = {
    "none": Never(),
    "cosine": Similar(unit=True, least=0.85),  # as the recipe is told
    "dot": Similar("mean query"),  # as SentenceKV scores
    "centred": Similar(unit=True, centred=True),
    "key": Similar("key", unit=True, least=0.85),
    "exact": Exact(),
    "bounds": Bounded(),
}
