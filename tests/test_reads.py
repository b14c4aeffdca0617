"""What one log read: scores by definition, page sets as bits, overlaps beyond chance, drift by a plain loop."""

from dataclasses import replace

import numpy as np
import pytest

from wakekv.errors import InputError
from wakekv.heads.reads import Reads, overlap_beyond_chance, page_sets, poolable, read, shared_pages


def pages_of(trace, head, step):
    positions = np.asarray(trace.positions[head, step]).astype(int)
    return set(positions[positions < np.iinfo(trace.positions.dtype).max] // 16)


def with_manifest(trace, **changes):
    return replace(trace, manifest=trace.manifest | changes)


def restless(trace, seed=0):
    """The same log with page sets that wander: each step a head swaps one position in eight for another."""
    rng = np.random.default_rng(seed)
    positions = np.empty(trace.positions.shape, trace.positions.dtype)
    positions[:, 0] = rng.integers(trace.n_prompt, size=positions[:, 0].shape)
    for step in range(1, trace.n_steps):
        fresh = rng.integers(trace.n_prompt, size=positions[:, 0].shape)
        positions[:, step] = np.where(rng.random(fresh.shape) < 0.125, fresh, positions[:, step - 1])
    return replace(trace, positions=np.sort(positions, axis=-1))


@pytest.fixture(scope="module")
def trace(make_trace):
    return make_trace(n_steps=60, seed=3)


@pytest.fixture(scope="module")
def reads(trace):
    return read(trace)


def test_page_sets_are_the_pages_of_the_logged_positions(trace, reads):
    for head, step in [(0, 0), (3, 17), (7, 59)]:
        bits = np.unpackbits(reads.pages[head, step].view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(bits)) == pages_of(trace, head, step)
        assert reads.size[head, step] == len(pages_of(trace, head, step))
        assert reads.n_pages[head, step] == -(-(trace.n_prompt + step) // 16)


def test_padding_has_no_page_and_the_last_page_counts():
    positions = np.array([[[0, 17, 1023, 65535], [65535] * 4]], np.uint16)
    sets = page_sets(positions, 64)
    assert sets.shape == (1, 2, 1)
    assert int(sets[0, 0, 0]) == 1 | 1 << 1 | 1 << 63 and int(sets[0, 1, 0]) == 0


def test_needle_score_is_the_needles_share_of_what_sinks_and_local_window_leave(trace, reads):
    mass, sink, local = (getattr(trace, f"{n}_mass").astype(float) for n in ("needle", "sink", "local"))
    assert np.allclose(reads.score, mass / (1 - sink - local), atol=1e-5)
    assert reads.score.max() > 0.2  # the made-up heads do read it


def test_a_needle_that_covers_sinks_and_local_window_does_not_explode(make_trace):
    whole = make_trace(needle=((0, 200),), n_prompt=200, n_steps=8)
    score = read(whole).score
    assert score.max() <= 1.0 and score.mean() > 0.5


def test_nothing_outside_sinks_and_window_scores_zero(trace):
    full = replace(
        trace, needle_mass=trace.needle_mass * 0, sink_mass=trace.sink_mass * 0 + 1, local_mass=trace.local_mass * 0
    )
    assert (read(full).score == 0).all()


def test_copy_score_needs_the_needle_and_the_token_just_emitted(trace):
    start, stop = trace.needle[0]
    tokens, top = trace.tokens.copy(), trace.top.copy()
    tokens[trace.n_prompt + 5] = tokens[start + 2]  # emitted at step 5
    tokens[start - 1] = tokens[start + 2]
    top[0, 5], top[1, 5], top[2, 5], top[0, 6] = start + 2, start - 1, start + 3, start + 2
    tokens[start + 3] = tokens[trace.n_prompt + 4]  # the token fed at step 5, which must not count
    copy = read(replace(trace, tokens=tokens, top=top)).copy
    assert copy[0, 5] and not copy[1, 5] and not copy[2, 5] and not copy[0, 6]


def test_an_empty_needle_gives_defined_scores_of_zero(make_trace):
    reads = read(make_trace(needle=()))
    assert not reads.copy.any() and (reads.score == 0).all()


@pytest.mark.parametrize("what", ["needle_mass", "sink_mass", "local_mass", "entropy", "weights"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_one_clear_line(trace, what, value):
    array = getattr(trace, what).copy()
    array[5, 7] = value
    with pytest.raises(InputError, match=f"{what} is not finite at head 5, step 7"):
        read(replace(trace, **{what: array}))


def test_a_one_step_log_is_defined(make_trace):
    reads = read(make_trace(n_steps=1))
    assert np.isnan(reads.rco).all() and np.isnan(reads.drift.median).all() and not reads.drift.event.any()


def test_a_sliding_window_offers_fewer_pages(trace):
    model = trace.manifest["model"] | {"windows": [64, None]}
    reads = read(with_manifest(trace, model=model))
    first_visible = trace.n_prompt - 64
    assert reads.n_pages[0, 0] == -(-trace.n_prompt // 16) - first_visible // 16
    assert reads.n_pages[-1, 0] == -(-trace.n_prompt // 16)


def test_rco_is_one_for_equal_sets_zero_at_chance_and_undefined_when_all_pages_are_taken():
    assert overlap_beyond_chance(5, 5, 5, 100) == 1.0
    assert overlap_beyond_chance(1, 10, 10, 100) == pytest.approx(0.0)
    assert overlap_beyond_chance(0, 10, 10, 100) == 0.0
    assert overlap_beyond_chance(3, 4, 8, 10) == pytest.approx((3 / 4 - 4 / 10) / (1 - 4 / 10))
    assert np.isnan(overlap_beyond_chance(10, 10, 12, 10)) and np.isnan(overlap_beyond_chance(0, 0, 4, 10))


def test_rco_of_random_sets_is_near_zero():
    rng = np.random.default_rng(0)
    sets = np.array([np.isin(np.arange(200), rng.choice(200, 40, replace=False)) for _ in range(400)])
    shared = (sets[1:] & sets[:-1]).sum(1)
    assert overlap_beyond_chance(shared, 40, 40, 200).mean() < 0.05  # cut off at 0, so a little above it


def test_adjacent_rco_follows_the_definition(trace, reads):
    for head, step in [(1, 1), (4, 30)]:
        a, b = pages_of(trace, head, step - 1), pages_of(trace, head, step)
        k, n = min(len(a), len(b)), -(-(trace.n_prompt + step) // 16)
        assert reads.rco[head, step] == pytest.approx(max(0, (min(1, len(a & b) / k) - k / n) / (1 - k / n)))


def test_drift_is_the_plain_loop(make_trace):
    trace, events = restless(make_trace(n_prompt=800, n_steps=80)), 0
    reads = read(trace)
    for head in range(trace.n_heads):
        base, recent = pages_of(trace, head, 0), []
        for step in range(1, trace.n_steps):
            now = pages_of(trace, head, step)
            recent = [*recent, len(now & base) / min(len(now), len(base))][-8:]
            assert reads.drift.median[head, step] == pytest.approx(np.median(recent))
            fell = len(recent) == 8 and np.median(recent) < 0.5
            assert reads.drift.event[head, step] == fell
            if fell:
                base, recent, events = now, [], events + 1
    assert events > 10


def test_shared_pages_counts_what_both_hold():
    assert shared_pages(np.array([0b1011, 1], np.uint64), np.array([0b0110, 1], np.uint64)) == 2


def test_logs_of_several_models_are_not_pooled_and_repetitive_ones_are_left_out(trace):
    def logged(regime="niah", flagged=False):
        prompt = trace.manifest["prompt"] | {"regime": regime}
        return read(with_manifest(trace, prompt=prompt, repetition={"flagged": flagged}))

    good, loop = logged(), logged(flagged=True)
    assert poolable([good, loop]) == [good] and poolable([good, loop], flagged=True) == [good, loop]
    with pytest.raises(InputError, match="repeats itself"):
        poolable([loop])
    for mixed in ([good, logged("cot")], []):
        with pytest.raises(InputError, match="one regime"):
            poolable(mixed)
    assert isinstance(good, Reads) and "niah" in good.name
