"""Equal memory means equal memory: nothing extrapolated, nothing dropped unsaid."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    assert match.step(line("ours", [1], [0.5], grain=0.25), line("other", [1], [0.75]))[0].verdict == "win", "one miss"


def test_a_row_says_where_the_smallest_margin_is():
    row = match.tally(match.step(line("ours", [1, 2], [0.5, 0.25]), line("other", [1, 2], [1.0, 0.5]))).row()
    assert (row["wins"], row["smallest_margin"], row["at_budget"]) == (2, 0.25, 2)
    none = match.tally(match.step(line("ours", [9], [0.5]), line("other", [1], [0.5]))).row()
    assert np.isnan(none["smallest_margin"]) and np.isnan(none["at_budget"])


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
    assert whole.grain == 1 / (logs[0].n_wants + logs[1].n_wants), "one miss"


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


@st.composite
def made_up(draw, n=None, rising=False):
    """A curve of a few points, on a coarse grid, so that memories and rates of two are often equal."""
    n = draw(st.integers(1, 6)) if n is None else n
    more = draw(st.lists(st.integers(int(rising), 4), min_size=n, max_size=n))
    rate = draw(st.lists(st.integers(0, 16), min_size=n, max_size=n))
    budgets = sorted(draw(st.sets(st.integers(1, 9), min_size=n, max_size=n)))
    grain = draw(st.sampled_from([0.0, 0.02, 0.1]))
    return Curve("made up", np.array(budgets), np.cumsum(more) * 2.5 + 10, np.array(rate) / 16, grain)


@given(made_up(), made_up())
def test_a_step_takes_our_largest_memory_that_is_not_above_the_other(ours, other):
    for i, point in enumerate(match.step(ours, other)):
        fits = np.flatnonzero(ours.memory <= other.memory[i])
        assert (point.verdict == "excluded") == (len(fits) == 0)
        if len(fits):
            assert (point.our_memory, point.our_rate) == (ours.memory[fits[-1]], ours.rate[fits[-1]])
        assert (point.memory, point.rate, point.budget) == (other.memory[i], other.rate[i], other.budgets[i])


@given(made_up(), made_up())
def test_interpolation_is_at_the_other_memory_and_between_our_points(ours, other):
    for i, point in enumerate(match.linear(ours, other)):
        low, high = np.flatnonzero(ours.memory <= other.memory[i]), np.flatnonzero(ours.memory >= other.memory[i])
        assert (point.verdict == "excluded") == (len(low) == 0 or len(high) == 0)
        if point.verdict != "excluded":
            last = high[ours.memory[high] == ours.memory[high[0]]][-1]  # of points with one memory
            ends = sorted([ours.rate[low[-1]], ours.rate[last]])
            assert point.our_memory == other.memory[i]
            assert ends[0] - 1e-12 <= point.our_rate <= ends[1] + 1e-12


OPPOSITE = {"win": "loss", "loss": "win", "tie": "tie"}


@pytest.mark.parametrize("method", match.METHODS)
@given(data=st.data())
def test_what_one_wins_the_other_loses(method, data):
    """Where both have the same points; over points, and over prompts."""
    ours = data.draw(made_up(rising=True))
    theirs = data.draw(made_up(n=len(ours.budgets)))
    other = Curve("other", ours.budgets, ours.memory, theirs.rate, theirs.grain)
    one, two = match.METHODS[method](ours, other), match.METHODS[method](other, ours)
    assert [OPPOSITE[p.verdict] for p in one] == [p.verdict for p in two]
    assert [p.margin for p in one] == pytest.approx([-p.margin for p in two])
    a, b = (match.over_prompts([match.tally(points)]) for points in (one, two))
    assert (a.wins, a.losses) == (b.losses, b.wins)


@pytest.mark.parametrize("method", match.METHODS)
@given(made_up(), made_up())
def test_every_point_is_counted_once(method, ours, other):
    tally = match.tally(match.METHODS[method](ours, other))
    assert len(tally.points) == len(other.budgets) == tally.matched + len(tally.excluded)
    assert tally.matched == tally.at_most + tally.count("loss")
    assert (tally.smallest_margin is None) == (tally.matched == 0)
    assert tally.excluded_losses == sum(p.rate < p.our_rate for p in tally.excluded)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4), st.randoms())
def test_pooled_prompts_have_no_order(seeds, random):
    each = [curves(random_demand(np.random.default_rng(seed), "warm"), POLICIES["evict"], [2, 5]) for seed in seeds]
    whole = match.pooled("evict", each)
    random.shuffle(each)
    again = match.pooled("evict", each)
    assert (whole.rate == again.rate).all() and whole.memory == pytest.approx(again.memory)
    alone = match.pooled("evict", each[:1])
    assert (alone.rate == each[0].misses / each[0].n_wants).all() and (alone.memory == each[0].mean_pages).all()
