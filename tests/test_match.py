"""Equal memory means equal memory: nothing extrapolated, nothing dropped unsaid."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_simulate import random_demand

from wakekv.errors import InputError
from wakekv.policies import POLICIES
from wakekv.simulation import match
from wakekv.simulation.match import Curve
from wakekv.simulation.simulate import curves

PUBLISHED = json.loads((Path(__file__).parent.parent / "artifact" / "published.json").read_text())
COMBINATIONS = list(PUBLISHED["table3_sweep"]["rows"])


def compare_published(policies, method):
    points = []
    for combination in COMBINATIONS:
        for policy in policies:
            if policy == "evict" or combination in PUBLISHED["realised_memory_pages"]:
                ours, other = (match.published(PUBLISHED, combination, name) for name in ("reactive", policy))
                points += match.METHODS[method](ours, other)
    return match.tally(points)


def test_the_published_tables_give_back_19_of_20_against_evict():
    tally = compare_published(["evict"], "budget")
    assert (tally.at_most, tally.matched, tally.count("tie")) == (19, 20, 1)
    assert (tally.smallest_margin.budget, tally.smallest_margin.our_rate) == (8, 0.632)


def test_the_published_tables_give_back_13_of_13_against_frozen():
    tally = compare_published(["frozen"], "linear")
    assert (tally.at_most, tally.matched, len(tally.excluded)) == (13, 13, 3)


def test_the_published_tables_give_28_of_28_against_the_cited_three_with_20_out_of_range():
    tally = compare_published(["snapkv", "rkv", "reasonalloc"], "linear")
    assert (tally.at_most, tally.matched, len(tally.points), len(tally.excluded)) == (28, 28, 48, 20)
    assert tally.excluded_losses > 0, "some of what was left out would have been lost"


def line(label, memory, rate, grain=0.0):
    return Curve(label, np.arange(1, len(memory) + 1), np.array(memory, float), np.array(rate, float), grain)


def test_step_matching_never_uses_more_memory_than_the_other():
    ours = line("ours", [10, 20, 30], [0.5, 0.3, 0.1])
    points = match.step(ours, line("other", [9, 10, 25, 99], [0.6, 0.6, 0.2, 0.2]))
    assert [p.our_memory for p in points] == [10, 10, 20, 30]
    assert [p.verdict for p in points] == ["excluded", "win", "loss", "win"]


def test_linear_matching_refuses_to_extrapolate_and_says_so():
    ours = line("ours", [10, 20, 20], [0.5, 0.3, 0.2])
    points = match.linear(ours, line("other", [5, 15, 21], [0.4, 0.4, 0.1]))
    assert [p.verdict for p in points] == ["excluded", "win", "excluded"]
    assert points[1].our_rate == pytest.approx(0.35), "between (10, 0.5) and the last point at memory 20"
    tally = match.tally(points)
    assert len(tally.excluded) == 2 and tally.excluded_losses == 2
    assert all(p.reason for p in tally.excluded)


def test_an_excluded_point_without_a_margin_is_no_loss():
    points = match.linear(line("ours", [10, 20], [0.5, 0.3]), line("other", [5, 30], [0.5, 0.3]))
    assert [(p.verdict, p.margin) for p in points] == [("excluded", 0), ("excluded", 0)]
    assert match.tally(points).excluded_losses == 0


def test_less_than_one_miss_is_a_tie():
    ours, other = line("ours", [1], [0.5], grain=0.01), line("other", [1], [0.505], grain=0.01)
    assert match.tally(match.step(ours, other)).row()["ties"] == 1
    assert match.step(ours, line("other", [1], [0.52], grain=0.01))[0].verdict == "win"


def test_a_budget_we_did_not_simulate_is_excluded_not_replaced():
    (point,) = match.budget(
        line("ours", [1, 2], [0.5, 0.4]), Curve("other", np.array([8]), np.array([3.0]), np.array([0.9]))
    )
    assert point.verdict == "excluded"


def test_prompts_are_pooled_by_their_wants():
    logs = [random_demand(np.random.default_rng(seed), "cold", n_heads=2) for seed in (0, 1)]
    each = [curves(log, POLICIES["reactive"]) for log in logs]
    whole = match.pooled("reactive", each)
    assert whole.rate[1] == pytest.approx((each[0].misses[1] + each[1].misses[1]) / (logs[0].n_wants + logs[1].n_wants))
    assert whole.memory[1] == pytest.approx((each[0].mean_pages[1] + each[1].mean_pages[1]) / 2)


def test_the_sign_test_counts_prompts_not_points():
    ours, better, worse = (
        line(name, [1, 2], rate) for name, rate in [("a", [0.5, 0.5]), ("b", [0.6, 0.6]), ("c", [0.1, 0.4])]
    )
    result = match.over_prompts([match.tally(match.step(ours, other)) for other in (better, better, worse)])
    assert (result.wins, result.losses) == (2, 1)
    with pytest.raises(InputError, match="no prompt"):
        match.over_prompts([])


def test_bad_curves_are_refused():
    with pytest.raises(InputError, match="memory"):
        line("x", [2, 1], [0.1, 0.1])
    with pytest.raises(InputError, match="combination"):
        match.published(PUBLISHED, "qwen2.5-3b/nih", "reactive")
    with pytest.raises(InputError, match="not published"):
        match.published(PUBLISHED, "mistral-7b/niah", "frozen")
