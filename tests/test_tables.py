"""Tables: each number is where its column says, and what is read is the same, rounded."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from wakekv import tables
from wakekv.files import ROOT
from wakekv.learning import luck
from wakekv.logs.demand import demand
from wakekv.policies import POLICIES
from wakekv.scheduling import tables as scheduling
from wakekv.scheduling.costs import Costs
from wakekv.simulation.beyond import Flow
from wakekv.simulation.study import PAPER, studies
from wakekv.tables import gained
from wakekv.verdicts import as_text, cells

PUBLISHED = json.loads((ROOT / "artifact" / "published.json").read_text(encoding="utf-8"))
BUDGETS = [2, 4]


@pytest.fixture(scope="module")
def traces(make_trace):
    return [make_trace(n_prompt=300, n_steps=20, k=32, seed=seed) for seed in (0, 1)]


def test_a_table_is_its_numbers_as_csv_and_what_is_shown_as_markdown_and_html(tmp_path):
    table = tables.Table(pd.DataFrame({"x": [0.5, 2.0]}), pd.DataFrame({"x": ["50 %", "<2>"]}))
    table.save(tmp_path / "new", "t")
    assert (tmp_path / "new" / "t.csv").read_text() == "x\n0.5\n2\n"
    assert (tmp_path / "new" / "t.md").read_text() == "| x |\n| --- |\n| 50 % |\n| <2> |\n"
    tinted = tables.Table(table.numbers, table.shown, ("#aaa", "#bbb"))._repr_html_()
    assert "&lt;2&gt;" in tinted and "&lt;2&gt;" in table._repr_html_()
    assert tinted.count('<tr style="background: #bbb') == 1 and "background" not in table._repr_html_()


def test_logs_say_how_much_of_the_attention_they_hold(traces):
    table = tables.logs(traces)
    mass = [np.asarray(trace.weights, np.float32).sum(-1) for trace in traces]
    assert table.numbers["top-32 mass"].tolist() == pytest.approx([float(m.mean()) for m in mass])
    assert table.numbers["heads_steps_above_90"].tolist() == [float((m > 0.9).mean()) for m in mass]
    assert table.shown.loc[1, ["seed", "agreement", "flagged"]].tolist() == ["1", "100%", "no"]


def test_the_sweep_pools_prompts_and_stands_above_the_paper(traces):
    chosen = studies(traces, PAPER, BUDGETS)
    table = tables.sweep(chosen, BUDGETS, PUBLISHED, resamples=20)
    ours = table.numbers[table.numbers["source"] == "simulated"].set_index(["policy", "budget"])
    found = [chosen[0].curve("reactive").rate[i] for i in range(2)]
    assert ours.loc["reactive"]["miss_rate"].reindex(BUDGETS).tolist() == pytest.approx(found)
    theirs = table.numbers[table.numbers["source"] == "published"]
    point = PUBLISHED["table3_sweep"]["rows"]["mistral-7b/niah"][0]
    row = theirs[(theirs["model"] == "mistral-7b") & (theirs["budget"] == point["budget_pages"])].set_index("policy")
    assert row.loc["evict", "miss_rate"] == point["evict"]
    assert row.loc["reactive", "mean_pages"] == point["reactive_mean_pages"]
    assert table.shown["model"].iloc[0] == "made-up, greedy, n = 2"
    assert set(table.shown["model"].iloc[2:]) == {f"{name} (published)" for name in theirs["model"].unique()}
    assert "optimum" not in theirs["policy"].tolist(), "the paper has none"


def test_variants_keep_a_budget_in_tokens(traces):
    table = tables.variants(traces, BUDGETS).numbers.set_index(["variant", "policy", "budget_tokens"])["miss_rate"]
    (plain,), (small,), (heads,) = (
        studies(traces, ["evict"], BUDGETS),
        studies(traces, ["evict"], [4, 8], page_tokens=8),
        studies(traces, ["evict"], BUDGETS, unit="kv_head"),
    )
    for i, tokens in enumerate((32, 64)):
        assert (
            table["default: cold start, batch steps, pages of 16, k = 64", "evict", tokens]
            == (plain.curve("evict").rate[i])
        )
        assert table["pages of 8 tokens", "evict", tokens] == small.curve("evict").rate[i]
        assert table["KV heads", "evict", tokens] == heads.curve("evict").rate[i]


# what one budget for all heads gains


def test_a_rule_that_is_the_optimum_goes_the_whole_way(traces):
    wants = demand(traces[0])
    log, _ = luck.drawn(wants, POLICIES["commons"])
    table = gained.chance({"drawn": (log, POLICIES["optimum"].but(scope="model"))}, [1, 2, 10**6])
    best = table.numbers[table.numbers["policy"] == "true odds"]
    assert best["budget"].tolist() == [1, 2] and (best["gap_closed"] == 1).all()
    assert (table.numbers["gap_closed"] <= 1).all() and "100%" in table.shown["B = 1"].tolist()


def test_where_a_pool_is_and_how_far_from_another_regime():
    layer = np.array([0, 0, 0, 1])
    one, other = (
        Flow("m", name, "head", 2, layer, np.array([[n, n] for n in held]))
        for name, held in (("niah", (1, 1, 1, 5)), ("cot", (5, 1, 1, 1)))
    )
    row = gained.where([one, other]).numbers.iloc[0]
    assert (row["head_least"], row["head_most"], row["layer_least"], row["layer_most"]) == (1, 5, 1, 5)
    assert (row["most_in_layer"], row["in_top_quarter"], row["moved"], row["apart"]) == (1, 5 / 8, 0, 0.5)
    assert np.isnan(gained.where([one]).numbers["apart"].iloc[0])


def test_a_plan_is_held_against_the_cache():
    row = {"policy": "reactive", "budget": 8, "fetches": 10.0, "stall_ms": 2.0, "log_fetches": 12.0,
           "log_stall_ms": 1.0, "wants_fetches": 10.0, "wants_stall_ms": 2.0}  # fmt: skip
    table = gained.predicted([row])
    off = table.numbers.iloc[0]
    assert (off["log_fetches_off"], off["log_stall_ms_off"], off["wants_fetches_off"]) == (pytest.approx(0.2), -0.5, 0)
    assert table.shown["fetches a step, planned from the log"].iloc[0] == "12.0 (+20%)"


# several requests on one server


def test_hidden_states_are_an_option_where_they_take_less():
    table = scheduling.hidden({"many KV heads": (512, 8, 64), "few": (2048, 2, 64), "even": (1024, 8, 64)})
    assert table.numbers["ratio"].tolist() == [0.5, 8, 1] and table.numbers["kept"].tolist() == [True, False, False]
    assert table.shown["hidden caching"].tolist()[0] == "an option"


def test_costs_are_in_microseconds():
    costs = Costs(2e-3, 1e-3, 5e-6, 1e-6, 4e-4, 4096, 1e9, 1e-5)
    table = scheduling.server_costs(costs, 0.1, [{}] * 7)
    assert table.numbers["us"].tolist() == pytest.approx([2000, 1000, 5, 1, 400])
    assert set(table.numbers["n_steps"]) == {7} and table.shown["microseconds"].iloc[0] == "2,000.00"


def test_attainment_by_load_and_the_highest_that_can_be_borne():
    found = pd.DataFrame([
        {"scheduler": name, "load": load, "seed": seed, "attainment": met - 0.1 * seed, "effective": 3 * load}
        for name, mets in (("first come", (1.0, 0.5)), ("value", (1.0, 1.0)))
        for load, met in zip((0.5, 1.0), mets)
        for seed in (0, 1)
    ])  # fmt: skip
    table = scheduling.scheduled({"measured": found})
    at = table.numbers.set_index(["scheduler", "load"])
    assert at.loc[("first come", 1.0), "estimate"] == pytest.approx(0.45) and set(at["case"]) == {"measured"}
    assert table.shown["nine in ten up to load"].tolist() == ["0.5", "1"]
    assert table.shown["worth having, requests a second"].tolist() == ["3, load 1"] * 2


def test_agents_on_one_pool_are_told_by_the_worst():
    found = pd.DataFrame([
        {"rule": "minima", "seed": seed, "agent": agent, "attainment": met, "worst": 0.5, "jain": 0.9,
         "stored": 75, "unshared": 100}
        for seed in (0, 1) for agent, met in (("a", 0.5), ("b", 1.0))
    ])  # fmt: skip
    table = scheduling.tenants(found)
    assert table.numbers.loc[0, ["jain", "stored", "unshared", "a", "b"]].tolist() == [0.9, 75, 100, 0.5, 1.0]
    shown = table.shown.iloc[0]
    assert shown["worst agent keeps"].startswith("0.50") and shown["b keeps"] == "1.00"
    assert shown["pages not stored twice"] == "25%"


# verdicts


def test_a_claim_says_published_ours_verdict_and_on_what():
    row = {"id": "c", "section": "§5", "sentence": "S", "published": [0.1, 0.2], "value": 0.12345, "lo": 0.1, "hi": 0.2,
           "failed": True, "verdict": "not reproduced", "kind": "simulated", "model": "m", "n": 3, "unit": "prompts",
           "note": "", "rule": "within", "tolerance": 0.05, "direction": "lower", "notebook": "05"}  # fmt: skip
    other = row | {"id": "d", "value": None, "lo": None, "hi": None, "failed": False, "verdict": "not run here"}
    said = as_text([row, other]).splitlines()
    assert said[1].split() == (
        "c 0.1 to 0.2 0.123 [0.1, 0.2] FAILED: not reproduced, simulated, m, n = 3 prompts".split()
    )
    assert said[2].split()[:5] == "d 0.1 to 0.2 –".split() and "simulated" not in said[2]
    assert said[-1] == "declared to hold, and failed: c" and "1 not reproduced, 1 not run here" in said[-2]
    assert cells(row)["ours"] == "0.123 [0.1, 0.2]" and cells(row)["rule"] == "within, ± 0.05"
