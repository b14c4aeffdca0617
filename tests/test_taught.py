"""Orders that are taught: from training logs alone, the same from the same seed, judged as all others are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from wakekv.errors import InputError
from wakekv.learning import reinforce, taught
from wakekv.learning.taught import BASELINES, Prompt, interrogate
from wakekv.logs.demand import Demand, demand
from wakekv.policies import POLICIES, Ledger
from wakekv.policies.experts import LeCaR
from wakekv.policies.learned import AWAY, FEATURES, Learned, features
from wakekv.simulation.simulate import curves, replay


@pytest.fixture(scope="module")
def wants(make_trace):
    return demand(make_trace(k=8, n_steps=30), "kv_head")


@pytest.fixture(scope="module")
def orders(wants):
    return reinforce.teach([reinforce.lesson(wants, (2, 4))], seed=3, imitate=60, improve=6, span=6)


# what a network sees


def test_features_say_what_they_are_named_after():
    log = Demand.from_lists([[[0, 1]] + [[1]] * (AWAY + 1) + [[0], [2]]], created=[-1, 0, AWAY + 3])
    seen = Ledger(log, scope="model")
    for _ in range(AWAY + 4):
        seen.observe()
    items, values = features(seen)
    of = dict(zip(FEATURES, values))
    assert len(FEATURES) == 16 and items.tolist() == [0, 1, 2]
    assert np.expm1(of["returns"]) == pytest.approx([1, 0, 0], abs=1e-5)
    assert np.expm1(of["born"]) == pytest.approx([AWAY + 3, AWAY + 3, 0], abs=1e-4)
    assert of["generated"].tolist() == [0, 1, 1]
    assert of["weight_80"].argmin() != 2 and np.isfinite(values).all()


@pytest.mark.parametrize(("gap", "returns"), [(AWAY - 1, 0), (AWAY, 1)])
def test_a_page_has_returned_if_it_was_away_long_enough(gap, returns):
    seen = Ledger(Demand.from_lists([[[0]] + [[1]] * (gap - 1) + [[0]]]), scope="model")
    for _ in range(gap + 1):
        seen.observe()
    assert np.expm1(features(seen)[1][FEATURES.index("returns")]) == pytest.approx([returns, 0], abs=1e-5)


def test_a_network_is_not_printed_with_its_numbers():
    assert len(repr(Learned())) < 200


@pytest.mark.parametrize("rule", [LeCaR(budget=4), LeCaR(budget=4, scope="head"), "taught"])
def test_an_order_is_the_same_step_by_step_and_blind_to_the_future(rule, wants, orders):
    rule, kept = orders[1] if rule == "taught" else rule, {}
    for part in (wants, wants.until(12)):
        seen = []
        found = replay(part, rule, 3, on_step=lambda t, resident, missed, seen=seen: seen.append(resident.copy()))
        assert found.misses == curves(part, rule, [3]).misses
        kept[part.n_steps] = seen
    assert all((a == b).all() for a, b in zip(kept[30], kept[12]))


def test_a_network_of_another_shape_is_refused():
    with pytest.raises(InputError, match="16 features"):
        Learned(outer=np.zeros(3))


def test_a_network_scores_what_it_is_given():
    log = Demand.from_lists([[[0, 1], [1], []], [[1], [], [0]]], layer=[0, 2], created=[-1, -1, -1])
    seen = Ledger(log, scope="model")
    for _ in range(3):
        seen.observe()
    items, values = features(seen)
    born, depth = FEATURES.index("born"), FEATURES.index("depth")
    assert values[depth].tolist() == [0, 0, 1, 1] and items.tolist() == [0, 1, 3, 4]
    weight = [1.0 * 0.8**2, 2.0 * 0.8**2 + 1.0 * 0.8, 1.0, 1.0 * 0.8**2]
    assert np.exp(values[FEATURES.index("weight_80")]) - 1e-5 == pytest.approx(weight, abs=1e-5)
    inner, outer = np.zeros((16, 32), np.float32), np.zeros(32, np.float32)
    inner[born, 0], inner[depth, 1], outer[0], outer[1] = 0.5, 1.0, 2.0, 4.0
    mean, scale, bias = np.full(16, 0.25, np.float32), np.full(16, 2.0, np.float32), np.full(32, 0.125, np.float32)
    rank = Learned(mean=mean, scale=scale, inner=inner, inner_bias=bias, outer=outer).rank(seen)
    x = (values - 0.25) / 2
    by_hand = 2 * np.tanh(0.5 * x[born] + 0.125) + 4 * np.tanh(x[depth] + 0.125)
    assert rank.reshape(-1)[items] == pytest.approx(by_hand, rel=1e-5)
    assert np.isneginf(np.delete(rank.reshape(-1), items)).all()


# LeCaR


def test_lecar_trusts_the_expert_that_is_right():
    hot = Demand.from_lists([[[0, 1] if t % 2 else [2 + t // 2] for t in range(40)]])
    seen = Ledger(hot, scope="model")
    for _ in range(40):
        seen.observe()
        LeCaR(budget=2).rank(seen)
    weights = seen.running("lecar", lambda: None)[0]
    assert weights.sum() == pytest.approx(1.0)
    assert weights[1] > 0.6  # frequency: 0 and 1 come back, the others never


def test_lecar_takes_from_an_expert_what_it_alone_would_miss():
    seen = Ledger(Demand.from_lists([[[0], [0], [1], [0]]]), scope="head")
    rule, ranks = LeCaR(budget=1, scope="head"), []
    for _ in range(4):
        seen.observe()
        ranks.append(rule.rank(seen)[0])
    wrong, right = np.exp(-0.45), 1.0
    first, second = np.array([wrong, right]) / (wrong + right)
    assert seen.running("lecar", lambda: None)[0] == pytest.approx([first, second])
    assert ranks[2] == pytest.approx([-2, -2])  # each expert's first page, half of the room for each
    assert ranks[3] == pytest.approx([-1 / second, -2 / second])  # both put 0 first now; of 1, frequency asks more


def test_regret_is_a_share_of_the_wants_and_first_reads_are_none():
    steps = [[0], [0], [], [2], [0, 3]]
    seen = Ledger(Demand.from_lists([steps], created=[-1, -1, 2, 4], first_touch="warm"), scope="head")
    said = []
    for _ in steps:
        seen.observe()
        LeCaR(budget=1, scope="head").rank(seen)
        said.append(seen.running("lecar", lambda: None)[0][0])
    assert said[:4] == [0.5] * 4  # recency alone held page 2, and its first read is nobody's miss
    wrong = np.exp(-0.45 / 2)  # of the last step's two wants recency alone had lost one, page 0
    assert said[4] == pytest.approx(wrong / (wrong + 1))


def test_no_expert_is_forgotten():
    log = Demand.from_lists([[[0], *([0] if t % 2 else [1 + t // 2] for t in range(80))]])
    seen = Ledger(log, scope="model")
    for _ in range(81):
        seen.observe()
        LeCaR(budget=1).rank(seen)
    assert seen.running("lecar", lambda: None)[0][0] == pytest.approx(1e-3, rel=1e-6)


def test_a_page_that_two_heads_share_a_budget_for_is_held_by_one():
    seen = Ledger(Demand.from_lists([[[0], [], [0]], [[], [0], []]]), scope="model")
    for _ in range(2):
        seen.observe()
    _, places, held = LeCaR(budget=1)._now(seen, np.full(2, 0.5))
    assert places[0].reshape(-1).tolist() == [1, 0] and held.all()  # two heads, a page each, in one pool
    assert LeCaR(budget=1, scope="head")._now(seen, np.full(2, 0.5))[1][0].reshape(-1).tolist() == [0, 0]


# teaching


def test_the_same_seed_teaches_the_same_and_another_another(wants):
    of = [reinforce.lesson(wants, (2,))]
    state = torch.random.get_rng_state()
    a, b, c = (reinforce.teach(of, seed, imitate=5, improve=2, span=4)[1] for seed in (0, 0, 1))
    assert np.array_equal(a.inner, b.inner) and not np.array_equal(a.inner, c.inner)
    assert torch.equal(state, torch.random.get_rng_state())


def test_imitation_learns_what_the_optimum_keeps(wants, orders):
    misses = {name: curves(wants, rule, [4]).misses[0] for name, rule in BASELINES.items()}
    untaught = Learned(
        inner=np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32), outer=np.ones(32, np.float32)
    )
    assert misses["optimum"] <= curves(wants, orders[0], [4]).misses[0] < curves(wants, untaught, [4]).misses[0]


def test_the_policy_gradient_raises_the_odds_of_what_came_out_better():
    score = torch.nn.Linear(16, 1, bias=False)
    values = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)

    def log_odds(order):
        left = -score(torch.from_numpy(values[order])).squeeze(-1)
        return float(sum(left[i] - torch.logsumexp(left[i:], 0) for i in range(2)))

    drawn = [([(0, values[[0, 1, 2, 3, 4]], 2)], [0.0]), ([(0, values[[3, 4, 0, 1, 2]], 2)], [1.0])]
    better, before = np.array([[1.0], [-1.0]]), (log_odds([0, 1, 2, 3, 4]), log_odds([3, 4, 0, 1, 2]))
    loss = reinforce._log_odds(drawn, better, lambda v: score(torch.from_numpy(v)).squeeze(-1))
    assert float(loss) == pytest.approx(-(before[0] - before[1]) / 4, abs=1e-5)
    loss.backward()
    with torch.no_grad():
        score.weight -= 0.05 * score.weight.grad
    assert log_odds([0, 1, 2, 3, 4]) > before[0] and log_odds([3, 4, 0, 1, 2]) < before[1]


def test_a_roll_out_that_evicts_as_recency_does_costs_what_the_replay_counts(wants):
    of = reinforce.lesson(wants, (3,))
    age = FEATURES.index("age")
    rule, missed = POLICIES["reactive"].but(scope="model"), []
    replay(wants, rule, 3, on_step=lambda t, resident, m: missed.append((m.copy(), resident.copy())))
    start = missed[9][1].reshape(-1)

    def by_recency(values):
        return torch.from_numpy(-1e6 * values[:, age])

    _, costs = reinforce._roll(replace(of, scale={3: np.array([np.inf, 1.0, np.inf])}), by_recency, 10, 11, 3, start,
                               torch.Generator().manual_seed(0))  # fmt: skip
    assert costs[0] == pytest.approx(missed[10][0].sum() / 3)


def test_a_log_too_short_to_learn_from_is_refused(wants):
    with pytest.raises(InputError, match="too short"):
        reinforce.lesson(wants.until(10), (2,))


# judging


def test_no_rule_beats_the_optimum_and_trials_are_averaged(make_trace, orders):
    prompts = [Prompt("made-up", "niah", s, demand(make_trace(k=8, seed=s, n_steps=30), "kv_head")) for s in range(3)]
    rules = {name: [rule] for name, rule in BASELINES.items()} | {"imitated": list(orders), "learned": [orders[1]]}
    rules["recency again"] = rules["recency"]
    found = taught.contest(prompts, rules, (3, 5))
    best = found[found["policy"] == "optimum"].set_index(["seed", "budget"])["misses"]
    assert all(row.misses >= best[row.seed, row.budget] for row in found.itertuples())
    made = taught.eviction(found, resamples=20)
    own = made.numbers.set_index(["policy", "budget"])
    assert (own["estimate"] <= 1).all() and own.loc[("imitated", 3), "n_seeds"] == 2
    assert own.loc[("recency again", 3), ["estimate", "cost"]].tolist() == [0, 1]
    each = own.loc[("imitated", 3)]
    assert each["seed_lo"] <= each["estimate"] <= each["seed_hi"]
    assert len(made.shown) == len(rules) - 2


def test_questions_are_real_steps_and_miss_what_their_replay_misses(wants):
    for rule in (BASELINES["recency"], BASELINES["decayed reads"]):
        order, misses, n = interrogate(wants, rule, 3, 8)
        asked = wants.select(steps=order)
        assert order[:15].tolist() == list(range(15)) and len(set(order[15:])) == 8 and max(order) < 15
        seen = []
        replay(asked, rule, 3, on_step=lambda t, resident, missed, seen=seen: seen.append(int(missed.sum())))
        assert sum(seen[15:]) == misses and n == sum(len(wants.at(int(t))[1]) for t in order[15:])
        plain = wants.select(steps=[*range(15), *range(8)])
        seen.clear()
        replay(plain, rule, 3, on_step=lambda t, resident, missed, seen=seen: seen.append(int(missed.sum())))
        assert misses >= sum(seen[15:])
    with pytest.raises(InputError, match="steps to ask again"):
        interrogate(wants, BASELINES["recency"], 3, 20)


def test_questions_are_told_with_the_optimum_s_misses_on_the_same(wants):
    rules = {name: [rule] for name, rule in BASELINES.items() if name in ("recency", "decayed reads", "optimum")}
    made = taught.asked_again(
        taught.questions([Prompt("m", "niah", s, wants) for s in (0, 1)], rules, 3, 8), resamples=20
    )
    assert set(made.numbers["policy"]) == {"recency", "decayed reads"}
    assert (made.numbers["estimate"] >= made.numbers["best"]).all()
