"""TieredCache: the reversible cache with another kind of fast tier.

Everything that is read and written stays as it is there (the reservoir with the exact bytes of every full page, the
open page, prefill in chunks, going back on failure); what a decoded token attends to is a shelf's affair, one a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig

from wakekv.cache import ReversibleCache
from wakekv.cache.books import Books
from wakekv.cache.layer import PagedLayer
from wakekv.cache.reading import How
from wakekv.errors import CacheError


@dataclass
class TierBooks(Books):
    """The same, where a *unit* (a sentence, a page) is what comes and goes: fetched and misses count units.

    probed_bytes  key bytes of demoted tokens that were read in the reservoir only to decide what returns
    n_asked       times a KV head asked an index;  n_fired: and had an answer;  best, best_sum: the largest, and the sum
                  of the largest, similarities that it was told
    """

    probed_bytes: int = 0
    n_asked: int = 0
    n_fired: int = 0
    best: float = -torch.inf
    best_sum: float = 0.0

    def told(self, best: torch.Tensor, n_fired: int) -> None:
        """An index has answered: the largest similarity of each question that had an answer, float [n]."""
        if len(best):
            self.best, self.best_sum = max(self.best, float(best.max())), self.best_sum + float(best.sum())
        self.n_asked, self.n_fired = self.n_asked + len(best), self.n_fired + n_fired


class Shelf(Protocol):
    """The fast tier of one layer; n_tokens: the closed tokens that it has taken in."""

    n_tokens: int

    def attend(self, query: torch.Tensor, how: How) -> torch.Tensor:
        """The output [row, group, d] for the token that the layer holds; query [row, group, d], a row a KV head."""

    def settle(self) -> None:
        """The step is over and its token counted in."""

    def tiers(self) -> dict[str, int]:
        """Bytes: fast (what stands for tokens; codes: those of it that are not exact), index (what is kept of those
        that are away), tables; gone: tokens that can never be read again."""


class Tier(Protocol):
    """What a cache is asked to be: a frozen dataclass."""

    returns: bool  # nothing is ever lost: what is not on the fast tier can come back

    def shelf(self, layer: PagedLayer, ids: list[int], books: TierBooks) -> Shelf:
        """The fast tier of a layer; ids: the text so far, a list that grows."""


class TieredCache(ReversibleCache):
    """A ReversibleCache of one sequence whose fast tier is `tier`.

        cache = TieredCache(model.config, Sentences(splitter))
        with cache.attached(model):
            model.generate(ids, past_key_values=cache)

    page, max_tokens, block, slow: as in Settings.  history: `tiers()` after every decoded token.  Raises InputError and
    CacheError as a ReversibleCache does; for more than one sequence, for padding, and for a later pass of many tokens
    where the tier has lost some, CacheError.
    """

    def __init__(self, config: PreTrainedConfig, tier: Tier, **settings: Any):
        self.tier = tier
        super().__init__(config, budget=1, **settings)  # no budget: the tier says what stays

    def _start_over(self) -> None:
        super()._start_over()
        self.ids: list[int] = []
        self._coming: list[int] = []
        self.books = TierBooks()
        self.steps = TierSteps(self)

    @property
    def history(self) -> list[dict[str, int]]:
        return self.steps.history

    @contextmanager
    def attached(self, model: torch.nn.Module) -> Iterator[TieredCache]:
        hook = model.register_forward_pre_hook(self._note_ids, with_kwargs=True)
        try:
            with super().attached(model):
                yield self
        finally:
            hook.remove()

    def _note_ids(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        ids = args[0] if args else kwargs.get("input_ids")
        self._coming = [] if ids is None or bool((ids != ids[:1]).any()) else ids[0].tolist()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if len(key_states) != 1 or self._pads is not None:
            raise CacheError("a cache in tiers serves one sequence without padding: give each one of its own")
        if len(self._coming) != key_states.shape[2]:
            raise CacheError("a cache in tiers needs to see the token ids: give the model input_ids, not embeddings")
        if key_states.shape[2] > 1 and self.steps.host is not None and not self.tier.returns:
            raise CacheError("this tier has lost tokens, which a pass of many would read: call reset() and feed again")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _commit(self) -> None:
        self.ids += self._coming
        super()._commit()

    def again(self, tier: Tier | None = None) -> TieredCache:
        """Another cache that holds the same text, with another tier if one is given."""
        kept = {name: getattr(self.settings, name) for name in ("page", "max_tokens", "block", "slow")}
        new = TieredCache(self.config, tier or self.tier, **kept)
        new.hold(self)
        new.ids = list(self.ids)
        new.steps = TierSteps(new)
        return new

    def tiers(self) -> dict[str, int]:
        """Bytes by tier: those of a Shelf, the open page being on the fast one; slow: the pages in the reservoir, which
        holds everything whatever is on the fast tier too."""
        paged = [layer for layer in self.paged if layer.is_initialized]
        parts = [shelf.tiers() for shelf in self.steps.shelves.values()]
        for layer in paged:  # what no shelf has taken in is still in the open place
            n = layer.get_seq_length() - self.steps.taken(layer)
            parts.append({"fast": n * layer.n_rows * layer.reservoir.page_bytes // layer.sizes.page})
        found = {
            name: sum(part.get(name, 0) for part in parts) for name in ("fast", "codes", "index", "tables", "gone")
        }
        slow = sum(layer.n_closed * layer.n_rows * layer.reservoir.page_bytes for layer in paged)  # none is destroyed
        return found | {"slow": slow if self.tier.returns else 0}

    def demands(self) -> list:
        raise CacheError("a cache in tiers has no pages to want: its books count the units that it fetched")

    def resident(self) -> list:
        raise CacheError("a cache in tiers has no pages: tiers() says what is on the fast tier")


class TierSteps:
    """The decoded tokens of a TieredCache; stands where a ReversibleCache has its Steps and, once begun, its Host."""

    def __init__(self, cache: TieredCache):
        self.tier, self.ids, self.layers, self.books = cache.tier, cache.ids, cache.paged, cache.books
        self.host: TierSteps | None = None
        self.shelves: dict[int, Shelf] = {}
        self.history: list[dict[str, int]] = []
        self._tiers = cache.tiers

    def attend(self, module: torch.nn.Module, layer: PagedLayer, query: torch.Tensor, how: How) -> torch.Tensor:
        """The output [1, 1, head, d] of a layer for the token it holds; query [1, head, 1, d]."""
        self.host = self
        if layer.index not in self.shelves:
            self.shelves[layer.index] = self.tier.shelf(layer, self.ids, self.books)
        stalled = self.books.stall_s
        with self.books.timing("attend_s"):
            out = self.shelves[layer.index].attend(query.reshape(layer.n_rows, -1, query.shape[-1]), how)
        self.books.attend_s -= self.books.stall_s - stalled
        return out.reshape(1, 1, query.shape[1], -1)

    def taken(self, layer: PagedLayer) -> int:
        """Closed tokens that the layer's shelf has taken in; before the first step, when there is none, all of them."""
        shelf = self.shelves.get(layer.index)
        return layer.n_closed * layer.sizes.page if shelf is None else shelf.n_tokens

    def commit(self) -> None:
        for layer in self.layers:
            layer.advance()
        for shelf in self.shelves.values():
            shelf.settle()
        self.books.n_steps += 1
        self.history.append(self._tiers())

    def undo(self) -> None:
        """Shelves change only as a step is over, but for what was fetched, which stays."""

    def select(self, index: list[int]) -> None:
        if index != [0]:
            raise CacheError("a cache in tiers serves one sequence, so no beams: take num_beams=1")
