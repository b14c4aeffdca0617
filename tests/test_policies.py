"""What every policy must hold to, published, ours or a user's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_simulate import cycle, random_demand

from wakekv.errors import InputError
from wakekv.logs.demand import Demand
from wakekv.policies import POLICIES, Ledger, Policy
from wakekv.policies.offload import adjacent_jaccard
from wakekv.simulation.simulate import curves, replay

FOR_EACH = pytest.mark.parametrize("name", POLICIES)
FIRST_TOUCH = st.sampled_from(["cold", "warm"])
SEEDS = st.integers(0, 2**32 - 1)
# Where heads weigh alike, these go by their place: each but the first among a few heads of equal worth.
BY_PLACE = {"random": "draws a number for each place", "lava": "a layer with less than a page for each head's newest",
            "flexicache": "heads named equally often", "heterocache": "heads with as many neighbours"}  # fmt: skip
FOR_EACH_ONLINE = pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if not policy.offline])


def watch(demand, policy, budget):
    """[(resident, missed) at the end of each step]"""
    seen = []
    replay(demand, policy, budget, on_step=lambda t, resident, missed: seen.append((resident.copy(), missed.copy())))
    return seen


@FOR_EACH
def test_it_keeps_only_pages_that_exist(name):
    demand = random_demand(np.random.default_rng(0), "warm")
    for t, (resident, _) in enumerate(watch(demand, POLICIES[name], 3)):
        assert not resident[:, demand.created > t].any()


@FOR_EACH
def test_the_same_demand_gives_the_same_numbers(name):
    demand = random_demand(np.random.default_rng(0), "cold")
    once, again = curves(demand, POLICIES[name]), curves(demand, POLICIES[name])
    assert (once.misses == again.misses).all() and (once.mean_pages == again.mean_pages).all()


@FOR_EACH_ONLINE
def test_it_is_blind_to_the_future(name):
    policy = POLICIES[name]
    demand = random_demand(np.random.default_rng(4), "warm", n_heads=3)
    before = watch(demand.until(10), policy, 3)
    assert all((a[0] == b[0]).all() for a, b in zip(before, watch(demand, policy, 3), strict=False))


@FOR_EACH
def test_it_is_never_over_its_budget_after_a_trim(name):
    policy = POLICIES[name]
    demand = random_demand(np.random.default_rng(6), "cold", n_heads=4)
    limit = policy.fit(demand).share(Ledger(demand, policy.start))
    for budget in (1, 3):
        for t, (resident, _) in enumerate(watch(demand, policy, budget)):
            if policy.every and (t + 1) % policy.every == 0 and policy.scope == "head":
                assert (resident.sum(1) <= np.floor(limit * budget + 1e-9)).all()


@FOR_EACH
def test_what_it_destroys_never_comes_back(name):
    policy = POLICIES[name].but(reversible=False, fetch="miss")
    demand = random_demand(np.random.default_rng(8), "warm", n_steps=30)
    gone = np.zeros((demand.n_heads, demand.n_pages), bool)
    before = gone.copy()
    for resident, _ in watch(demand, policy, 2):
        gone |= before & ~resident
        assert not (gone & resident).any()
        before = resident


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.nested])
@settings(max_examples=6)
@given(seed=SEEDS, first_touch=FIRST_TOUCH, small=st.integers(1, 7), more=st.integers(1, 7))
def test_what_a_budget_holds_every_larger_one_holds(name, seed, first_touch, small, more):
    """So no head misses more with more pages: what one pass over all budgets rests on."""
    demand = random_demand(np.random.default_rng(seed), first_touch)
    few, many = (watch(demand, POLICIES[name], budget) for budget in (small, min(small + more, demand.n_pages)))
    for (held, missed), (holds, misses) in zip(few, many, strict=True):
        assert not (held & ~holds).any() and not (misses & ~missed).any()


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in BY_PLACE])
@settings(max_examples=6)
@given(seed=SEEDS, order=st.permutations(range(6)))
def test_heads_in_another_order_miss_the_same(name, seed, order):
    rng = np.random.default_rng(seed)
    demand = random_demand(rng, "cold", n_heads=6)
    weight = rng.permutation(demand.n_wants).astype(np.float32) + 1  # no two alike, so that no place settles a tie
    weight = weight[np.lexsort((weight, demand.step_of, demand.head_of))]
    demand = replace(demand, weight=weight, page_tokens=128)
    assume(name != "frozen" or len(set(adjacent_jaccard(demand))) == 6)  # of heads as restless the first stay whole
    whole, moved = curves(demand, POLICIES[name]), curves(demand.select(heads=order), POLICIES[name])
    assert (whole.head_misses[order] == moved.head_misses).all()
    for count in ("misses", "fetched", "mean_pages", "peak_pages", "stall_steps"):
        assert (getattr(whole, count) == getattr(moved, count)).all()


@given(seed=SEEDS, first_touch=FIRST_TOUCH)
def test_full_never_misses_and_never_lets_go(seed, first_touch):
    demand = random_demand(np.random.default_rng(seed), first_touch)
    whole = curves(demand, POLICIES["full"])
    assert not whole.misses.any() and not whole.fetched.any()
    assert (whole.mean_pages == curves(demand, POLICIES["reactive"]).mean_pages[-1]).all()


def test_frozen_keeps_every_page_of_the_least_stable_quarter():
    steady, restless = [[0, 1]] * 20, [[t % 5, 5 + t % 3] for t in range(20)]
    demand = Demand.from_lists([steady, restless, steady, steady])
    assert POLICIES["frozen"].fit(demand).profile == (1,)
    assert curves(demand, POLICIES["frozen"]).head_misses[1].sum() == 0


def test_frozen_does_not_fetch_between_refreshes():
    demand = Demand.from_lists([[[0, 1, 2]] * 16 + [[0]] * 3] * 4)
    policy = POLICIES["frozen"].but(dense=0.0)
    whole = replay(demand, policy, 2)
    first_page_after_refresh = 4 * 3  # page 0 is the least recent of three equally often wanted ones
    assert whole.misses[0] == first_page_after_refresh and whole.fetched[0] == 0


def test_a_policy_of_ten_lines_has_a_curve():
    @dataclass(frozen=True)
    class FirstPages(Policy):
        def rank(self, seen):
            return -np.broadcast_to(np.arange(len(seen.created)), seen.known.shape)

    demand = cycle(6, 60)
    whole = curves(demand, FirstPages())
    assert [replay(demand, FirstPages(), b).misses[0] for b in whole.budgets] == list(whole.misses)
    assert whole.misses[0] > whole.misses[2] > whole.misses[5] == 0


def test_a_wrong_setting_is_named():
    for changes, said in [
        ({"scope": "galaxy"}, "scope"),
        ({"every": -1}, "every"),
        ({"every": 1.5}, "every"),
        ({"floor": 2}, "floor"),
        ({"fetch": "trim", "reversible": False}, "fetch"),
    ]:
        with pytest.raises(InputError, match=said):
            POLICIES["reactive"].but(**changes)


def test_a_floor_may_be_a_whole_share_and_no_more():
    assert POLICIES["pooled"].but(floor=1.0).floor == 1.0
    with pytest.raises(InputError, match="floor"):
        POLICIES["pooled"].but(floor=1.01)


def test_reads_may_fade_at_once_or_never_and_no_faster():
    for keep in (0.0, 1.0):
        assert POLICIES["lfu"].but(keep=keep).keep == keep
    for keep in (-0.1, 1.5):
        with pytest.raises(InputError, match="keep"):
            POLICIES["lfu"].but(keep=keep)


@pytest.mark.parametrize(
    ("name", "when"),
    [("reactive", "decode"), ("duoattention", "offline"), ("snapkv", "prefill"), ("streamingllm", "decode")],
)
def test_a_policy_says_when_it_decides(name, when):
    assert POLICIES[name].when == when


def test_what_was_calibrated_on_other_logs_is_no_upper_bound():
    other = random_demand(np.random.default_rng(3), "warm")
    assert POLICIES["reactive"].held_out(other) is POLICIES["reactive"]
    duo = POLICIES["duoattention"]
    fitted = duo.held_out(other)
    assert duo.offline and not fitted.offline and fitted != duo.but(offline=False)
    assert {name for name, policy in POLICIES.items() if policy.offline} >= {"optimum", "duoattention", "frozen"}
    assert not Policy().offline


def test_wants_are_those_of_the_present_step_unless_another_is_named():
    seen = Ledger(Demand.from_lists([[[1], [0, 2]]]))
    seen.observe()
    seen.observe()
    assert seen.wants()[1].tolist() == seen.wants(1)[1].tolist() == [0, 2] and seen.wants(0)[1].tolist() == [1]
    with pytest.raises(InputError, match="yet to come"):
        seen.wants(2)


def test_decayed_sums_do_not_depend_on_when_they_are_asked_for():
    demand = random_demand(np.random.default_rng(10), "cold")
    often, once = Ledger(demand), Ledger(demand)
    for _ in range(demand.n_steps):
        often.observe()
        once.observe()
        for what in ("reads", "weight", "peak"):
            often.decayed(what, 0.6)
    for what in ("reads", "weight", "peak"):
        assert np.allclose(often.decayed(what, 0.6), once.decayed(what, 0.6))
    assert (once.decayed("reads", 1.0) == once.reads).all()
    assert np.allclose(once.decayed("weight", 0.0), once.weight)


def test_the_future_is_handed_to_the_optimum_alone():
    with pytest.raises(InputError, match="offline"):
        _ = Ledger(cycle(3, 5)).next_use


@pytest.mark.parametrize(
    "steps",
    [
        [[5], [1], [3], [1]],  # page 5 came first, whatever its number
        [[2, 4], [7], [4]],  # of two that came together the first of the text goes
    ],
)
def test_first_in_is_first_out(steps):
    wants = Demand.from_lists([steps])
    assert replay(wants, POLICIES["fifo"], 2).misses == 0
    assert curves(wants, POLICIES["fifo"], [2]).misses[0] == 0
