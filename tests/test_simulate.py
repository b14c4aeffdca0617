"""One pass over the wants equals the step-by-step definition equals brute force, at every budget."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import OrderedDict

import numpy as np
import pytest

from wakekv import kernels
from wakekv.errors import InputError
from wakekv.logs.demand import Demand
from wakekv.policies import POLICIES, Ledger, Policy
from wakekv.simulation import simulate
from wakekv.simulation.simulate import curves, replay

COUNTS = ("misses", "missed_weight", "mean_pages", "peak_pages", "fetched", "stall_steps", "head_misses")
PAIRS = int(os.environ.get("WAKEKV_PAIRS", "1500"))  # (trace, budget) pairs a check goes through; `make agree`: 10^5
VARIANTS = {
    "as published": {},
    "pooled over a layer": {"scope": "layer"},
    "pooled over the model": {"scope": "model"},
    "trimmed every second step": {"every": 2},
    "trimmed every third step": {"every": 3},
    "from the prompt": {"start": "prompt"},
    "once": {"start": "prompt", "every": 0},
    "a floor of 0.2 in each layer": {"scope": "layer", "floor": 0.2},
    "a floor of 0.5 in the model, every fourth step": {"scope": "model", "floor": 0.5, "every": 4},
}


def random_demand(rng, first_touch, n_heads=None, n_steps=20, n_pages=8, most=5) -> Demand:
    created = np.maximum(np.sort(rng.integers(-n_steps // 2, n_steps, n_pages)), -1)
    created[0] = -1
    wants = []
    for _ in range(n_heads or rng.integers(1, 5)):
        steps = []
        for t in range(n_steps):
            there = np.flatnonzero(created <= t)
            pages = rng.choice(there, rng.integers(0, min(most, len(there)) + 1), replace=False)
            steps.append({int(p): float(rng.integers(1, 4)) for p in pages})
        wants.append(steps)
    rows = rng.random((len(wants), 32, n_pages)).astype(np.float32)
    layer = np.arange(len(wants)) // 2
    keys = rng.normal(size=(len(wants), n_pages, 4)).astype(np.float32)
    return Demand.from_lists(wants, created, layer, first_touch=first_touch, prompt_rows=rows, key_means=keys)


def cycle(n_pages, n_steps, first_touch="cold") -> Demand:
    """One head that wants one page a step, round and round: the trace on which recency is at its worst."""
    rows, keys = np.ones((1, 32, n_pages), np.float32), np.eye(n_pages, dtype=np.float32)[None]
    wants = [[[t % n_pages] for t in range(n_steps)]]
    return Demand.from_lists(wants, first_touch=first_touch, prompt_rows=rows, key_means=keys)


def demands(seed, first_touch):
    """Random and adversarial demands without end."""
    rng = np.random.default_rng(seed)
    for n in itertools.count():
        yield cycle(2 + n % 7, 12 + n % 9, first_touch) if n % 8 == 7 else random_demand(rng, first_touch)


def assert_same(one, other, what):
    for name in COUNTS:
        a, b = getattr(one, name), getattr(other, name)
        assert np.allclose(a, b), f"{what}: {name} is {a} in one pass and {b} step by step"


@pytest.mark.parametrize("first_touch", ["cold", "warm"])
@pytest.mark.parametrize("name", POLICIES)
def test_one_pass_equals_the_replay_at_every_budget(name, first_touch):
    pairs = 0
    for demand in demands(7, first_touch):
        for variant, changes in VARIANTS.items():
            policy = POLICIES[name].but(**changes)
            whole = curves(demand, policy)
            assert list(whole.budgets) == list(range(1, demand.n_pages + 1))
            for budget in whole.budgets:
                assert_same(whole.at([budget]), replay(demand, policy, budget), f"{name}, {variant}, B={budget}")
                pairs += 1
        if pairs >= PAIRS / (2 * len(POLICIES)):
            break


@pytest.mark.parametrize("first_touch", ["cold", "warm"])
def test_long_logs_and_wide_steps_make_no_difference(first_touch):
    """Rows of bits that are packed, steps of more than a word of them, more steps than are taken at once."""
    rng = np.random.default_rng(23)
    wide = random_demand(rng, first_touch, n_heads=2, n_steps=60, n_pages=220, most=150)
    long = random_demand(rng, first_touch, n_heads=2, n_steps=600, n_pages=40)
    for demand in (wide, long):
        for name in ("reactive", "evict", "shadow", "adakv", "frozen"):
            for changes in ({}, {"start": "prompt"}, {"every": 550}, {"scope": "layer", "floor": 0.5, "every": 0}):
                policy = POLICIES[name].but(**changes)
                whole = curves(demand, policy)
                for budget in (9, 100 if demand is wide else 20):
                    assert_same(whole.at([budget]), replay(demand, policy, budget), f"{name}, {changes}, B={budget}")


def test_the_order_among_all_heads_is_that_of_the_demand():
    rng = np.random.default_rng(29)
    for n_steps in (1, 7, 40):
        demand = random_demand(rng, "cold", n_heads=6, n_steps=n_steps, n_pages=12)
        weight = np.where(demand.weight == 1, rng.choice([0.0, -0.0], demand.n_wants), demand.weight * 1e-3)
        demand = dataclasses.replace(demand, weight=weight.astype(np.float32))
        stamps, expected = 1000, np.full((demand.n_heads, demand.n_pages), -1, np.int64)
        base = (demand.step_of.astype(np.int64) + 1) * stamps + expected.size + demand.order
        np.maximum.at(expected, (demand.head_of, demand.page), base)
        for stops in ([n_steps], [1, n_steps], [n_steps // 2, n_steps - 1, n_steps]):
            found, start = np.full_like(expected, -1), 0
            for stop in stops:
                bits = demand.weight.view(np.uint32)
                kernels.stamp(start, stop, demand.ptr, demand.page, bits, stamps, found)
                start = stop
            assert (found == expected).all()


def brute_force_recency(demand: Demand, budget: int, reversible: bool) -> int:
    """The batch step in sets and sorts, written without the ledger, the trim or the kernels."""
    misses = 0
    for h in range(demand.n_heads):
        cold = demand.first_touch == "cold"
        known = set() if cold else {int(p) for p in np.flatnonzero(demand.created < 0)}
        order = sorted(known)  # least recent first, resident or not
        resident = set(order[-budget:])
        for t in range(demand.n_steps):
            wants = [int(p) for p in demand.page[demand.ptr[h, t] : demand.ptr[h, t + 1]]]
            misses += sum(p in known and p not in resident for p in wants)
            new = (
                [p for p in wants if p not in known] if cold else [int(p) for p in np.flatnonzero(demand.created == t)]
            )
            front = [p for p in new if p not in wants] + wants
            order = [p for p in order if p not in front] + front
            known.update(front)
            resident.update(front if reversible else new)
            resident = set([p for p in order if p in resident][-budget:])
    return misses


@pytest.mark.parametrize("first_touch", ["cold", "warm"])
@pytest.mark.parametrize("name,reversible", [("reactive", True), ("evict", False)])
def test_recency_equals_brute_force(name, reversible, first_touch):
    for demand, _ in zip(demands(3, first_touch), range(PAIRS // 50), strict=False):
        whole = curves(demand, POLICIES[name])
        for budget, misses in zip(whole.budgets, whole.misses, strict=True):
            assert misses == brute_force_recency(demand, budget, reversible)


def least_misses(demand: Demand, budget: int) -> int:
    """The fewest misses any demand-fetching schedule can have: all resident sets tried, one head, few pages."""
    cold = demand.first_touch == "cold"
    known = frozenset() if cold else frozenset(int(p) for p in np.flatnonzero(demand.created < 0))

    def subsets(pages):
        return map(frozenset, itertools.combinations(sorted(pages), min(budget, len(pages))))

    cost = dict.fromkeys(subsets(known), 0)
    for t in range(demand.n_steps):
        wants = frozenset(int(p) for p in demand.page[demand.ptr[0, t] : demand.ptr[0, t + 1]])
        new = wants - known if cold else frozenset(int(p) for p in np.flatnonzero(demand.created == t))
        after: dict[frozenset, int] = {}
        for resident, so_far in cost.items():
            total = so_far + len((wants & known) - resident)
            for kept in subsets(resident | wants | new):
                after[kept] = min(after.get(kept, total), total)
        known, cost = known | wants | new, after
    return min(cost.values())


@pytest.mark.parametrize("first_touch", ["cold", "warm"])
def test_the_optimum_is_the_least_any_schedule_can_miss(first_touch):
    rng = np.random.default_rng(5)
    for _ in range(PAIRS // 60):
        demand = random_demand(rng, first_touch, n_heads=1, n_steps=9, n_pages=5)
        whole = curves(demand, POLICIES["optimum"])
        assert [least_misses(demand, b) for b in whole.budgets] == list(whole.misses)


def ordered_dict_misses(steps, births, prompt, budget) -> int:
    """steps: the wants of each; births: the pages that exist from each on; prompt: those there from the start."""
    cache, seen, misses = OrderedDict.fromkeys(prompt[-budget:]), set(prompt), 0

    def enter(page):
        cache[page] = None
        cache.move_to_end(page)
        if len(cache) > budget:
            cache.popitem(last=False)

    for pages, born in zip(steps, births, strict=True):
        for page in born:
            enter(page)
        for page in pages:
            misses += page in seen and page not in cache
            enter(page)
            seen.add(page)
        seen.update(born)
    return misses


@pytest.mark.parametrize("first_touch", ["cold", "warm"])
def test_the_sequential_convention_is_an_ordered_dict(first_touch):
    for demand, _ in zip(demands(11, first_touch), range(20), strict=False):
        whole = curves(demand, POLICIES["reactive"], convention="sequential")
        warm, n = first_touch == "warm", demand.n_steps
        births = [np.flatnonzero(demand.created == t).tolist() if warm else [] for t in range(-1, n)]
        wants = [np.split(demand.page[ptr[0] : ptr[-1]], ptr[1:-1] - ptr[0]) for ptr in demand.ptr]
        for budget, misses in zip(whole.budgets, whole.misses, strict=True):
            assert misses == sum(
                ordered_dict_misses([pages.tolist() for pages in steps], births[1:], births[0], budget)
                for steps in wants
            )


@pytest.mark.parametrize("first_touch", ["cold", "warm"])
@pytest.mark.parametrize("name", ["reactive", "evict"])
def test_the_sequential_definition_gives_what_one_pass_gives(name, first_touch):
    for demand, _ in zip(demands(17, first_touch), range(20), strict=False):
        whole = curves(demand, POLICIES[name], convention="sequential")
        for budget in whole.budgets:
            assert_same(whole.at([budget]), replay(demand, POLICIES[name], budget, convention="sequential"), name)


def test_batch_and_sequential_agree_when_a_step_wants_one_page():
    demand = cycle(5, 40)
    for name in ("reactive", "evict"):
        assert_same(curves(demand, POLICIES[name]), curves(demand, POLICIES[name], convention="sequential"), name)


def test_the_sequential_convention_is_refused_where_it_has_no_meaning():
    for name in ("full", "frozen", "optimum", "shadow"):
        with pytest.raises(InputError, match="sequential"):
            curves(cycle(4, 9), POLICIES[name], convention="sequential")


def test_without_numba_the_numbers_are_the_same(monkeypatch):
    demand = random_demand(np.random.default_rng(1), "cold")
    with_numba = {name: curves(demand, policy) for name, policy in POLICIES.items()}
    monkeypatch.setattr(kernels, "AVAILABLE", False)
    monkeypatch.setattr(simulate, "_sweep", None)
    for name, policy in POLICIES.items():
        assert_same(with_numba[name], curves(demand, policy), name)


def test_evict_beats_reactive_on_a_cycle_over_one_page_more_than_the_budget():
    budget, n_steps = 7, 80
    demand = cycle(budget + 1, n_steps, "warm")
    reactive, evict = (replay(demand, POLICIES[name], budget).misses[0] for name in ("reactive", "evict"))
    assert reactive == n_steps, "recency misses every want of the cycle"
    assert evict == n_steps // (budget + 1), "what was destroyed never comes back to push out the rest"


@pytest.mark.parametrize("first_touch", ["cold", "warm"])
def test_reactive_never_loses_to_its_own_schedule_made_destructive(first_touch):
    for demand, _ in zip(demands(13, first_touch), range(60), strict=False):
        assert (curves(demand, POLICIES["reactive"]).misses <= curves(demand, POLICIES["shadow"]).misses).all()


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_nothing_reversible_misses_less_than_the_optimum_of_its_scope(scope):
    for demand, _ in zip(demands(17, "cold"), range(20), strict=False):
        floor = curves(demand, POLICIES["optimum"].but(scope=scope)).misses
        for name, policy in POLICIES.items():
            shares = policy.fit(demand).share(Ledger(demand, policy.start))
            every_step = policy.every == 1 and policy.fetch == "miss" and policy.start == "demand"
            if policy.reversible and every_step and (shares <= 1).all():
                assert (floor <= curves(demand, policy.but(scope=scope)).misses).all(), f"{name} beats the optimum"


def test_misses_of_a_reversible_policy_never_rise_with_the_budget():
    for demand, _ in zip(demands(19, "warm"), range(30), strict=False):
        for policy in POLICIES.values():
            if policy.reversible and not policy.floor:
                assert (np.diff(curves(demand, policy).misses) <= 0).all()


def test_per_head_curves_add_up_to_the_whole():
    demand = random_demand(np.random.default_rng(2), "cold", n_heads=4)
    for policy in POLICIES.values():
        whole = curves(demand, policy)
        assert (whole.head_misses.sum(0) == whole.misses).all()


@pytest.mark.parametrize("budget", [0, -1, 9, 2.5])
def test_a_budget_that_cannot_be_met_is_refused_by_name(budget):
    with pytest.raises(InputError, match=f"budget {budget}"):
        curves(cycle(8, 20), POLICIES["reactive"], budgets=[budget])
    with pytest.raises(InputError, match=f"budget {budget}"):
        replay(cycle(8, 20), POLICIES["reactive"], budget)


def test_a_policy_without_a_rank_or_with_nan_is_refused():
    class Mute(Policy):
        pass

    class Vague(Policy):
        def rank(self, seen):
            return np.full(seen.known.shape, np.nan)

    with pytest.raises(NotImplementedError, match="Mute"):
        replay(cycle(4, 9), Mute(), 2)
    with pytest.raises(InputError, match="not-a-number"):
        curves(cycle(4, 9), Vague())


def test_a_floor_guarantees_each_head_its_part_of_the_pool():
    rng = np.random.default_rng(3)
    demand = random_demand(rng, "cold", n_heads=4)
    for floor in (0.2, 1.0):
        policy = POLICIES["decayed-reads"].but(scope="model", floor=floor)
        for budget in (1, 2, 4):
            peaks = []
            replay(demand, policy, budget, on_step=lambda t, resident, missed: peaks.append(resident.sum()))  # noqa: B023
            assert max(peaks) <= budget * demand.n_heads
    alone = curves(demand, POLICIES["decayed-reads"]).misses
    assert_all = curves(demand, POLICIES["decayed-reads"].but(scope="model", floor=1.0)).misses
    assert (assert_all <= alone).all(), "with the whole share as a floor, a pool keeps no less than separate budgets"
