"""Do heads change their minds? Churn, drift and the spells that heads read and rest for (the paper's section 2.1).

Each measure is taken per log, over all its heads, and pooled over prompts. What a definition leaves undefined is
skipped and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from statsmodels.duration.survfunc import SurvfuncRight

from wakekv import stats
from wakekv.errors import InputError
from wakekv.heads.reads import HEADS, Reads, label, overlap_beyond_chance, poolable, shared_pages

WINDOW = 16  # steps in the window of the unstable fraction
UNSTABLE = 0.5  # mean random-corrected overlap below which a head is unstable


def jaccard(active: np.ndarray, earlier: np.ndarray | None = None) -> np.ndarray:
    """float64 [pair]: |A and B| / |A or B| of neighbouring steps of `active` [head, step], or of it and `earlier`.

    nan where both sets are empty: such a pair says nothing about change, and is skipped and counted by the callers.
    """
    a, b = (active[:, 1:], active[:, :-1]) if earlier is None else (active, earlier)
    either = (a | b).sum(0)
    return np.where(either > 0, (a & b).sum(0) / np.maximum(either, 1), np.nan)


def jaccard_of_random_pairs(active: np.ndarray, *, draws: int = 2000, seed: int = 0) -> np.ndarray:
    """The same for pairs of steps drawn at random: what it would be if the order of the steps meant nothing."""
    n = active.shape[1]
    if n < 2:
        return np.full(0, np.nan)
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    first = rng.integers(n, size=draws)
    return jaccard(active[:, first], active[:, (first + rng.integers(1, n, size=draws)) % n])


def mean_rco(reads: Reads, window: int = WINDOW, against: str = "previous") -> np.ndarray:
    """float64 [head]: mean RCO over `window`-step windows; nan for a head without any defined one.

    against "previous" (default): each set with the one before, averaged over trailing windows. "first": FlexiCache's
    reading, each set with the first of its window, windows side by side.
    """
    if window < 2:
        raise InputError(f"window must be at least 2 steps, not {window}")
    if against == "previous":
        return _nanmean(rolling_mean(reads.rco[:, 1:], min(window, max(1, reads.rco.shape[1] - 1))))
    if against != "first":
        raise InputError(f"against must be 'previous' or 'first', not {against!r}")
    step = np.arange(reads.size.shape[1])
    first = step - step % window
    both = shared_pages(reads.pages, reads.pages[:, first])
    rco = overlap_beyond_chance(both, reads.size, reads.size[:, first], reads.n_pages)
    return _nanmean(np.where(step % window > 0, rco, np.nan))


def lowest_medians(reads: Reads, windows: Sequence[int]) -> np.ndarray:
    """float64 [window, head]: the lowest windowed median overlap with the first page set; inf if no window is full.

    A head drifts at least once exactly where this is below the threshold, whatever baselines come after: so one
    pass gives the drift fraction at every threshold (`(lowest_medians(reads, [8])[0] < 0.5).mean()`).
    """
    out = np.full((len(windows), len(reads.size)), np.inf)
    for h in range(0, len(reads.size), HEADS):
        block = slice(h, h + HEADS)
        smaller = np.minimum(reads.size[block], reads.size[block, :1])
        both = shared_pages(reads.pages[block], reads.pages[block, :1])
        overlap = np.where(smaller > 0, both / np.maximum(smaller, 1), 1.0)[:, 1:]
        for w, window in enumerate(windows):
            if window <= overlap.shape[1]:
                views = np.lib.stride_tricks.sliding_window_view(overlap, window, axis=1)
                out[w, block] = np.median(views, axis=-1).min(axis=1)
    return out


def drift_sweep(many: Sequence[Reads], thresholds: Sequence[float], windows: Sequence[int]) -> list[dict]:
    """Rows window, threshold, estimate, lo, hi ...: the drift fraction at other settings than 0.5 and 8."""
    lowest = [lowest_medians(reads, windows) for reads in many]
    return [
        {"window": window, "threshold": float(threshold)}
        | stats.ratio([(m[w] < threshold).sum() for m in lowest], [m.shape[1] for m in lowest]).row()
        for w, window in enumerate(windows)
        for threshold in thresholds
    ]


@dataclass(frozen=True, eq=False)
class Spells:
    """Runs of steps in which a head stays in one state, in order of head and time. Arrays over spells.

    reading bool: active or at rest; head, length: int; ended bool: False where the log ends first (right-censored);
    from_start bool: under way when the log begins, so that its true length is unknown (left-censored).
    """

    head: np.ndarray
    length: np.ndarray
    reading: np.ndarray
    ended: np.ndarray
    from_start: np.ndarray


def spells(active: np.ndarray) -> Spells:
    """The spells of `active` bool [head, step]."""
    n_heads, n_steps = active.shape
    edge = np.ones((n_heads, n_steps + 1), bool)
    edge[:, 1:-1] = active[:, 1:] != active[:, :-1]
    head, start = np.nonzero(edge[:, :-1])
    stop = np.nonzero(edge[:, 1:])[1] + 1
    return Spells(head, stop - start, active[head, start], stop < n_steps, start == 0)


@dataclass(frozen=True, eq=False)
class Survival:
    """Kaplan-Meier: the share of spells that last longer than `time` steps, with a band from resampling prompts.

    n_spells entered, n_censored of them cut off by the end of a log, n_left_out were under way when their log began.
    """

    time: np.ndarray
    share: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    median: stats.Estimate
    n_spells: int
    n_censored: int
    n_left_out: int


def survival(many: Sequence[Spells], *, reading: bool, from_start: bool = False, seed: int = 0) -> Survival:
    """How long spells of reading (or of rest) last, one `Spells` a prompt; statsmodels' SurvfuncRight.

    Spells under way at the first step are left out, as their beginning is not in the log; from_start=True keeps them
    and takes the first decode step as their beginning. A median that the curve never reaches is nan.
    """
    wanted = [s.reading == reading for s in many]
    kept = [w & (~s.from_start | from_start) for w, s in zip(wanted, many, strict=True)]
    n = sum(int(k.sum()) for k in kept)
    left_out = sum(int(w.sum()) for w in wanted) - n
    if not n:
        none, nothing = np.zeros(0), stats.mean([])
        return Survival(none, none, none, none, nothing, 0, 0, left_out)
    prompt = np.repeat(np.arange(len(many)), [k.sum() for k in kept])
    length = np.concatenate([s.length[k] for k, s in zip(kept, many, strict=True)])
    ended = np.concatenate([s.ended[k] for k, s in zip(kept, many, strict=True)])
    cells, where = np.unique(np.stack([length, ended], axis=1), axis=0, return_inverse=True)
    counts = np.zeros((len(many), len(cells)))
    np.add.at(counts, (prompt, where.ravel()), 1)

    def fit(weights):
        used = weights > 0
        curve = SurvfuncRight(cells[used, 0], cells[used, 1], freq_weights=weights[used])
        return curve, curve.quantile(0.5)

    curve, median = fit(counts.sum(0))
    time, draws, medians = curve.surv_times, [], []
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    for drawn in rng.multinomial(len(many), np.full(len(many), 1 / len(many)), size=stats.RESAMPLES // 4):
        if len(many) > 1 and (drawn @ counts).any():
            again, middle = fit(drawn @ counts)
            step = np.searchsorted(again.surv_times, time, side="right")
            draws.append(np.concatenate([[1.0], again.surv_prob])[step])
            medians.append(np.inf if np.isnan(middle) else middle)
    lo, hi = np.quantile(draws, [0.025, 0.975], axis=0) if draws else np.full((2, len(time)), np.nan)
    low, high = np.quantile(medians, [0.025, 0.975], method="nearest") if draws else (np.nan, np.nan)
    how = f"percentile bootstrap over prompts, {len(draws)} resamples, 95%" if draws else "one prompt, no interval"
    middle = stats.Estimate(float(median), float(low), float(high), len(many), "prompts", f"Kaplan-Meier, {how}")
    return Survival(time, curve.surv_prob, lo, hi, middle, n, int((~ended).sum()), left_out)


def churn_table(many: Sequence[Reads], *, flagged: bool = False, seed: int = 0) -> list[dict]:
    """Table 4 for one model and regime: rows model, regime, quantity, n_used, n_skipped, n_flagged, estimate, lo, ...

    Ratios of sums over prompts; used and skipped count step pairs (Jaccard), head-step pairs (mean_rco) or heads.
    """
    kept = poolable(many, flagged=flagged)
    model, regime = label(kept[0].trace)

    def row(quantity, values):
        """values: per prompt, one array each; their mean over all that is defined."""
        good = [np.asarray(v, float)[~np.isnan(v)] for v in values]
        used, of = sum(map(len, good)), sum(np.size(v) for v in values)
        estimate = stats.ratio([g.sum() for g in good], [len(g) for g in good], seed=seed)
        cells = {"n_used": used, "n_skipped": of - used, "n_flagged": len(many) - len(kept)}
        return {"model": model, "regime": regime, "quantity": quantity, **cells, **estimate.row()}

    def below(means):
        return [np.where(np.isnan(m), np.nan, m < UNSTABLE) for m in means]

    rows = []
    for kind in ("binary", "continuous"):
        active = [reads.active(kind) for reads in kept]
        rows.append(row(f"adjacent_jaccard_{kind}", [jaccard(a) for a in active]))
        rows.append(row(f"random_pair_jaccard_{kind}", [jaccard_of_random_pairs(a, seed=seed) for a in active]))
        rows.append(row(f"active_share_{kind}", [a.ravel() for a in active]))
    rows.append(row("mean_rco", [reads.rco[:, 1:].ravel() for reads in kept]))
    rows.append(row("unstable_fraction", below([mean_rco(reads) for reads in kept])))
    rows.append(row("unstable_fraction_first", below([mean_rco(reads, against="first") for reads in kept])))
    rows.append(row("drift_fraction", [reads.drift.event.any(1) for reads in kept]))
    rows.append(row("drift_events_per_100_steps", [100 * reads.drift.event.mean(1) for reads in kept]))
    return rows


def rolling_mean(x: np.ndarray, window: int) -> np.ndarray:
    """Mean over trailing windows of x [row, step], [row, step - window + 1]; nan is left out of its window."""
    known = ~np.isnan(x)
    total, count = (np.cumsum(np.pad(a, ((0, 0), (1, 0))), axis=1) for a in (np.where(known, x, 0.0), known))
    n = count[:, window:] - count[:, :-window]
    return np.where(n > 0, (total[:, window:] - total[:, :-window]) / np.maximum(n, 1), np.nan)


def _nanmean(x: np.ndarray) -> np.ndarray:
    n = (~np.isnan(x)).sum(1)
    return np.where(n > 0, np.nansum(x, axis=1) / np.maximum(n, 1), np.nan)
