"""Markers: a planted one is found and holds on the other half, chance finds none, and the missed effect has a size."""

from dataclasses import replace

import numpy as np
import pytest

from wakekv.errors import InputError
from wakekv.heads import markers as M
from wakekv.heads.reads import read

MARKER = 7


def log(make_trace, seed, strength=1.0, n_steps=240, needle=((50, 62),)):
    """A log with 20 kinds of token; `strength` is the chance that a head wakes at the step after token 7."""
    rng = np.random.default_rng(seed)
    trace = make_trace(n_steps=n_steps, seed=seed, needle=needle)
    tokens = trace.tokens.copy()
    emitted = rng.integers(0, 20, n_steps)
    emitted[1::12] = MARKER
    tokens[trace.n_prompt :] = emitted
    mass = np.zeros(trace.needle_mass.shape, np.float32)
    for s in np.flatnonzero(emitted[:-1] == MARKER):
        if s >= 8 and rng.random() < strength:
            mass[rng.integers(8), s + 1] = 0.8
    mass[:, rng.random(n_steps) < 0.02] = 0.8
    zero = np.zeros_like(mass)
    return read(replace(trace, tokens=tokens, needle_mass=mass, sink_mass=zero, local_mass=zero))


@pytest.fixture(scope="module")
def planted(make_trace):
    return [log(make_trace, seed) for seed in range(5)]


@pytest.fixture(scope="module")
def unmarked(make_trace):
    return [log(make_trace, seed, strength=0.0) for seed in range(5)]


def test_burst_follows_is_the_plain_window():
    n = np.array([0, 0, 2, 0, 1, 0, 0])
    assert M.burst_follows(n).tolist() == [False, True, False, True, False, False]
    assert M.burst_follows(n, horizon=2).tolist() == [True, True, True, True, False]
    assert M.burst_follows(n, horizon=3, size=3).tolist() == [False, True, False, False]
    assert M.burst_follows(n[:1]).size == 0 and M.burst_follows(n, horizon=20).size == 0
    for how in ({"horizon": 0}, {"size": 0}):
        with pytest.raises(InputError):
            M.burst_follows(n, **how)


@pytest.mark.parametrize("split", ["steps", "prompts"])
def test_a_planted_marker_is_found_and_holds_on_the_other_half(planted, split):
    found = M.find_markers(planted, split=split)
    assert found.tokens == [MARKER]
    assert found.tested[0]["token"] == MARKER and found.tested[0]["p_bonferroni"] < 1e-6
    assert found.family == len(found.tested) == 20
    assert found.held_out["lift"].lo > 2 and found.held_out["recall"].value > 0.5
    assert found.held_out["precision"].n == (5 if split == "steps" else 2)
    assert found.chance_p < 0.05


def test_rotated_bursts_give_chance(planted):
    assert M.find_markers(planted).by_chance.mean() < 1.0


def test_without_a_marker_none_is_found_and_the_smallest_detectable_effect_is_told(unmarked):
    found = M.find_markers(unmarked)
    assert found.tokens == [] and found.held_out == {}
    median, commonest = found.detectable["median"], found.detectable["commonest"]
    assert found.base_rate < commonest < median < 1
    rows = {r["quantity"]: r for r in M.marker_table(unmarked)}
    assert rows["markers"]["estimate"] == 0 and np.isnan(rows["heldout_f1"]["estimate"])
    assert "no marker" in rows["heldout_f1"]["method"]


def test_the_detectable_rate_is_detected_about_as_often_as_it_says():
    rate = M.detectable_rate(60, 540, 0.1, family=20)
    rng = np.random.default_rng(0)
    token = np.repeat([0, *range(1, 20)], [60] + [28] * 18 + [36])
    hit = 0
    for _ in range(300):
        burst = rng.random(600) < np.where(token == 0, rate, 0.1)
        hit += any(row["marker"] and row["token"] == 0 for row in M.try_tokens(token, burst))
    assert 0.7 < hit / 300 < 0.9


def test_the_detectable_rate_is_undefined_where_nothing_could_be_seen():
    assert np.isnan(M.detectable_rate(5, 20, 0.9, family=20))
    for case in ((0, 10, 0.1, 5), (5, 0, 0.1, 5), (5, 10, 0.0, 5), (5, 10, np.nan, 5), (5, 10, 0.1, 0)):
        assert np.isnan(M.detectable_rate(*case))


def test_rare_tokens_are_not_tested():
    token = np.array([1] * 5 + [2] * 4 + [3] * 30)
    rows = M.try_tokens(token, np.arange(39) % 3 == 0)
    assert sorted(r["token"] for r in rows) == [1, 3]


def test_the_exact_test_guards_small_counts():
    token = np.array([1] * 5 + [2] * 995)
    burst = np.zeros(1000, bool)
    burst[[0, 1]] = burst[500:518] = True  # two of five against a base of 2 %: z is carried away, Fisher less so
    row = M.try_tokens(token, burst)[0]
    assert row["token"] == 1 and row["p"] < 1e-7 < 1e-3 < row["p_exact"]


def test_token_tested_is_the_one_emitted_before_the_burst_not_with_it(make_trace):
    reads = log(make_trace, 0)
    tokens = reads.trace.tokens.copy()
    tokens[reads.trace.n_prompt + 1 :] = tokens[reads.trace.n_prompt : -1].copy()  # now emitted when the head wakes
    late = [replace(reads, trace=replace(reads.trace, tokens=tokens))]
    assert MARKER in M.find_markers([reads]).tokens and MARKER not in M.find_markers(late).tokens


@pytest.mark.parametrize("n_steps", [1, 8, 9, 60])
def test_logs_in_which_nobody_wakes_have_no_marker_and_no_detectable_effect(make_trace, n_steps):
    found = M.find_markers([read(make_trace(needle=(), n_steps=n_steps))])
    assert found.tokens == [] and np.isnan(found.detectable["median"])
    assert len(M.marker_table([read(make_trace(needle=(), n_steps=n_steps))])) > 10


def test_bad_splits_are_refused(planted):
    with pytest.raises(InputError, match="split"):
        M.find_markers(planted, split="half")
    with pytest.raises(InputError, match="at least two logs"):
        M.find_markers(planted[:1], split="prompts")
