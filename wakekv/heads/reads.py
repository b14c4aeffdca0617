"""What the heads of one log read: the two needle scores, and the page sets with how far they move.

`read` turns a log into arrays over heads and steps, which churn.py measures and wakeups.py tries to foresee.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from wakekv.errors import InputError
from wakekv.logs.trace import PAGE, Trace

ACTIVE = 0.1  # needle score above which a head counts as reading the needle (continuous reading of Table 4)
DRIFT_WINDOW, DRIFT_BELOW = 8, 0.5  # a drift event: the median overlap with the baseline over 8 steps falls below 0.5
HEADS = 32  # heads handled at once, to bound memory


@dataclass(frozen=True, eq=False)
class Reads:
    """What the heads of one log read.

    copy   bool    [head, step]        binary copy score: the heaviest position is a needle token, the one just emitted
    score  float32 [head, step]        continuous needle score in [0, 1]
    pages  uint64  [head, step, word]  the pages of the logged positions, one bit a page
    size   int32   [head, step]        how many pages that is
    n_pages int32  [head, step]        how many pages the head could have read from (its window, if its layer has one)
    """

    trace: Trace
    copy: np.ndarray
    score: np.ndarray
    pages: np.ndarray
    size: np.ndarray
    n_pages: np.ndarray

    @property
    def name(self) -> str:
        """model/regime/seed, and how far into the prompt the needle begins: for messages and tables."""
        trace = self.trace
        where = f"/needle at {trace.needle[0][0] / trace.n_prompt:.0%}" if trace.needle else ""
        return "{}/{}/seed {}".format(*label(trace), trace.manifest["prompt"]["seed"]) + where

    @property
    def flagged(self) -> bool:
        """The text repeats itself beyond the stated rate: not for pooled statistics."""
        return bool(self.trace.manifest.get("repetition", {}).get("flagged", False))

    def active(self, kind: str) -> np.ndarray:
        """bool [head, step]: A_t, the heads that read the needle, by the "binary" or the "continuous" score."""
        if kind not in ("binary", "continuous"):
            raise InputError(f"kind must be 'binary' or 'continuous', not {kind!r}")
        return self.copy if kind == "binary" else self.score > ACTIVE

    @cached_property
    def rco(self) -> np.ndarray:
        """float64 [head, step]: RCO of each page set with the one a step before; nan where undefined, and at step 0."""
        out = np.full(self.size.shape, np.nan)
        both = shared_pages(self.pages[:, 1:], self.pages[:, :-1])
        out[:, 1:] = overlap_beyond_chance(both, self.size[:, 1:], self.size[:, :-1], self.n_pages[:, 1:])
        return out

    @cached_property
    def drift(self) -> Drift:
        return drift(self)


def label(trace: Trace) -> tuple[str, str]:
    """(model, regime) of a log."""
    return trace.manifest["model"]["name"], trace.manifest["prompt"]["regime"]


def read(trace: Trace) -> Reads:
    """Scores and page sets of one log. Raises InputError if it holds a value that is not finite, or no step at all.

    Needle score: needle_mass / (1 - sink_mass - local_mass), where the sinks and the local window count outside the
    needle only; 0 where that leaves nothing. An empty needle gives scores of 0. Copy score: Wu et al., 2404.15574.
    """
    if trace.n_steps < 1 or trace.n_heads < 1:
        raise InputError("a log without heads or steps has nothing to measure: record it again with at least one step")
    for what in ("needle_mass", "sink_mass", "local_mass", "entropy", "weights"):
        _refuse_undefined(what, getattr(trace, what))
    mass, sinks, local = (np.asarray(getattr(trace, f"{m}_mass")) for m in ("needle", "sink", "local"))
    rest = 1.0 - sinks - local
    with np.errstate(divide="ignore", invalid="ignore"):
        score = np.where(rest > 1e-6, np.clip(mass / rest, 0.0, 1.0), 0.0).astype(np.float32)

    within = np.zeros(len(trace.tokens), bool)
    for start, stop in trace.needle:
        within[start:stop] = True
    top = np.asarray(trace.top).astype(np.int64)
    copy = within[top] & (np.asarray(trace.tokens)[top] == np.asarray(trace.emitted)[None, :])

    context = trace.n_prompt + np.arange(trace.n_steps)
    last = -(-context // PAGE)
    windows = np.array([w or context[-1] for w in trace.manifest["model"]["windows"]])
    reach = np.maximum(0, context[None, :] - windows[:, None]) // PAGE  # [layer, step]: the first page in sight
    n_pages = (last[None, :] - reach)[trace.layer].astype(np.int32)

    pages = page_sets(trace.positions, int(last[-1]))
    return Reads(trace, copy, score, pages, np.bitwise_count(pages).sum(-1, dtype=np.int32), n_pages)


def page_sets(positions: np.ndarray, n_pages: int) -> np.ndarray:
    """uint64 [head, step, word]: the pages of `positions` [head, step, k] as bits; padding has none."""
    n_heads, n_steps, _ = positions.shape
    words = -(-n_pages // 64)
    out = np.empty((n_heads, n_steps, words), np.uint64)
    for h in range(0, n_heads, HEADS):
        block = np.minimum(np.asarray(positions[h : h + HEADS]) // PAGE, n_pages).astype(np.int64)
        bits = np.zeros((*block.shape[:2], words * 64 + 1), bool)
        np.put_along_axis(bits, np.where(block == n_pages, words * 64, block), True, axis=-1)
        out[h : h + HEADS] = np.packbits(bits[..., :-1], axis=-1, bitorder="little").view("<u8")
    return out


def overlap_beyond_chance(shared, size_a, size_b, n_pages) -> np.ndarray:
    """RCO, the random-corrected overlap of page sets, elementwise; nan where it is undefined (N <= K, or an empty set).

    K = min(|A|, |B|), N = n_pages: max(0, (min(1, |A and B| / K) - K / N) / (1 - K / N)).
    """
    k = np.minimum(size_a, size_b).astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = k / n_pages
        rco = np.maximum(0.0, (np.minimum(1.0, shared / k) - chance) / (1 - chance))
    return np.where((k > 0) & (n_pages > k), rco, np.nan)


@dataclass(frozen=True, eq=False)
class Drift:
    """Overlap with a baseline that follows the head. median float64 [head, step] (nan at step 0); event bool alike."""

    median: np.ndarray
    event: np.ndarray


def drift(reads: Reads, below: float = DRIFT_BELOW, window: int = DRIFT_WINDOW) -> Drift:
    """Drift events of every head: the median over the last `window` steps of O(page set, baseline) falls below `below`.

    O(A, B) = |A and B| / min(|A|, |B|). The baseline is the first page set and becomes the current one at an event,
    which also empties the window, so that no step is judged against two baselines. An event needs a full window;
    the median before that is over the steps there are (1 right after an event: the baseline is the set itself).
    """
    n_heads, n_steps = reads.size.shape
    pages, sizes = np.ascontiguousarray(reads.pages.swapaxes(0, 1)), np.ascontiguousarray(reads.size.T)
    base, base_size = pages[0].copy(), sizes[0].copy()
    recent, seen, rows = np.full((n_heads, window), np.nan), np.zeros(n_heads, int), np.arange(n_heads)
    median, event = np.full((n_steps, n_heads), np.nan), np.zeros((n_steps, n_heads), bool)
    for t in range(1, n_steps):
        smaller = np.minimum(sizes[t], base_size)
        recent[rows, seen % window] = np.where(smaller > 0, shared_pages(pages[t], base) / np.maximum(smaller, 1), 1.0)
        seen += 1
        ordered, held = np.sort(recent, axis=1), np.minimum(seen, window)  # nan sorts last
        median[t] = (ordered[rows, (held - 1) // 2] + ordered[rows, held // 2]) / 2
        event[t] = fell = (seen >= window) & (median[t] < below)
        base[fell], base_size[fell], recent[fell], seen[fell] = pages[t, fell], sizes[t, fell], np.nan, 0
    return Drift(median.T, event.T)


def poolable(many: Sequence[Reads], *, flagged: bool = False) -> list[Reads]:
    """The logs that statistics may pool: one model, one regime, and no text that repeats itself (unless `flagged`)."""
    kinds = sorted({label(reads.trace) for reads in many})
    if len(kinds) != 1:
        raise InputError(f"pool the logs of one model and one regime, got {kinds or 'none'}")
    kept = [reads for reads in many if flagged or not reads.flagged]
    if not kept:
        raise InputError(f"every log of {'/'.join(kinds[0])} repeats itself: use scripted text, or pass flagged=True")
    return kept


def shared_pages(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """int32: |A and B| of page sets as bits [..., word]."""
    return np.bitwise_count(a & b).sum(-1, dtype=np.int32)


def _refuse_undefined(what: str, values: np.ndarray) -> None:
    for h in range(0, len(values), HEADS):
        bad = ~np.isfinite(values[h : h + HEADS])
        if bad.any():
            head, step = np.argwhere(bad)[0][:2]
            raise InputError(
                f"{what} is not finite at head {h + head}, step {step}: that log is damaged, record it again"
            )
