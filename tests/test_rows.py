"""What is logged of a row of attention is exact, whatever the floor it was searched above."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakekv.errors import ModelError
from wakekv.recording.rows import Rows

N_LAYERS, N_HEADS, K = 2, 3, 8


def note(rows, logits, layer, start=0):
    """Note rows of `logits` [head, context] of which only those from `start` on are seen; the whole rows of weights."""
    scores = torch.from_numpy(logits[:, start:].astype(np.float32))
    weights = torch.softmax(scores, -1)
    rows.note(layer, scores, weights, start)
    return np.concatenate([np.zeros((len(logits), start), np.float32), weights.numpy()], axis=1)


def assert_logged(got, want):
    for name in ("positions", "weights", "top"):
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    for name in ("needle_mass", "sink_mass", "local_mass", "entropy"):
        np.testing.assert_allclose(got[name], want[name], atol=2e-5, err_msg=name)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    levels=st.sampled_from([None, 2, 5]),  # few levels: ties everywhere
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    needle=st.sampled_from([[], [[0, 3]], [[10, 20], [40, 41]], [[0, 90]]]),
)
@settings(max_examples=60)
def test_logged_step_equals_its_definition(log_rows, seed, lengths, levels, scale, needle):
    rng, rows = np.random.default_rng(seed), Rows(N_LAYERS, K, needle, 100)
    for n in lengths:  # a new length each step, so floors of the last step are often wrong
        whole = []
        for layer in range(N_LAYERS):
            logits = rng.normal(0, 1, (N_HEADS, n)) if levels is None else rng.integers(0, levels, (N_HEADS, n))
            whole.append(note(rows, scale * logits, layer))
        assert_logged(rows.take(), log_rows(np.concatenate(whole), needle, K, np.uint16))


def test_logged_steps_stay_exact_when_floors_carry_over(log_rows):
    rng, rows, needle = np.random.default_rng(0), Rows(N_LAYERS, K, [[5, 9]], 400), [[5, 9]]
    logits = rng.normal(0, 2, (N_LAYERS, N_HEADS, 400))
    for n in range(300, 330):
        logits += rng.normal(0, 0.1, logits.shape)
        whole = [note(rows, logits[layer][:, :n], layer) for layer in range(N_LAYERS)]
        assert_logged(rows.take(), log_rows(np.concatenate(whole), needle, K, np.uint16))


@pytest.mark.parametrize("window", [3, 8, 40])
def test_positions_of_a_window_are_absolute(log_rows, window):
    rng, needle = np.random.default_rng(1), [[50, 60]]
    rows = Rows(N_LAYERS, K, needle, 100)
    for n in range(70, 75):
        logits = rng.normal(0, 2, (N_LAYERS, N_HEADS, n))
        whole = [note(rows, logits[0], 0), note(rows, logits[1], 1, start=n - window)]
        want = log_rows(np.concatenate(whole), needle, K, np.uint16)
        unseen = (want["positions"] < n - window) & (np.arange(2 * N_HEADS) >= N_HEADS)[:, None]
        seen = np.where(unseen, 65535, want["positions"])  # beyond the window there is nothing to read
        want["positions"] = np.sort(seen, axis=1)
        order = np.argsort(seen, axis=1, kind="stable")
        want["weights"] = np.take_along_axis(want["weights"], order, 1)
        assert_logged(rows.take(), want)


def test_positions_widen_for_long_contexts():
    rows = Rows(1, 4, [], 70_000)
    note(rows, np.arange(66_000)[None] / 1000, 0)
    step = rows.take()
    assert step["positions"].dtype == step["top"].dtype == np.uint32
    assert step["positions"].tolist() == [[65_996, 65_997, 65_998, 65_999]]


def test_a_layer_that_logged_nothing_is_named():
    rows = Rows(3, K, [], 100)
    for layer in (0, 2):
        note(rows, np.zeros((N_HEADS, 20)), layer)
    with pytest.raises(ModelError, match="layer 1 logged nothing at step 0"):
        rows.take()


def test_a_layer_that_logs_twice_is_refused():
    rows = Rows(2, K, [], 100)
    note(rows, np.zeros((N_HEADS, 20)), 1)
    with pytest.raises(ModelError, match="layer 1 attends twice in step 0"):
        note(rows, np.zeros((N_HEADS, 20)), 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("step", [0, 2])
def test_weights_that_are_not_numbers_name_layer_step_and_the_way_out(bad, step):
    rows = Rows(2, K, [], 100)
    for _ in range(step):
        note(rows, np.zeros((N_HEADS, 20)), 0)
        note(rows, np.zeros((N_HEADS, 20)), 1)
        rows.take()
    broken = np.zeros((N_HEADS, 20))
    broken[1, 7] = bad
    note(rows, np.zeros((N_HEADS, 20)), 0)
    with pytest.raises(ModelError, match=f"layer 1 .* not numbers in the pass of step {step}: .*float32"):
        note(rows, broken, 1)
        rows.take()
