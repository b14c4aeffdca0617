"""Section 2 in pictures, tables and answers: what was measured, beside what was printed; they can say the opposite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import section2

from wakekv import figures
from wakekv.drawing import foresight as drawn
from wakekv.errors import InputError
from wakekv.heads import pools
from wakekv.heads.grading import hot
from wakekv.heads.markers import try_tokens
from wakekv.heads.reads import read
from wakekv.heads.wakeups import ENSEMBLE, SIGNALS, events
from wakekv.reproduction.claims import published
from wakekv.tables import measured

DATA = published()


@pytest.fixture(scope="module")
def many(make_trace):
    return section2.study(make_trace)


@pytest.fixture(scope="module")
def found(many):
    return section2.numbers(many)


@pytest.fixture(scope="module")
def reads(many):
    return many[0].reads[0]


def test_logs_are_pooled_by_model_regime_and_text_and_the_smaller_kind_stands_beside(many, make_trace):
    kinds = [(pool.regime, pool.text, len(pool.reads), pool.beside) for pool in many]
    assert kinds == [("niah", "scripted", 3, False), ("cot", "scripted", 3, False), ("cot", "greedy", 1, True)]
    only = pools.pools([section2.log(make_trace, text="greedy")])
    assert not only[0].beside and pools.counted(only) == only


def test_a_regime_that_repeats_itself_is_left_out_and_nothing_but_such_is_refused_in_one_line(make_trace):
    good, bad = section2.log(make_trace, "niah"), section2.log(make_trace, "cot", flagged=True)
    assert [pool.regime for pool in pools.counted(pools.pools([good, bad]))] == ["niah"]
    for logs in ([bad], []):
        with pytest.raises(InputError, match=r"^[^\n]+$"):
            pools.counted(pools.pools(logs))


def test_what_stands_beside_has_a_row_in_table_4_and_no_part_in_anything_else(found):
    assert set(found["churn"].loc[~found["churn"]["pooled"], "text"]) == {"greedy"}
    for name in ("wakeups", "markers", "bursts", "prefetching", "tokens"):
        assert set(found[name]["text"]) == {"scripted"}, name
    assert found["logs"]["flagged"].tolist() == [0, 0, 1] and found["logs"]["pooled"].tolist() == [3, 3, 0]


@pytest.mark.parametrize("name", ["churn", "wakeups", "markers", "bursts"])
def test_every_row_says_on_how_many_prompts_how_and_what_was_published(name, found):
    table = found[name]
    assert {"model", "regime", "n_prompts", "estimate", "lo", "hi", "method", "published"} <= set(table)
    assert (table.loc[table["pooled"] & (table["unit"] == "prompts"), "n_prompts"] <= 3).all()
    cells = [c for c in ("text", "quantity", "share", "signal", "grading", "lead", "metric") if c in table]
    assert not table.duplicated(["model", "regime", *cells]).any()
    assert table["published"].ne("").any() and not table["published"].str.contains("nan").any()


def test_the_papers_number_stands_beside_ours_or_alone_where_the_model_is_the_papers(make_trace):
    for model, value in (("made-up", "0.85; 0.79"), ("r1-distill-llama-8b", "0.79")):
        table = pools.churn(pools.pools([section2.log(make_trace, "cot", model=model)]), DATA)
        assert pools.find(table, quantity="drift_fraction")["published"] == value
        assert pools.find(table, quantity="adjacent_jaccard_continuous")["published"] == ""


def test_chance_stands_beside_precision_recall_and_f1(found):
    table = found["wakeups"].set_index(["metric", "grading"]).sort_index()
    for metric in ("precision", "recall", "f1"):
        assert table.loc[(metric, "z"), list(pools.CHANCE)].notna().all(axis=None)
    assert table.loc[("lift", "z"), list(pools.CHANCE)].isna().all(axis=None)


def test_a_table_of_section_2_has_ours_above_the_papers_regime_by_regime(found):
    shown = measured.churn(found["churn"], DATA).shown
    assert shown["regime"].tolist() == ["niah"] * 2 + ["cot"] * 4 + ["multiturn"]
    assert ["(published)" in model for model in shown["model"]] == [False, True, False, False, True, True, True]
    assert shown["Jaccard, continuous"].iloc[1] == "0.53" and shown["Jaccard, binary"].iloc[1] == ""
    cells = measured.wakeups(found["wakeups"], DATA).shown
    paper = cells[cells["model"].str.startswith("r1-distill-qwen-1.5b") & (cells[""] == "recall")].iloc[0]
    assert [paper[name] for name in (*SIGNALS, ENSEMBLE)] == ["0.69", "0.41", "0.45", "0.72", "0.46"]


def test_find_prefers_the_models_asked_for_and_refuses_what_was_not_measured(found):
    table = pd.concat([found["churn"], found["churn"].assign(model="other")])
    assert pools.find(table, ["absent", "other"], quantity="drift_fraction")["model"] == "other"
    assert pools.find(table, ["absent"], quantity="drift_fraction")["model"] == "made-up"
    with pytest.raises(InputError, match="regime = multiturn"):
        pools.find(table, regime="multiturn")


def test_evidence_is_the_row_or_says_why_there_is_none(found):
    table = found["churn"]
    row = pools.find(table, regime="niah", quantity="drift_fraction")
    ours = pools.evidence(table, [], regime="niah", quantity="drift_fraction")
    assert (ours["value"], ours["lo"], ours["hi"], ours["n"]) == (row["estimate"], row["lo"], row["hi"], 3)
    assert "fewer than five" in ours["note"]
    assert pools.evidence(table, [], regime="multiturn", quantity="drift_fraction")["value"] is None
    nothing = table.assign(estimate=np.nan, method="undefined: nothing to count")
    without = pools.evidence(nothing, [], regime="niah", quantity="drift_fraction")
    assert without["value"] is None and "nothing to count" in without["note"]


@pytest.mark.parametrize("tested, markers, f1, expected", [(0, 0, np.nan, None), (9, 0, np.nan, 0.0), (9, 2, 0.6, 0.6)])
def test_no_marker_is_no_foresight_but_nothing_tested_is_no_evidence(tested, markers, f1, expected, found):
    table = found["markers"].copy()
    for quantity, value in (("tokens_tested", tested), ("markers", markers), ("heldout_f1", f1)):
        table.loc[table["quantity"] == quantity, "estimate"] = value
    assert pools.marker_evidence(table, [], "cot", "heldout_f1")["value"] == expected
    assert pools.marker_evidence(table, [], "cot", "markers")["value"] == (None if expected is None else markers)


def set_to(table, lo, **estimates):
    """The table with these estimates at causal z, their intervals from `lo` of them to themselves."""
    table = table.copy()
    for metric, value in estimates.items():
        at = (table["grading"] == "z") & (table["metric"] == metric)
        table.loc[at, ["estimate", "hi"]], table.loc[at, "lo"] = value, value * lo
    return table


@pytest.mark.parametrize(
    "estimates, lo, verdict, word",
    [
        ({"precision": 0.8, "recall": 0.9}, 0.9, "reliable", "Yes"),
        ({"precision": 0.55, "recall": 0.9}, 0.9, "tells when", "Better than by chance, but not reliably"),
        ({"f1_above_same_heads": -0.1}, 1.1, "tells who, not when", "No"),
        ({"f1_above_random": -0.1}, 1.1, "no better than chance", "No"),
    ],
)
def test_the_verdict_on_a_signal_follows_the_numbers_at_the_unfavourable_end(estimates, lo, verdict, word, found):
    base = {"f1_above_random": 0.3, "f1_above_same_heads": 0.2, "precision": 0.1, "recall": 0.5}
    seen = measured.foresight(set_to(found["wakeups"], lo, **(base | estimates)))
    assert set(seen["verdict"]) == {verdict} and len(seen) == 2
    assert measured.foreseen(seen).startswith(word + ".")


def test_heads_that_were_foreseeable_would_be_called_so(make_trace):
    """Entropy jumps in the steps before each wake-up, and at no other time."""
    logs = []
    for seed in range(5):
        trace = section2.log(make_trace, seed=seed, n_steps=240)
        mass, entropy = np.zeros_like(trace.needle_mass), np.full_like(trace.entropy, 3.0)
        entropy += np.sin(np.arange(240)).astype(np.float32) * 0.1
        for head in range(trace.n_heads):
            for step in (60 + 7 * head % 20, 130 + 5 * head % 30, 200 + head):
                mass[head, step], entropy[head, step - 3] = 0.8, 9.0
        logs.append(replace(trace, needle_mass=mass, entropy=entropy))
    seen = measured.foresight(pools.wakeups(pools.pools(logs), DATA, leads=(8, 32)))
    assert seen["signal"].tolist() == ["entropy_trend"] and seen["verdict"].tolist() == ["reliable"]
    assert measured.foreseen(seen).startswith("Yes.")


def test_logs_in_which_nobody_wakes_have_an_answer_too(make_trace):
    logs = [section2.log(make_trace, seed=seed) for seed in (0, 1)]
    still = [replace(trace, needle_mass=np.zeros_like(trace.needle_mass)) for trace in logs]
    seen = measured.foresight(pools.wakeups(pools.pools(still), DATA, leads=(32,)))
    assert seen["verdict"].tolist() == ["nobody wakes"]
    assert measured.foreseen(seen) == "These logs cannot tell: nobody wakes in them."


@pytest.mark.parametrize("drift, word", [(0.9, "Yes"), (0.1, "Most do not"), (0.5, "It depends on model and regime")])
def test_the_answer_on_churn_follows_the_drift_fraction(drift, word, found):
    table = found["churn"].copy()
    table.loc[table["quantity"] == "drift_fraction", ["estimate", "lo", "hi"]] = drift, drift - 0.05, drift + 0.05
    assert measured.changed(table).startswith(word + ":")


def test_wakers_shows_every_wake_up_once_and_the_first_to_wake_first(reads):
    table = figures.wakers([reads]).table
    assert sorted(zip(table["head"], table["step"])) == [tuple(at) for at in np.argwhere(events(reads.score))]
    firsts = table.groupby("place")["step"].min()
    assert firsts.is_monotonic_increasing


def test_head_pages_shows_the_overlap_and_the_drifts_that_were_measured(reads):
    table = figures.head_pages(reads, 3, 5, 40).table
    assert table["drift_event"].tolist() == reads.drift.event[3, 5:45].tolist()
    whole = figures.head_pages(reads, 3).table
    assert (whole.loc[whole["drift_event"], "in_baseline"] == whole.loc[whole["drift_event"], "pages"]).all()
    assert whole["in_baseline"].iloc[0] == whole["pages"].iloc[0] and (whole["in_baseline"] <= whole["pages"]).all()


def test_table_4_draws_our_intervals_and_the_papers_points(many, found):
    table = figures.table_4(many, found["churn"], DATA).table
    ours = table[(table["source"] == "ours") & (table["quantity"] == "drift_fraction")].set_index("regime")
    for regime in section2.REGIMES:
        row = pools.find(found["churn"], regime=regime, quantity="drift_fraction")
        assert ours.loc[regime, ["estimate", "lo", "hi"]].tolist() == row[["estimate", "lo", "hi"]].tolist()
    paper = table[(table["source"] == "published") & (table["quantity"] == "drift_fraction")]
    assert sorted(paper["estimate"]) == [0.63, 0.76, 0.79, 0.85]
    jaccard = table[(table["source"] == "published") & table["quantity"].str.contains("jaccard")]
    assert sorted(jaccard["quantity"].str.rsplit("_", n=1).str[1]) == ["binary"] * 3 + ["continuous"]


def test_the_sweep_goes_through_the_drift_fraction_at_the_papers_setting(many, found):
    table = figures.drift_settings(many, DATA).table
    here = table[(table["window"] == 8) & np.isclose(table["threshold"], 0.5)].set_index("regime")["estimate"]
    for regime in section2.REGIMES:
        assert here[regime] == pools.find(found["churn"], regime=regime, quantity="drift_fraction")["estimate"]
    assert (table.groupby(["regime", "window"])["estimate"].diff().dropna() >= 0).all()


def test_an_alarm_is_drawn_right_where_the_head_wakes_within_the_lead(reads):
    table = figures.alarms(reads, 3).table
    assert len(table) and table["step"].min() >= 33
    assert table["right"].tolist() == hot(events(reads.score), 32)[3, table["step"]].tolist()


def test_the_mirage_meets_the_table_at_the_alarm_threshold_and_at_the_oracle(many, found):
    table = figures.mirage(many, DATA).table
    for line, grading, beta in (("z > 2", "z", None), ("oracle", "oracle", 1.0)):
        at = table[(table["line"] == line) & (table["regime"] == "cot") & (table["signal"] == "entropy_trend")]
        at = (at if beta is None else at[at["beta"] == beta]).iloc[0]
        for metric in ("precision", "recall"):
            cells = {"signal": "entropy_trend", "grading": grading, "lead": 32, "metric": metric}
            assert at[metric] == pytest.approx(pools.find(found["wakeups"], regime="cot", **cells)["estimate"])


def test_a_token_lies_above_the_curve_exactly_if_the_test_calls_it_a_marker():
    rng = np.random.default_rng(0)
    token = rng.integers(0, 30, 3000)
    burst = rng.random(3000) < np.where(token < 4, 0.3, 0.08)
    rows = try_tokens(token, burst)
    n, rate = drawn._needed(3000, burst.mean(), len(rows), max(row["n"] for row in rows))
    needed = dict(zip(n, rate))
    assert {row["token"] for row in rows if row["marker"]} == {0, 1, 2, 3}
    assert all((row["rate"] >= needed[row["n"]]) == row["marker"] for row in rows)


def test_the_prefetch_picture_has_every_predictor_below_its_ceiling(many, found):
    table = figures.prefetch_yield(many, found["prefetching"]).table
    saved = table[table["metric"] == "misses_saved"]
    assert set(saved["predictor"]) == {*SIGNALS, ENSEMBLE, "woke_recently", "always", "perfect_when"}
    assert (saved["ceiling"] > 0).all() and (saved["estimate"] < saved["ceiling"]).all()
    random = saved["predictor"].isin(["always", "perfect_when"])
    assert saved.loc[random, "by_random"].isna().all() and saved.loc[~random, "by_random"].notna().all()


@pytest.mark.parametrize("call", [
    lambda reads: figures.wakers([]),
    lambda reads: figures.head_pages(reads, 99),
    lambda reads: figures.alarms(reads, 3, 100, 60),
    lambda reads: figures.table_4([], pd.DataFrame(), DATA),
])  # fmt: skip
def test_what_is_not_there_is_refused_in_one_line(call, reads):
    with pytest.raises(InputError, match=r"^[^\n]+$"):
        call(reads)


def test_one_short_log_without_a_wake_up_can_be_drawn_and_tabulated(make_trace):
    alone = pools.pools([make_trace(n_steps=1, needle=())])
    found = section2.numbers(alone)
    for name, call in section2.examples(alone, found).items():
        made = call()
        made.figure.draw_without_rendering() if name in figures.FIGURES else made.markdown()
    assert read(alone[0].reads[0].trace).score.max() == 0


def test_few_prompts_are_called_descriptive_in_the_answer(found):
    assert "Descriptive in 2 of 2 pairs" in measured.changed(found["churn"])
    assert "Descriptive" not in measured.changed(found["churn"].assign(n_prompts=5))
    assert "Descriptive in 2 of 2 pairs" in measured.foreseen(measured.foresight(found["wakeups"]))
