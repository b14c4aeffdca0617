"""How well alarms foresee wake-ups, and how well chance would have.

An event at t is recalled if its head raised an alarm in [t - lead, t); an alarm at s is true if its head wakes in
(s, s + lead]. Three gradings, from too kind to too harsh:
  oracle  each head's best threshold on the raw signal, chosen after the fact. The paper calls it a mirage: no system
          could have known the threshold, and heads that never wake never alarm
  z       causal z above one threshold: what could be deployed
  raw     one threshold on the raw signal for all heads, the 0.9 quantile of the log
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wakekv import stats
from wakekv.errors import InputError
from wakekv.heads.reads import Reads, label, poolable
from wakekv.heads.wakeups import ALARM, ENSEMBLE, FIRST, SIGNALS, at_least_two, causal_z, events

LEADS = (1, 2, 4, 8, 16, 32)
QUANTILE = 0.9
RECENTLY = 32  # steps for which "woke recently" keeps alarming


class Tally(NamedTuple):
    """What one log counts. Steps are head-steps from the first that may alarm; hot: one with a wake-up within the lead.

    unreachable: events too early for any alarm to come before them. They count as missed unless left out.
    """

    alarms: float
    true: float
    events: float
    recalled: float
    steps: float
    hot: float
    unreachable: float


def _f1(precision, recall):
    both = precision + recall
    return np.where(both > 0, 2 * precision * recall / np.where(both > 0, both, 1), both * 0)


METRICS: dict[str, Callable[[Tally], np.ndarray]] = {
    "precision": lambda t: t.true / t.alarms,
    "recall": lambda t: t.recalled / t.events,
    "f1": lambda t: _f1(t.true / np.where(t.alarms > 0, t.alarms, 1), t.recalled / t.events),  # no alarm at all: 0
    "base_rate": lambda t: t.hot / t.steps,
    "lift": lambda t: (t.true / t.alarms) / (t.hot / t.steps),
    "alarm_rate": lambda t: t.alarms / t.steps,
}


def hot(event: np.ndarray, lead: int) -> np.ndarray:
    """bool [head, step]: a wake-up follows within (s, s + lead]."""
    if lead < 1:
        raise InputError(f"a lead is at least one step, not {lead}")
    upto, step = running(event), np.arange(event.shape[1])
    return upto[:, np.minimum(step + lead, step[-1]) + 1] > upto[:, step + 1]


def running(event: np.ndarray) -> np.ndarray:
    """int32 [head, step + 1]: how many of `event` lie before each step."""
    out = np.zeros((event.shape[0], event.shape[1] + 1), np.int32)
    np.cumsum(event, axis=1, out=out[:, 1:])
    return out


def grade(alarm: np.ndarray, event: np.ndarray, lead: int, first: int = FIRST, unreachable: bool = True) -> Tally:
    """Alarms of one log against its events, both bool [head, step]. Alarms before step `first` do not exist.

    Warm-up: events that no alarm could precede count as missed; unreachable=False leaves them out of recall.
    """
    wakers = np.flatnonzero(event.any(axis=1))
    heard, woke = alarm[wakers], event[wakers]
    heard[:, :first] = False
    follows = hot(woke, lead)[:, first:]
    head, step = np.nonzero(woke)
    upto, early = running(heard), step <= first
    seen = upto[head, step] > upto[head, np.maximum(step - lead, 0)]
    n_events = len(step) if unreachable else int((~early).sum())
    counts = alarm[:, first:].sum(), (heard[:, first:] & follows).sum(), n_events, seen.sum()
    return Tally(*map(float, (*counts, alarm[:, first:].size, follows.sum(), early.sum())))


def at_random(
    own: Tally, alarm: np.ndarray, event: np.ndarray, lead: int, first: int = FIRST, same_heads: bool = False
) -> Tally:
    """What as many independent random alarms would score on average: exact, no draws. own: the tally of `alarm`.

    They fall on any head and step; with same_heads, each head keeps its own number of alarms and only their time is
    random. What a signal has beyond the first but not the second is knowing who wakes, not when.
    """
    n_steps = max(1, alarm[:, first:].shape[1])
    rate = alarm[:, first:].sum(axis=1) / n_steps
    if not same_heads:
        rate = np.full(len(rate), rate.mean() if len(rate) else 0.0)
    wakers = np.flatnonzero(event.any(axis=1))
    true = (rate[wakers] * hot(event[wakers], lead)[:, first:].sum(axis=1)).sum()
    head, step = np.nonzero(event)
    chances = np.maximum(0, step - np.maximum(step - lead, first))  # steps at which an alarm would recall the event
    return own._replace(true=float(true), recalled=float(np.sum(1 - (1 - rate[head]) ** chances)))


def periodic(tally: Tally, event: np.ndarray, lead: int, first: int = FIRST) -> Tally:
    """An alarm every n-th step of each head, staggered over heads, n giving the rate closest to the tally's own."""
    alarm = np.zeros(event.shape, bool)
    if tally.alarms:
        every = max(1, round(tally.steps / tally.alarms))
        step, head = np.arange(event.shape[1]), np.arange(len(event))[:, None]
        alarm = (step + head) % every == 0
    return grade(alarm, event, lead, first)._replace(events=tally.events)


def woke_recently(event: np.ndarray, within: int = RECENTLY) -> np.ndarray:
    """Alarm, bool [head, step]: the head woke in the last `within` steps, this one included."""
    upto, step = running(event), np.arange(event.shape[1])
    return upto[:, step + 1] > upto[:, np.maximum(step + 1 - within, 0)]


def _before(x: np.ndarray, event: np.ndarray, lead: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """(head, largest x in [t - lead, t) from step `first` on) of every event; -inf where there is no such step."""
    head, step = np.nonzero(event)
    at = step[:, None] - np.arange(1, lead + 1)
    return head, np.where(at >= first, x[head[:, None], np.maximum(at, 0)], -np.inf).max(axis=1, initial=-np.inf)


def oracle(x: np.ndarray, event: np.ndarray, lead: int, first: int = FIRST, beta: float = 1.0) -> np.ndarray:
    """float64 [head]: each head's best threshold after the fact (alarm where x >= it); inf for a head never to alarm.

    Best: the largest F-beta of the head's own precision and recall; ties go to the higher threshold. Not causal, and
    not meant to be: beta traces the mirage from precision (small) to recall (large).
    """
    x = np.where(np.isnan(x), -np.inf, x)
    best, follows = np.full(len(x), np.inf), hot(event, lead)
    of, peak = _before(x, event, lead, first)
    for head in np.unique(of):
        order = first + np.argsort(-x[head, first:], kind="stable")
        level, n = x[head, order], np.arange(1, len(order) + 1)
        precision = np.cumsum(follows[head, order]) / n
        mine = np.sort(peak[of == head])
        recall = 1 - np.searchsorted(mine, level) / len(mine)
        score = (1 + beta**2) * precision * recall / np.where(precision + recall > 0, beta**2 * precision + recall, 1)
        usable = np.isfinite(level) & np.append(level[1:] < level[:-1], True)[: len(level)]  # the last of each tie
        score = np.where(usable, score, 0.0)
        if score.size and score.max() > 0:
            best[head] = level[score.argmax()]
    return best


def alarms(reads: Reads, event: np.ndarray, lead: int, z: dict, x: dict, first: int = FIRST) -> dict:
    """{(signal, grading): bool [head, step]} of one log, from its raw signals `x` and their causal z-scores `z`."""
    found = {(name, "z"): value > ALARM for name, value in z.items()}
    for name, value in x.items():
        known = value[:, first:][~np.isnan(value[:, first:])]
        found[name, "raw"] = value > np.quantile(known, QUANTILE) if known.size else np.zeros(value.shape, bool)
    found[ENSEMBLE, "raw"] = at_least_two([found[name, "raw"] for name in x])
    for name, value in {**x, ENSEMBLE: z[ENSEMBLE]}.items():
        found[name, "oracle"] = value >= oracle(value, event, lead, first)[:, None]
    found["woke_recently", "baseline"] = woke_recently(event)
    return found


def wakeup_table(
    many: Sequence[Reads],
    leads: Sequence[int] = LEADS,
    *,
    flagged: bool = False,
    unreachable: bool = True,
    seed: int = 0,
) -> list[dict]:
    """Rows model, regime, signal, grading, lead, metric, estimate, lo, hi, n ... over the prompts of one regime.

    Beside METRICS stand as many alarms raised blindly: random_* on any head and step, same_heads_* at random steps of
    the heads that the signal chose, periodic_* by a clock; f1_above_* is the difference, prompt by prompt. Counts:
    n_events, n_alarms, n_unreachable, and for z n_constant and n_undefined, the head-steps without alarm because the
    window was constant or held an undefined value.
    """
    kept = poolable(many, flagged=flagged)
    model, regime = label(kept[0].trace)
    tallies, silent = {}, {}
    for reads in kept:
        event = events(reads.score)
        x = {name: signal(reads) for name, signal in SIGNALS.items()}
        z = {name: causal_z(value) for name, value in x.items()}
        for name, value in z.items():
            counts = np.array([np.isneginf(value).sum(), np.isnan(value[:, FIRST:]).sum()])
            silent[name] = silent.get(name, 0) + counts
        z[ENSEMBLE] = at_least_two(list(z.values()))
        for lead in leads:
            for key, alarm in alarms(reads, event, lead, z, x).items():
                own = grade(alarm, event, lead, unreachable=unreachable)
                blind = at_random(own, alarm, event, lead), at_random(own, alarm, event, lead, same_heads=True)
                row = [*own, *blind[0], *blind[1], *periodic(own, event, lead)]
                tallies.setdefault((*key, lead), []).append(row)
    rows = []
    for (signal, grading, lead), sums in tallies.items():
        total = Tally(*np.sum(sums, axis=0)[: len(Tally._fields)])
        cells = {"model": model, "regime": regime, "signal": signal, "grading": grading, "lead": lead}
        counts = {"n_events": int(total.events), "n_alarms": int(total.alarms), "n_unreachable": int(total.unreachable)}
        constant, undefined = silent.get(signal, (None, None)) if grading == "z" else (None, None)
        counts |= {"n_constant": constant, "n_undefined": undefined, "n_flagged": len(many) - len(kept)}
        for metric, of in _TABLE.items():
            rows.append({**cells, "metric": metric, **stats.bootstrap(np.array(sums), of, seed=seed).row(), **counts})
    return rows


def _of(metric: str, which: int) -> Callable[[np.ndarray], np.ndarray]:
    n = len(Tally._fields)
    return lambda totals: METRICS[metric](Tally(*np.moveaxis(totals[..., which * n : (which + 1) * n], -1, 0)))


_BESIDE = ("own", "random", "same_heads", "periodic")  # the order of a row's tallies
_TABLE = {metric: _of(metric, 0) for metric in METRICS}
_TABLE |= {
    f"{who}_{metric}": _of(metric, which)
    for which, who in enumerate(_BESIDE)
    for metric in ("precision", "recall", "f1")
    if who != "own"
}
_TABLE |= {
    f"f1_above_{who}": lambda totals, which=which: _of("f1", 0)(totals) - _of("f1", which)(totals)
    for which, who in enumerate(_BESIDE)
    if who != "own"
}


@dataclass(frozen=True, eq=False)
class Curve:
    """Precision and recall, pooled over logs, as one threshold falls. float64 [point]."""

    threshold: np.ndarray
    precision: np.ndarray
    recall: np.ndarray


def precision_recall(xs: Sequence[np.ndarray], wakes: Sequence[np.ndarray], lead: int, points: int = 200) -> Curve:
    """One threshold on `xs` (a [head, step] per log) swept over all values, at `points` evenly spread alarm rates."""
    level, follows, peaks = [], [], []
    for x, event in zip(xs, wakes, strict=True):
        x = np.where(np.isnan(x), -np.inf, x)
        level.append(x[:, FIRST:].ravel())
        follows.append(hot(event, lead)[:, FIRST:].ravel())
        peaks.append(_before(x, event, lead, FIRST)[1])
    level, follows, peaks = map(np.concatenate, (level, follows, peaks))
    order = np.argsort(-level, kind="stable")
    order = order[np.isfinite(level[order])]
    last = np.flatnonzero(np.append(np.diff(level[order]) < 0, True)) if order.size else np.zeros(0, int)
    last = last[np.unique(np.linspace(0, len(last) - 1, points).astype(int))] if last.size else last
    precision = np.cumsum(follows[order])[last] / (last + 1)
    threshold = level[order][last]
    recall = 1 - np.searchsorted(np.sort(peaks), threshold) / len(peaks) if len(peaks) else np.full(len(last), np.nan)
    return Curve(threshold, precision, recall)
