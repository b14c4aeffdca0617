"""What every policy costs on a real log, to the last miss. A change here changes results: say so where it is made.

`python tests/micro.py` writes the counts anew (see there).
"""

from __future__ import annotations

import json

import pytest
from micro import BUDGETS, COUNTED, GOLDEN, ROUNDED, counts, micro

from wakekv.policies import POLICIES
from wakekv.simulation.replay import replay

COUNTS = json.loads((GOLDEN / "counts.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=["cold", "warm"])
def wants(request):
    return micro(request.param)


def test_every_policy_has_golden_counts():
    assert list(COUNTS) == list(POLICIES), "python tests/micro.py writes them"


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_costs_what_it_cost(name, wants):
    found, golden = counts(wants, POLICIES[name]), COUNTS[name][wants.first_touch]
    assert {n: found[n] for n in COUNTED} == {n: golden[n] for n in COUNTED}
    for number in ROUNDED:
        assert found[number] == pytest.approx(golden[number], abs=2e-4), number


def test_the_golden_counts_are_those_of_the_definition(wants):
    for name in ("reactive", "evict", "frozen", "rkv"):
        slow = [int(replay(wants, POLICIES[name], budget).misses[0]) for budget in BUDGETS]
        assert slow == COUNTS[name][wants.first_touch]["misses"]


def test_the_micro_trace_is_long_enough_for_a_pruning_and_small_enough_for_a_repository():
    wants = micro()
    assert (wants.n_heads, wants.n_steps) == (12, 150) and wants.n_steps > POLICIES["rkv"].every
    assert max(BUDGETS) < wants.n_pages
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 200_000
    distinct = {json.dumps(cells) for cells in COUNTS.values()}
    assert len(distinct) > 0.8 * len(COUNTS), "a log on which policies cannot be told apart guards nothing"
