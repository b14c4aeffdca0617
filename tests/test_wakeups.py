"""Wake-ups and their signals: events by a plain loop, z that cannot see ahead, signals that cannot either."""

from dataclasses import replace

import numpy as np
import pytest

from wakekv.errors import InputError
from wakekv.heads.reads import read
from wakekv.heads.wakeups import (
    ENSEMBLE,
    FIRST,
    SIGNALS,
    above_trailing_mean,
    at_least_two,
    causal_z,
    events,
    zscores,
)


def plain_events(row, wake=0.2, rest=0.05, quiet=8):
    found, run = [], 0
    for t, score in enumerate(row):
        if score > wake and run >= quiet:
            found.append(t)
        run = run + 1 if score < rest else 0
    return found


def test_events_are_the_plain_loop():
    rng = np.random.default_rng(0)
    score = rng.choice([0.0, 0.1, 0.5], p=[0.9, 0.04, 0.06], size=(40, 400))
    found = events(score)
    assert found.sum() > 100
    for head in range(40):
        assert np.flatnonzero(found[head]).tolist() == plain_events(score[head])


@pytest.mark.parametrize(
    ("row", "when"),
    [
        ([0.0] * 8 + [0.3], [8]),
        ([0.0] * 7 + [0.3], []),  # one quiet step short
        ([0.0] * 8 + [0.1, 0.3], []),  # a value between the two resets the quiet count
        ([0.0] * 8 + [0.2], []),  # 0.2 is not above 0.2
        ([0.05] * 8 + [0.3], []),  # 0.05 is not below 0.05
        ([0.0] * 8 + [0.3] * 5 + [0.0] * 8 + [0.3], [8, 21]),  # staying awake is one event
    ],
)
def test_hysteresis(row, when):
    assert np.flatnonzero(events(np.array([row]))[0]).tolist() == when


def test_hysteresis_refuses_crossed_thresholds():
    with pytest.raises(InputError):
        events(np.zeros((1, 9)), wake=0.1, rest=0.2)


@pytest.mark.parametrize("n_steps", [1, 7, 8, 9])
def test_a_head_that_never_wakes_or_a_short_log_has_no_event(n_steps):
    assert not events(np.zeros((3, n_steps))).any()


def test_causal_z_is_by_definition_and_leaves_the_present_out_of_its_window():
    x = np.random.default_rng(0).random((70, 100))
    z = causal_z(x)
    assert np.isnan(z[:, :32]).all()
    for head, t in [(0, 32), (3, 50), (69, 99)]:
        past = x[head, t - 32 : t]
        assert z[head, t] == pytest.approx((x[head, t] - past.mean()) / past.std())
    spike = np.random.default_rng(1).normal(size=(1, 40))
    spike[0, 39] = 1e6
    assert causal_z(spike)[0, 39] > 1e5  # with x_t inside the window it could not pass 5.6


def test_a_constant_window_never_alarms_and_is_told_from_an_undefined_one():
    for level in (0.0, 0.1, 1 / 3, 1e9):
        x = np.full((1, 60), level)
        x[0, 59] = level + 1
        z = causal_z(x)
        assert np.isneginf(z[0, 32:]).all()
    x = np.random.default_rng(0).random((1, 100))
    x[0, 40] = np.nan
    z = causal_z(x)
    assert np.isfinite(z[0, 32:40]).all() and np.isnan(z[0, 40:73]).all() and np.isfinite(z[0, 73:]).all()


def test_a_constant_signal_has_no_trend_at_all():
    for level in (0.1, 1 / 3, 7.7):
        trend = above_trailing_mean(np.full((2, 50), level))
        assert np.isnan(trend[:, 0]).all() and (trend[:, 1:] == 0).all()


def test_trend_is_x_minus_the_mean_of_the_steps_before():
    x = np.random.default_rng(0).random((1, 30))
    trend = above_trailing_mean(x, 8)[0]
    assert trend[1] == pytest.approx(x[0, 1] - x[0, 0])
    assert trend[20] == pytest.approx(x[0, 20] - x[0, 12:20].mean())


def test_ensemble_fires_exactly_where_two_of_the_four_do():
    rng = np.random.default_rng(0)
    z = [rng.normal(1, 1.5, (10, 200)) for _ in range(4)]
    z[0][0, 0] = np.nan
    fired = sum((v > 2).astype(int) for v in z)
    assert ((at_least_two(z) > 2) == (fired >= 2)).all()
    assert (at_least_two([v > 2 for v in z]) == (fired >= 2)).all()


@pytest.fixture(scope="module")
def pair(make_trace):
    """A log, and another one that is the same up to step 60 and altogether different from there on."""
    a, b = make_trace(n_steps=100, seed=1), make_trace(n_steps=100, seed=2)
    logged = ("positions", "weights", "top", "needle_mass", "sink_mass", "local_mass", "entropy")
    changed = {}
    for name in logged:
        array = getattr(a, name).copy()
        array[:, 60:] = getattr(b, name)[:, 60:]
        changed[name] = array
    return a, replace(a, **changed)


@pytest.mark.parametrize("name", [*SIGNALS, "z", "events"])
def test_changing_the_future_changes_nothing_before_it(pair, name):
    before = []
    for trace in pair:
        reads = read(trace)
        if name == "z":
            before.append(np.stack(list(zscores(reads).values())))
        else:
            before.append(events(reads.score) if name == "events" else SIGNALS[name](reads))
    assert np.array_equal(before[0][..., :60], before[1][..., :60], equal_nan=True)
    assert not np.array_equal(before[0][..., 60:], before[1][..., 60:], equal_nan=True)


@pytest.mark.parametrize("name", [*SIGNALS])
def test_signals_are_defined_from_the_second_step_to_the_last(pair, name):
    signal = SIGNALS[name](read(pair[0]))
    assert signal.shape == (pair[0].n_heads, pair[0].n_steps)
    assert np.isnan(signal[:, 0]).all() and np.isfinite(signal[:, 1:]).all()


def test_zscores_start_where_warm_up_ends(pair):
    z = zscores(read(pair[0]))
    assert set(z) == {*SIGNALS, ENSEMBLE}
    for name in SIGNALS:
        assert np.isnan(z[name][:, :FIRST]).all() and not np.isnan(z[name][:, FIRST:]).any()


def test_a_one_step_log_and_an_empty_needle_have_defined_signals(make_trace):
    for reads in (read(make_trace(n_steps=1)), read(make_trace(needle=(), n_steps=50))):
        assert not events(reads.score).any()
        for z in zscores(reads).values():
            assert z.shape == reads.score.shape
    assert np.isneginf(z[:, FIRST:]).any() or (z[:, FIRST:] < 100).all()
    assert np.isneginf(zscores(reads)["needle_mass_delta"][:, FIRST:]).all()  # constant, so no alarm
