"""Could one tell beforehand? When heads wake, and the signals that might have said so (the paper's section 2.2).

A signal maps what a log's heads read to one number per head and step, larger = more alarming, from the present and the
past alone. grading.py asks how well alarms on it foresee wake-ups. To add a signal: one function, one line in SIGNALS.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wakekv.errors import InputError
from wakekv.heads.reads import HEADS, Reads

WAKE, REST, QUIET = 0.2, 0.05, 8  # an event: the needle score passes 0.2 after 8 consecutive steps below 0.05
WINDOW, ALARM = 32, 2.0  # causal z: against the 32 steps before; alarm above 2
TREND = 8  # steps in the trailing mean of the two trend signals; the paper does not say
FIRST = WINDOW + 1  # first step that may alarm: signals of change start at step 1, and z needs a full window
ENSEMBLE = "ensemble"


def events(score: np.ndarray, wake: float = WAKE, rest: float = REST, quiet: int = QUIET) -> np.ndarray:
    """bool [head, step]: wake-ups. The score passes `wake` right after at least `quiet` consecutive steps below `rest`.

    A score between the two is neither: it ends the quiet run without being a wake-up. No event before step `quiet`.
    """
    if not rest <= wake or quiet < 1:
        raise InputError(f"hysteresis needs rest <= wake and at least one quiet step, not {rest}, {wake}, {quiet}")
    asleep = np.cumsum(np.pad(score < rest, ((0, 0), (1, 0))), axis=1)
    found = np.zeros(score.shape, bool)
    found[:, quiet:] = (score[:, quiet:] > wake) & (asleep[:, quiet:-1] - asleep[:, : -quiet - 1] == quiet)
    return found


def causal_z(x: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """z_t = (x_t - mean(x_t-w..t-1)) / sd(x_t-w..t-1), float64 [head, step]; the window leaves x_t out.

    With x_t inside the window |z| could not pass sqrt(w - 1), 5.6 for 32 steps. sd divides by w.
    nan in the first `window` steps and where any value involved is nan; -inf, so no alarm at any threshold, where the
    window is constant.
    """
    if window < 2:
        raise InputError(f"a z-score needs a window of at least 2 steps, not {window}")
    z = np.full(x.shape, np.nan)
    for h in range(0, len(x) if x.shape[1] > window else 0, HEADS):
        block = np.asarray(x[h : h + HEADS], float)
        last = block[:, window - 1 : -1]  # x_t-1: taken relative to it, a constant window has sd exactly 0
        gaps = [block[:, window - lag : block.shape[1] - lag] - last for lag in range(1, window + 1)]
        mean = sum(gaps) / window
        sd = np.sqrt(sum((gap - mean) ** 2 for gap in gaps) / window)
        ahead = block[:, window:] - last - mean
        with np.errstate(divide="ignore", invalid="ignore"):
            z[h : h + HEADS, window:] = np.where((sd == 0) & ~np.isnan(ahead), -np.inf, ahead / sd)
    return z


def above_trailing_mean(x: np.ndarray, window: int = TREND) -> np.ndarray:
    """x_t minus the mean of the (up to) `window` values before it, float64 [head, step]; nan at step 0."""
    x = np.asarray(x, float)
    total, count = np.zeros(x.shape), np.zeros(x.shape[1])
    for lag in range(1, min(window, x.shape[1] - 1) + 1):
        total[:, lag:] += x[:, lag:] - x[:, :-lag]  # differences: a constant gives exactly 0
        count[lag:] += 1
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def online_rco(reads: Reads) -> np.ndarray:
    """1 - RCO of the page set with the one a step before. [head, step]; nan at step 0 and where RCO is undefined."""
    return 1.0 - reads.rco


def windowed_drift(reads: Reads) -> np.ndarray:
    """1 - the median overlap with the drift baseline over the last 8 steps. [head, step]; nan at step 0."""
    return 1.0 - reads.drift.median


def entropy_trend(reads: Reads) -> np.ndarray:
    """Attention entropy minus its trailing mean, nats. [head, step]; nan at step 0."""
    return above_trailing_mean(reads.trace.entropy)


def needle_mass_delta(reads: Reads) -> np.ndarray:
    """Needle score minus its trailing mean. [head, step]; nan at step 0."""
    return above_trailing_mean(reads.score)


def at_least_two(fired: list[np.ndarray]) -> np.ndarray:
    """The ensemble of z-scores or of alarms, [head, step] each: the second largest, which fires iff at least two do."""
    if fired[0].dtype == bool:
        return sum(f.astype(int) for f in fired) >= 2
    return np.sort(np.where(np.isnan(fired), -np.inf, fired), axis=0)[-2]


def zscores(reads: Reads, window: int = WINDOW) -> dict[str, np.ndarray]:
    """Causal z of every signal in SIGNALS, [head, step] each, and of their ensemble (at least two of them alarm)."""
    z = {name: causal_z(signal(reads), window) for name, signal in SIGNALS.items()}
    return z | {ENSEMBLE: at_least_two(list(z.values()))}


SIGNALS: dict[str, Callable[[Reads], np.ndarray]] = {
    "online_rco": online_rco,
    "drift": windowed_drift,
    "entropy_trend": entropy_trend,
    "needle_mass_delta": needle_mass_delta,
}
