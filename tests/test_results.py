"""What was measured is kept, and measured again only where something it depends on changed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiny

from wakekv import results, trials
from wakekv.compare import load_rules
from wakekv.errors import InputError
from wakekv.profiles import PROFILES
from wakekv.results import SIZES, Bench, bench


@pytest.fixture
def counted(monkeypatch):
    """A kind of trial that only notes what it was asked."""
    asked = []

    def trial(loaded, **how):
        asked.append(how)
        return [how]

    monkeypatch.setitem(trials.TRIALS, "contest", trial)
    monkeypatch.setattr(results, "_loaded", lambda **model: tiny.loaded())
    return asked


def small(out, **changes) -> Bench:
    sizes = replace(SIZES["smoke"], seeds=(0, 1), **changes)
    return Bench(PROFILES["smoke"], out, sizes)


def test_what_is_there_is_not_measured_again(tmp_path, counted):
    first = small(tmp_path).contest()
    assert [row["seed"] for row in first] == [row["seed"] for row in counted] == [0, 1]
    assert small(tmp_path).contest() == json.loads(json.dumps(first)) and len(counted) == 2
    kept = json.loads((tmp_path / "measured" / "contest_niah_s1.json").read_text())
    assert kept["machine"] and kept["seconds"] >= 0 and kept["asked"]["seed"] == 1 and kept["model"] == "smollm2-135m"


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text(path.read_text()[:50])])
def test_what_is_missing_or_cut_short_is_measured_again_and_the_rest_is_not(tmp_path, counted, damage):
    small(tmp_path).contest()
    damage(tmp_path / "measured" / "contest_niah_s1.json")
    small(tmp_path).contest()
    assert [row["seed"] for row in counted] == [0, 1, 1]


def test_other_questions_other_code_and_another_machine_are_measured_again(tmp_path, counted, monkeypatch):
    small(tmp_path).contest()
    small(tmp_path, budgets=(5,)).contest()
    assert len(counted) == 4
    monkeypatch.setattr(results, "_code", lambda: {"machine": "another"})
    small(tmp_path, budgets=(5,)).contest()
    assert len(counted) == 6


def test_the_code_that_counts_is_what_measures_and_not_the_pictures():
    code = results._code()
    assert {"wakekv/trials.py", "wakekv/witness.py", "wakekv/cache/cache.py", "torch"} <= set(code)
    assert not any("drawing" in name or "twins" in name for name in code)


def test_every_profile_says_how_much_is_measured():
    assert set(SIZES) == set(PROFILES)
    assert bench("smoke", "x").sizes == SIZES["smoke"]
    with pytest.raises(InputError, match="unknown profile"):
        bench("smoek", "x")


def test_comparing_two_runs_judges_what_was_counted_and_not_what_was_timed():
    rules = load_rules()

    def judged(file: str) -> bool:
        return next(rule for rule in rules if rule.fits(file, "estimate")).judged

    assert judged("tables/06_equal_memory.csv") and judged("figures/06_needles.csv")
    assert not judged("tables/06_stalls_timed.csv") and not judged("figures/06_growth_timed.csv")


@pytest.mark.model
def test_the_smoke_profile_measures_each_kind(tmp_path):
    it = bench("smoke", tmp_path)
    steps, exact, rows = it.ten_steps(), it.exactness(), it.contest()
    assert steps["reversible"]["fetched"] == steps["reversible"]["equal"] > 0
    assert all(row["equal_text"] for row in exact) and all(row["replay_differs"] == 0 for row in rows)
    assert {row["arm"] for row in it.needles()} == {"full", *{row["arm"] for row in rows}}
    assert {row["context"] for row in it.growth()} == set(it.sizes.contexts)
    assert it.parts()[0]["settings"] == "dynamic"
