"""Roles: which heads matter is settled once, offline, and holds for every text that follows.

The published methods find their heads by training gates, by probes with needles or with repeated random tokens, or by
gradients. A demand holds attention by page and nothing else, so `fit` takes what it can see of the same thing: how
much a head reads beyond the first and the newest pages. Where a trace is at hand, `needle_scores` and `echo_scores`
give the published probes' own scores from its tokens; pass them as `scores`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from wakekv.errors import InputError
from wakekv.logs.demand import Demand
from wakekv.logs.trace import Trace

from .compress import SnapKV, StreamingLLM
from .ledger import Ledger

Scores = tuple[float, ...]
NEAR = 256  # tokens: what counts as newest when heads are told apart, DuoAttention's own window


def distance(demand: Demand) -> np.ndarray:
    """int [want]: how many pages before the newest page of its step a want lies; 0 for the newest."""
    newest = np.searchsorted(demand.created, np.arange(demand.n_steps), "right") - 1
    return np.maximum(newest[demand.step_of] - demand.page, 0)


def far_weight(demands: Sequence[Demand], sinks: int, recent: int) -> Scores:
    """(head): share of the logged weight read beyond the pages of the first `sinks` and the last `recent` tokens."""
    far = total = 0.0
    for d in demands:
        beyond = (d.page * d.page_tokens >= sinks) & (distance(d) * d.page_tokens >= recent)
        far = far + np.bincount(d.head_of, d.weight * beyond, d.n_heads)
        total = total + np.bincount(d.head_of, d.weight, d.n_heads)
    return tuple((far / np.maximum(total, 1e-30)).tolist())


def needle_scores(trace: Trace, unit: str = "head") -> Scores:
    """(head): HeadKV's retrieval score: of as many heaviest positions as the needle has tokens, the weight that lies in
    the needle, per needle token, mean over steps. InputError for a trace without a needle."""
    inside = np.zeros(len(trace.tokens) + 1, bool)
    for start, stop in trace.needle:
        inside[start:stop] = True
    n = int(inside.sum())
    if not n:
        raise InputError("this trace has no needle, so it says nothing of which heads retrieve")
    top = np.argsort(-np.asarray(trace.weights, np.float32), axis=2, kind="stable")[:, :, :n]
    at = np.minimum(np.take_along_axis(np.asarray(trace.positions), top, 2), len(trace.tokens))
    return _mean_score(trace, np.take_along_axis(np.asarray(trace.weights, np.float64), top, 2) * inside[at] / n, unit)


def echo_scores(trace: Trace, unit: str = "head") -> Scores:
    """(head): RazorAttention's two kinds: weight on earlier copies of the token being fed (echo) and on the tokens that
    followed them (induction), mean over steps; on this trace's text, where the method uses repeated random tokens."""
    tokens = np.append(trace.tokens, -1).astype(np.int64)
    fed = np.arange(trace.n_steps) + trace.n_prompt - 1
    at = np.minimum(np.asarray(trace.positions).astype(np.int64), len(trace.tokens))
    now = tokens[fed][None, :, None]
    hit = (at < fed[None, :, None]) & ((tokens[at] == now) | (tokens[at - 1] == now) & (at > 0))
    return _mean_score(trace, np.asarray(trace.weights, np.float64) * hit, unit)


def _mean_score(trace: Trace, weight: np.ndarray, unit: str) -> Scores:
    score = weight.sum(2).mean(1)
    return tuple((score if unit == "head" else score.reshape(-1, trace.group).max(1)).tolist())


def per_head(values: Sequence[float] | None, seen: Ledger) -> np.ndarray:
    """float [head]: what a policy was fitted with; InputError if that was another number of heads, or nothing."""
    if values is None:
        raise InputError("this policy must be calibrated before it runs: policy.fit(demand, ...)")
    if len(values) != len(seen.layer):
        raise InputError(
            f"this policy was calibrated for {len(values)} heads and the log has {len(seen.layer)}: "
            "calibrate it on logs of the same model and unit"
        )
    return np.asarray(values, np.float64)


@dataclass(frozen=True)
class DuoAttention(StreamingLLM):
    """DuoAttention: the `dense` half of heads that retrieve keep every page, the others the first 64 tokens and the
    newest (256 in the method, B here).

    Simplified: heads are told apart by `scores`, by default the weight they read beyond those 64 and 256 tokens (a
    trained gate there).
    """

    source = "arXiv 2410.10819"
    roles = "offline"
    offline: bool = True
    sinks: int = 64
    recent: int = 256
    dense: float = 0.5
    scores: Scores | None = field(default=None, repr=False)

    def fit(self, *demands: Demand) -> DuoAttention:
        return self if self.scores is not None else self.but(scores=far_weight(demands, self.sinks, NEAR))

    def share(self, seen: Ledger) -> np.ndarray:
        scores = per_head(self.scores, seen)
        best = np.argsort(-scores, kind="stable")[: round(self.dense * len(scores))]
        share = np.ones(len(scores))
        share[best] = np.inf
        return share


@dataclass(frozen=True)
class RazorAttention(DuoAttention):
    """RazorAttention: heads that echo or induce keep every page, the others the first tokens and a window, with one
    made-up token that stands for all that was dropped.

    Simplified: `scores` may come from echo_scores; by default, as in DuoAttention. The made-up token helps answers,
    which no miss rate shows. How many heads stay dense is ours.
    """

    source = "arXiv 2407.15891"
    sinks: int = 4
    recent: int = 4
    dense: float = 0.15


def spans(demands: Sequence[Demand], sinks: int, density: float) -> Scores:
    """(head): how many pages each head should keep, the first `sinks` tokens' and then the newest, for the least logged
    weight lost, their mean being `density` of all: one price a page for all heads, bisected until the mean is met."""
    n, fixed = max(d.n_pages for d in demands), -(-sinks // demands[0].page_tokens)
    read = np.zeros((demands[0].n_heads, n + 1))
    for d in demands:
        item = d.head_of.astype(np.int64) * (n + 1) + distance(d) + 1
        read += np.bincount(item, d.weight * (d.page >= fixed) / d.n_steps, read.size).reshape(read.shape)
    kept = np.cumsum(read, axis=1)  # [head, window]
    low, high = 0.0, float(kept.max()) + 1.0
    for _ in range(50):
        price = (low + high) / 2
        window = (kept - price * np.arange(n + 1)).argmax(1)
        low, high = (price, high) if window.mean() + fixed > density * n else (low, price)
    return tuple((np.maximum(window, 1) + fixed).astype(float).tolist())


@dataclass(frozen=True)
class MoA(StreamingLLM):
    """MoA: every head its own sliding window beside the first block, wide where narrowing it costs most.

    Simplified: a window costs the logged weight it loses (the change of the loss, by gradients, there); one length
    only, so windows do not grow with the text; their ratios are those at `density` and hold at every budget.
    """

    source = "arXiv 2406.14909"
    roles = "offline"
    offline: bool = True
    sinks: int = 64
    recent: int = 64
    density: float = 0.5
    widths: Scores | None = field(default=None, repr=False)

    def fit(self, *demands: Demand) -> MoA:
        return self if self.widths is not None else self.but(widths=spans(demands, self.sinks, self.density))

    def share(self, seen: Ledger) -> np.ndarray:
        widths = per_head(self.widths, seen)
        return widths / widths.mean()


@dataclass(frozen=True)
class HeadKV(SnapKV):
    """HeadKV: SnapKV with head budgets of a fixed part, 1 - 1 / beta of an equal share, and a part of a pool of the
    rest in proportion to how much the head retrieves.

    Simplified: `scores` may come from needle_scores; by default the weight a head reads beyond the first page and the
    last 32 tokens. beta is published as 1.005 to 10; ours lies between.
    """

    source = "arXiv 2410.19258"
    roles = "offline"
    offline: bool = True
    beta: float = 1.5
    scores: Scores | None = field(default=None, repr=False)

    def fit(self, *demands: Demand) -> HeadKV:
        return self if self.scores is not None else self.but(scores=far_weight(demands, 4, self.rows))

    def share(self, seen: Ledger) -> np.ndarray:
        scores = per_head(self.scores, seen)
        part = scores / scores.mean() if scores.any() else np.ones(len(scores))
        return 1.0 - 1.0 / self.beta + part / self.beta
