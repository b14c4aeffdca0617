"""The host for any policy: wanted pages come beside those resident, and as the step ends the policy says, through a
Ledger, which of all stay. Until then a pool holds the budget and what the step brought."""

from __future__ import annotations

import copy

import torch

from wakekv.cache.host import Host, Wanted, destroy_absent, put_open
from wakekv.cache.layer import PagedLayer
from wakekv.cache.pool import EMPTY
from wakekv.residency import Residency


class Settling(Host):
    """Any policy: the step's wants beside the resident pages, then one trim over all layers."""

    def first_pages(self) -> list[torch.Tensor]:
        self.rules = [Residency(wants, self.policy, self.budget) for wants in self.wants]
        return [self._target(self.rules, i) for i in range(len(self.layers))]

    def _target(self, rules: list[Residency], i: int) -> torch.Tensor:
        """bool [row, page]: what the rules have resident in the i-th layer."""
        layer = self.layers[i]
        heads, n = slice(i * layer.n_kv, (i + 1) * layer.n_kv), layer.n_closed
        target = torch.zeros(layer.n_rows, n, dtype=torch.bool)
        for b, (rule, skip) in enumerate(zip(rules, self.firsts, strict=True)):
            rows = slice(b * layer.n_kv, (b + 1) * layer.n_kv)
            target[rows, skip:] = torch.from_numpy(rule.resident[heads, : n - skip])
        return target.to(layer.digests.device)

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
                got = self.fetch(layer, rows, pages)
                layer.pool.room(int(torch.bincount(rows).max()))
                layer.pool.place(rows, pages, *got, torch.zeros_like(pages))

    def settle(self, step: int, last: int | None, absent: int) -> int:
        n = self.layers[0].n_closed
        sure = self.policy.fetch == "miss" and not self.lagged and n - self.n_known == (last is not None)
        rules = self.rules if sure else [self._copy(rule) for rule in self.rules]  # a fetch could fail
        misses = sum(int(rule.step().missed.sum()) for rule in rules)
        self._apply(rules, last)
        self.rules = rules
        return misses

    @staticmethod
    def _copy(rule: Residency) -> Residency:
        wants = rule.seen._demand
        same = (wants, wants.layer, wants.created, wants.prompt_rows, wants.key_means)
        return copy.deepcopy(rule, {id(x): x for x in same})

    def _apply(self, rules: list[Residency], last: int | None) -> None:
        """Move pages until those are resident that the rules say; first all that can fail."""
        n, plans = self.layers[0].n_closed, []
        for i, layer in enumerate(self.layers):
            target = self._target(rules, i)
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
                pool.room(int(torch.bincount(rows).max()))
                pool.place(rows, pages, *got, torch.zeros_like(pages))
            if written is not None and len(written):
                pool.room(1)
                put_open(layer, written, last, torch.zeros_like(written))
            if not self.policy.reversible:
                destroy_absent(layer)

    def select(self, index: list[int]) -> None:
        pairs = [copy.deepcopy((self.wants[b], self.rules[b])) for b in index]
        super().select(index)
        self.wants, self.rules = ([pair[i] for pair in pairs] for i in range(2))
