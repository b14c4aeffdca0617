"""Allocators: what a head or layer may keep is decided from the prompt's attention, and stays as decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .compress import SnapKV
from .ledger import Ledger


def entropy(weight: np.ndarray) -> np.ndarray:
    """float [head]: entropy in nats of each row of weights [head, page], scaled to sum to 1."""
    share = weight / np.maximum(weight.sum(-1, keepdims=True), 1e-30)
    return -(share * np.log(np.where(share > 0, share, 1.0))).sum(-1)


def by_layer(value: np.ndarray, layer: np.ndarray) -> np.ndarray:
    """float [head]: mean of a value [head] over the head's layer, as a multiple of the mean over heads (1 if all 0)."""
    _, where = np.unique(layer, return_inverse=True)
    mean = (np.bincount(where, value) / np.bincount(where))[where]
    return mean / mean.mean() if mean.mean() > 0 else np.ones_like(mean)


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """Ada-KV: SnapKV's score, the heads of a layer sharing one budget; each keeps 0.2 of an equal share whatever its
    score. A head gets room in proportion to its pages among the layer's best (trim's `floor`)."""

    source = "arXiv 2407.11550"
    roles = "prefill"
    scope: Literal["head", "layer", "model"] = "layer"
    floor: float = 0.2


@dataclass(frozen=True)
class LAVa(AdaKV):
    """LAVa: heads share within a layer as in Ada-KV, layers by the entropy of their scores.

    Simplified: the published score also multiplies by the largest norm of the values, which a log of attention does not
    hold, so here it is the attention alone.
    """

    source = "arXiv 2509.09754"

    def share(self, seen: Ledger) -> np.ndarray:
        score = self.score(seen)
        total = np.zeros((seen.layer.max() + 1, score.shape[1]))
        np.add.at(total, seen.layer, score)
        return by_layer(entropy(total)[seen.layer], seen.layer)


@dataclass(frozen=True)
class DynamicKV(SnapKV):
    """DynamicKV: layers get budgets by how many of the globally best pages they hold.

    Simplified: the published code settles this four layers at a time, caps a layer at ten equal shares and lets heads
    of a layer keep alike; here the model's best pages stay, wherever they are.
    """

    source = "arXiv 2412.14838"
    roles = "prefill"
    scope: Literal["head", "layer", "model"] = "model"
    rows: int = 8


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV: SnapKV with budgets that fall in a straight line from the first layer to the last, which has 1 / beta
    of an equal share (the first as much above it as the last is below: our reading)."""

    source = "arXiv 2406.02069"
    roles = "prefill"
    beta: float = 20.0

    def share(self, seen: Ledger) -> np.ndarray:
        depth = seen.layer / max(seen.layer.max(), 1)
        return 1.0 + (1.0 - 1.0 / self.beta) * (1.0 - 2.0 * depth) * (seen.layer.max() > 0)


@dataclass(frozen=True)
class CAKE(SnapKV):
    """CAKE: layers get budgets by how spread their attention is and how much it shifts, H^(1/tau) * V^(1/shift_tau); a
    head keeps the pages of highest mean + gamma * variance, and goes on evicting to its budget at every step.

    H, V: entropy over pages and variance over rows of the prompt's last 32 rows. Simplified: while decoding, mean and
    variance are taken over an exponential window as long as `rows`, not a sliding one; the published exponents differ
    by model and are 1 here.
    """

    source = "arXiv 2503.12491"
    roles = "prefill"
    every: int = 1
    gamma: float = 200.0
    tau: float = 1.0
    shift_tau: float = 1.0

    def share(self, seen: Ledger) -> np.ndarray:
        rows = seen.prompt(self.rows)
        spread = by_layer(entropy(rows.mean(1)), seen.layer)
        shift = by_layer(rows.var(1).sum(1), seen.layer)
        return by_layer(spread ** (1.0 / self.tau) * shift ** (1.0 / self.shift_tau), seen.layer)

    def rank(self, seen: Ledger) -> np.ndarray:
        keep = 1.0 - 1.0 / self.rows

        def moments():
            rows = seen.prompt(self.rows)
            return rows.mean(1, dtype=np.float64), np.square(rows, dtype=np.float64).mean(1)

        fade = keep ** (seen.step + 1)
        mean, square = (
            fade * early + (1.0 - keep) * seen.decayed(what, keep)
            for early, what in zip(seen.running("moments", moments), ("weight", "square"), strict=True)
        )
        value = mean + self.gamma * np.maximum(square - mean * mean, 0.0)
        return np.where(seen.newest(self.rows), np.inf, value)
