"""Statistics: intervals that cover, tests that know chance, and curves nobody extrapolates."""

import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint, proportions_ztest

from wakekv import stats
from wakekv.errors import InputError


def test_ratio_is_a_ratio_of_sums_not_a_mean_of_ratios():
    found = stats.ratio([1, 90], [10, 100])
    assert found.value == pytest.approx(91 / 110)
    assert (found.n, found.unit) == (2, "prompts")
    assert found.lo <= found.value <= found.hi


def test_bootstrap_is_seeded_and_leaves_global_state_alone():
    sums = np.random.default_rng(3).random((9, 2))
    before = np.random.get_state()[1].copy()
    a, b, c = (stats.ratio(sums[:, 0], sums[:, 1], seed=seed) for seed in (1, 1, 2))
    assert a == b and (a.lo, a.hi) != (c.lo, c.hi)
    assert (np.random.get_state()[1] == before).all()


def test_interval_covers_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for draw in range(200):
        rates = rng.beta(2, 8, size=30)  # prompts differ: steps of one prompt are not independent
        found = stats.ratio(rng.binomial(200, rates), np.full(30, 200), seed=draw, resamples=400)
        covered += found.lo <= 0.2 <= found.hi
    assert 0.88 <= covered / 200 <= 0.99


def test_resampling_prompts_gives_wider_intervals_than_pretending_that_steps_are_independent():
    hits, steps = np.array([0, 0, 100, 100, 100, 0]), np.full(6, 100)
    clustered, naive = stats.ratio(hits, steps), stats.proportion(int(hits.sum()), int(steps.sum()), unit="steps")
    assert clustered.hi - clustered.lo > 3 * (naive.hi - naive.lo)


def test_one_prompt_has_no_interval_and_few_are_descriptive():
    one = stats.ratio([3], [4])
    assert one.value == 0.75 and np.isnan([one.lo, one.hi]).all() and one.descriptive
    assert stats.ratio([1] * 4, [2] * 4).descriptive and not stats.ratio([1] * 5, [2] * 5).descriptive
    assert "descriptive" in str(one)


def test_nothing_to_count_is_undefined_and_says_so():
    nothing = stats.ratio([0, 0], [0, 0])
    assert np.isnan(nothing.value) and "undefined" in nothing.method and "undefined" in str(nothing)
    assert stats.mean([np.nan, np.nan]).n == 0
    assert stats.mean([np.nan, 1.0, 3.0]).value == 2.0 and stats.mean([np.nan, 1.0, 3.0]).n == 2


def test_undefined_resamples_are_left_out_and_counted():
    found = stats.ratio([0, 0, 0, 1], [0, 0, 0, 2])
    assert found.value == 0.5 and np.isfinite(found.lo)
    assert int(found.method.split(", ")[2].split()[0]) > 100 and "undefined" in found.method


@pytest.mark.parametrize("sums", [np.zeros((0, 2)), np.zeros(3), np.array([[1.0, np.nan]])])
def test_bootstrap_refuses_what_it_cannot_sum(sums):
    with pytest.raises(InputError):
        stats.bootstrap(sums, lambda total: total[..., 0])


def test_proportion_is_wilsons():
    found = stats.proportion(3, 20, unit="heads")
    assert (found.lo, found.hi) == pytest.approx(proportion_confint(3, 20, method="wilson"))
    assert stats.proportion(0, 20, unit="heads").hi > 0
    assert np.isnan(stats.proportion(0, 0, unit="heads").value)
    with pytest.raises(InputError, match="5 of 4"):
        stats.proportion(5, 4, unit="heads")


def test_permutation_p_is_never_zero_and_is_uniform_under_the_null():
    assert stats.permutation_p(10.0, np.zeros(199)) == pytest.approx(1 / 200)
    assert stats.permutation_p(0.0, np.zeros(199)) == 1.0
    draws = np.random.default_rng(0).random((2000, 100))
    p = np.array([stats.permutation_p(row[0], row[1:]) for row in draws])
    assert abs((p <= 0.05).mean() - 0.05) < 0.02
    for null in ([], [np.nan]):
        with pytest.raises(InputError):
            stats.permutation_p(1.0, null)


def test_sign_test_counts_ties_apart():
    found = stats.sign_test([0.2, 0.1, 0.05, -0.1, 1e-9], tie=1e-6)
    assert (found.wins, found.ties, found.losses) == (3, 1, 1)
    assert found.p == pytest.approx(0.625)
    assert np.isnan(stats.sign_test([0.0, 0.0]).p)
    assert stats.sign_test([1] * 9).p == pytest.approx(2 / 2**9)
    with pytest.raises(InputError):
        stats.sign_test([np.nan])


@pytest.mark.parametrize("method", ["bonferroni", "fdr_bh"])
def test_one_undefined_p_does_not_undo_the_others(method):
    found = stats.adjust([0.001, np.nan, 0.2], method)
    assert found.n_undefined == 1 and found.family == 2
    assert found.p[0] == pytest.approx(0.002) and np.isnan(found.p[1])
    assert found.reject.tolist() == [True, False, False]


def test_bonferroni_can_answer_for_a_larger_family():
    assert stats.adjust([0.01], family=10).p[0] == pytest.approx(0.1)
    with pytest.raises(InputError, match="family"):
        stats.adjust([0.01, 0.02], family=1)
    with pytest.raises(InputError, match="family"):
        stats.adjust([0.01], "fdr_bh", family=10)
    assert stats.adjust([np.nan]).family == 0


def test_a_corrected_p_is_never_above_one():
    assert stats.adjust([0.6, 0.9]).p.tolist() == [1, 1]


def test_two_proportions_is_the_textbook_pooled_z_test():
    hits_a, n_a, hits_b, n_b = [7, 2, 0], [20, 50, 5], [30, 9, 0], [400, 100, 10]
    ours = stats.two_proportions(hits_a, n_a, hits_b, n_b)
    for i in range(2):
        _, p = proportions_ztest([hits_a[i], hits_b[i]], [n_a[i], n_b[i]], alternative="larger")
        assert ours[i] == pytest.approx(p)
    assert np.isnan(ours[2])  # no hit anywhere: nothing to compare


def test_interpolation_is_linear_inside_and_refuses_outside():
    assert stats.interpolate([1.5, 3.0], [1, 2, 3], [10, 20, 0]).tolist() == [15.0, 0.0]
    for x in (0.9, 3.1):
        with pytest.raises(InputError, match="outside"):
            stats.interpolate(x, [1, 2, 3], [10, 20, 0])


@pytest.mark.parametrize(
    ("x", "y"),
    [([1, 1], [0, 1]), ([2, 1], [0, 1]), ([1, np.nan], [0, 1]), ([1, 2], [0, np.nan]), ([], []), ([1], [1, 2])],
)
def test_interpolation_refuses_what_numpy_lets_pass(x, y):
    with pytest.raises(InputError):
        stats.interpolate(1.0, x, y)


def test_an_interval_takes_one_resample_at_least_and_two_prompts():
    assert stats.bootstrap(np.ones((3, 1)), np.sum, resamples=1).method.startswith("percentile bootstrap")
    with pytest.raises(InputError, match="resamples"):
        stats.bootstrap(np.ones((3, 1)), np.sum, resamples=0)
    assert stats.ratio([1.0], [2.0]).method == "one prompt, no interval"
    assert stats.ratio([1.0, 1.0], [0.0, 0.0]).method == "undefined: nothing to count"


def test_area_between_is_exact_on_the_common_range():
    found = stats.area_between([0, 2], [0, 2], [1, 3], [0, 0])
    assert (found.lo, found.hi) == (1, 2)
    assert found.area == pytest.approx(1.5) and found.mean == pytest.approx(1.5)
    crossing = stats.area_between([0, 1, 2], [0, 1, 0], [0, 2], [0.5, 0.5])
    assert crossing.area == pytest.approx(0.0)
    wide = stats.area_between([0, 4], [2, 2], [0, 4], [0, 0])
    assert wide.area == pytest.approx(8) and wide.mean == pytest.approx(2), "over a range that is not 1 wide"
    with pytest.raises(InputError, match="share no range"):
        stats.area_between([0, 1], [0, 0], [1, 2], [0, 0])
    inner = stats.area_between([1, 2, 3], [1, 1, 5], [0, 1.5, 4], [0, 0, 0])
    assert (inner.lo, inner.hi) == (1, 3) and inner.area == pytest.approx(1 + 3)
    assert stats.area_between([0, 4], [0, 0], [1, 2, 3], [1, 1, 5]).area == pytest.approx(-4)
