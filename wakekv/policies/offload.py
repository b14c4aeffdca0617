"""Policies that keep what they drop in a reservoir and bring it back: as all pages are ranked again, or when wanted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from wakekv import kernels
from wakekv.errors import InputError
from wakekv.logs.demand import Demand

from .ledger import Ledger
from .policy import Policy


def adjacent_jaccard(demand: Demand) -> np.ndarray:
    """float [head]: mean Jaccard overlap of the wants of adjacent steps; 0 for a log of one step, pairs of empty
    steps left out."""
    common, mean = np.zeros((1, demand.n_steps - 1), np.int64), np.zeros(demand.n_heads)
    for h in range(demand.n_heads):
        common[:] = 0
        kernels.adjacent_common(demand.ptr[h : h + 1], demand.page, demand.n_pages, common)
        size = np.diff(demand.ptr[h])
        union = size[:-1] + size[1:] - common[0]
        mean[h] = np.where(union > 0, common[0] / np.maximum(union, 1), 0.0).sum() / max((union > 0).sum(), 1)
    return mean


@dataclass(frozen=True)
class Frozen(Policy):
    """The paper's frozen foil (section 5.1): FlexiCache's defaults at page level, classified on the log it runs on.

    The `dense` quarter of heads with the lowest adjacent-step Jaccard of page sets keep every page; the others hold
    the B pages most often wanted so far, refreshed every 16 steps; between refreshes nothing comes back, and pages
    that come to be stay until the next one. The profile is taken from the same log, which favours it (unless it was
    `held_out`).
    """

    source = "WakeKV, section 5.1"
    every: int = 16
    fetch: Literal["miss", "trim"] = "trim"
    offline: bool = True
    dense: float = 0.25
    profile: tuple[int, ...] | None = field(default=None, repr=False)

    @property
    def roles(self) -> str:
        return "offline" if self.dense else ""

    def restless(self, demands: tuple[Demand, ...], n: int) -> np.ndarray:
        """int [n]: the heads to keep whole."""
        return np.argsort(np.mean([adjacent_jaccard(d) for d in demands], axis=0), kind="stable")[:n]

    def fit(self, *demands: Demand) -> Policy:
        if self.profile is not None:
            return self
        n = round(self.dense * demands[0].n_heads)
        return self.but(profile=tuple(sorted(self.restless(demands, n).tolist())) if n else ())

    def rank(self, seen: Ledger) -> np.ndarray:
        return seen.reads

    def share(self, seen: Ledger) -> np.ndarray:
        share, whole = np.ones(len(seen.layer)), list(self.profile or ())
        if whole and max(whole) >= len(share):
            raise InputError(
                f"this profile names head {max(whole)} and the log has {len(share)}: calibrate it on its unit"
            )
        share[whole] = np.inf
        return share


def instability(demand: Demand, chunk: int = 16, top: int = 64) -> np.ndarray:
    """float [head, chunk]: 1 - mean random-corrected overlap of a step's pages with those of its chunk's first step.

    FlexiCache's measure: overlap |A0 & As| / |A0| and chance |As| / N give max(0, (overlap - chance) / (1 - chance)),
    with A the `top` heaviest pages wanted and N the pages there are. Sets of a log vary in size; where both hold `top`
    pages this is the published formula. Steps with nothing wanted or N <= |As| are left out; nan for a chunk that has
    no other.
    """
    n_chunks = -(-demand.n_steps // chunk)
    total, n = np.zeros((2, demand.n_heads, n_chunks))
    for t in range(demand.n_steps):
        heads, entries = demand.at(t)
        best = demand.ptr[heads, t + 1] - entries <= top  # wants stand in order of rising weight
        now = np.zeros((demand.n_heads, demand.n_pages), bool)
        now[heads[best], demand.page[entries[best]]] = True
        if t % chunk == 0:
            first = now
            continue
        size, chance = first.sum(1), now.sum(1) / max((demand.created <= t).sum(), 1)
        valid = (size > 0) & now.any(1) & (chance < 1.0)
        overlap = (first & now).sum(1)[valid] / size[valid]
        total[valid, t // chunk] += np.maximum(0.0, (overlap - chance[valid]) / (1.0 - chance[valid]))
        n[valid, t // chunk] += 1
    return np.where(n > 0, 1.0 - total / np.maximum(n, 1), np.nan)


@dataclass(frozen=True)
class FlexiCache(Frozen):
    """FlexiCache by its own rule: the heads most often among the `dense` quarter of a chunk's least stable keep every
    page; the others hold the B pages of highest score, scored every 16 steps, and what came to be since.

    Roles come from other logs in the method: `held_out`. A new ranking takes effect at the next step, as there; the
    newest page is always chosen. dense=0 leaves no head whole: what the paper's system deploys, ranking every 1 to 16
    steps (section 5.2). Simplified: a page's score is the weight read from it at that step, where the method bounds it
    from minimal and maximal keys, so the ranking is better than the method's own.
    """

    source = "arXiv 2511.00868"
    chunk: int = 16
    top: int = 64

    def restless(self, demands: tuple[Demand, ...], n: int) -> np.ndarray:
        by_chunk = np.concatenate([instability(d, self.chunk, self.top) for d in demands], axis=1)
        by_chunk = by_chunk[:, ~np.isnan(by_chunk).all(0)]
        by_chunk = np.where(np.isnan(by_chunk), -1.0, by_chunk)
        named = np.argsort(-by_chunk, axis=0, kind="stable")[:n]
        often = np.bincount(named.ravel(), minlength=len(by_chunk))
        return np.lexsort((-by_chunk.sum(1), -often))[:n]

    def rank(self, seen: Ledger) -> np.ndarray:
        return np.where(seen.newest(1), np.inf, seen.window(1))


@dataclass(frozen=True)
class Quest(Policy):
    """Quest: every step a head reads its B pages of highest score and leaves the rest unread; nothing leaves the GPU.
    The first `whole` layers read everything.

    Simplified: a log holds neither queries nor key bounds, so the score is perfect: the pages read are those about to
    be wanted, and a step misses only what it wants beyond B. Quest itself leaves at least that unread.
    """

    source = "arXiv 2406.10774"
    withheld = dict.fromkeys(
        ("mean_pages", "peak_pages", "fetched", "stall_steps"), "keeps every page resident: B counts the pages it reads"
    ) | {"missed_weight": "leaves the lowest scores unread, and a log does not hold its scores"}
    fetch: Literal["miss", "trim"] = "trim"
    foresight = True
    offline: bool = True
    whole: int = 2

    def rank(self, seen: Ledger) -> np.ndarray:
        return -seen.next_use

    def share(self, seen: Ledger) -> np.ndarray:
        return np.where(seen.layer < self.whole, np.inf, 1.0)


@dataclass(frozen=True)
class ArkVale(Policy):
    """ArkVale: a page that scores high and is not there is recalled before attention; the page that the layer as a
    whole scores lowest goes. The first page and the newest two stay; the first `whole` layers keep everything.

    Simplified: a score is the weight read at this step, summed over the layer, and recall is exact, where the method
    estimates from key digests and recalls a limited number of pages, for all heads of the layer at once.
    """

    source = "ArkVale, NeurIPS 2024"
    sinks: int = 16
    recent: int = 32
    whole: int = 2

    def rank(self, seen: Ledger) -> np.ndarray:
        layers = np.arange(seen.layer.max() + 1)
        total = (seen.layer == layers[:, None]).astype(np.float32) @ seen.window(1)
        first = np.arange(len(seen.created)) * seen.page_tokens < self.sinks
        return np.where(first | seen.newest(self.recent), np.inf, total[seen.layer])

    def share(self, seen: Ledger) -> np.ndarray:
        return np.where(seen.layer < self.whole, np.inf, 1.0)


@dataclass(frozen=True)
class ShadowKV(Policy):
    """ShadowKV: values lie in host memory and those of the best prompt pages are fetched each step; what is decoded and
    the prompt's last 32 tokens never leave.

    Simplified: a chunk is a page, its score the weight read at this step (softmax over chunk means there), recall is
    exact; its 48 outlier chunks, told by keys, are not kept. Decoded pages count within B and come first.
    """

    source = "arXiv 2410.21465"
    withheld = dict.fromkeys(
        ("mean_pages", "peak_pages"), "keeps low-rank keys of every page resident: pages do not tell its memory"
    )
    local: int = 32

    def rank(self, seen: Ledger) -> np.ndarray:
        prompt = seen.created < 0
        last = prompt & (np.cumsum(prompt[::-1])[::-1] * seen.page_tokens <= self.local)
        return np.where(~prompt | last, np.inf, seen.window(1))


@dataclass(frozen=True)
class HeadInfer(Policy):
    """HeadInfer: all pages lie in host memory; each head's are brought in, whole, just before it attends, and dropped.

    Nothing is resident between steps, so in the simulator each want is absent; all are brought in ahead of time.
    """

    source = "arXiv 2502.12574"
    withheld = dict.fromkeys(
        ("misses", "missed_weight", "fetched", "stall_steps", "head_misses", "mean_pages", "peak_pages"),
        "streams every page through two heads' buffers at each step: nothing is missed, and time is not in a log",
    )

    def rank(self, seen: Ledger) -> np.ndarray:
        return seen.recency

    def share(self, seen: Ledger) -> np.ndarray:
        return np.zeros(len(seen.layer))


@dataclass(frozen=True)
class InfiniGen(HeadInfer):
    """InfiniGen: all tokens lie in host memory; a layer's important ones are guessed from the layer before it and
    fetched meanwhile.

    Nothing is resident between steps. `fetched` is what it would bring in if it guessed every want and nothing else.
    """

    source = "InfiniGen, OSDI 2024"
    withheld = dict.fromkeys(
        ("misses", "missed_weight", "stall_steps", "head_misses", "mean_pages", "peak_pages"),
        "guesses a layer's reads from the hidden state of the layer before, which a log does not hold",
    )
