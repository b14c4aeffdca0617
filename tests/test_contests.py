"""Equal memory, prompt by prompt: what is counted, what is left out and why, and that a broken policy is found out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from micro import micro

from wakekv.errors import InputError
from wakekv.policies import POLICIES, Policy
from wakekv.reproduction import claims
from wakekv.simulation.simulate import curves
from wakekv.simulation.study import Study, studies
from wakekv.tables import contests
from wakekv.tables.contests import CITED, MATCHED, OURS, SEVEN, SURVEY, against, claim_values, contest, survey, withheld
from wakekv.tables.matched import headline, sensitivity, seven, systems

BUDGETS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Backwards(Policy):
    """Least recently used stays: LRU, broken."""

    def rank(self, seen):
        return -seen.recency


def study_of(ours: Policy) -> Study:
    """A study of the micro-trace in which `ours` stands in reactive's place, and evict shares its schedule."""
    wants = micro()
    rules = {name: POLICIES[name] for name in (*SEVEN, "optimum")} | {OURS: ours}
    found = {name: [curves(wants, rule)] for name, rule in rules.items()}
    per_head = wants.ptr[:, -1] - wants.ptr[:, 0]
    return Study("smollm2-135m", "cot", "scripted", "", "head", wants.layer, per_head, found, wants.n_pages)


@pytest.fixture(scope="module")
def study():
    return study_of(POLICIES[OURS])


def verdicts(study, out) -> dict[str, str]:
    """What notebook 05 writes down, and what the run's table of claims then says."""
    values, declared = claim_values([study], BUDGETS), claims.load_claims()
    own = [name for name in values if declared[name].notebook == "05_matched"]
    claims.write_claims(out, "05_matched", [claims.decide(name, **values[name]) for name in own])
    written = {row["id"]: row["verdict"] for row in claims.table(out)}
    return {name: written[name] if name in own else claims.decide(name, **values[name]).verdict for name in values}


COUNTS = ["frozen-17-of-17", "evict-19-of-20", *(f"{name}-matched" for name in CITED), "rkv-example"]


def test_on_a_real_log_every_count_holds_its_direction(study, tmp_path):
    assert {name: verdict for name, verdict in verdicts(study, tmp_path).items() if name in COUNTS} == dict.fromkeys(
        COUNTS, "direction holds"
    )


def test_breaking_lru_turns_the_claims_red(tmp_path):
    broken = verdicts(study_of(Backwards()), tmp_path)
    assert {name: broken[name] for name in COUNTS} == dict.fromkeys(COUNTS, "not reproduced")


def test_a_contest_with_oneself_is_all_ties(study):
    one = contest(study.curves[OURS], study.curves[OURS], "step", BUDGETS)
    assert one.row()["ties"] == len(BUDGETS) and one.margin.value == 0
    assert (one.sign.wins, one.sign.ties, one.sign.losses) == (0, 1, 0)


def test_nothing_beats_the_optimum_at_its_own_memory(study):
    one = contest(study.curves[OURS], study.curves["optimum"], "step")
    assert one.pooled.count("win") == 0 and one.margin.value < 0


def test_the_margin_is_the_mean_over_prompts_of_their_own_margins(study):
    two = [study.curves[OURS] * 2, study.curves["evict"] + study.curves["frozen"]]
    one = contest(*two, "step", BUDGETS)
    assert one.margin.n == 2
    assert one.margin.value == pytest.approx(
        np.mean([np.mean([p.margin for p in prompt.points]) for prompt in one.prompts])
    )


def test_a_policy_that_never_pruned_has_no_number_and_says_so(make_trace):
    (short,) = studies([make_trace(k=64)], (OURS, "rkv", "snapkv"))
    assert "never gave up a page" in withheld(short.curves["rkv"]) and not withheld(short.curves["snapkv"])
    values = claim_values([study_with(short)], (2, 4))
    assert "value" not in values["rkv-matched"] and "never gave up" in values["rkv-matched"]["note"]


def study_with(short: Study) -> Study:
    """The study with every policy that claims ask for: the missing ones stood in for by rkv."""
    full = {name: short.curves.get(name, short.curves["rkv"]) for name in (OURS, *MATCHED)}
    return Study(**short.__dict__ | {"curves": full})


def test_budgets_beyond_the_pages_are_left_out(study):
    assert [p.budget for p in against(study, "evict", "budget", (8, 500)).pooled.points] == [8]
    with pytest.raises(InputError, match="way of matching"):
        against(study, "evict", "luck", BUDGETS)
    with pytest.raises(InputError, match="policy"):
        against(study, "evikt", "budget", BUDGETS)


def test_every_system_of_figure_1a_is_placed_and_has_a_number_or_a_reason(make_trace):
    chosen = studies([make_trace(k=64, seed=s) for s in (0, 1)], list(SURVEY), slow_budgets=(2, 4), held_out=True)
    numbers = survey(chosen, (2, 4), resamples=50)
    assert list(numbers["policy"]) == list(SURVEY)
    assert set(numbers["when"]) == {"offline", "prefill", "decode"}
    assert (numbers["margin"].notna() | (numbers["reason"] != "")).all()
    for name in ("quest", "shadowkv", "infinigen", "headinfer", "thinkv"):
        row = numbers.set_index("policy").loc[name]
        assert np.isnan(row["margin"]) and row["reason"]
    own = numbers[numbers["calibrated"] == "this prompt"]["policy"]
    assert set(own) == {"quest", "optimum"}, "every other one is calibrated on another prompt"


def test_every_policy_of_the_paper_is_surveyed_under_a_name_of_its_own():
    variants = {"full", "shadow", "fifo", "random", "lfu", "decayed-reads", "snapkv-one-query", "rkv-importance"}
    variants |= {"spindlekv", "spindlekv-max"}  # of another text (notebook 08)
    variants |= {"gkv-blend", "pooled", "commons"} | {name for name in POLICIES if name.startswith("flexicache-m0")}
    assert set(SURVEY) == set(POLICIES) - variants and len(set(SURVEY.values())) == len(SURVEY)


def test_a_policy_of_ones_own_gets_curves_and_a_place(make_trace):
    traces = [make_trace(k=64, seed=s) for s in (0, 1)]
    (study,) = studies(traces, {OURS: POLICIES[OURS], "backwards": Backwards()})
    row = survey([study], (2, 4), resamples=50).set_index("policy").loc["backwards"]
    assert (row["when"], row["gives_up"]) == ("decode", "recoverable") and row["margin"] > 0


def test_the_paper_and_its_own_tables_stand_above_ours(study):
    table = headline([study], BUDGETS, claims.published(), resamples=50).numbers
    told = table[~table["whose"].str.startswith("ours")].set_index(["against", "whose"])["at_most"]
    assert told.xs("the paper, as printed", level="whose").to_list() == [17, 19, 32]
    assert told.xs("the paper's tables, matched by us", level="whose").to_list() == [13, 19, 28]
    total = table[table["whose"] == "ours, all together"].set_index(["against", "matching"])
    assert total.loc[("evict", "budget"), "matched"] == len(BUDGETS)


def test_the_tables_show_every_row_and_every_reason(study, make_trace):
    table = seven([study], BUDGETS, claims.published(), resamples=50)
    assert {"reactive", "R-KV", "optimum"} <= set(table.shown.columns) and (table.shown["B"] == "64").any()
    moved = sensitivity([make_trace(k=64)], (2, 4), resamples=50)
    text = moved.shown.set_index("variant")
    assert "prompt rows" in text.loc["pages of 8 tokens", "SnapKV"]
    assert "sequential convention" in text.loc["each want in turn (sequential)", "frozen"]
    assert moved.numbers["margin"].notna().sum() > len(text)


def test_systems_say_what_is_withheld(make_trace):
    chosen = studies([make_trace(k=64, seed=s) for s in (0, 1)], (OURS, "headinfer", "thinkv", "duoattention"))
    shown = systems(chosen, (2, 4), resamples=50).shown.set_index("system")
    assert "streams every page" in shown.loc["HeadInfer", "withheld"]
    assert "no memory" in shown.loc["ThinKV", "withheld"]
    assert "pages" in shown.filter(like="B = ").loc["DuoAttention"].iloc[0]
    assert shown.loc["DuoAttention", "calibrated on"] == "this prompt"


def test_the_names_used_here_are_policies():
    assert set(SURVEY) | set(MATCHED) | set(SEVEN) <= set(POLICIES)
    assert all(rule.every == 8 for rule in contests.EVERY_8.values())
