"""Sentences that leave the fast tier when nothing in them is read for a while, and come back when they are recalled.

A sentence is a unit of its own, of as many tokens as it has, with its own ledger for each KV head; pages stay what the
reservoir is written in. Rounding sentences to pages would demote, at each end, half a page of its neighbour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from wakekv.cache.layer import PagedLayer
from wakekv.cache.reading import How, digest
from wakekv.errors import InputError, lookup
from wakekv.tiers.cache import TierBooks
from wakekv.tiers.index import INDEXES
from wakekv.tiers.recall import RECALLS
from wakekv.tiers.text import Cuts, Splitter
from wakekv.tiers.tokens import NONE, Tokens


@dataclass(frozen=True)
class Sentences:
    """A tier of sentences.

    splitter   what a sentence is
    threshold  a sentence is demoted by a KV head once its a* is below this: the largest attention weight that any query
               of the head's group gave any token of the sentence in the last `window` steps (SpindleKV, arXiv
               2507.06517, pooled over the group and the sentence). What is not over yet, and the open page, stay
    recall     how it comes back: a key of RECALLS
    index      where vectors are kept: a key of INDEXES;  vector_bits: 32, or 8
    stand_in   a demoted sentence of n tokens is attended to as n tokens of its mean key and mean value
    batch      a KV head demotes only once so many sentences are due (the recipe for small memory: 4)
    audit      count misses: (KV head, sentence)s that a step would weigh by the threshold or more, and has not. That
               reads all keys, at every step
    past       layer -> float32 [row, sentence] of each of some steps, the last of the prompt: what they read there, as
               SentenceShelf.read. As if those steps had been taken with all sentences resident
    """

    splitter: Splitter
    threshold: float = 0.02
    window: int = 32
    recall: str = "exact"
    index: Literal["torch", "faiss"] = "torch"
    vector_bits: int = 32
    stand_in: bool = False
    batch: int = 1
    audit: bool = False
    past: Mapping[int, Sequence[torch.Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        lookup(self.recall, RECALLS, "recall")
        lookup(self.index, INDEXES, "index")
        if not 0 <= self.threshold <= 1:
            raise InputError(f"threshold is an attention weight, from 0 to 1, not {self.threshold!r}")
        for name in ("window", "batch"):
            if not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1):
                raise InputError(f"{name} counts from 1, not {getattr(self, name)!r}")

    @property
    def returns(self) -> bool:
        return self.recall != "none"

    def shelf(self, layer: PagedLayer, ids: list[int], books: TierBooks) -> SentenceShelf:
        return SentenceShelf(self, layer, ids, books)


class SentenceShelf:
    """The sentences of one layer.

    there     the tokens that are on the fast tier: of resident sentences, and those after the last one
    resident  bool [row, sentence];  last int64 [row, sentence]: the last step that weighed it by the threshold or more,
              so that a* is below the threshold once that is `window` steps ago
    unit_of   int64 [token]: the sentence of each closed token, n_units for those after the last one
    sizes     int64 [sentence], in tokens;  means, mean_values float32 [row, sentence, d]
    digests   [row, sentence, 2 d]: bounds of its keys;  centre float32 [row, d]: mean of the prompt's means
    """

    def __init__(self, tier: Sentences, layer: PagedLayer, ids: list[int], books: TierBooks):
        self.tier, self.layer, self.ids, self.books = tier, layer, ids, books
        self.recall, self.there, self.cuts = RECALLS[tier.recall], Tokens(layer), Cuts(tier.splitter, ids)
        rows, keys, values = layer.n_rows, self.there.keys, self.there.values
        self.index = (
            INDEXES[tier.index](rows, keys.shape[2], tier.vector_bits, keys.device) if self.recall.vectors else None
        )
        self.n_tokens = self.n_units = self.step = 0
        self.resident, self.last = keys.new_ones(rows, 0, dtype=torch.bool), keys.new_zeros(rows, 0, dtype=torch.int64)
        self.unit_of = self.sizes = self.last[0]
        self.means, self.mean_values = keys.float(), values.float()
        self.digests = layer.digests[:, :0]
        self._queries: list[torch.Tensor] = []  # of the sentence that is being written
        self._read: torch.Tensor | None = None  # [row, sentence + 1]: this step's largest weights
        self._catch_up()
        self.centre = self.means.mean(1).nan_to_num()  # a prompt without a whole sentence has none
        self._remember(tier.past.get(layer.index, ()))

    def _remember(self, past: Sequence[torch.Tensor]) -> None:
        for step, read in enumerate(past):
            n = read.shape[1]
            self.last[:, :n].masked_fill_(read >= self.tier.threshold, step)
            self.last[:, n:] = step  # not over yet
        if past:
            self.step = len(past) - 1
            self._send(self._due())
            self.step += 1

    def _catch_up(self) -> None:
        """Take in the pages that were closed since."""
        n = self.layer.n_closed * self.layer.sizes.page
        if n == self.n_tokens:
            return
        new = self.there.keys.new_zeros(self.layer.n_rows, n, dtype=torch.bool)
        new[:, self.n_tokens :] = True
        self.books.admitted_bytes += self.there.fetch(new)
        ends = torch.from_numpy(self.cuts.upto(n))
        keys, values = (x.flatten(1, 2) for x in (self.layer.reservoir.keys, self.layer.reservoir.values))
        spans = list(zip([0, *ends.tolist()], ends.tolist()))[self.n_units :]
        if spans:
            device = self.there.keys.device
            more = [torch.stack([how(x[:, a:b]) for a, b in spans], 1).to(device)
                    for x, how in ((keys, _mean), (values, _mean), (keys, digest))]  # fmt: skip
            for name, x in zip(("means", "mean_values", "digests"), more):
                setattr(self, name, torch.cat([getattr(self, name), x], 1))
            pad = (0, len(spans))
            self.resident = torch.nn.functional.pad(self.resident, pad, value=True)
            self.last = torch.nn.functional.pad(self.last, pad, value=self.step - 1)
            if self.index is not None:
                self.index.grow(len(ends))
        self.n_tokens, self.n_units = n, len(ends)
        self.sizes = ends.diff(prepend=ends.new_zeros(1)).to(self.last.device)
        self.unit_of = torch.bucketize(torch.arange(n), ends, right=True).to(self.last.device)

    @property
    def read(self) -> torch.Tensor:
        """float32 [row, sentence]: the largest weight that this step gave a token of each; 0 where it is away."""
        return self._read[:, : self.n_units]

    @property
    def mean_query(self) -> torch.Tensor:
        """float32 [row, group, d]: mean of the queries since the sentence that is being written began."""
        return torch.stack([*self._queries, self._query]).float().mean(0)

    def attend(self, query: torch.Tensor, how: How) -> torch.Tensor:
        self._catch_up()
        self._query = query
        wanted = self._recalled(query, how) & ~self.resident
        if bool(wanted.any()):
            with self.books.timing("stall_s"):
                self._bring(wanted)
        if self.tier.audit:
            missed = (self.true_weight(query, how) >= self.tier.threshold) & ~self.resident
            self.books.misses += int(missed.sum())
        out, weights = self._with_means(query, how) if self.tier.stand_in else self.there.attend(query, how)
        place = self.there.position
        unit = torch.where(place == NONE, self.n_units, self.unit_of[place])
        self._read = self._largest(weights[..., : place.shape[1]].amax(1), unit)
        return out

    def _recalled(self, query: torch.Tensor, how: How) -> torch.Tensor:
        """bool [row, sentence]: what comes back, if it is away."""
        return self.recall(self, query, how)

    def _bring(self, wanted: torch.Tensor) -> None:
        """Sentences that are away, bool [row, sentence], come back."""
        self.resident |= wanted
        if self.index is not None:
            self.index.remove(*torch.nonzero(wanted, as_tuple=True))
        self.books.fetched_bytes += self.there.fetch(torch.nn.functional.pad(wanted, (0, 1))[:, self.unit_of])
        self.books.fetched += int(wanted.sum())

    def _with_means(self, query: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
        """As Tokens.attend, and over the means of what is away, each as often as it has tokens."""
        scores, means = self.there.scores(query, how), how.scores(query, self.means.to(query.dtype)) + self.sizes.log()
        n = scores.shape[2]
        weights = torch.softmax(torch.cat([scores, means.masked_fill_(self.resident[:, None], -torch.inf)], -1), -1)
        away = torch.bmm(weights[..., n:].to(query.dtype), self.mean_values.to(query.dtype))
        return self.there.mixture(weights[..., :n]) + away, weights

    def settle(self) -> None:
        self.last.masked_fill_(self.read >= self.tier.threshold, self.step)
        leave = self._due()
        self.step += 1
        self._queries.append(self._query)
        over = self.cuts.upto(len(self.ids))
        if len(over) and over[-1] == len(self.ids):
            self._queries.clear()
        self._send(leave)

    def _due(self) -> torch.Tensor:
        """bool [row, sentence]: what is demoted after this step."""
        leave = self.resident & (self.step - self.last >= self.tier.window)
        return leave & (leave.sum(1, keepdim=True) >= self.tier.batch)

    def _send(self, leave: torch.Tensor) -> None:
        """Sentences that are here, bool [row, sentence], are demoted."""
        if not bool(leave.any()):
            return
        self.resident &= ~leave
        rows, units = torch.nonzero(leave, as_tuple=True)
        if self.index is not None:
            self.index.add(rows, units, self.recall.vector(self.means[rows, units], self.centre[rows]))
        place = self.there.position.clamp(min=0)
        stays = torch.nn.functional.pad(self.resident, (0, 1), value=True)
        self.there.keep(stays.gather(1, self.unit_of[place]))

    def true_weight(self, query: torch.Tensor, how: How) -> torch.Tensor:
        """float32 [row, sentence]: the largest weight of any token in it, were all of them here."""
        held = self.layer.reservoir.keys.flatten(1, 2)[:, : self.n_tokens].to(query.device)
        scores = [how.scores(query, x) for x in (held, self.layer.pool.open[0][:, : self.layer.n_open + 1])]
        weight = torch.softmax(torch.cat(scores, -1), -1).amax(1)[:, : self.n_tokens]
        return self._largest(weight, self.unit_of.expand(len(weight), -1))[:, : self.n_units]

    def _largest(self, weight: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """[row, sentence + 1]: the largest of weights [row, token], whose sentences `unit` names."""
        return weight.new_zeros(len(weight), self.n_units + 1).scatter_reduce_(1, unit, weight, "amax")

    def tiers(self) -> dict[str, int]:
        mean_bytes = 4 * self.means.shape[2]
        each = self.recall.digests * self.digests.shape[2] * self.digests.element_size()
        if self.tier.stand_in:
            each += mean_bytes * (self.index is None) + 4 * self.mean_values.shape[2]
        tables = sum(x.numel() * x.element_size() for x in (self.resident, self.last, self.there.position))
        lost = 0 if self.tier.returns else int((~self.resident * self.sizes).sum()) * self.there.token_bytes
        found = 0 if self.index is None else self.index.n_bytes
        found += int((~self.resident).sum()) * each if each else 0
        return {"fast": self.there.n_bytes, "index": found, "tables": tables, "gone": lost}


def _mean(x: torch.Tensor) -> torch.Tensor:
    """float32 [row, d] of [row, token, d]."""
    return x.float().mean(1)
