"""The fast tier where the heads of a layer, or of all layers, share one budget: one store of pages for all of them.

A sequence has budget * KV heads pages in a layer, or in all layers that times their number, and a head as many of them
as its pages earn. At the scope of the layer the order is the simulator's, and what a ranking brings stands beside the
rest until its layer has attended; then the layer is trimmed. That room, one ranking's wants of one layer, all layers
use in turn, and one place for each open page.

At the scope of the model a layer is trimmed, before the next one ranks, to its part of the whole, which is how many of
the sequence's best pages lay in it as the step before ended: so no more is held meanwhile than at the layer's scope.
The simulator, which trims all layers as the step ends, misses somewhat less.
"""

from __future__ import annotations

import numpy as np
import torch

from wakekv.vllm import ragged
from wakekv.vllm.tier import FastTier
from wakekv.vllm.torchtier import TorchTier


class SharedTier(FastTier):
    """FastTier in mode pooled. quota int64 [layer, sequence slot]: pages that a layer has once it is trimmed."""

    def furnish(self, n_sequences: int) -> None:
        n_layers, rows, _ = self.where.shape
        self.equal = self.budget * self.n_kv
        self.quota = np.full((n_layers, n_sequences), self.equal, np.int64)
        self.held = np.zeros_like(self.quota)
        absent = (self.n_pages - self.budget) * (n_layers if self.settings.policy.scope == "model" else 1)
        n_blocks = int(rows + self.quota.sum() + (0 if self.late else rows * min(self.n_wants, absent)))
        self.pools = [self.pages(n_blocks)] * n_layers
        self.open_at, self.first = np.arange(rows)[None].repeat(n_layers, 0), np.zeros((n_layers, rows), np.int64)
        self.blocks, self.n_blocks = np.arange(rows, n_blocks, dtype=np.int32), np.array([n_blocks - rows])  # free ones
        self.heat, self.last = np.zeros(self.where.shape), np.zeros(self.where.shape, np.int64)
        self.bits, self.keep = self.shares.view(np.uint32), self.settings.policy.keep

    @property
    def late(self) -> bool:
        """Do pages that are wanted come as the step ends, those of them that stay?"""
        return self.settings.timing == "lagged"

    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        return self.where, self.heat, self.last, self.blocks

    def vacate(self, rows: slice) -> None:
        blocks, slot = self.where[:, rows], rows.start // self.n_kv
        gone = blocks[blocks >= 0]
        self.blocks[self.n_blocks[0] : self.n_blocks[0] + len(gone)] = gone
        self.n_blocks += len(gone)
        self.where[:, rows], self.held[:, slot], self.quota[:, slot] = ragged.ABSENT, 0, self.equal

    def admit(self, step, layer: int, i: int) -> int:
        return ragged.admit(
            layer, step.seqs[i], step.blocks[i], step.closed[i], self.budget, self.n_kv,
            self.where, self.heat, self.last, self.held, self.blocks, self.n_blocks, self.moves,
        )  # fmt: skip

    def rank(self, layer: int, seqs, blocks, closed, newborn, base, scored: tuple, counts, scale: float) -> int:
        return ragged.rank(
            layer, seqs, blocks, closed, base, *scored, self.n_wants, self.settings.least, not self.late,
            self.where, self.heat, self.last, self.held, self.blocks, self.n_blocks, scale,
            self.wants, self.found, self.shares, self.bits, self.moves, counts,
        )  # fmt: skip

    def table(self, step, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(step.seqs) * self.n_kv
        out, lengths = np.zeros((rows, self.n_pages + 1), np.int32), np.empty(rows, np.int32)
        ragged.tables(
            layer, step.seqs, step.closed, step.tokens, self.settings.page, self.n_kv, self.open_at[layer], self.where,
            out, lengths,
        )  # fmt: skip
        return torch.from_numpy(out).to(self.device), torch.from_numpy(lengths)

    def settle(self, step, layer: int) -> int:
        layers, born = len(self.where), step.newborn >= 0
        n = self._trim(step, layer, step.closed, step.newborn)
        if self.settings.policy.scope == "layer":
            self._fade(step, layer)
        elif layer == layers - 1:
            some, known = np.flatnonzero(step.due | born), step.closed + born  # some: where there is anything new
            total = layers * self.equal
            ragged.share(step.seqs[some], known[some], total, self.equal, self.n_kv, self.heat, self.last, self.quota)
            for each in range(layers):
                self._trim(step, each, known, np.full_like(known, -1))
                self._fade(step, each)
        return n

    def _trim(self, step, layer: int, closed: np.ndarray, newborn: np.ndarray) -> int:
        return ragged.settle(
            layer, step.seqs, step.blocks, closed, newborn, step.base, self.quota[layer, step.seqs], self.n_kv,
            self.where, self.heat, self.last, self.held, self.blocks, self.n_blocks, self.moves, self.counts,
        )  # fmt: skip

    def _fade(self, step, layer: int) -> None:
        ragged.fade(layer, step.seqs, step.closed, self.keep, self.n_kv, self.heat)


class TorchSharedTier(TorchTier, SharedTier):
    """SharedTier on whatever device its layers are."""
