"""One budget for all heads: never past the optimum of its scope, blind to held-out prompts, counted as said."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import section9
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulate import cycle, random_demand

from wakekv.errors import InputError
from wakekv.files import ROOT
from wakekv.learning import learn, luck
from wakekv.logs.demand import demand
from wakekv.logs.trace import save_trace
from wakekv.policies import POLICIES, Ledger
from wakekv.policies.history import Faded, Rhythm, Twice
from wakekv.policies.pooled import SIGNALS, TABLE, Commons, signals
from wakekv.reproduction.profiles import PROFILES
from wakekv.simulation import beyond
from wakekv.simulation.beyond import BY_LAYER, GOAL, RULES, TRIED, best_splits, count_all, gap, split_misses, splits
from wakekv.simulation.simulate import curves, replay
from wakekv.tables import gained

REVERSIBLE = {**RULES, **BY_LAYER, **{name: rule for name, rule in TRIED.items() if rule.fetch == "miss"}}


@pytest.fixture(scope="module")
def cases(make_trace):
    return section9.cases(make_trace)


# the policies


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_no_rule_misses_less_than_the_optimum_of_its_scope(scope, seed):
    wants = random_demand(np.random.default_rng(seed), "cold", n_heads=4)
    least = curves(wants, POLICIES["optimum"].but(scope=scope)).misses
    for name in ("reactive", "pooled", "commons"):
        assert (curves(wants, POLICIES[name].but(scope=scope)).misses >= least).all(), name


def test_the_optimum_of_a_wider_scope_misses_no_more():
    wants = random_demand(np.random.default_rng(5), "cold", n_heads=4)
    head, layer, model = (curves(wants, POLICIES["optimum"].but(scope=s)).misses for s in ("head", "layer", "model"))
    assert (model <= layer).all() and (layer <= head).all() and (model < head).any()


@pytest.mark.parametrize("name", TRIED)
def test_every_order_tried_is_the_same_step_by_step_and_blind_to_the_future(name):
    wants = random_demand(np.random.default_rng(11), "cold", n_heads=3)
    whole, kept = curves(wants, TRIED[name]), {}
    for budget in (1, 2, 4):
        assert replay(wants, TRIED[name], budget).misses == whole.at(budget).misses
    for part in (wants, wants.until(9)):
        seen = []
        replay(part, TRIED[name], 2, on_step=lambda t, resident, missed, seen=seen: seen.append(resident.copy()))
        kept[part.n_steps] = seen
    assert all((a == b).all() for a, b in zip(kept[wants.n_steps], kept[9], strict=False))


def test_a_cycle_over_one_page_more_than_fit_defeats_every_order_that_fetches_but_not_eviction():
    wants = cycle(9, 90)
    missed = {
        name: int(curves(wants, POLICIES[name], [8]).misses[0]) for name in ("reactive", "evict", "pooled", "optimum")
    }
    assert missed["reactive"] == missed["pooled"] == 81
    assert missed["evict"] == 9 and missed["optimum"] < 12


def test_signals_are_what_they_say_on_a_log_written_out():
    wants = demand_of([[{0: 1.0, 1: 3.0}, {1: 2.0}, {1: 1.0, 0: 4.0}]])
    seen = Ledger(wants, scope="model")
    for _ in range(2):
        seen.observe()
        items, read, values = signals(seen)
    of = dict(zip(SIGNALS, values))
    assert items.tolist() == [0, 1] and read.tolist() == [False, True]
    assert np.exp(of["age"]) == pytest.approx([2, 1]) and of["place"] == pytest.approx([0.5, 1.0])
    assert np.exp(of["reads_50"]) - 0.003 == pytest.approx([0.25, 0.75], abs=1e-5)
    assert of["lead"] == pytest.approx([0.0, 0.0], abs=1e-6) and of["newest"].tolist() == [0, 1]
    seen.observe()
    assert dict(zip(SIGNALS, signals(seen)[2]))["lead"] == pytest.approx([np.log(4), 0.0], abs=1e-6)


def test_orders_by_history_are_what_they_say_on_a_log_written_out():
    wants = demand_of([[{0: 1.0, 1: 2.0}, {0: 4.0}, {2: 1.0}, [], {0: 2.0}], [[], [], {1: 3.0}, [], []]])
    seen = Ledger(wants, scope="model")
    for _ in range(5):
        seen.observe()
    assert Twice().rank(seen).tolist() == [[1, -1, -1], [-1, -1, -1]]
    gap = 0.7 * (0.7 * 64 + 0.3 * 1) + 0.3 * 3
    assert Rhythm().rank(seen)[0] == pytest.approx([-gap, -64, -64], abs=1e-5)
    weight = [0.5**4 + 4.0 * 0.5**3 + 2.0, 2.0 * 0.5**4, 0.5**2]
    reads = [0.5**4 + 0.5**3 + 1, 0.5**4, 0.5**2]
    assert Faded(keep=0.5).rank(seen)[0] == pytest.approx(weight, abs=1e-6)
    assert Faded(keep=0.5, peak=True).rank(seen)[0] == pytest.approx([2.0, 2 * 0.5**4, 0.5**2], abs=1e-6)
    mixed = [0.75 * r + 0.25 * w for r, w in zip(reads, weight)]
    assert Faded(keep=0.5, blend=0.25).rank(seen)[0] == pytest.approx(mixed, abs=1e-6)


def test_a_page_waits_as_long_as_it_has_waited_where_that_is_longer():
    seen = Ledger(demand_of([[[0], *[[1]] * 70]]), scope="model")
    for _ in range(71):
        seen.observe()
    rank = Rhythm().rank(seen)[0]
    assert rank[0] == -70 and rank[1] == pytest.approx(-1, abs=1e-6)


def demand_of(wants):
    from wakekv.logs.demand import Demand

    return Demand.from_lists(wants)


def test_coefficients_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="coefficients"):
        Commons(read=(1.0,))


# the split and the fit


def test_the_split_names_prompts_that_the_study_records_and_nothing_of_the_second_model():
    rule = yaml.safe_load((ROOT / "artifact" / "split.yaml").read_text(encoding="utf-8"))["train"]
    logs = PROFILES["default"].logs
    for regime, seeds in rule["prompts"].items():
        own = [log for log in logs if log.regime == regime and log.model in rule["models"] and log.text == rule["text"]]
        assert {log.seed for log in own} > set(seeds), "some prompt of every regime is held out"
    assert not {"gemma3-270m"} & set(rule["models"])


def test_a_log_is_train_held_out_or_neither(make_trace):
    def part(model="smollm2-135m", seed=0, mode="scripted"):
        trace = make_trace(n_steps=8)
        manifest = trace.manifest | {"model": {"name": model}, "text": {"mode": mode}}
        return learn.part_of(replace(trace, manifest=manifest | {"prompt": {"regime": "niah", "seed": seed}}))

    assert (part(), part(seed=1), part("gemma3-270m", 1)) == ("train", "heldout", "heldout")
    assert (part("gemma3-270m"), part(mode="greedy"), part(seed=1, mode="greedy")) == ("", "", "")


def test_the_shipped_coefficients_say_where_they_are_from():
    made = json.loads(TABLE.read_text(encoding="utf-8"))
    assert tuple(made["signals"]) == SIGNALS and made["made_by"].startswith("python -m wakekv.learning.learn")
    assert set(made["logs"].values()) == {"niah", "cot", "multiturn"} and made["examples"] > 10**5


def test_a_fit_finds_odds_that_were_put_there():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 20_000)).astype(np.float32)
    y = rng.random(20_000) < 1 / (1 + np.exp(-(1.5 * values[0] - values[2] + 0.5)))
    b, _ = learn.logistic(values, y, np.ones(len(y)))
    assert b == pytest.approx([1.5, 0.0, -1.0, 0.5], abs=0.08)


def test_a_fit_on_made_up_logs_gives_a_rule_that_runs(make_trace):
    wants = demand(make_trace(k=32))
    found = learn.fit({"niah": [wants]}, n=3000)
    rule = Commons(read=tuple(found["read"]), rest=tuple(found["rest"]))
    assert curves(wants, rule).misses.sum() < curves(wants, POLICIES["random"].but(scope="model")).misses.sum()


def test_learning_names_a_folder_without_training_logs(tmp_path):
    with pytest.raises(InputError, match="no log of a training prompt"):
        learn.main(str(tmp_path))


# counting


def test_counts_are_those_of_the_curves_and_the_same_from_two_workers(make_trace, tmp_path):
    for seed in (0, 1):
        save_trace(make_trace(k=32, seed=seed, n_steps=16), tmp_path / str(seed))
    paths = [tmp_path / "0", tmp_path / "1"]
    alone, both = count_all(paths, RULES), count_all(paths, RULES, workers=2)
    for a, b in zip(alone, both, strict=True):
        assert all((a.misses[name] == b.misses[name]).all() for name in RULES) and a.unit == b.unit
    wants = demand(make_trace(k=32, seed=0, n_steps=16))
    assert (alone[0].misses["commons"] == curves(wants, POLICIES["commons"]).misses).all()


def test_a_split_is_the_best_there_is_where_curves_are_convex():
    by_head = np.array([[40, 20, 10, 5, 5], [9, 6, 4, 3, 3], [0, 0, 0, 0, 0]])
    totals = range(3, 12)
    for total, budget in zip(totals, best_splits(by_head, totals)):
        least = min(
            split_misses(by_head, np.array(b)) for b in itertools.product(range(1, 6), repeat=3) if sum(b) <= total
        )
        assert split_misses(by_head, budget) == least and budget.sum() <= total and budget.min() >= 1
    with pytest.raises(InputError, match="less than one"):
        best_splits(by_head, [5, 2])


def test_a_split_of_its_own_log_misses_no_more_than_equal_budgets_or_than_another_s(cases):
    table = splits(cases, section9.BUDGETS)
    held = {(c.regime, c.seed, c.unit): c for c in cases}
    for row in table.itertuples():
        case = held[row.regime, row.seed, row.unit]
        assert row.own <= case.misses["reactive"][row.budget - 1] * 1.02 + 1  # greedy along hulls: nearly always best
        assert row.own <= row.other_prompt * 1.02 + 1
    assert table["other_regime"].notna().all()


def test_the_way_to_the_optimum_is_none_for_reactive_and_whole_for_the_optimum(cases):
    held = [case for case in cases if case.part == "heldout" and case.unit == "head" and case.regime == "niah"]
    assert gap(held, "reactive", 6, resamples=20)[2].value == 0
    assert gap(held, "optimum", 6, resamples=20)[2].value == 1
    rate, saved, closed = gap(held, "commons", 6, resamples=20)
    misses = {name: sum(case.misses[name][5] for case in held) for name in RULES}
    assert rate.value == pytest.approx(misses["commons"] / sum(case.wants.sum() for case in held))
    assert saved.value == pytest.approx(1 - misses["commons"] / misses["reactive"])
    gone = misses["reactive"] - misses["commons"]
    assert closed.value == pytest.approx(gone / (misses["reactive"] - misses["optimum"])) and closed.n == len(held)


def test_the_table_has_the_columns_that_were_promised_and_no_rule_past_its_optimum(cases):
    table = gained.beyond(cases, section9.BUDGETS, resamples=20).numbers
    promised = "policy scope model regime split unit budget miss_rate fewer_misses gap_closed lo hi".split()
    assert list(table.columns[: len(promised)]) == promised
    assert set(table["split"]) == {"train", "heldout"} and set(table["unit"]) == {"head", "kv_head"}
    assert (table["gap_closed"].dropna() <= 1 + 1e-9).all()
    assert set(table.loc[table["policy"] == "commons, layer", "scope"]) == {"layer"}


def test_a_rule_that_is_worse_somewhere_is_reported_so(cases):
    spoilt = [
        replace(c, misses=c.misses | {"commons": c.misses["reactive"] + (np.arange(c.n_pages) == 5)}) for c in cases
    ]
    fine, bad = gained.goal(cases, "optimum", section9.WITHIN).numbers, gained.goal(spoilt, "commons", section9.WITHIN)
    assert (fine["worse"] == 0).all() and (fine["met"] == fine["budgets"] - fine["without_gap"]).all()
    assert (bad.numbers["worse"] == bad.numbers["n"]).all() and set(bad.numbers["worse_budgets"]) == {"6"}
    assert not bad.shown["worse than reactive"].str.contains("nowhere").any() and (bad.numbers["least"] < GOAL).all()


def test_what_a_pool_holds_adds_up_and_follows_the_heads(make_trace):
    flow = beyond.follow(make_trace(k=32, n_steps=24), 3)
    assert flow.pages.sum(0).max() <= 3 * len(flow.layer) and 0 <= flow.moved() < 1
    assert flow.by_layer().mean() == pytest.approx(flow.pages.mean())


# chance


def test_a_drawn_log_keeps_first_reads_and_follows_the_odds(make_trace):
    wants = demand(make_trace(k=32, n_steps=40))
    log, true = luck.drawn(wants, POLICIES["commons"], seed=1)
    assert (log.next_use[1] == wants.next_use[1]).all()
    again = luck.drawn(wants, POLICIES["commons"], seed=1)[0]
    assert (log.page == again.page).all()
    was = np.zeros((wants.n_steps, wants.n_heads, wants.n_pages), bool)
    was[log.step_of, log.head_of, log.page] = True
    known = np.arange(wants.n_steps)[:, None, None] >= wants.next_use[1]
    odds = 1 / (1 + np.exp(-true.odds[:-1]))
    drawn, expected = was[1:][known[:-1]], odds[known[:-1]]
    assert drawn.mean() == pytest.approx(expected.mean(), abs=4 * np.sqrt(0.25 / len(drawn)))
    high = expected > np.median(expected)
    assert drawn[high].mean() > drawn[~high].mean() + 0.1


def test_the_search_can_be_made_again_from_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "wakekv.learning.learn", "/nowhere"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode and "no log of a training prompt" in done.stderr
