"""What engines are asked: passages, files of prompts, questions."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from wakekv.errors import InputError
from wakekv.serving import loads


class Letters:
    """A tokenizer of characters."""

    chat_template, is_fast = None, True

    def __call__(self, text, **_):
        ids, at = [ord(letter) for letter in text], [(i, i + 1) for i in range(len(text))]
        return SimpleNamespace(input_ids=ids, offset_mapping=at)

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


def test_passages_of_a_text_begin_as_far_apart_as_it_allows():
    load = loads.from_text("abcdefghij", Letters(), 3, 4, 5, "letters")
    assert ["".join(map(chr, prompt)) for prompt in load.prompts] == ["abcd", "defg", "ghij"]
    with pytest.raises(InputError, match="letters has 10 tokens, not 11"):
        loads.from_text("abcdefghij", Letters(), 1, 11, 5, "letters")


def test_prompts_come_from_json_lines_and_a_line_that_is_none_is_named(tmp_path):
    path = tmp_path / "leval.jsonl"
    path.write_text("\n".join(json.dumps({"input": letter * 300}) for letter in "xyz"))
    load = loads.from_file(path, Letters(), 2, 8, 5)
    assert load.prompts == ((ord("x"),) * 8, (ord("y"),) * 8)
    with pytest.raises(InputError, match="has 3 prompts, not 4"):
        loads.from_file(path, Letters(), 4, 8, 5)
    path.write_text("\ufeff" + json.dumps({"input": "x\u2028" * 300}, ensure_ascii=False), "utf-8")
    assert loads.from_file(path, Letters(), 1, 8, 5).prompts[0][:2] == (ord("x"), 0x2028)
    path.write_text('{"input": "short"}')
    with pytest.raises(InputError, match="line 1: an object with a long"):
        loads.from_file(path, Letters(), 1, 8, 5)
    with pytest.raises(InputError, match="cannot be read"):
        loads.from_file(tmp_path / "none.txt", Letters(), 1, 8, 5)


def test_questions_of_the_benchmark_fit_their_length_and_know_what_is_right(tmp_path):
    path = tmp_path / "triviaqa.jsonl"
    row = {"context": "x" * 900, "input": "who?", "answers": ["Ann Lee"], "dataset": "triviaqa"}
    path.write_text("\n".join(json.dumps(row) for _ in range(3)))
    first, _ = loads.longbench([path], 2, Letters(), 200)
    assert first.task == "triviaqa" and first.n_tokens == 32 and len(first.prompt) == 200 - 32
    assert first.score("Ann Lee\nand more") == 1 and first.score("nobody") == 0


def test_needles_hide_one_number_each_at_three_depths_and_an_answer_must_hold_it():
    questions = loads.needles(4, Letters(), 3000)
    texts = ["".join(map(chr, question.prompt)) for question in questions]
    assert [question.task for question in questions] == ["needles"] * 4 and len(set(texts)) == 4
    for question, text in zip(questions, texts):
        assert question.score(text) == 1 and question.score("none") == 0
    assert loads.needles(0, Letters(), 3000) == []
