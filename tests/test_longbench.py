"""LongBench's prompts, truncation and metrics are the benchmark's, and no score stands alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import tiny
import torch

from wakekv.__main__ import main
from wakekv.costs import longbench, quality
from wakekv.errors import InputError
from wakekv.recording import models

MODEL = tiny.model("llama")
MODEL.set_attn_implementation("sdpa")
ROW = {"input": "Who?", "context": "Some text.", "answers": ["Ann"], "dataset": "qasper", "_id": "a", "length": 2}
DATA = os.environ.get("WAKEKV_DATA")


class Words:
    """A tokenizer whose tokens are words, numbered as they come, modulo `size`; a template in angle brackets."""

    eos_token_id = None

    def __init__(self, chat_template=None, size=1000):
        self.words, self.chat_template, self.size = [], chat_template, size

    def __call__(self, text, add_special_tokens):
        ids = []
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word) % self.size)
        return SimpleNamespace(input_ids=ids)

    def decode(self, ids, skip_special_tokens):
        return "".join(f" {self.words[i]}" for i in ids if i < len(self.words))

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        (turn,) = turns
        return f"<{turn['role']}> {turn['content']} <go>"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def sample(**changes):
    row = {**ROW, **changes}
    return longbench.Sample(row["dataset"], row["_id"], row["context"], row["input"], tuple(row["answers"]))


def test_files_are_read_line_by_line(tmp_path):
    one = write(tmp_path / "one.jsonl", ROW, {**ROW, "_id": "b", "dataset": "triviaqa", "answers": ["x", "y"]})
    two = write(tmp_path / "two.jsonl", {**ROW, "dataset": "multi_news"})
    found = longbench.read([one, two])
    assert [(x.task, x.id, x.answers) for x in found] == [
        ("qasper", "a", ("Ann",)), ("triviaqa", "b", ("x", "y")), ("multi_news", "a", ("Ann",))
    ]  # fmt: skip
    assert longbench.read([one, two], 1) == [found[0], found[2]]
    with pytest.raises(InputError, match="0 samples of a file are none"):
        longbench.read([one], 0)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: LongBench's fields"),
        ('{"input": "a", "context": "b", "answers": ["c"]}', "line 2: LongBench's fields"),
        (json.dumps({**ROW, "answers": []}), "line 2: .* not empty"),
        (json.dumps({**ROW, "answers": "Ann"}), "line 2: .* a list"),
        (json.dumps({**ROW, "dataset": "qaspr"}), "line 2: unknown task 'qaspr': did you mean qasper"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(InputError, match=message):
        longbench.read([path])


def test_a_file_that_is_not_there_or_empty_is_named(tmp_path):
    with pytest.raises(InputError, match="none.jsonl cannot be read"):
        longbench.read([tmp_path / "none.jsonl"])
    with pytest.raises(InputError, match="empty"):
        longbench.read([write(tmp_path / "empty.jsonl")])


def test_of_a_long_prompt_the_middle_goes_and_only_then_comes_the_template():
    one = sample(dataset="triviaqa", context=" ".join(f"w{i}" for i in range(30)), input="Question: who? Answer:")
    chat = sample(context=one.context)
    for asked, template, ends in ((one, "yes", ""), (chat, "yes", "<>"), (chat, None, "")):
        tokenizer = Words(template)
        task = longbench.TASKS[asked.task]
        whole = task.prompt.format(context=asked.context, input=asked.input).split()
        left = tokenizer.decode(longbench.tokens_of(asked, tokenizer, 21), True).split()
        kept = whole[:10] + whole[-10:]
        assert left == (["<user>", *kept, "<go>"] if ends else kept)
    tokenizer = Words()
    assert tokenizer.decode(longbench.tokens_of(one, tokenizer, 60), True).split()[-1] == "Answer:"
    with pytest.raises(InputError, match="2 tokens at least"):
        longbench.tokens_of(one, tokenizer, 1)


@pytest.mark.parametrize(
    "answer, reference, expected",
    [
        ("The cat sat.", "a cat SAT", 1.0),
        ("cat", "cat sat", 2 / 3),
        ("cat cat", "cat sat", 1 / 2),  # of 2 and 2 words, one in common
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "an", 0.0),  # nothing is left of either
        ("U.S.", "us", 1.0),
        ("is_it  so\n", "is it so", 2 / 5),  # punctuation goes, and with it what parts words
    ],
)
def test_f1_is_squads(answer, reference, expected):
    assert longbench.f1(answer, reference) == pytest.approx(expected)


def longest_common(a, b):
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + longest_common(a[1:], b[1:])
    return max(longest_common(a[1:], b), longest_common(a, b[1:]))


@pytest.mark.parametrize("answer", ["the cat sat on the mat", "mat the on sat cat", "On the mat, the CAT sat!", "dog"])
def test_rouge_l_is_the_f_of_the_longest_common_subsequence(answer):
    reference = "the cat was on the mat"
    words = ["".join(c for c in word.lower() if c.isalnum()) for word in answer.split()]
    common = longest_common(words, reference.split())
    assert longbench.rouge_l(answer, reference) == pytest.approx(2 * common / (len(words) + len(reference.split())))


def test_the_best_reference_counts_and_of_some_tasks_the_first_line():
    best = sample(dataset="2wikimqa", answers=["red fox", "blue dog cat"])
    assert longbench.score(best, "blue dog") == pytest.approx(4 / 5)
    assert longbench.score(best, "red\nfox") == 1.0
    assert longbench.score(sample(dataset="triviaqa", answers=["red"]), "\nred\nfox") == 1.0
    assert longbench.score(sample(dataset="multi_news", answers=["one two", "two one"]), "two one") == 1.0


@pytest.fixture
def rows(monkeypatch):
    for name, task in longbench.TASKS.items():
        monkeypatch.setitem(longbench.TASKS, name, replace(task, n_tokens=5))
    loaded = SimpleNamespace(model=MODEL, tokenizer=Words(size=64), context=700)
    samples = [sample(_id=i, dataset=task, answers=["Who?", "w3"]) for i in "ab" for task in ("2wikimqa", "qasper")]
    return longbench.answers(loaded, samples, budgets=[40, 1], page=4)


def test_every_arm_answers_every_sample(rows):
    arms = ["full", *["reversible", "destructive", "destructive, wider"] * 2]
    assert rows["arm"].tolist() == arms * 4 and rows["id"].tolist() == ["a"] * 14 + ["b"] * 14
    assert (rows["n_steps"] == 5).all() and rows["score"].between(0, 1).all()
    assert rows.loc[rows["budget"] == 40, "as_full"].all()  # room for all
    small = rows[(rows["budget"] == 1) & (rows["arm"] != "destructive, wider")]
    assert small["misses"].sum() > 0 and not small["as_full"].all()
    for row in rows.itertuples():
        assert row.score == longbench.score(sample(dataset=row.task, answers=["Who?", "w3"]), row.text)


def test_a_score_stands_beside_the_full_caches(rows):
    rows["score"] = [0.5 if arm == "full" else 0.25 for arm in rows["arm"]]
    found = longbench.scores(rows)
    assert len(found) == 2 * 7 and (found["n"] == 2).all() and (found["metric"] == "F1").all()
    for row in found.itertuples():
        mine = 50.0 if row.arm == "full" else 25.0
        assert (row.score, row.full, row.difference, row.retained) == (mine, 50.0, mine - 50.0, mine / 50.0)
    nothing = longbench.scores(rows.assign(score=0.0))
    assert nothing["retained"].isna().all() and (nothing["score"] == 0).all()


@pytest.mark.parametrize(
    "some, message",
    [
        (lambda rows: rows[rows["arm"] != "full"], "full cache's answer 2wikimqa a is missing"),
        (lambda rows: rows.drop(rows[(rows["arm"] == "full") & (rows["id"] == "b")].index[0]), "2wikimqa b is missing"),
        (lambda rows: rows[:0], "full cache's answer of any sample is missing"),
        (lambda rows: pd.concat([rows, rows]), "answered twice"),
    ],
)
def test_no_score_is_given_alone(rows, some, message):
    with pytest.raises(InputError, match=message):
        longbench.scores(some(rows))


def test_the_command_prints_every_score_beside_the_full_caches(tmp_path, monkeypatch, capsys):
    for name, task in longbench.TASKS.items():
        monkeypatch.setitem(longbench.TASKS, name, replace(task, n_tokens=3))
    monkeypatch.setattr(models, "load", lambda *_, **__: SimpleNamespace(model=MODEL, tokenizer=Words(size=64)))
    path = write(tmp_path / "x.jsonl", ROW, {**ROW, "_id": "b"}, {**ROW, "_id": "c"})
    asked = ["quality", "--longbench", str(path), "--samples", "2", "--budgets", "1", "--lengths", "40"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in told["table"]] == ["full", *quality.ARMS] and len(told["answers"]) == 8
    assert {row["n"] for row in told["table"]} == {2} and told["table"][0]["budget"] is None
    assert main(asked) == 0 and "destructive, wider" in capsys.readouterr().out


@pytest.mark.skipif(not DATA, reason="WAKEKV_DATA names no folder with the benchmark's own files, longbench/*.jsonl")
def test_the_benchmarks_own_files_are_read_and_asked(smol):
    samples = longbench.read(sorted(Path(DATA, "longbench").glob("*.jsonl")))
    assert {x.task for x in samples} == set(longbench.TASKS)
    for one in samples:
        assert longbench.score(one, one.answers[-1]) == 1.0 or not longbench.normalised(one.answers[-1])
        ids = longbench.tokens_of(one, smol.tokenizer, 400)  # the shortest of them has 600
        assert 380 < len(ids) < 460
        text = smol.tokenizer.decode(ids)
        assert one.input[-40:] in text and text.startswith("<|im_start|>") == (one.task != "triviaqa")
    (one,) = [x for x in samples if x.task == "2wikimqa"][:1]
    found = longbench.scores(longbench.answers(smol, [one], budgets=[16], length=500))
    assert found["full"].nunique() == 1 and torch.tensor(found["score"].tolist()).isfinite().all()
