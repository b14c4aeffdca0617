"""Compressors: policies that destroy what they drop, from the prompt's attention or again and again while decoding.

A page's weight is the sum over its 16 tokens, which does what the methods' pooling over 5 or 7 tokens does for them;
`kernel` pools over neighbouring pages on top of that and is 1 (off) unless asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.ndimage import maximum_filter1d

from wakekv.errors import InputError
from wakekv.logs.demand import Demand

from .ledger import Ledger
from .order import interleave, newest_first, places
from .policy import Policy


@dataclass(frozen=True)
class SnapKV(Policy):
    """SnapKV: once, as the prompt ends, keep the pages that the last `rows` queries weigh most, and those of the window
    itself; what is decoded always stays. SnapKV(rows=8, every=128, start="demand") is its decode-time form.

    Simplified: pages, not tokens; its two published windows are 32 and 64 rows, of which a log holds 32. The paper this
    project follows has a SnapKV of one query: rows=1.
    """

    source = "arXiv 2404.14469"
    reversible: bool = False
    every: int = 0
    start: Literal["demand", "prompt"] = "prompt"
    rows: int = 32
    kernel: int = 1

    def score(self, seen: Ledger) -> np.ndarray:
        """float32 [head, page]: mean weight from the window's rows, pooled."""
        mean = seen.window(self.rows) / self.rows
        return mean if self.kernel == 1 else maximum_filter1d(mean, self.kernel, axis=1, mode="constant")

    def rank(self, seen: Ledger) -> np.ndarray:
        return np.where(seen.newest(self.rows), np.inf, self.score(seen))


def redundancy(seen: Ledger, among: np.ndarray, similar: float = 0.5) -> np.ndarray:
    """float [head, page]: R-KV's redundancy of the pages of `among`, a softmax over them that sums to 1 in each head.

    From the cosines of page key means, each page's latest similar page (cosine above `similar`) being let off; pages
    without a similar one let off the first page, as the published code does. InputError without key means.
    """
    keys = seen.keys()
    unit = keys / np.maximum(np.linalg.norm(keys, axis=2, keepdims=True), 1e-12)
    out = np.zeros(among.shape)
    for h in range(len(among)):
        at = np.flatnonzero(among[h])
        if not len(at):
            continue
        cosine = unit[h, at] @ unit[h, at].T
        np.fill_diagonal(cosine, 0.0)
        alike = cosine > similar
        latest = np.where(alike.any(1), len(at) - 1 - alike[:, ::-1].argmax(1), 0)
        cosine[np.arange(len(at)), latest] = 0.0
        mean = np.exp(cosine.mean(0, dtype=np.float64))
        out[h, at] = mean / mean.sum()
    return out


@dataclass(frozen=True)
class RKV(SnapKV):
    """R-KV: every 128 steps keep the pages of highest importance less redundancy, lam * I - (1 - lam) * R; the window
    of the last 8 queries always stays. lam=1 is importance only: at page level also SnapKV's decode-time form.

    Simplified: redundancy compares mean keys of pages (post-RoPE), not keys of tokens, and all pages that the head has
    known and that are older than the window: an order that looked at what is still kept would have no exact curve.
    """

    source = "arXiv 2505.24133"
    every: int = 128
    start: Literal["demand", "prompt"] = "demand"
    rows: int = 8
    lam: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 <= self.lam <= 1.0:
            raise InputError(f"lam must lie between 0 and 1, not {self.lam!r}")

    def rank(self, seen: Ledger) -> np.ndarray:
        window = seen.newest(self.rows)
        old = seen.known & ~window
        value = np.where(old, self.score(seen), 0.0).astype(np.float64)
        value /= np.maximum(value.sum(1, keepdims=True), 1e-30)
        if self.lam < 1.0:
            value = self.lam * value - (1.0 - self.lam) * redundancy(seen, old)
        return np.where(window, np.inf, value)


@dataclass(frozen=True)
class ReasonAlloc(RKV):
    """ReasonAlloc: R-KV whose budgets move between the heads of a layer at each pruning, above a floor of 0.2.

    A declared simplification, since formulas, calibration set, interval and floor are not public: heads share the
    layer's budget in the order of R-KV's score, in the form of Ada-KV (trim's `floor`); layers share equally, or, with
    layerwise="demand", by the mean wants of each layer on the logs it is fitted on. R-KV's interval and window.
    """

    source = "arXiv 2606.11164"
    roles = "decode"
    scope: Literal["head", "layer", "model"] = "layer"
    floor: float = 0.2
    layerwise: Literal["equal", "demand"] = "equal"
    layers: tuple[float, ...] | None = field(default=None, repr=False)

    def fit(self, *demands: Demand) -> Policy:
        if self.layerwise == "equal" or self.layers is not None:
            return self
        wants = sum(np.bincount(d.layer[d.head_of], minlength=d.layer.max() + 1) for d in demands)
        heads = np.bincount(demands[0].layer)
        mean = wants / np.maximum(heads, 1)
        return self.but(layers=tuple(mean / max((mean * heads).sum() / heads.sum(), 1e-30)))

    def share(self, seen: Ledger) -> np.ndarray:
        return super().share(seen) if self.layers is None else np.asarray(self.layers)[seen.layer]


@dataclass(frozen=True)
class GKV(RKV):
    """G-KV: every 128 steps a score with a memory, F = max(0.8 * F, S / max S), S the mean weight from the last 16
    queries; a page that mattered once fades by a fifth at each pruning. lam < 1 adds R-KV's redundancy, scaled to its
    maximum.

    Simplified: as R-KV. The prompt is not compressed at once under a cold start, where no page is there yet.
    """

    source = "arXiv 2512.00504"
    rows: int = 16
    lam: float = 1.0
    keep: float = 0.8

    def rank(self, seen: Ledger) -> np.ndarray:
        def local(t):
            weight = seen.window(self.rows, at=t)
            return weight / np.maximum(weight.max(1, keepdims=True), 1e-30)

        def fade(F, t):
            return np.maximum(self.keep * F, local(t)) if self.every and (t + 1) % self.every == 0 else F

        value = seen.running("g-kv", lambda: local(-1) if seen.step < 0 else np.zeros(seen.known.shape), fade)
        window = seen.newest(self.rows)
        if self.lam < 1.0:
            twin = redundancy(seen, seen.known & ~window)
            twin /= np.maximum(twin.max(1, keepdims=True), 1e-30)
            value = self.lam * value - (1.0 - self.lam) * twin
        return np.where(window, np.inf, value)


@dataclass(frozen=True)
class GKVBlend(Policy):
    """G-KV as it is also told: lam * (largest weight of the last 128 steps) + (1 - lam) * (how often it was wanted).

    Not the published rule (GKV is). Wants are counted per step of a page's age, without which they outgrow any weight.
    """

    source = "arXiv 2512.00504, as retold"
    reversible: bool = False
    every: int = 128
    steps: int = 128
    lam: float = 0.5

    def rank(self, seen: Ledger) -> np.ndarray:
        age = np.maximum(seen.step - seen.born + 1, 1)
        return self.lam * seen.recent(self.steps, "max") + (1.0 - self.lam) * seen.reads / age


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """StreamingLLM: the first `sinks` tokens and the newest pages. Nothing that is read changes it.

    A budget too small for both has them in the ratio of sinks to recent, in whole pages.
    """

    source = "arXiv 2309.17453"
    reversible: bool = False
    sinks: int = 4
    recent: int = 4

    def rank(self, seen: Ledger) -> np.ndarray:
        page = np.arange(len(seen.created), dtype=np.float64)
        first = np.where(page * seen.page_tokens < self.sinks, page, np.inf)
        order = interleave((first, self.sinks), (newest_first(seen.created <= seen.step), self.recent))
        return np.broadcast_to(order, seen.known.shape)


@dataclass(frozen=True)
class H2O(Policy):
    """H2O: half the budget for the pages with the most attention so far, half for the newest.

    Simplified: the prompt's part of the sum comes from the last rows logged, not from all of them; the halves are
    interleaved, so that the order does not look at the budget, and destroyed pages keep their place in it.
    """

    source = "arXiv 2306.14048"
    reversible: bool = False
    start: Literal["demand", "prompt"] = "prompt"
    heavy: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not 0.0 < self.heavy < 1.0:
            raise InputError(f"heavy must lie between 0 and 1, both left out, not {self.heavy!r}")

    def rank(self, seen: Ledger) -> np.ndarray:
        total = seen.running("prompt", lambda: seen.prompt_weight) + seen.decayed("weight", 1.0)
        recent = newest_first(seen.created <= seen.step)
        return interleave((places(total, seen.known), self.heavy), (recent, 1.0 - self.heavy))


@dataclass(frozen=True)
class SCOPE(SnapKV):
    """SCOPE (slide): the prompt's pages are chosen once, what is decoded has a budget of its own, half for the pages
    that this step weighs most and half for the newest. every > 1 is its discontinuous form.

    Simplified: the two budgets (2048 tokens for the prompt, 512 for the rest) are parts of B and interleaved; until
    pages are decoded the prompt has all of B; destroyed pages keep their place in the order.
    """

    source = "arXiv 2412.13649"
    every: int = 1
    prompt_tokens: int = 2048
    heavy_tokens: int = 256
    recent_tokens: int = 256

    def rank(self, seen: Ledger) -> np.ndarray:
        prompt, decoded = seen.created < 0, (seen.created >= 0) & (seen.created <= seen.step)

        def chosen():
            first = np.where(prompt & (np.cumsum(prompt[::-1])[::-1] * seen.page_tokens <= self.rows), np.inf, 0)
            return places(first + seen.prompt(self.rows).sum(1), np.broadcast_to(prompt, seen.known.shape))

        return interleave(
            (seen.running("prompt", chosen), self.prompt_tokens),
            (places(seen.weight, decoded & seen.known), self.heavy_tokens),
            (newest_first(decoded), self.recent_tokens),
        )


@dataclass(frozen=True)
class ThinKV(Policy):
    """ThinKV: decoding falls into thoughts by how sparse attention is; each time the thought changes, what earlier ones
    wrote is thinned, the less critical first.

    A simplification throughout, as formulas and code are not public. The thought of a decoded page is the third its
    sparsity falls in (pages a head does not want as it is written, against all decoded pages so far); each later
    change halves what stays of a segment, its pages going by attention received; the sparser the thought, the less
    stays (`parts`, ours; the prompt counts as the most critical). Interval: that of the other compressors.
    """

    source = "arXiv 2510.01290"
    withheld = dict.fromkeys(
        ("mean_pages", "peak_pages"), "keeps pages at a precision chosen by thought: pages do not tell its memory"
    )
    reversible: bool = False
    every: int = 128
    parts: tuple[float, float, float] = (4.0, 2.0, 1.0)

    def rank(self, seen: Ledger) -> np.ndarray:
        def count(wanted, t):
            return [*wanted, np.count_nonzero(seen.recent(1, at=t)) / max((seen.created <= t).sum(), 1)]

        density = np.array(seen.running("density", list, count))
        page_of = np.searchsorted(seen.created, np.arange(len(density)), "right") - 1
        steps = np.bincount(page_of, minlength=len(seen.created))
        dense = np.bincount(page_of, density, len(seen.created)) / np.maximum(steps, 1)
        decoded = np.flatnonzero((seen.created >= 0) & (steps > 0))
        thought = (
            2 - np.searchsorted(np.quantile(dense[decoded], (1 / 3, 2 / 3)), dense[decoded]) if len(decoded) else []
        )
        first = np.flatnonzero(np.diff(thought, prepend=-1))  # where a segment of one thought begins
        starts = [0, *decoded[first]] if len(first) else [0]
        value, weight = np.full(seen.known.shape, -np.inf), seen.decayed("weight", 1.0)
        for i, (a, b) in enumerate(zip(starts, [*starts[1:], len(seen.created)], strict=True)):
            part = self.parts[0] if i == 0 else self.parts[thought[first[i - 1]]]
            place = places(weight[:, a:b], seen.known[:, a:b])
            value[:, a:b] = -(place + 1.0) / part * 2.0 ** (len(starts) - 1 - i)
        return np.where(seen.newest(1), np.inf, value)
