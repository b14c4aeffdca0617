"""Prefetching: without alarms it is reactive itself, knowing the future it misses nothing, and each page is counted."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from wakekv.errors import InputError
from wakekv.heads import prefetch as prefetching
from wakekv.heads.prefetch import predictors, prefetch, prefetch_table
from wakekv.heads.reads import read
from wakekv.heads.wakeups import FIRST, SIGNALS
from wakekv.logs.demand import Demand, demand
from wakekv.policies import POLICIES
from wakekv.simulation.replay import replay


@pytest.fixture(scope="module", params=["cold", "warm"])
def wants(request, make_trace):
    return demand(make_trace(n_prompt=400, n_steps=60, seed=4), first_touch=request.param, k=16)


def plain(wants, alarm, budget, ask, exact):
    """The same rule with an OrderedDict a head, last = most recent, and a list of demoted pages, last = newest."""
    misses, moved, used = (np.zeros(alarm.shape, int) for _ in range(3))
    for h in range(wants.n_heads):
        resident, reservoir, ahead, seen = OrderedDict(), [], set(), set()

        def trim(resident=resident, reservoir=reservoir, ahead=ahead):
            while len(resident) > budget:
                page, _ = resident.popitem(last=False)
                reservoir.append(page)
                ahead.discard(page)

        def bring(page, resident=resident, reservoir=reservoir):
            if page in reservoir:
                reservoir.remove(page)
            resident[page] = None
            resident.move_to_end(page)

        born = {t: [int(p) for p in np.flatnonzero(wants.created == t)] for t in range(-1, wants.n_steps)}
        warm = wants.first_touch == "warm"
        for page in born[-1] if warm else ():
            bring(page)
        trim()
        for t in range(wants.n_steps):
            pages = [int(p) for p in wants.page[wants.ptr[h, t] : wants.ptr[h, t + 1]]]
            if t and alarm[h, t - 1]:
                chosen = [p for p in reversed(pages) if p in reservoir] if exact else reservoir[::-1]
                chosen = chosen[:ask]
                for page in chosen if exact else reversed(chosen):
                    bring(page)
                    ahead.add(page)
                moved[h, t] = len(chosen)
            misses[h, t] = sum(p in reservoir for p in pages)
            used[h, t] = len(ahead & set(pages))
            ahead -= set(pages)
            for page in (born[t] if warm else []) + pages:
                bring(page)
            seen.update(pages)
            trim()
    return misses, moved, used


@pytest.mark.parametrize("budget", [1, 3, 8, 20])
def test_without_alarms_it_is_reactive_itself(wants, budget):
    ours = prefetch(wants, np.zeros((wants.n_heads, wants.n_steps), bool), budget)
    assert (ours.misses.sum(1) == replay(wants, POLICIES["reactive"], budget).head_misses[:, 0]).all()
    assert ours.misses.sum() > 0 and not ours.moved.any() and not ours.used.any()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("budget", "ask"), [(2, 3), (6, 2), (6, 100), (12, 4)])
def test_prefetching_is_the_plain_loop(wants, budget, ask, exact):
    alarm = np.random.default_rng(budget).random((wants.n_heads, wants.n_steps)) < 0.2
    ours = prefetch(wants, alarm, budget, ask, exact)
    for name, expected in zip(("misses", "moved", "used"), plain(wants, alarm, budget, ask, exact), strict=True):
        assert np.array_equal(getattr(ours, name), expected), name
    assert ours.moved.sum() > 0


def test_knowing_the_next_wants_saves_every_miss_after_the_first_step_and_moves_nothing_in_vain(wants):
    always = np.ones((wants.n_heads, wants.n_steps), bool)
    ours = prefetch(wants, always, 6, ask=1000, exact=True)
    assert ours.misses[:, 1:].sum() == 0 and np.array_equal(ours.moved, ours.used)
    assert ours.moved.sum() > 0


def test_asking_for_nothing_changes_nothing(wants):
    alarm = np.ones((wants.n_heads, wants.n_steps), bool)
    none = prefetch(wants, alarm & False, 6)
    assert np.array_equal(prefetch(wants, alarm, 6, ask=0).misses, none.misses)


def test_a_prefetch_that_is_not_used_can_cost_a_miss():
    # budget 2: page 0 is demoted, brought back in vain at step 3, and pushes out page 1, which step 4 wants
    wants = Demand.from_lists([[[0], [1], [2], [2], [1]]])
    quiet = prefetch(wants, np.zeros((1, 5), bool), 2)
    alarmed = prefetch(wants, np.array([[0, 0, 1, 0, 0]], bool), 2)
    assert quiet.misses.sum() == 0 and alarmed.misses.tolist() == [[0, 0, 0, 0, 1]]
    assert alarmed.moved.sum() == 1 and alarmed.used.sum() == 0


def test_alarms_that_do_not_fit_are_refused(wants):
    with pytest.raises(InputError, match="do not fit"):
        prefetch(wants, np.zeros((1, 1), bool))
    for bad in ({"budget": 0}, {"ask": -1}):
        with pytest.raises(InputError, match="at least"):
            prefetch(wants, np.zeros((wants.n_heads, wants.n_steps), bool), **bad)


def returning(trace, foretold):
    """Heads read pages 3 and 5 in turn, and pages 1 and 4 at wake-ups alone, which entropy foretells or not."""
    rng = np.random.default_rng(trace.manifest["prompt"]["seed"])
    shape = trace.needle_mass.shape
    mass, entropy = np.zeros(shape, np.float32), rng.normal(3, 0.1, shape).astype(np.float32)
    positions = np.tile(np.arange(48, 64, dtype=trace.positions.dtype), (*shape, 1))
    positions[:, ::2] += 32
    for head in range(shape[0]):
        for t in np.arange(50, 150, 40) + rng.integers(8):
            mass[head, t] = 0.8
            positions[head, t] = np.arange(16, 32)
            positions[head, t + 1] = np.arange(64, 80)
            entropy[head, t - 1] += 3 * foretold
    zero = np.zeros(shape, np.float32)
    changed = {"needle_mass": mass, "sink_mass": zero, "local_mass": zero, "entropy": entropy, "positions": positions}
    return read(replace(trace, **changed))


def rows_of(table, **where):
    (row,) = [r for r in table if all(r[k] == v for k, v in where.items())]
    return row


def test_a_signal_that_foretells_saves_what_the_perfect_one_saves_and_noise_does_not(make_trace):
    traces = [make_trace(n_steps=160, seed=s) for s in range(5)]
    told = prefetch_table([returning(t, True) for t in traces], budget=2, ask=2)
    noise = prefetch_table([returning(t, False) for t in traces], budget=2, ask=2)
    for table in (told, noise):
        assert rows_of(table, predictor="perfect_what", metric="misses_saved")["estimate"] == 1.0
        assert rows_of(table, predictor="perfect_what", metric="pages_in_vain_per_step")["estimate"] == 0.0
    good = rows_of(told, predictor="entropy_trend", metric="misses_saved_at_wakeups")
    assert (
        good["estimate"] == rows_of(told, predictor="perfect_when", metric="misses_saved_at_wakeups")["estimate"] > 0.9
    )
    assert rows_of(told, predictor="entropy_trend", metric="misses_saved_above_random")["lo"] > 0.1
    assert rows_of(noise, predictor="entropy_trend", metric="misses_saved_at_wakeups")["estimate"] < 0.3


def test_predictors_are_every_signal_and_what_they_must_beat_and_start_together(make_trace):
    found = predictors(read(make_trace(n_steps=60)))
    assert set(found) == {*SIGNALS, "ensemble", "woke_recently", "always", "perfect_when", "perfect_what"}
    assert not any(alarm[:, :FIRST].any() for alarm in found.values())
    assert found["always"][:, FIRST:].all()


@pytest.mark.parametrize("n_steps", [1, 20, 50])
def test_logs_too_short_or_without_wakeups_are_defined(make_trace, n_steps):
    table = prefetch_table([read(make_trace(needle=(), n_steps=n_steps))])
    assert np.isnan(rows_of(table, predictor="perfect_when", metric="pages_used")["estimate"])


@pytest.mark.parametrize("exact", [False, True])
def test_compiled_or_not_it_counts_the_same(wants, exact, monkeypatch):
    alarm = np.random.default_rng(2).random((wants.n_heads, wants.n_steps)) < 0.3
    compiled = prefetch(wants, alarm, 4, 3, exact)
    for name in ("_push", "_drop", "_replay"):
        loop = getattr(prefetching, name)
        monkeypatch.setattr(prefetching, name, getattr(loop, "py_func", loop))
    plain = prefetch(wants, alarm, 4, 3, exact)
    assert compiled.used.any() and all((getattr(compiled, n) == getattr(plain, n)).all() for n in vars(plain))
