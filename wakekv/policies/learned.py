"""An order of pages by a small network, taught on training prompts (reinforce.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from wakekv.errors import InputError

from .ledger import Ledger
from .policy import Policy
from .pooled import SIGNALS, signals

SHARED = ("reads_50", "reads_95", "place_95", "age", "place", "lead", "rate", "near", "layer", "model", "distance")
FEATURES = (  # what the network sees of a page, all of the past; the first are those of `commons`
    *SHARED,
    "born",  # log of the steps since it became known
    "weight_80",  # log of its attention weight, fading by 0.8 a step
    "returns",  # log of how often it was read again after AWAY steps and more: what a small cache had to fetch
    "generated",  # 1 if it was decoded, 0 if it is in the prompt
    "depth",  # of its layer, 0 to 1
)
AWAY, HIDDEN = 8, 32
_TAKEN = [SIGNALS.index(name) for name in SHARED]


def features(seen: Ledger) -> tuple[np.ndarray, np.ndarray]:
    """(items, values) of all known pages as a step ends: int64 [item] head * pages + page; float32 [feature, item]."""
    items, _, values = signals(seen)
    head, page = np.divmod(items, seen.known.shape[1])
    out = np.empty((len(FEATURES), len(items)), np.float32)
    out[: len(SHARED)] = values[_TAKEN]
    out[-5] = np.log1p(seen.step - seen.born.reshape(-1)[items])
    out[-4] = np.log(seen.decayed("weight", 0.8).reshape(-1)[items] + 1e-5)
    out[-3] = np.log1p(_returns(seen)[1].reshape(-1)[items])
    out[-2] = seen.created[page] >= 0
    out[-1] = seen.layer[head] / max(seen.layer.max(), 1)
    return items, out


def _returns(seen: Ledger) -> tuple[np.ndarray, np.ndarray]:
    """(step of the last read, reads after AWAY steps and more without one), int32 [head, page] each."""

    def add(state, step):
        last, count = state
        heads, pages, _ = seen.wants(step)
        before = last[heads, pages]
        count[heads, pages] += (before >= 0) & (step - before >= AWAY)
        last[heads, pages] = step
        return state

    return seen.running("returns", lambda: (np.full(seen.known.shape, -1), np.zeros(seen.known.shape, int)), add)


@dataclass(frozen=True)
class Learned(Policy):
    """Pages of all heads by a network of 16 features, 32 hidden units (tanh) and one score, the same for all pages.

    mean, scale float32 [feature];  inner [feature, hidden], inner_bias [hidden], outer [hidden]
    """

    source = "this project"
    scope: Literal["head", "layer", "model"] = "model"
    mean: np.ndarray = field(default_factory=lambda: np.zeros(len(FEATURES), np.float32), repr=False)
    scale: np.ndarray = field(default_factory=lambda: np.ones(len(FEATURES), np.float32), repr=False)
    inner: np.ndarray = field(default_factory=lambda: np.zeros((len(FEATURES), HIDDEN), np.float32), repr=False)
    inner_bias: np.ndarray = field(default_factory=lambda: np.zeros(HIDDEN, np.float32), repr=False)
    outer: np.ndarray = field(default_factory=lambda: np.zeros(HIDDEN, np.float32), repr=False)

    def __post_init__(self):
        super().__post_init__()
        n = len(FEATURES)
        found = [np.shape(x) for x in (self.mean, self.scale, self.inner, self.inner_bias, self.outer)]
        if found != [(n,), (n,), (n, HIDDEN), (HIDDEN,), (HIDDEN,)]:
            raise InputError(f"a network of {n} features and {HIDDEN} hidden units has other shapes than {found}")

    def rank(self, seen: Ledger) -> np.ndarray:
        items, values = features(seen)
        inner = self.inner / self.scale[:, None]
        hidden = np.tanh(values.T @ inner + (self.inner_bias - self.mean @ inner))
        out = np.full(seen.known.size, -np.inf, np.float32)
        out[items] = hidden @ self.outer
        return out.reshape(seen.known.shape)
