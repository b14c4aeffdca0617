"""The host for any policy: wanted pages come beside those resident, and as the step ends the policy says, through a
Ledger, which of all stay. Until then the fast tier holds the budget and what the step brought.

All layers share one store, so a page of memory goes to whichever head the policy gives it; a budget is shared within
one sequence.
"""

from __future__ import annotations

import copy

import torch

from wakekv.cache import loops
from wakekv.cache.host import Host, Wanted, destroy_absent, put_open
from wakekv.cache.layer import PagedLayer
from wakekv.cache.pool import EMPTY
from wakekv.cache.shared import Shared, Store
from wakekv.residency import Residency


class Settling(Host):
    """Any policy: the step's wants beside the resident pages, then one trim over all layers."""

    def first_pages(self) -> list[torch.Tensor]:
        self.rules = [Residency(wants, self.policy, self.budget) for wants in self.wants]
        targets, self.stores = self._targets(self.rules), {}
        for layer in self.layers:
            kind = tuple((x.shape[1:], x.dtype, x.device) for x in layer.pool.open)  # pages of one kind share
            store = self.stores.setdefault(kind, Store(layer.pool.open))
            layer.pool = Shared(store, layer.sizes.n_pages, layer.pool.open)
        for store in self.stores.values():
            store.room(sum(int(t.sum()) for x, t in zip(self.layers, targets, strict=True) if x.pool.store is store))
        return targets

    def _targets(self, rules: list[Residency]) -> list[torch.Tensor]:
        """bool [row, page] a layer: what the rules have resident."""
        first, n = self.layers[0], self.layers[0].n_closed
        resident = torch.zeros(len(rules), len(self.layers) * first.n_kv, n, dtype=torch.bool)
        for own, rule, skip in zip(resident, rules, self.firsts, strict=True):
            own[:, skip:] = torch.from_numpy(rule.resident[:, : n - skip])
        rows = resident.unflatten(1, (-1, first.n_kv)).transpose(0, 1).flatten(1, 2)  # [layer, row, page]
        return [target.to(layer.digests.device) for target, layer in zip(rows, self.layers, strict=True)]

    def bring(self, layer: PagedLayer, wanted: Wanted) -> None:
        if self.lagged:
            return
        come = wanted.absent & (layer.pool.slot_of.gather(1, wanted.page) == EMPTY)
        if not (self.policy.reversible and self.policy.fetch == "miss"):
            come &= wanted.page >= self.n_known
        rows, at = torch.nonzero(come, as_tuple=True)
        if len(rows):
            pages, self.stalled = wanted.page[rows, at], True
            with self.books.timing("stall_s"):
                if loops.hosted(pages):
                    blocks = layer.pool.enter(rows, pages)
                    self.fetch(layer, *(x.numpy() for x in (rows, pages, blocks)))
                else:
                    layer.pool.place(rows, pages, *self.fetch(layer, rows, pages))

    def settle(self, step: int, last: int | None, absent: int) -> int:
        n = self.layers[0].n_closed
        sure = self.policy.fetch == "miss" and not self.lagged and n - self.n_known == (last is not None)
        rules = self.rules if sure else [self._copy(rule) for rule in self.rules]  # a fetch could fail
        misses = sum(int(rule.step().missed.sum()) for rule in rules)
        self._apply(rules, last)
        self.rules = rules
        for store in self.stores.values():
            store.fit([layer.pool for layer in self.layers if layer.pool.store is store], spare=absent)
        return misses

    @staticmethod
    def _copy(rule: Residency) -> Residency:
        wants = rule.seen._demand
        same = (wants, wants.layer, wants.created, wants.prompt_rows, wants.key_means)
        return copy.deepcopy(rule, {id(x): x for x in same})

    def _apply(self, rules: list[Residency], last: int | None) -> None:
        """Move pages until those are resident that the rules say; first all that can fail."""
        n, plans = self.layers[0].n_closed, []
        for layer, target in zip(self.layers, self._targets(rules), strict=True):
            add = target & (layer.pool.slot_of[:, :n] == EMPTY)
            written = None
            if last is not None:  # its bytes are still in the open place
                written = torch.nonzero(add[:, last])[:, 0]
                add[:, last] = False
            rows, pages = torch.nonzero(add, as_tuple=True)
            got = self.fetch(layer, rows, pages) if len(rows) else None
            plans.append((layer, target, rows, pages, got, written))
        for layer, target, rows, pages, got, written in plans:
            pool = layer.pool
            pool.free(*torch.nonzero(~target & (pool.slot_of[:, :n] != EMPTY), as_tuple=True))
            if got is not None:
                pool.place(rows, pages, *got)
            if written is not None and len(written):
                put_open(layer, written, last)
            if not self.policy.reversible:
                destroy_absent(layer)

    def select(self, index: list[int]) -> None:
        pairs = [copy.deepcopy((self.wants[b], self.rules[b])) for b in index]
        super().select(index)
        self.wants, self.rules = ([pair[i] for pair in pairs] for i in range(2))
