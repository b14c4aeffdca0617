"""The paper's own two, their controls, and the textbook's: orders by time, by count, by chance and by foresight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wakekv.errors import InputError

from .ledger import Ledger
from .policy import Policy


@dataclass(frozen=True)
class Recency(Policy):
    """Least recently used goes first: WakeKV's rule (paper, section 3). With reversible=False it is `evict`."""

    source = "WakeKV, section 3"
    alone = True

    def rank(self, seen: Ledger) -> np.ndarray:
        return seen.recency


@dataclass(frozen=True)
class Full(Policy):
    """Every page stays, at any budget: the ceiling of memory, the floor of misses."""

    alone = True
    every: int = 0

    def rank(self, seen: Ledger) -> np.ndarray:
        return seen.recency

    def share(self, seen: Ledger) -> np.ndarray:
        return np.full(len(seen.layer), np.inf)


@dataclass(frozen=True)
class Optimum(Policy):
    """Belady's rule on sets: the page whose next want is farthest goes first. Nothing reversible misses less.

    The only policy that is handed the future (L. A. Belady, IBM Systems Journal 5(2), 1966). For demand fetching with
    the whole step admitted at once and a trim at its end; of equal scope with whatever it is compared with.
    """

    source = "Belady 1966"
    foresight = True
    alone = True
    offline: bool = True

    def rank(self, seen: Ledger) -> np.ndarray:
        return -seen.next_use


@dataclass(frozen=True)
class Born(Policy):
    """First in, first out, by the step in which a page came to be; a page that is fetched back does not become young.

    (With re-admission as a new birth FIFO is no stack algorithm and has no curve: Belady's anomaly.)
    """

    alone = True

    def rank(self, seen: Ledger) -> np.ndarray:
        return seen.born + np.arange(len(seen.created)) * 1e-9


@dataclass(frozen=True)
class Random(Policy):
    """Any page may go: a fresh draw at each trim, from `seed`, the same at every budget."""

    seed: int = 0

    def rank(self, seen: Ledger) -> np.ndarray:
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, seen.step + 1]))
        return rng.random(seen.known.shape)


@dataclass(frozen=True)
class Frequency(Policy):
    """Least often wanted goes first, each want counting `keep` times less with every step that passes (1: LFU)."""

    alone = True
    keep: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 <= self.keep <= 1.0:
            raise InputError(f"keep must lie between 0 and 1, not {self.keep!r}")

    def rank(self, seen: Ledger) -> np.ndarray:
        return seen.decayed("reads", self.keep)
