"""The host for any policy: wanted pages come beside those resident, and as the step ends the policy says, through a
Ledger, which of all stay. Until then the fast tier holds the budget and what the step brought.

All layers share one store, so a page of memory goes to whichever head the policy gives it; a budget is shared within
one sequence.
"""

from __future__ import annotations

import copy

import torch

from wakekv.cache.host import Host, Wanted, destroy_absent, put_open
from wakekv.cache.layer import PagedLayer
from wakekv.cache.pool import EMPTY
from wakekv.cache.shared import Shared, Store
from wakekv.simulation.residency import Residency


class Settling(Host):
    """Any policy: the step's wants beside the resident pages, then one trim over all layers."""

    def first_pages(self) -> list[torch.Tensor]:
        self.rules = [Residency(wants, self.policy, self.budget) for wants in self.wants]
        kinds: dict[tuple, list[int]] = {}
        for i, layer in enumerate(self.layers):
            kinds.setdefault(tuple((x.shape[1:], x.dtype, x.device) for x in layer.pool.open), []).append(i)
        target, self.stores = self._target(self.rules), []
        for some in kinds.values():  # layers whose pages are alike
            like = self.layers[some[0]].pool.open
            store = Store(len(some), self.layers[0].sizes.n_pages, like)
            store.room(int(target[some].sum()))
            for place, i in enumerate(some):
                self.layers[i].pool = Shared(store, place, self.layers[i].pool.open)
            self.stores.append((store, some))
        return [own.to(layer.digests.device) for own, layer in zip(target, self.layers, strict=True)]

    def _target(self, rules: list[Residency]) -> torch.Tensor:
        """bool [layer, row, page], in host memory: what the rules have resident."""
        n_kv, n = self.layers[0].n_kv, self.layers[0].n_closed
        resident = torch.zeros(len(rules), len(self.layers) * n_kv, n, dtype=torch.bool)
        for own, rule, skip in zip(resident, rules, self.firsts, strict=True):
            own[:, skip:] = torch.from_numpy(rule.resident[:, : n - skip])
        return resident.unflatten(1, (-1, n_kv)).transpose(0, 1).flatten(1, 2)

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
                layer.pool.bring(layer.reservoir, rows, pages)
                self.charge(layer, len(pages))

    def settle(self, step: int, last: int | None, absent: int) -> int:
        n = self.layers[0].n_closed
        sure = self.policy.fetch == "miss" and not self.lagged and n - self.n_known == (last is not None)
        rules = self.rules if sure else [self._copy(rule) for rule in self.rules]  # a fetch could fail
        misses = sum(int(rule.step().missed.sum()) for rule in rules)
        self._apply(rules, last)
        self.rules = rules
        for store, _ in self.stores:
            store.fit(spare=absent)
        return misses

    @staticmethod
    def _copy(rule: Residency) -> Residency:
        wants = rule.seen._demand
        same = (wants, wants.layer, wants.created, wants.prompt_rows, wants.key_means)
        return copy.deepcopy(rule, {id(x): x for x in same})

    def _apply(self, rules: list[Residency], last: int | None) -> None:
        """Move pages until those are resident that the rules say; first all that can fail."""
        n, target, plans = self.layers[0].n_closed, self._target(rules), []
        for store, some in self.stores:
            layers, there = [self.layers[i] for i in some], store.slot_of[:, :, :n] != EMPTY
            own = target[some].to(there.device)
            add, written = own & ~there, None
            if last is not None:  # its bytes are still in the open place
                written = add[:, :, last].clone()
                add[:, :, last] = False
            come = []
            for place in torch.nonzero(add.any(2).any(1))[:, 0].tolist():
                rows, pages = torch.nonzero(add[place], as_tuple=True)
                come.append((layers[place], rows, pages, self.fetch(layers[place], rows, pages)))
            plans.append((store, layers, there & ~own, come, written))
        for store, layers, gone, come, written in plans:
            store.free(gone)
            for layer, rows, pages, got in come:
                layer.pool.place(rows, pages, *got)
            for layer, rows in zip(layers, () if written is None else written):
                put_open(layer, torch.nonzero(rows)[:, 0], last)
            if not self.policy.reversible:
                for layer in layers:
                    destroy_absent(layer)

    def select(self, index: list[int]) -> None:
        pairs = [copy.deepcopy((self.wants[b], self.rules[b])) for b in index]
        super().select(index)
        self.wants, self.rules = ([pair[i] for pair in pairs] for i in range(2))
        n_kv = self.layers[0].n_kv
        for store, _ in self.stores:
            store.select((torch.tensor(index)[:, None] * n_kv + torch.arange(n_kv)).flatten())
