"""Figures and tables: they show the numbers they are given, and the same numbers make the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from io import BytesIO

import matplotlib
import numpy as np
import pandas as pd
import pytest
import section2
import section5
import section6
import section7
import section8
import section9
import section11

from wakekv import figures
from wakekv.drawing import claims as claims_drawn
from wakekv.drawing import mechanism as drawn
from wakekv.drawing.picture import FORMATS
from wakekv.errors import InputError
from wakekv.files import ROOT
from wakekv.heads.reads import read
from wakekv.logs.demand import demand
from wakekv.logs.trace import save_trace
from wakekv.policies import POLICIES
from wakekv.reproduction import claims
from wakekv.reproduction.claims import published
from wakekv.simulation.replay import replay
from wakekv.simulation.study import PAPER, studies
from wakekv.tables import Table, rates
from wakekv.verdicts import VERDICTS

BUDGETS = (2, 4, 8)


@pytest.fixture(scope="module")
def traces(make_trace):
    return [make_trace(k=64, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def study(traces):
    (one,) = studies(traces)
    return one


@pytest.fixture(scope="module")
def examples(traces, study, make_trace):
    """A call of every figure and table, by name."""
    data, many = published(), section2.study(make_trace)
    return (
        section2.examples(many, section2.numbers(many))
        | section5.examples(traces)
        | section6.examples()
        | section7.examples()
        | section8.examples()
        | section9.examples(make_trace)
        | section11.examples(make_trace)
        | {
            "one_head": lambda: figures.one_head(traces[0], 3, 5, 20),
            "needle_scores": lambda: figures.needle_scores(read(traces[0])),
            "mechanism": lambda: figures.mechanism(traces[0], 3, 4, 0, 30),
            "miss_curves": lambda: figures.miss_curves([study], data, BUDGETS, resamples=50),
            "miss_map": lambda: figures.miss_map(study, 4),
            "logs": lambda: figures.logs(traces),
            "sweep": lambda: figures.sweep([study], BUDGETS, data, resamples=50),
            "variants": lambda: figures.variants(traces[:1], BUDGETS),
            "claims_beside": lambda: figures.claims_beside(verdicts(), "made-up, measured"),
            "verdict_table": lambda: figures.verdict_table(verdicts()),
        }
    )


def verdicts() -> list[dict]:
    """A row of `claims.table` for every claim, with each verdict among them."""
    rows = []
    for number, claim in enumerate(claims.load_claims().values()):
        low, high = claims.number(claim.published)
        value = [high, high + 1e6, low - 1e6, None][number % 4]
        found = claims.decide(claim.id, value, lo=value, hi=value, model=claim.models[0], note="made up", machine="A30")
        rows.append(asdict(claim) | asdict(found) | {"section": claim.section, "needs": claim.hardware})
    return rows


def test_every_claim_is_drawn_and_each_row_has_the_colour_of_its_verdict(examples):
    rows, drawn = verdicts(), examples["claims_beside"]().table
    assert {row["verdict"] for row in rows} == set(VERDICTS)
    assert set(drawn["id"]) == {row["id"] for row in rows}
    shares = drawn[drawn["share"] & drawn["ours"].between(-1, 2)]
    assert (shares["published_hi"] <= 1).all() and len(shares)
    page = examples["verdict_table"]()._repr_html_()
    for row, line in zip(rows, page.split("<tbody>")[1].splitlines()[1:]):
        assert claims_drawn.TINTS[row["verdict"]] in line and row["verdict"] in line


def test_every_figure_and_table_has_an_example_here(examples):
    assert set(examples) == set(figures.FIGURES) | set(figures.TABLES)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_the_same_bytes_twice_and_leaves_matplotlib_as_it_was(name, examples, tmp_path):
    before = dict(matplotlib.rcParams)
    for folder in ("a", "b"):
        examples[name]().save(tmp_path / folder, name)
    assert dict(matplotlib.rcParams) == before
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(
        f"{name}.{kind}" for kind in (*FORMATS, "csv")
    )
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", figures.FIGURES)
def test_no_panel_stands_where_only_the_last_digits_of_the_layout_put_it(name, examples):
    places = [axes.get_position(original=True).bounds for axes in examples[name]().figure.axes]
    np.testing.assert_allclose(places, np.round(places, 5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", figures.TABLES)
def test_a_table_is_the_same_bytes_twice_and_shows_every_row(name, examples, tmp_path):
    for folder in ("a", "b"):
        made = examples[name]().save(tmp_path / folder, name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    lines = (tmp_path / "a" / f"{name}.md").read_text().splitlines()
    assert len(lines) == len(made.shown) + 2 and {line.count("|") for line in lines} == {made.shown.shape[1] + 1}
    assert made._repr_html_().count("<tr") == len(made.shown) + 1


def test_another_process_with_another_hash_seed_draws_the_same_bytes(traces, tmp_path):
    path, code = tmp_path / "log", (
        "import sys; from wakekv import figures; from wakekv.logs.trace import open_trace;"
        "figures.mechanism(open_trace(sys.argv[1]), 3, 4, 0, 30).save(sys.argv[2], 'it')"
    )  # fmt: skip
    save_trace(traces[0], path)
    figures.mechanism(traces[0], 3, 4, 0, 30).save(tmp_path / "here", "it")
    environment = {**os.environ, "PYTHONHASHSEED": "7", "MPLBACKEND": "svg"}
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "there"], check=True, cwd=ROOT, env=environment)
    for kind in (*FORMATS, "csv"):
        assert (tmp_path / "here" / f"it.{kind}").read_bytes() == (tmp_path / "there" / f"it.{kind}").read_bytes()


def test_importing_figures_chooses_no_backend():
    code = "from matplotlib import rcParams as now; old = dict(now); import wakekv.figures; assert dict(now) == old"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_picture_says_where_it_comes_from_and_names_its_axes(name, examples):
    figure = examples[name]().figure
    stamp = figure.texts[0].get_text()
    assert "made-up" in stamp and any(words in stamp for words in ("one log", "logs of 3 prompts", "measured"))
    first = [axes for axes in figure.axes if axes.get_visible()][0]
    assert first.get_ylabel() and any(axes.get_xlabel() for axes in figure.axes)


def test_no_two_policies_look_alike():
    looks = list(figures.POLICY_STYLE.values())
    assert len({look["color"] for look in looks}) == len({look["marker"] for look in looks}) == len(looks)


def test_the_curves_drawn_are_those_of_the_replay(study, traces):
    table = figures.miss_curves([study], None, BUDGETS, resamples=10).table
    wants = [demand(trace) for trace in traces]
    for policy in PAPER:
        runs = [replay(one, POLICIES[policy], 4) for one in wants]
        row = table[(table["policy"] == policy) & (table["budget"] == 4)].iloc[0]
        assert row["miss_rate"] == pytest.approx(sum(r.misses[0] for r in runs) / sum(r.n_wants for r in runs))
        assert row["mean_pages"] == pytest.approx(np.mean([r.mean_pages[0] for r in runs]))


def test_what_is_drawn_as_published_is_what_was_published(study):
    table = figures.miss_curves([study], published(), BUDGETS, resamples=10).table
    paper = table[table["source"] == "published"]
    assert set(paper["model"]) == {"qwen2.5-3b", "mistral-7b"} and set(paper["regime"]) == {"niah"}
    point = paper[(paper["model"] == "qwen2.5-3b") & (paper["policy"] == "frozen") & (paper["budget"] == 16)]
    assert point[["mean_pages", "miss_rate"]].to_numpy().tolist() == [[37204, 0.276]]
    assert paper[(paper["model"] == "mistral-7b") & (paper["policy"] == "frozen")]["mean_pages"].isna().all()


def test_one_prompt_has_no_band(traces):
    (alone,) = studies(traces[:1], ["reactive"])
    assert rates(alone, ["reactive"], BUDGETS)[["lo", "hi"]].isna().all(axis=None)


def test_a_study_keeps_models_regimes_and_kinds_of_text_apart(traces):
    other = dict(traces[0].manifest, text={"mode": "scripted"})
    greedy, scripted = studies([traces[0], type(traces[0])(**{**vars(traces[0]), "manifest": other})], ["full"], [1])
    assert (greedy.text, scripted.text) == ("greedy", "scripted") and greedy.n_prompts == scripted.n_prompts == 1


@pytest.mark.parametrize(
    "policy, first_touch", [("reactive", "cold"), ("evict", "cold"), ("evict", "warm"), ("frozen", "cold")]
)
def test_the_mechanism_shows_each_miss_of_the_replay(policy, first_touch, traces):
    wants = drawn.only(demand(traces[0], first_touch=first_touch), 3)
    grid = drawn.states(wants, policy, 4)
    run = replay(wants, POLICIES[policy], 4)
    assert ((grid == drawn.FETCHED) | (grid == drawn.LOST)).sum() == run.misses[0] > 0
    read_then = (grid == drawn.READ) | (grid == drawn.FIRST) | (grid == drawn.FETCHED) | (grid == drawn.LOST)
    assert read_then.sum() == wants.n_wants


def test_what_evict_destroyed_never_returns_and_reactive_destroys_nothing(traces):
    wants = drawn.only(demand(traces[0]), 3)
    evict, reactive = (drawn.states(wants, policy, 4) for policy in ("evict", "reactive"))
    gone = np.logical_or.accumulate((evict == drawn.DESTROYED) | (evict == drawn.LOST), axis=1)
    assert gone.any() and np.isin(evict[gone], [drawn.DESTROYED, drawn.LOST]).all()
    assert not np.isin(reactive, [drawn.DESTROYED, drawn.LOST]).any()


def test_one_head_of_a_demand_misses_what_it_misses_among_the_others(traces):
    wants = demand(traces[0])
    alone = replay(drawn.only(wants, 5), POLICIES["evict"], 4)
    assert alone.misses[0] == replay(wants, POLICIES["evict"], 4).head_misses[5, 0]


def test_the_close_up_shows_the_wants_of_the_demand(traces):
    table = figures.one_head(traces[0], 3, 5, 20).table
    wants = demand(traces[0])
    for step in (5, 24):
        entries = slice(wants.ptr[3, step], wants.ptr[3, step + 1])
        pages = table[table["step"] == step].groupby("page")["weight"].sum()
        assert dict(pages.round(4)) == pytest.approx(dict(zip(wants.page[entries], wants.weight[entries])), abs=1e-3)


def test_the_map_adds_up_to_the_miss_rate(study):
    table = figures.miss_map(study, 4).table
    layered = table[table["policy"] == "reactive"].sort_values(["layer", "head"])["miss_rate"].to_numpy()
    whole = study.curve("reactive").at([4]).rate[0]
    assert (layered * study.wants).sum() / study.wants.sum() == pytest.approx(whole)


def test_the_sweep_has_our_rows_and_the_papers(study):
    table = figures.sweep([study], BUDGETS, published(), resamples=20)
    assert list(table.shown["B"]) == ["2", "4", "8", *["8", "16", "32", "64"] * 2]
    assert table.shown["model"].iloc[0] == "made-up, greedy, n = 3"
    assert table.shown["evict"].iloc[-1] == "0.090" and table.shown["pages frozen"].iloc[-1] == ""
    ours = table.numbers[table.numbers["source"] == "simulated"]
    assert (ours["lo"] <= ours["miss_rate"]).all() and (ours["miss_rate"] <= ours["hi"]).all()
    assert (ours["unit"] == "prompts").all() and (ours["n"] == 3).all()


def test_the_default_among_the_variants_is_the_study_itself(study, traces):
    table = figures.variants(traces, BUDGETS).numbers
    first = table[table["variant"].str.startswith("default") & (table["policy"] == "reactive")]
    assert first["miss_rate"].to_numpy() == pytest.approx(study.curve("reactive").at(BUDGETS).rate)
    assert table.groupby("variant")["miss_rate"].sum().nunique() == table["variant"].nunique()


def test_the_csv_beside_a_figure_reads_back_as_its_numbers(study, tmp_path):
    picture = figures.miss_map(study, 4).save(tmp_path, "map")
    back = pd.read_csv(BytesIO((tmp_path / "map.csv").read_bytes()))
    pd.testing.assert_frame_equal(back, picture.table, check_dtype=False, rtol=1e-5)


@pytest.mark.parametrize("call", [
    lambda t, s: figures.one_head(t, 99),
    lambda t, s: figures.mechanism(t, 0, 4, 30, 60),
    lambda t, s: figures.mechanism(t, 0, 4, policies=["reactiv"]),
    lambda t, s: figures.miss_curves([]),
    lambda t, s: figures.miss_map(s, 4000),
    lambda t, s: figures.sweep([s], [4000]),
])  # fmt: skip
def test_what_is_not_in_the_log_is_refused_in_one_line(call, traces, study):
    with pytest.raises(InputError, match=r"^[^\n]+$"):
        call(traces[0], study)


def test_a_table_is_text_all_of_it(examples):
    for name in figures.TABLES:
        made = examples[name]()
        assert isinstance(made, Table) and made.shown.map(lambda cell: isinstance(cell, str)).all(axis=None)
