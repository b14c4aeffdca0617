"""What was measured is kept, and measured again only where something it depends on changed."""

from __future__ import annotations

import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch

from wakekv.costs import quality, system, trials
from wakekv.errors import InputError, WakeKVError
from wakekv.reproduction import results
from wakekv.reproduction.compare import load_rules
from wakekv.reproduction.profiles import PROFILES
from wakekv.reproduction.results import SIZES, Bench, bench


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
    assert (
        kept["machine"]
        and kept["seconds_s"] >= 0
        and kept["cpu_s"] >= 0
        and kept["asked"]["seed"] == 1
        and kept["model"] == "smollm2-135m"
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(path.read_text()[:50]),
        lambda path: path.write_text("[]"),
    ],
)
def test_what_is_missing_or_cut_short_is_measured_again_and_the_rest_is_not(tmp_path, counted, damage):
    small(tmp_path).contest()
    damage(tmp_path / "measured" / "contest_niah_s1.json")
    small(tmp_path).contest()
    assert [row["seed"] for row in counted] == [0, 1, 1]


def test_other_questions_other_code_and_another_machine_are_measured_again(tmp_path, counted, monkeypatch):
    small(tmp_path).contest()
    small(tmp_path, budgets=(5,)).contest()
    assert len(counted) == 4
    monkeypatch.setattr(results, "_code", lambda home: {"machine": "another"})
    small(tmp_path, budgets=(5,)).contest()
    assert len(counted) == 6


def test_a_process_that_was_killed_is_told_in_one_line_and_what_was_done_is_kept(tmp_path, counted, monkeypatch):
    class Pool:
        def __init__(self, *args, **how):
            self.n = 0

        def __enter__(self):
            return self

        def __exit__(self, *args):
            return False

        def submit(self, function, *args):
            self.n += 1
            future = Future()
            future.set_result(function(*args)) if self.n == 1 else future.set_exception(BrokenProcessPool())
            return future

    monkeypatch.setattr(results, "ProcessPoolExecutor", Pool)
    with pytest.raises(WakeKVError, match=r"^a process that measured contest_niah_s1 was killed[^\n]+$"):
        replace(small(tmp_path), workers=2).contest()
    assert [path.name for path in (tmp_path / "measured").iterdir()] == ["contest_niah_s0.json"]


def test_the_code_that_counts_is_what_measures_and_not_the_pictures():
    code = results._code("wakekv.costs.trials")
    assert "wakekv/tiers/trial.py" in results._code("wakekv.tiers.trial").keys() - code.keys()
    assert {"wakekv/costs/trials.py", "wakekv/costs/witness.py", "wakekv/cache/cache.py", "torch"} <= set(code)
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


ASKED = {  # a small question of each kind
    "watch": {"length": 120, "n_tokens": 20, "budget": 3, "wants": 2},
    "exactness": {"length": 60, "n_tokens": 4},
    "contest": {"regime": "niah", "seed": 0, "length": 60, "budgets": (2, 3), "n_tokens": 12},
    "parts": {"context": 60, "budget": 2, "steps": 5},
    "needles": {"length": 60, "depth": 0.5, "seeds": (0,), "budgets": (2,), "n_tokens": 4},
    "growth": {"contexts": (48, 80), "budget": 2, "steps": 4},
    "pools": {"regime": "niah", "seed": 1, "length": 60, "budgets": (2, 3), "n_tokens": 5},
    "foreseen": {"regime": "niah", "seed": 1, "length": 60, "budget": 2, "n_tokens": 5},
}


@pytest.mark.parametrize("kind", trials.TRIALS)
def test_each_kind_of_trial_ends_in_rows_that_are_json(kind, tmp_path, monkeypatch):
    loaded = tiny.loaded(max_position_embeddings=256)
    loaded.model.set_attn_implementation("sdpa")
    loaded.tokenizer.decode = lambda ids: " ".join(map(str, ids))

    def build(regime, tokenizer, *, length=80, scripted=True, **_):
        return SimpleNamespace(**vars(tiny.prompt(length, 40 if scripted else None)), answer="17")

    for module in (trials, quality):
        monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(
        system, "passages", lambda tokenizer, b, n: torch.arange(b * n).view(b, n) * 7 % loaded.model.config.vocab_size
    )
    monkeypatch.setattr(results, "_loaded", lambda **model: loaded)
    it = Bench(PROFILES["smoke"], tmp_path, SIZES["smoke"])
    (found,) = it._all(kind, {"it": ASKED[kind]})
    assert found and it._all(kind, {"it": ASKED[kind]}) == [found]
    if kind == "watch":
        assert found["reversible"]["fetched"] == found["reversible"]["equal"] > 0 == found["destructive"]["fetched"]
        assert found["reversible"]["head"] == found["destructive"]["head"]
    if kind in ("contest", "needles"):
        assert set(trials.KINDS) <= {row["arm"] for row in found}
    if kind in ("parts", "growth"):
        assert len({row["context"] for row in found}) == (1 if kind == "parts" else 2)
        assert {"policy=reactive", "policy=evict"} <= {row["settings"] for row in found}
