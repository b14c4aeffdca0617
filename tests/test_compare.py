"""compare: equal runs are equal, a difference is found where it is, in numbers, and a clock is not judged."""

from __future__ import annotations

import json
import shutil

import pytest

from wakekv.__main__ import main
from wakekv.errors import InputError
from wakekv.reproduction.compare import TOLERANCES, Rule, as_text, compare, exact, load_rules, open_run

TABLE = "model,budget,miss_rate,seconds_s\nsmall,8,0.5,1.0\nsmall,16,0.25,1.0\nlarge,8,0.75,1.0\n"
CLAIMS = {"verdicts": [{"id": "evict-19-of-20", "verdict": "direction holds", "value": 0.5, "lo": None, "hi": None}]}
RECORD = {"profile": "smoke", "stages": {"04_x": {"inputs": {"cells": "1"}, "versions": {"numpy": "2.3"}}},
          "volatile": {"04_x": {"seconds_s": 3.0, "peak_bytes": 10}}}  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    """Two equal runs."""
    for name in "a", "b":
        for part in "tables", "figures", "claims":
            (tmp_path / name / part).mkdir(parents=True)
        (tmp_path / name / "tables" / "t.csv").write_text(TABLE)
        (tmp_path / name / "figures" / "f.csv").write_text("step,page\n0,1\n1,2\n")
        (tmp_path / name / "claims" / "04_x.json").write_text(json.dumps(CLAIMS))
        (tmp_path / name / "run.json").write_text(json.dumps(RECORD))
    return tmp_path / "a", tmp_path / "b"


def edit(path, was, now):
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, now))


def found(runs, **options):
    return compare(*map(open_run, runs), **options)


def test_equal_runs_are_equal(runs, capsys):
    result = found(runs)
    assert result["beyond"] == 0 and not result["verdicts"] and not result["only_in_one"]
    assert main(["compare", *map(str, runs)]) == 0
    assert "2 of 2 tables are equal; 0 verdicts differ; beyond tolerance: 0" in capsys.readouterr().out


def test_a_small_difference_is_told_and_a_large_one_counts(runs, capsys):
    edit(runs[1] / "tables" / "t.csv", "0.25", "0.255")
    (table,) = (t for t in found(runs)["tables"] if t["file"] == "tables/t.csv")
    assert (table["differing"], table["beyond"]) == (1, 0) and table["max_abs"] == pytest.approx(0.005)
    assert compare(*map(open_run, runs), exact(load_rules()))["beyond"] == 1
    edit(runs[1] / "tables" / "t.csv", "0.75", "0.85")
    (table,) = (t for t in found(runs)["tables"] if t["file"] == "tables/t.csv")
    assert (table["differing"], table["beyond"]) == (2, 1) and table["max_abs"] == pytest.approx(0.1)
    assert table["columns"]["miss_rate"]["beyond"] == 1
    assert main(["compare", *map(str, runs), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["beyond"] == 1


def test_what_a_clock_measured_is_shown_and_not_judged(runs):
    edit(runs[1] / "tables" / "t.csv", "0.5,1.0", "0.5,99.0")
    table = found(runs, tolerances=exact(load_rules()))["tables"][-1]
    assert table["beyond"] == 0 and table["differing"] == 1 and "clock" in table["columns"]["seconds_s"]["not judged"]
    said = as_text(found(runs, tolerances=load_rules()))
    assert (
        "tables/t.csv: 1 of " in said
        and "1 of them not judged; beyond tolerance: 0" in said
        and "by 0 at most" not in said
    )


@pytest.mark.parametrize(
    "was, now, beyond",
    [
        ("large,8,0.75,1.0\n", "", 1),  # a row is gone
        ("large,8,0.75,1.0\n", "large,8,0.75,1.0\nhuge,8,0.75,1.0\n", 1),  # a row came
        ("small,16", "tiny,16", 1),  # a text is another
        ("miss_rate", "missrate", 2),  # a column is gone, another came
        ("0.75", "nan", 1),  # a number is none
        ("0.75", "inf", 1),
    ],
)
def test_rows_columns_and_texts_that_differ_count(runs, was, now, beyond):
    edit(runs[1] / "tables" / "t.csv", was, now)
    assert found(runs)["beyond"] == beyond
    assert compare(*map(open_run, reversed(runs)))["beyond"] == beyond


def test_infinities_apart_are_beyond_any_tolerance(runs):
    for run, value in zip(runs, ("inf", "-inf")):
        edit(run / "tables" / "t.csv", "0.5", value)
    assert found(runs, tolerances=[Rule("*", ("*",), "of anything", rel=0.5)])["beyond"] == 1


def test_rows_in_another_order_are_matched_by_their_texts(runs):
    (runs[1] / "tables" / "t.csv").write_text(
        "model,budget,miss_rate,seconds_s\nlarge,8,0.75,1.0\nsmall,8,0.5,1.0\nsmall,16,0.25,1.0\n"
    )
    assert found(runs)["beyond"] == 0


def test_a_missing_table_counts_unless_both_are_asked_for(runs):
    (runs[1] / "figures" / "f.csv").unlink()
    result = found(runs)
    assert result["beyond"] == 1 and result["only_in_one"] == [{"file": "figures/f.csv", "in": str(runs[0])}]
    assert found(runs, both=True)["beyond"] == 0


def test_a_verdict_that_turns_counts_and_a_value_that_moves_is_told(runs):
    edit(runs[1] / "claims" / "04_x.json", "0.5", "0.51")
    assert found(runs)["beyond"] == 0 and found(runs)["verdicts"][0]["value"] == [0.5, 0.51]
    edit(runs[1] / "claims" / "04_x.json", "direction holds", "not reproduced")
    assert found(runs)["beyond"] == 1
    assert "evict-19-of-20: verdict direction holds -> not reproduced" in as_text(found(runs))


def test_versions_and_inputs_that_differ_are_named(runs):
    edit(runs[1] / "run.json", "2.3", "2.4")
    edit(runs[1] / "run.json", '"cells": "1"', '"cells": "2"')
    row = found(runs)["record"]["notebooks"]["04_x"]
    assert row["versions"] == {"numpy": ["2.3", "2.4"]} and row["inputs"] == ["cells"]
    assert row["volatile"]["seconds_s"] == [3.0, 3.0] and "numpy" in as_text(found(runs))


def test_the_reference_is_what_the_repository_shows():
    reference = open_run("reference")
    assert {name.split("/")[0] for name in reference.files} == {"tables", "figures", "claims"}
    assert compare(reference, reference)["beyond"] == 0


def test_every_rule_says_why_and_the_last_fits_all():
    rules = load_rules()
    assert all(len(rule.why) > 20 for rule in rules) and rules[-1].fits("any", "thing")


def test_refused_in_one_line(runs, tmp_path):
    shutil.rmtree(runs[1])
    with pytest.raises(InputError, match="holds no results"):
        open_run(runs[1])
    (tmp_path / "bad.yaml").write_text("- {file: x, columnz: [a]}")
    with pytest.raises(InputError, match="bad.yaml"):
        load_rules(tmp_path / "bad.yaml")
    assert TOLERANCES.exists()
