"""The host for recency, without a ledger: a wanted page that is not there takes the slot that would be trimmed, before
attention, so that a pool never holds more than the budget."""

from __future__ import annotations

import numpy as np
import torch

from wakekv.cache import loops
from wakekv.cache.host import Host, Wanted, destroy_absent, put_open
from wakekv.cache.layer import PagedLayer
from wakekv.cache.pool import EMPTY
from wakekv.policies import Policy
from wakekv.policies.classic import Recency


class Swapping(Host):
    """Recency at every step, each head on its own: the stamps of slots are the ledger."""

    @classmethod
    def serves(cls, policy: Policy) -> bool:
        return type(policy) is Recency and policy.every == 1 and policy.scope == "head" and not policy.sticky

    def first_pages(self) -> list[torch.Tensor]:
        targets = [layer.real_pages(0, layer.n_closed) for layer in self.layers]
        for layer, target in zip(self.layers, targets, strict=True):
            target[:, : max(0, layer.n_closed - self.budget)] = False
            layer.pool.room(min(self.budget, layer.sizes.n_pages))
        return targets

    def bring(self, layer: PagedLayer, wanted: Wanted) -> None:
        pool, base = layer.pool, self.stamps(self.step) + layer.sizes.n_pages
        come = wanted.absent if self.policy.reversible else wanted.absent & (wanted.page >= self.n_known)
        if loops.hosted(pool.keys):
            self._bring_compiled(layer, wanted, come, base)
            return
        stamp = torch.arange(base, base + wanted.page.shape[1], device=wanted.page.device).expand(wanted.page.shape)
        slot = pool.slot_of.gather(1, wanted.page)
        here = torch.where((slot != EMPTY) & wanted.real, stamp, EMPTY)
        pool.stamp.scatter_reduce_(1, slot.clamp(min=0), here, "amax")
        if bool(come.any()):
            with self.books.timing("stall_s"):
                rows, at = torch.nonzero(come, as_tuple=True)
                pages, self.stalled = wanted.page[rows, at], True
                pool.place(rows, pages, *self.fetch(layer, rows, pages), stamp[rows, at])

    def _bring_compiled(self, layer: PagedLayer, wanted: Wanted, come: torch.Tensor, base: int) -> None:
        pool, found = layer.pool, np.empty((4, come.numel()), np.int64)
        tables = pool.arrays()
        n = loops.assign(wanted.page.numpy(), wanted.real.numpy(), come.numpy(), base, *tables[1:], *found)
        if n:
            self.stalled = True
            with self.books.timing("stall_s"):
                rows, pages, slots, stamps = found[:, :n]
                self.fetch(layer, rows, pages, rows * (pool.n_slots + 1) + slots)
                gaps = loops.enter(rows, pages, slots, stamps, *tables)
                pool.gaps = pool.gaps and gaps

    def settle(self, step: int, last: int | None, absent: int) -> int:
        n, base = self.layers[0].n_closed, self.stamps(step)
        born = range(max(self.n_known, n - self.budget), n)
        plans = []
        for layer in self.layers if born else ():
            real = layer.real_pages(0, n)
            for page in born:
                rows = torch.nonzero(real[:, page] & (layer.pool.slot_of[:, page] == EMPTY))[:, 0]
                plans.append((layer, page, rows, None if page == last else self.fetch(layer, rows, rows * 0 + page)))
        for layer, page, rows, got in plans:
            room = layer.pool.stamp[rows].amin(1) < base + page
            rows, stamps = rows[room], torch.full_like(rows[room], base + page)
            if not len(rows):
                continue
            if got is None:
                put_open(layer, rows, page, stamps)
            else:
                layer.pool.place(rows, torch.full_like(rows, page), got[0][room], got[1][room], stamps)
        if not self.policy.reversible and born:
            for layer in self.layers:
                destroy_absent(layer)
        return absent
