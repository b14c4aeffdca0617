"""Grading on planted data: a signal that leads is found, shuffled labels give chance, the oracle flatters."""

from dataclasses import replace

import numpy as np
import pytest

from wakekv.errors import InputError
from wakekv.heads.grading import (
    LEADS,
    METRICS,
    at_random,
    grade,
    hot,
    oracle,
    periodic,
    precision_recall,
    wakeup_table,
    woke_recently,
)
from wakekv.heads.reads import read
from wakekv.heads.wakeups import SIGNALS, causal_z, events


def planted(rng, n_heads=60, n_steps=300, rate=0.01, lead=None):
    """(signal, events): noise, and wake-ups at random; with a lead, the signal spikes that many steps ahead of each.

    Leading spikes are kept 40 steps apart: two in one window of 32 would hide each other.
    """
    event = rng.random((n_heads, n_steps)) < rate
    event[:, :80] = False
    x = rng.normal(size=event.shape)
    if lead:
        for head, step in np.argwhere(event):
            event[head, step + 1 : step + 40] = False
        head, step = np.nonzero(event)
        x[head, step - lead] += 12
    return x, event


def wakes_at(trace, steps, spike=None):
    """The same log, every head waking at `steps` [head][...]; `spike` steps before each, its entropy jumps."""
    rng = np.random.default_rng(5)
    shape = trace.needle_mass.shape
    mass = np.zeros(shape, np.float32)
    entropy = rng.normal(3, 0.1, shape).astype(np.float32)
    for head, when in enumerate(steps):
        for t in when:
            mass[head, t] = 0.8
            if spike:
                entropy[head, t - spike] += 3
    zero = np.zeros(shape, np.float32)
    return replace(trace, needle_mass=mass, sink_mass=zero, local_mass=zero, entropy=entropy)


def test_hot_and_woke_recently_are_their_definitions():
    event = np.random.default_rng(0).random((20, 120)) < 0.03
    for lead in (1, 5, 32, 500):
        follows = hot(event, lead)
        recent = woke_recently(event, lead)
        for head, s in [(0, 0), (3, 60), (19, 119), (7, 100)]:
            assert follows[head, s] == event[head, s + 1 : s + lead + 1].any()
            assert recent[head, s] == event[head, max(0, s - lead + 1) : s + 1].any()
    with pytest.raises(InputError, match="lead"):
        hot(event, 0)


@pytest.mark.parametrize("lead", LEADS)
def test_grade_is_the_plain_count(lead):
    rng = np.random.default_rng(lead)
    event, alarm = rng.random((15, 150)) < 0.02, rng.random((15, 150)) < 0.05
    tally = grade(alarm, event, lead, first=33)
    heads_alarms = [(h, s) for h, s in np.argwhere(alarm) if s >= 33]
    assert tally.alarms == len(heads_alarms) and tally.steps == 15 * (150 - 33)
    assert tally.true == sum(event[h, s + 1 : s + lead + 1].any() for h, s in heads_alarms)
    when = np.argwhere(event)
    assert tally.events == len(when)
    assert tally.recalled == sum(alarm[h, max(33, t - lead) : t].any() for h, t in when if t > 33)
    assert tally.unreachable == sum(t <= 33 for _, t in when)
    assert grade(alarm, event, lead, unreachable=False).events == tally.events - tally.unreachable


@pytest.mark.parametrize("same_heads", [False, True])
def test_random_alarms_score_what_the_formula_says(same_heads):
    rng = np.random.default_rng(0)
    _, event = planted(rng)
    event[:30] &= rng.random((30, 300)) < 0.2  # half of the heads seldom wake
    alarm = rng.random(event.shape) < np.repeat([0.02, 0.15], 30)[:, None]
    own = grade(alarm, event, 8)
    expected = at_random(own, alarm, event, 8, same_heads=same_heads)
    rate = alarm[:, 33:].mean(1, keepdims=True) if same_heads else alarm[:, 33:].mean()
    drawn = np.mean([grade(rng.random(event.shape) < rate, event, 8) for _ in range(300)], axis=0)
    assert expected.recalled == pytest.approx(drawn[3], rel=0.02)
    assert expected.true == pytest.approx(drawn[1], rel=0.03)
    assert (expected.true / expected.alarms > 1.3 * own.hot / own.steps) == same_heads


def test_knowing_who_but_not_when_is_told_from_knowing_when(make_trace):
    rng = np.random.default_rng(0)
    _, event = planted(rng, n_heads=100, rate=0.05)
    event[20:] = False
    alarm = np.zeros(event.shape, bool)
    alarm[:20] = rng.random((20, 300)) < 0.2  # the heads that wake, at any time
    own = grade(alarm, event, 4)
    f1 = METRICS["f1"]
    assert f1(own) > 2 * f1(at_random(own, alarm, event, 4))
    assert f1(own) == pytest.approx(f1(at_random(own, alarm, event, 4, same_heads=True)), rel=0.1)


def test_a_periodic_alarm_recalls_everything_once_the_lead_spans_its_period():
    rng = np.random.default_rng(0)
    _, event = planted(rng)
    own = grade(rng.random(event.shape) < 0.1, event, 16)
    tally = periodic(own, event, 16)
    assert tally.recalled == tally.events and tally.alarms == pytest.approx(own.alarms, rel=0.1)
    nothing = periodic(own._replace(alarms=0.0), event, 16)
    assert nothing.alarms == 0 and nothing.recalled == 0


def test_a_signal_that_leads_has_recall_one_from_its_lead_on_and_none_before():
    x, event = planted(np.random.default_rng(0), lead=8)
    alarm = causal_z(x) > 5
    for lead in LEADS:
        tally = grade(alarm, event, lead)
        recall = METRICS["recall"](tally)
        assert recall == 1.0 if lead >= 8 else recall < 0.1
    assert METRICS["precision"](grade(alarm, event, 8)) > 0.95


def test_shuffled_labels_give_chance():
    rng = np.random.default_rng(1)
    x, event = planted(rng, n_heads=200, rate=0.02, lead=4)
    alarm = causal_z(x) > 2
    honest = grade(alarm, event, 4)
    assert METRICS["lift"](honest) > 5
    lift, beyond = [], []
    for _ in range(30):
        shuffled = np.zeros_like(event)
        shuffled[:, 80:] = rng.permuted(event[:, 80:], axis=1)[rng.permutation(200)]
        tally = grade(alarm, shuffled, 4, first=80)
        lift.append(METRICS["lift"](tally))
        beyond.append(METRICS["recall"](tally) - METRICS["recall"](at_random(tally, alarm, shuffled, 4, 80)))
    assert np.mean(lift) == pytest.approx(1.0, abs=0.06)
    assert np.mean(beyond) == pytest.approx(0.0, abs=0.01)


def test_the_oracle_flatters_even_pure_noise():
    x, event = planted(np.random.default_rng(2), n_heads=200, rate=0.003)
    kind = grade(x >= oracle(x, event, 8)[:, None], event, 8)
    deployable = grade(causal_z(x) > 2, event, 8)
    assert METRICS["f1"](kind) > 1.5 * METRICS["f1"](deployable)
    assert METRICS["lift"](kind) > 1.5 and METRICS["lift"](deployable) < 1.3


def test_the_oracle_threshold_is_the_best_of_all_thresholds():
    rng = np.random.default_rng(3)
    x, event = planted(rng, n_heads=8, n_steps=150, rate=0.03)
    x = np.round(x, 1)  # ties
    x[0, 90] = np.nan
    best = oracle(x, event, 4)
    for head in range(8):
        one = slice(head, head + 1)

        def f1(threshold, one=one):
            return float(METRICS["f1"](grade(x[one] >= threshold, event[one], 4)))

        if not event[head].any():
            assert np.isposinf(best[head])
            continue
        levels = x[head, 33:][~np.isnan(x[head, 33:])]
        assert f1(best[head]) == pytest.approx(max(f1(level) for level in levels))


def test_the_oracle_never_alarms_on_heads_that_never_wake_and_survives_constant_signals():
    event = np.zeros((2, 100), bool)
    event[0, 60] = True
    assert oracle(np.zeros((2, 100)), event, 4).tolist() == [0.0, np.inf]
    assert np.isposinf(oracle(np.full((2, 100), np.nan), event, 4)).all()
    assert np.isposinf(oracle(np.zeros((2, 20)), event[:, :20], 4)).all()


def test_precision_recall_agrees_with_grade_at_every_threshold():
    x, event = planted(np.random.default_rng(4), n_heads=20, n_steps=150, lead=4)
    half = [x[:10], x[10:]], [event[:10], event[10:]]
    curve = precision_recall(*half, 4, points=50)
    assert (np.diff(curve.recall) >= 0).all() and (np.diff(curve.threshold) < 0).all()
    for i in (0, 10, 49):
        tally = grade(x >= curve.threshold[i], event, 4)
        assert curve.precision[i] == pytest.approx(METRICS["precision"](tally))
        assert curve.recall[i] == pytest.approx(METRICS["recall"](tally))
    nobody = precision_recall([x], [event & False], 4)
    assert np.isnan(nobody.recall).all()


def rows_of(table, **where):
    return [r for r in table if all(r[k] == v for k, v in where.items())]


@pytest.fixture(scope="module")
def leading(make_trace):
    """Five logs whose entropy jumps exactly 4 steps before each wake-up."""
    logs = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        steps = [np.sort(rng.choice(np.arange(50, 200, 30), 3, replace=False)) for _ in range(8)]
        logs.append(read(wakes_at(make_trace(n_steps=200, seed=seed), steps, spike=4)))
    return logs


def test_a_log_with_a_leading_signal_is_found_predictable(leading):
    table = wakeup_table(leading, leads=(2, 4, 8))
    for lead, recall in ((2, 0.3), (4, 1.0), (8, 1.0)):
        (found,) = rows_of(table, signal="entropy_trend", grading="z", lead=lead, metric="recall")
        assert found["estimate"] == 1.0 if recall == 1.0 else found["estimate"] < recall
        assert found["n"] == 5 and found["n_events"] == 5 * 8 * 3 and "bootstrap" in found["method"]
    (above,) = rows_of(table, signal="entropy_trend", grading="z", lead=4, metric="f1_above_same_heads")
    assert above["lo"] > 0.1
    (lift,) = rows_of(table, signal="entropy_trend", grading="z", lead=4, metric="lift")
    assert lift["lo"] > 3


def test_the_table_holds_every_signal_grading_lead_and_metric_once(leading):
    table = wakeup_table(leading, leads=(1, 8))
    keys = [(r["signal"], r["grading"], r["lead"], r["metric"]) for r in table]
    assert len(set(keys)) == len(keys) == 2 * ((len(SIGNALS) + 1) * 3 + 1) * (len(METRICS) + 12)
    assert {r["signal"] for r in table} == {*SIGNALS, "ensemble", "woke_recently"}


def test_a_periodic_waker_is_foreseen_by_having_woken_recently(make_trace):
    logs = [read(wakes_at(make_trace(n_steps=240, seed=s), [range(40, 240, 20)] * 8)) for s in range(5)]
    assert (np.flatnonzero(events(logs[0].score)[0]) == np.arange(40, 240, 20)).all()
    table = wakeup_table(logs, leads=(32,))
    (recall,) = rows_of(table, signal="woke_recently", lead=32, metric="recall")
    assert recall["estimate"] == pytest.approx(0.9)  # all but the first of ten
    (precision,) = rows_of(table, signal="woke_recently", lead=32, metric="precision")
    assert precision["estimate"] > 0.85


def test_logs_in_which_nobody_wakes_give_defined_rows(make_trace):
    table = wakeup_table([read(make_trace(needle=(), n_steps=60, seed=s)) for s in range(5)], leads=(4,))
    for row in table:
        assert row["n_events"] == 0
        if row["metric"] in ("recall", "f1", "random_recall", "lift"):
            assert np.isnan(row["estimate"]) and "undefined" in row["method"]
    (constant,) = rows_of(table, signal="needle_mass_delta", grading="z", metric="alarm_rate")
    assert constant["estimate"] == 0 and constant["n_constant"] == 5 * 8 * (60 - 33)


def test_one_step_logs_give_a_table_too(make_trace):
    table = wakeup_table([read(make_trace(n_steps=1))], leads=(1, 32))
    assert all(r["n_events"] == 0 and r["descriptive"] for r in table)
