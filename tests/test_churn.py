"""Churn on logs whose answer is known."""

from dataclasses import replace

import numpy as np
import pytest
from statsmodels.duration.survfunc import SurvfuncRight

from wakekv.errors import InputError
from wakekv.heads.churn import (
    churn_table,
    drift_sweep,
    jaccard,
    jaccard_of_random_pairs,
    lowest_medians,
    mean_rco,
    rolling_mean,
    spells,
    survival,
)
from wakekv.heads.reads import drift, read


@pytest.fixture(scope="module")
def many(make_trace):
    return [read(make_trace(n_steps=60, seed=seed)) for seed in range(6)]


def frozen_from(trace, step):
    """The same log with every head reading the same positions from `step` on."""
    positions = trace.positions.copy()
    positions[:, step:] = positions[:, step : step + 1]
    return replace(trace, positions=positions)


def test_jaccard_is_by_definition_and_undefined_for_two_empty_sets():
    active = np.array([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 0, 0]], bool)
    found = jaccard(active)
    assert found[:3].tolist() == [0.5, 1 / 3, 0.0] and np.isnan(found[3])


def test_steady_heads_have_jaccard_one_and_random_heads_no_more_than_random_pairs():
    rng = np.random.default_rng(0)
    steady = np.repeat(rng.random((50, 1)) < 0.3, 300, axis=1)
    assert (jaccard(steady) == 1).all()
    noise = rng.random((50, 300)) < 0.3
    assert np.nanmean(jaccard(noise)) == pytest.approx(np.nanmean(jaccard_of_random_pairs(noise)), abs=0.02)
    slow = np.repeat(rng.random((50, 30)) < 0.3, 10, axis=1)
    assert np.nanmean(jaccard(slow)) > 3 * np.nanmean(jaccard_of_random_pairs(slow))


def test_random_pairs_never_pair_a_step_with_itself():
    alternating = np.tile([[True, False], [False, True]], 1)
    assert (jaccard_of_random_pairs(alternating) == 0).all()
    assert jaccard_of_random_pairs(alternating[:, :1]).size == 0


def test_heads_that_read_the_same_pages_are_stable_and_never_drift(make_trace):
    still = read(frozen_from(make_trace(n_prompt=400), 0))
    for against in ("previous", "first"):
        assert (mean_rco(still, against=against) == 1).all()
    assert not still.drift.event.any()
    assert (lowest_medians(still, [8]) == 1).all()


def test_mean_rco_against_the_first_of_each_window_is_the_plain_loop(many):
    reads = many[0]
    ours = mean_rco(reads, window=16, against="first")
    bits = np.unpackbits(reads.pages.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    for head in range(3):
        values = []
        for t in range(60):
            first, n = t - t % 16, reads.n_pages[head, t]
            k = min(reads.size[head, t], reads.size[head, first])
            if t != first and n > k:
                shared = (bits[head, t] & bits[head, first]).sum()
                values.append(max(0, (shared / k - k / n) / (1 - k / n)))
        assert ours[head] == pytest.approx(np.mean(values))


def test_mean_rco_refuses_unknown_readings(many):
    with pytest.raises(InputError, match="against"):
        mean_rco(many[0], against="last")
    with pytest.raises(InputError, match="window"):
        mean_rco(many[0], window=1)


def test_rolling_mean_leaves_undefined_values_out():
    x = np.array([[1.0, np.nan, 3.0, 5.0, np.nan, np.nan]])
    found = rolling_mean(x, 2)[0]
    assert found[:4].tolist() == [1, 3, 4, 5] and np.isnan(found[4])


@pytest.mark.parametrize(("window", "below"), [(8, 0.5), (4, 0.7), (16, 0.4)])
def test_the_sweep_agrees_with_the_events_at_every_setting(many, window, below):
    for reads in many:
        assert ((lowest_medians(reads, [window])[0] < below) == drift(reads, below, window).event.any(1)).all()


def test_the_drift_fraction_rises_with_the_threshold_and_windows_longer_than_the_log_find_none(many):
    rows = drift_sweep(many, [0.2, 0.5, 0.9], [8, 100])
    assert [r["estimate"] for r in rows[:3]] == sorted(r["estimate"] for r in rows[:3]) and rows[2]["estimate"] > 0
    assert all(r["estimate"] == 0 for r in rows[3:])


def test_one_planted_change_of_pages_is_one_drift_event(make_trace):
    trace = make_trace(n_prompt=800)
    positions = np.tile(np.arange(16, dtype=trace.positions.dtype) * 16, (trace.n_heads, trace.n_steps, 1))
    positions[0, 20:] += 16 * 16  # head 0 leaves all its pages for good at step 20
    positions[1, 20:25] += 16 * 16  # head 1 for five steps, enough for a median of eight
    positions[2, 20:23] += 16 * 16  # head 2 for three, too few
    event = read(replace(trace, positions=positions)).drift.event
    assert np.argwhere(event).tolist() == [[0, 24], [1, 24], [1, 32]]  # head 1 drifts back to where it was


def test_spells_are_runs_with_both_ends_marked():
    found = spells(np.array([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]], bool))
    assert found.head.tolist() == [0, 0, 0, 1]
    assert found.length.tolist() == [2, 3, 1, 6]
    assert found.reading.tolist() == [False, True, False, True]
    assert found.ended.tolist() == [True, True, False, False]
    assert found.from_start.tolist() == [True, False, False, True]


def test_survival_is_kaplan_meier_and_recovers_a_planted_half_life_despite_censoring():
    rng = np.random.default_rng(0)
    logs = []
    for _ in range(8):
        active = np.zeros((60, 120), bool)
        for head in range(60):
            t, state = 0, False
            while t < 120:
                n = rng.geometric(0.05 if state else 0.2)
                active[head, t : t + n] = state
                t, state = t + n, not state
        logs.append(spells(active))
    found = survival(logs, reading=True)
    assert found.median.lo <= 14 <= found.median.hi + 1 and found.median.value in (13, 14, 15)  # ln 2 / 0.05 is 13.9
    assert found.n_censored > 100
    length = np.concatenate([s.length[s.reading & ~s.from_start] for s in logs])
    ended = np.concatenate([s.ended[s.reading & ~s.from_start] for s in logs])
    assert np.allclose(found.share, SurvfuncRight(length, ended).surv_prob)
    assert np.mean(length[ended]) < 0.9 * 20 < 20  # what leaving out the censored ones would have claimed
    assert (found.lo <= found.share + 1e-9).all() and (found.share <= found.hi + 1e-9).all()


def test_survival_without_spells_or_ends_is_undefined_not_wrong():
    resting = spells(np.zeros((3, 20), bool))
    none = survival([resting], reading=True)
    assert none.n_spells == 0 and np.isnan(none.median.value)
    assert survival([resting], reading=False).n_left_out == 3
    never_ends = survival([resting, resting], reading=False, from_start=True)
    assert never_ends.n_censored == never_ends.n_spells == 6 and np.isnan(never_ends.median.value)


def test_churn_table_pools_prompts_and_counts_what_it_skipped(many):
    rows = {r["quantity"]: r for r in churn_table(many)}
    row = rows["adjacent_jaccard_continuous"]
    per_log = [jaccard(reads.active("continuous")) for reads in many]
    assert row["estimate"] == pytest.approx(np.nanmean(np.concatenate(per_log)))
    assert row["n_used"] + row["n_skipped"] == 6 * 59 and row["n"] == 6 and row["unit"] == "prompts"
    assert row["lo"] <= row["estimate"] <= row["hi"] and "bootstrap" in row["method"]
    assert rows["drift_fraction"]["estimate"] == pytest.approx(np.mean([r.drift.event.any(1) for r in many]))
    assert rows["drift_fraction"]["n_used"] == 6 * 8


def test_churn_without_a_needle_or_with_one_step_is_undefined_and_counted(make_trace):
    rows = {r["quantity"]: r for r in churn_table([read(make_trace(needle=(), seed=s)) for s in range(5)])}
    assert np.isnan(rows["adjacent_jaccard_binary"]["estimate"])
    assert rows["adjacent_jaccard_binary"]["n_skipped"] == 5 * 39
    assert "undefined" in rows["adjacent_jaccard_binary"]["method"]
    rows = {r["quantity"]: r for r in churn_table([read(make_trace(n_steps=1))])}
    assert np.isnan(rows["mean_rco"]["estimate"]) and np.isnan(rows["unstable_fraction"]["estimate"])
    assert rows["drift_fraction"]["estimate"] == 0 and rows["drift_fraction"]["descriptive"]


def test_the_same_logs_give_the_same_table(many):
    assert repr(churn_table(many)) == repr(churn_table(many))
