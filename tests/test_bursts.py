"""Bursts on planted data: independent heads show none, synchronised ones do, and each null keeps what it says."""

from dataclasses import replace

import numpy as np
import pytest

from wakekv.errors import InputError
from wakekv.heads import bursts as B
from wakekv.heads.reads import read
from wakekv.heads.wakeups import QUIET


def independent(rng, n_heads=100, n_steps=508, rate=0.004):
    event = rng.random((n_heads, n_steps)) < rate
    event[:, :QUIET] = False
    return event


def rhythmic(rng, n_heads=100, n_steps=508, together=False):
    """Every head wakes each 50th step, at its own phase or all at one."""
    phase = np.zeros(n_heads, int) if together else rng.integers(50, size=n_heads)
    event = (np.arange(n_steps) + phase[:, None]) % 50 == 0
    event[:, :QUIET] = False
    return event


def z_of(event, null, share=0.02, seed=0):
    found = B.bursts(event, seed=seed)
    return B.against(B.top_steps(found.per_step, share), B.top_steps(found.null[null], share))


def test_independent_heads_are_not_bursty():
    found = [B.bursts(independent(np.random.default_rng(seed)), seed=seed) for seed in range(25)]
    for null in B.NULLS:
        z, p = np.array([B.against(B.top_steps(b.per_step, 0.02), B.top_steps(b.null[null], 0.02)) for b in found]).T
        assert abs(z.mean()) < 0.6 and 0.5 < z.std() < 1.6
        assert (p <= 0.05).sum() <= 5  # about one expected of 25


def test_heads_that_wake_together_are_bursty_under_both_nulls():
    for null in B.NULLS:
        z, p = z_of(rhythmic(np.random.default_rng(0), together=True), null)
        assert z > 10 and p == pytest.approx(1 / 201)


def test_the_shift_null_keeps_a_heads_own_rhythm_and_the_shuffle_destroys_it():
    event = rhythmic(np.random.default_rng(0))
    rng = np.random.default_rng(1)
    one = event[:1, QUIET:]
    gaps = {n: [set(np.diff(np.flatnonzero(draw(one, rng)))) for _ in range(20)] for n, draw in B.NULLS.items()}
    assert all(50 in g and len(g) <= 2 for g in gaps["shift"])
    assert any(len(g) > 3 for g in gaps["shuffle"])


@pytest.mark.parametrize("null", [*B.NULLS])
def test_nulls_keep_every_event_and_leave_the_first_steps_empty(null):
    event = independent(np.random.default_rng(0))
    found = B.bursts(event)
    assert found.null[null].shape == (200, 508 - QUIET)
    assert (found.null[null].sum(1) == event.sum()).all()


def test_fano_is_one_for_poisson_and_large_for_bursts():
    rng = np.random.default_rng(0)
    assert B.fano(rng.poisson(0.3, 20000)) == pytest.approx(1, abs=0.05)
    assert B.fano(rhythmic(rng, together=True).sum(0)) > 20
    assert np.isnan(B.fano(np.zeros(10)))


def test_concentration_counts_the_busiest_steps_rounded_up():
    per_step = np.array([0, 5, 1, 0, 3, 0, 0, 0, 0, 1])
    assert B.top_steps(per_step, 0.1) == 5 and B.top_steps(per_step, 0.11) == 8 and B.top_steps(per_step, 1.0) == 10
    for share in (0, 1.5):
        with pytest.raises(InputError):
            B.top_steps(per_step, share)


def test_a_clock_fires_as_often_as_it_may_and_evenly():
    at = B.clock(500, 0.02)
    assert len(at) == 10 and (np.diff(at) == 50).all()
    assert B.clock(0, 0.02).size == 0 and len(B.clock(3, 0.02)) == 1


def test_the_signal_trigger_fires_one_step_after_the_alarms():
    assert B.after_most_alarms(np.array([0, 1, 9, 0, 7, 99]), 0.3).tolist() == [3, 5]
    assert B.after_most_alarms(np.array([4]), 0.5).size == 0


def woken(trace, event):
    mass = np.where(event, 0.8, 0).astype(np.float32)
    zero = np.zeros_like(mass)
    return read(replace(trace, needle_mass=mass, sink_mass=zero, local_mass=zero))


def test_burst_table_pools_prompts_and_shows_what_chance_gives(make_trace):
    many, apart = [], []
    for seed in range(5):
        trace = make_trace(n_steps=208, heads_per_layer=10, seed=seed)
        many.append(woken(trace, rhythmic(np.random.default_rng(seed), 20, 208, together=True)))
        apart.append(woken(trace, rhythmic(np.random.default_rng(seed), 20, 208)))
    rows = {(r["quantity"], r["share"]): r for r in B.burst_table(many)}
    best = rows["coarse_recall", 0.02]
    assert best["estimate"] == 1.0 and best["n_events"] == 5 * 20 * 4 and best["n"] == 5
    assert best["shift_p"] < 0.01 and best["shift_mean"] < 0.5
    assert rows["random_trigger", 0.02]["estimate"] == pytest.approx(4 / 200)
    assert rows["periodic_trigger", 0.05]["estimate"] < 0.3
    assert rows["fano", None]["estimate"] > 10 > rows["fano", None]["shuffle_mean"]
    rows = {(r["quantity"], r["share"]): r for r in B.burst_table(apart)}
    assert rows["coarse_recall", 0.02]["shift_p"] > 0.05
    lone = B.per_log(many)
    assert len(lone) == 5 and all(r["shuffle_p"] < 0.01 and r["concentration"] == 1.0 for r in lone)
    assert repr(lone) == repr(B.per_log(many))


@pytest.mark.parametrize("n_steps", [1, 5, 60])
def test_logs_in_which_nobody_wakes_are_defined(make_trace, n_steps):
    silent = [read(make_trace(needle=(), n_steps=n_steps, seed=s)) for s in range(2)]
    for row in B.burst_table(silent):
        assert np.isnan(row["estimate"]) and np.isnan(row["shift_p"]) and row["n_events"] == 0
    assert all(np.isnan(r["concentration"]) and np.isnan(r["shuffle_p"]) for r in B.per_log(silent))
