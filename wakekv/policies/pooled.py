"""One budget for all heads: pages of every head compete for the same room, and it follows the heads as they change.

Ours. In an operating system's terms it is global instead of local page replacement (P. J. Denning, Computing Surveys
2(3), 1970). Allocators of the literature share a budget among heads too, but settle the split, at prefill or at a
pruning, by how much attention pages got, and destroy what is outside it (PyramidKV, Ada-KV, CAKE, DynamicKV, LAVa,
ReasonAlloc: allocate.py, compress.py). Where what is given up can come back, nothing need be settled: the split is
whatever the order of pages makes it at each step, so it is right again one miss after a head has changed its mind.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from wakekv.errors import InputError

from .classic import Frequency
from .ledger import Ledger
from .policy import Policy

SIGNALS = (  # what is known of a page after a step, each a function of the past; F: fading by a factor a step
    "reads_50",  # log F(0.5) of reads
    "reads_95",  # log F(0.95) of reads
    "place_95",  # log F(0.95) of the page's place in its head's order of weights, 1 the heaviest, where it was read
    "age",  # log steps since the last read
    "place",  # at the last read
    "lead",  # log of its weight then over the lightest page's that the head read then
    "rate",  # log of reads over steps known
    "before",  # the page before it was read at this step
    "near",  # log F(0.8) of the reads of both its neighbours
    "layer",  # log F(0.5) of reads, mean over the heads of the layer
    "model",  # and over all heads
    "distance",  # log of pages from the newest
    "newest",
    "turnover",  # log of the share of the head's reads that it did not read the step before, lately
    "wants",  # log of the pages that the head reads in a step, lately
)
FADES = np.array([0.5, 0.8, 0.95], np.float32)
FAR = 512  # steps: the age of a page that was never read
TABLE = Path(__file__).with_name("commons.json")


@dataclass(frozen=True)
class Pooled(Frequency):
    """Reads, each counting 0.6 times as much with every step that passes, over all heads' pages. Nothing is tuned."""

    source = "this project"
    keep: float = 0.6
    scope: Literal["head", "layer", "model"] = "model"


@dataclass(frozen=True)
class Commons(Policy):
    """All heads' pages in the order of their odds of being read at the next step, by two logistic regressions on
    SIGNALS: one for pages that were read at this step, one for the others.

    The 32 numbers are those of commons.json, fitted by `python -m wakekv.learning.learn` on the training prompts of
    artifact/split.yaml alone; they know no head, layer, model or budget. What a cache should keep is what it will want,
    which others have learned for storage (learned relaxed Belady: Song et al., NSDI 2020); here the host's own trace
    also tells of pages that are not resident, since the reservoir keeps them and they are wanted all the same.
    read, rest  [signal + 1], the intercept last
    """

    source = "this project"
    scope: Literal["head", "layer", "model"] = "model"
    read: tuple[float, ...] = field(default_factory=lambda: _table("read"), repr=False)
    rest: tuple[float, ...] = field(default_factory=lambda: _table("rest"), repr=False)

    def __post_init__(self):
        super().__post_init__()
        for name in ("read", "rest"):
            if len(getattr(self, name)) != len(SIGNALS) + 1:
                raise InputError(f"{name} must hold {len(SIGNALS)} coefficients and an intercept")

    def rank(self, seen: Ledger) -> np.ndarray:
        items, now, values = signals(seen)
        read, rest = (np.array(part, np.float32) for part in (self.read, self.rest))
        score = np.where(now, read[:-1] @ values + read[-1], rest[:-1] @ values + rest[-1])
        out = np.full(seen.known.size, -np.inf, np.float32)
        out[items] = score
        return out.reshape(seen.known.shape)


def _table(name: str) -> tuple[float, ...]:
    return tuple(json.loads(TABLE.read_text(encoding="utf-8"))[name])


def signals(seen: Ledger) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(items, read, values) of all known pages as a step ends: int64 [item] head * pages + page; bool [item] read at
    this step; float32 [signal, item], in the order of SIGNALS."""
    past = seen.running("commons", lambda: _Past(seen), lambda state, t: state.add(*seen.wants(t), t))
    return past.values(seen)


class _Past:
    """What SIGNALS need of the past, brought up to date step by step."""

    def __init__(self, seen: Ledger):
        shape = n_heads, n_pages = seen.known.shape
        self.reads = np.zeros((len(FADES), *shape), np.float32)  # fading by each of FADES
        self.places, self.place, self.lead = np.zeros((3, *shape), np.float32)
        self.last = np.full(shape, -1, np.int32)
        self.now, self.before = np.zeros((2, *shape), bool)  # read at this step, and at the one before
        self.count, self.fresh = np.zeros((2, n_heads), np.float32)  # a head's reads, and those that are new, fading
        layers, of = np.unique(seen.layer, return_inverse=True)
        self.layer_of, self.mean = of, np.zeros((len(layers), n_heads), np.float32)
        self.mean[of, np.arange(n_heads)] = 1.0 / np.bincount(of)[of]
        self.heads_in = (np.bincount(of) / n_heads).astype(np.float32)

    def add(self, heads: np.ndarray, pages: np.ndarray, weights: np.ndarray, step: int) -> _Past:
        n_heads = len(self.count)
        self.before, self.now = self.now, self.before
        self.now[:] = False
        self.now[heads, pages] = True
        for fading, keep in zip(self.reads, FADES, strict=True):
            fading *= keep
            fading[heads, pages] += 1 - keep
        count = np.bincount(heads, minlength=n_heads)
        start = np.cumsum(count) - count
        place = ((np.arange(len(heads)) - start[heads] + 1) / count[heads]).astype(np.float32)
        weights = np.maximum(weights, np.float32(1e-5))
        self.places *= FADES[2]
        self.places[heads, pages] += place * (1 - FADES[2])
        self.place[heads, pages] = place
        self.lead[heads, pages] = np.log(weights / weights[start[heads]])
        self.last[heads, pages] = step
        fresh = np.bincount(heads, weights=~self.before[heads, pages], minlength=n_heads)
        self.count += np.float32(0.1) * (count - self.count)
        self.fresh += np.float32(0.1) * (fresh.astype(np.float32) - self.fresh)
        return self

    def values(self, seen: Ledger) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n_pages, step = seen.known.shape[1], seen.step
        items = np.flatnonzero(seen.known)
        head, page = np.divmod(items, n_pages)
        last = self.last.reshape(-1)[items]
        near, before = np.zeros((2, *seen.known.shape), np.float32)
        near[:, 1:] = self.reads[1, :, :-1]
        near[:, :-1] += self.reads[1, :, 1:]
        before[:, 1:] = self.now[:, :-1]
        layer = self.mean @ self.reads[0]
        there = np.flatnonzero(seen.created <= step)
        distance = there[-1] - page if len(there) else page
        steady = 1.0 - 0.9 ** (step + 1) if step >= 0 else 1.0
        out = np.empty((len(SIGNALS), len(items)), np.float32)
        flat = (x.reshape(-1)[items] for x in (self.reads[0], self.reads[2], self.places))
        for row, value in zip(out, flat):
            row[:] = value
        out[3] = np.where(last >= 0, step - last, FAR) + 1.0
        out[4], out[5] = self.place.reshape(-1)[items], self.lead.reshape(-1)[items]
        out[6] = (seen.reads.reshape(-1)[items] + 0.1) / (step - seen.born.reshape(-1)[items] + 2.0)
        out[7], out[8] = before.reshape(-1)[items], near.reshape(-1)[items]
        out[9] = layer[self.layer_of[head], page]
        out[10] = (self.heads_in @ layer)[page]
        out[11], out[12] = np.maximum(distance, 0) + 1.0, distance == 0
        out[13] = ((self.fresh / steady + 0.02) / (self.count / steady + 0.05))[head]
        out[14] = (self.count / steady + 0.1)[head]
        out[[0, 1, 2, 8, 9, 10]] += np.float32(0.003)
        logs = [0, 1, 2, 3, 6, 8, 9, 10, 11, 13, 14]
        out[logs] = np.log(out[logs])
        return items, last == step, out
