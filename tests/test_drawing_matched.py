"""The pictures of matched comparisons show what was counted. (That they are equal bytes twice, test_figures holds.)"""

from __future__ import annotations

import numpy as np
import pytest

from wakekv import figures
from wakekv.errors import InputError
from wakekv.policies import POLICIES
from wakekv.reproduction.claims import published
from wakekv.simulation.study import studies
from wakekv.tables.contests import EVERY_8, SURVEY, contest, survey

BUDGETS = (2, 4, 8)
DRAWN = ("evict", "rkv", "rkv-every-8")


@pytest.fixture(scope="module")
def traces(make_trace):
    return [make_trace(k=64, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def study(traces):
    rules = {name: POLICIES[name] for name in ("reactive", "evict", "rkv", "optimum")}
    (one,) = studies(traces, rules | EVERY_8, slow_budgets=BUDGETS)
    return one


@pytest.fixture(scope="module")
def surveyed(traces):
    return studies(traces, list(SURVEY), slow_budgets=BUDGETS, held_out=True)


def corners(picture) -> dict[str, str]:
    """system -> "column row" of the panel its name stands in, in the order of the grid."""
    grid = [axes for axes in picture.figure.axes if axes.get_visible()]
    return {
        label.get_text().removesuffix(" *"): f"{i % 3} {i // 3}"
        for i, axes in enumerate(grid)
        for label in axes.get_yticklabels()
    }


def test_every_system_stands_once_in_the_corner_of_its_policy(surveyed):
    found = corners(figures.figure_1a(surveyed, BUDGETS, resamples=20))
    assert set(found) == set(SURVEY.values())
    for name, label in SURVEY.items():
        when = ("offline", "prefill", "decode").index(POLICIES[name].when)
        assert found[label] == f"{when} {0 if POLICIES[name].reversible else 1}", label


def test_the_numbers_of_figure_1a_are_those_of_the_survey(surveyed):
    drawn = figures.figure_1a(surveyed, BUDGETS, resamples=20).table
    counted = survey(surveyed, BUDGETS, resamples=20)
    np.testing.assert_array_equal(drawn["margin"], counted["margin"])
    assert drawn.loc[drawn["margin"].isna(), "reason"].all()


def test_a_margin_drawn_is_the_mean_over_prompts(study):
    table = figures.margins([study], None, BUDGETS, ("evict",), resamples=20).table.set_index("budget")
    for budget in BUDGETS:
        one = contest(study.curves["reactive"], study.curves["evict"], "budget", [budget])
        assert table.loc[budget, "estimate"] == pytest.approx(one.margin.value)


def test_a_policy_that_never_pruned_is_not_drawn_and_the_table_says_why(study):
    table = figures.margins([study], None, BUDGETS, DRAWN, resamples=20).table.set_index("policy")
    assert "never gave up a page" in table.loc["rkv", "reason"] and np.isnan(table.loc["rkv", "estimate"])
    assert table.loc["rkv-every-8", "estimate"].notna().any()


def test_the_paper_s_points_are_told_from_ours(study):
    table = figures.margins([study], published(), BUDGETS, ("evict",), resamples=20).table
    paper = table[table["source"] == "published"]
    assert len(paper) == 8 and set(paper["model"]) == {"qwen2.5-3b", "mistral-7b"}
    assert paper["estimate"].min() == pytest.approx(0.041, abs=0.002)


def test_nothing_to_draw_is_said():
    with pytest.raises(InputError, match="no study"):
        figures.margins([])
    with pytest.raises(InputError, match="no study"):
        figures.figure_1a([])
