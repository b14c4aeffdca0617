"""A prompt says where its needle is, and is right; the same seed gives the same prompt; bad input is one line."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from wakekv.errors import InputError
from wakekv.files import ROOT
from wakekv.recording import texts
from wakekv.recording.prompts import REGIMES, build, find

SEEDS = range(6)
MATH500 = ROOT.parent / "shared" / "data" / "math500" / "math500.jsonl"


@pytest.fixture(scope="module")
def tokenizer(smol):
    return smol.tokenizer


@pytest.fixture(scope="module")
def plain():
    """A tokenizer of bytes without a chat template, as a base model's may be."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(BPE(alphabet, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module")
def built(tokenizer):
    """Prompts of the default lengths, each made once: built(regime, scripted, seed)."""
    return functools.cache(lambda regime, scripted, seed: build(regime, tokenizer, scripted=scripted, seed=seed))


def spans(prompt, tokenizer):
    return [tokenizer.decode(prompt.tokens[start:stop]).strip() for start, stop in prompt.needle]


CASES = [(regime, scripted) for regime in REGIMES for scripted in (True, False)]


@pytest.mark.parametrize("regime, scripted", CASES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_needle_stands_where_the_prompt_says_and_nowhere_else(regime, scripted, seed, tokenizer, built):
    prompt = built(regime, scripted, seed)
    assert tokenizer.decode(prompt.tokens) == prompt.text
    texts_found = spans(prompt, tokenizer)
    assert len(set(texts_found)) == len(texts_found) >= (2 if scripted else 1)
    for text in texts_found:
        assert prompt.text.count(text) == 1
    assert list(prompt.needle) == sorted(prompt.needle)
    assert all(a < b <= c for (a, b), (c, _) in zip(prompt.needle, [*prompt.needle[1:], (len(prompt.tokens), 0)]))


@pytest.mark.parametrize("regime", ["niah", "multiturn"])
@pytest.mark.parametrize("scripted", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_answer_stands_in_the_needle_only(regime, scripted, seed, tokenizer, built):
    prompt = built(regime, scripted, seed)
    needles = spans(prompt, tokenizer)
    for answer in prompt.params["answers"]:
        assert sum(answer in needle for needle in needles) == 1 == prompt.text.count(answer)
        assert not scripted or answer in prompt.params["script"]
    assert prompt.answer == (None if scripted else prompt.params["answers"][0])


@pytest.mark.parametrize("regime, steps", [("niah", 250), ("cot", 600), ("multiturn", 250)])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_script_is_a_right_answer_and_long_enough(regime, steps, seed, tokenizer, built):
    prompt = built(regime, True, seed)
    assert steps <= len(prompt.script) <= 1500
    assert tokenizer.decode(prompt.script) == prompt.params["script"]
    for quote in prompt.params.get("quotes", []):  # what is to be copied is there to be copied, once, and asked for
        assert quote in prompt.text and quote in prompt.params["script"]
        assert prompt.text.count(" ".join(quote.split()[:5])) == 2
    assert built(regime, False, seed).script is None


@pytest.mark.parametrize("regime, scripted", CASES)
def test_the_seed_decides_everything(regime, scripted, tokenizer, built):
    first = [built(regime, scripted, seed) for seed in SEEDS]
    assert first[2] == build(regime, tokenizer, seed=2, scripted=scripted)
    assert len({prompt.text for prompt in first}) == len(SEEDS)
    assert json.loads(json.dumps(first[0].params)) == first[0].params  # a manifest can hold them


def test_five_seeds_of_cot_share_no_problem(built):
    rows = [row for seed in range(5) for row in built("cot", True, seed).params["rows"]]
    assert sorted(rows) == list(range(10))


@pytest.mark.parametrize("length", [600, 1200, 3000, 5000, 7500])
@pytest.mark.parametrize("regime", ["niah", "multiturn"])
def test_a_length_is_met_from_below(regime, length, tokenizer):
    length += 400 * (regime == "multiturn")
    for scripted, seed in [(True, 0), (False, 1)]:
        prompt = build(regime, tokenizer, seed=seed, length=length, scripted=scripted)
        assert length - 200 < len(prompt.tokens) <= length and prompt.params["length"] == length


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 0.75, 1])
def test_depth_is_where_the_needle_stands(depth, tokenizer):
    for seed in range(2):
        alone = build("niah", tokenizer, seed=seed, depth=depth, scripted=False, length=3000)
        assert abs(alone.needle[0][0] / len(alone.tokens) - depth) < 0.06
        prompt = build("niah", tokenizer, seed=seed, depth=depth, length=3000)
        starts = [start / len(prompt.tokens) for start, _ in prompt.needle]
        assert min(abs(start - depth) for start in starts) < 0.1
        assert max(starts) - min(starts) > 0.4  # the others are spread around


def test_a_tokenizer_without_a_chat_template_gets_plain_text_and_is_told(plain, tokenizer, caplog):
    prompt = build("niah", plain, length=6000)
    assert "plain text" in prompt.params["template"] and "plain text" in caplog.text
    assert prompt.text.startswith("User: Read this text.") and prompt.text.endswith("\n\nAssistant:\n")
    assert all(re.fullmatch(r"The pass number of the .* knows it\.", text) for text in spans(prompt, plain))
    assert build("niah", tokenizer).params["template"] == "chat"


def test_any_text_file_can_be_the_filler(tmp_path, tokenizer):
    path = tmp_path / "weather.txt"
    path.write_text(
        "\n".join(f"On day {i} the wind of the {i * i}th hour was felt\nby nobody at all." for i in range(400))
    )
    prompt = build("niah", tokenizer, length=2000, filler=path)
    assert prompt.params["filler"] == "weather.txt" and "was felt by nobody" in prompt.text
    assert "Shakespeare" not in prompt.text


def test_the_article_is_clean_prose(tokenizer):
    filler = texts.read_filler(None, lambda text: len(tokenizer(text).input_ids))
    assert 15_000 < sum(filler.n_tokens) and max(filler.n_tokens) < 200
    text = "".join(filler.sentences)
    assert not re.search(r"###|p\.\d+:|\[\^|\[\[|  |TIF", text)
    assert text.startswith("Shakespeare, William (1564--1616), English poet")
    assert sum(s.rstrip().endswith((".", '."', '"', "?", ":", ")")) for s in filler.sentences) > 0.97 * len(
        filler.sentences
    )


# Our own problems


def choir():
    return sum(len(set(group)) == 3 for group in itertools.combinations("SSSSSAAAABBB", 5))


def tokens():
    draws = list(itertools.combinations("RRRRRRBBBBGG", 3))
    return Fraction(sum(len(set(draw)) == 2 for draw in draws), len(draws))


def reservoir():
    litres, quarters = Fraction(0), 0  # of a minute
    while litres < 5400:
        litres += Fraction(60 - (15 if litres >= 1800 else 0), 4)
        quarters += 1
    return Fraction(quarters, 4)


def sequence():
    value, place = 2, 1
    while value <= 5000:
        value, place = 3 * value - 1, place + 1
    return place


def pond():
    (ax, ay), (bx, by), (cx, cy) = (5, 12), (0, 0), (14, 0)
    a, b, c = (math.dist(*pair) for pair in [((bx, by), (cx, cy)), ((ax, ay), (cx, cy)), ((ax, ay), (bx, by))])
    assert (a, b, c) == (14, 15, 13)
    return abs((a * ax + b * bx + c * cx) / (a + b + c) - ax)


SOLVED = {
    "reservoir": reservoir,
    "remainders": lambda: next(n for n in itertools.count(1) if (n % 7, n % 11, n % 13) == (3, 5, 8)),
    "choir": choir,
    "pond": pond,
    "sequence": sequence,
    "tokens": tokens,
    "tickets": lambda: next(180 - 2 * c for c in range(91) if 9 * (c + 20) + 5 * c + 6 * (180 - 2 * c) == 1360),
    "powers": lambda: (7**100 + 11**50) % 13,
    "pens": lambda: max(Fraction(w, 2) * (84 - 2 * w) for w in range(43)),
    "digits": lambda: sum(sum(map(int, str(n))) == 12 for n in range(100, 1000)),
}


def equalities(text):
    """The equalities between numbers in a text, as (left, right): "12 * 7 = 84", not those with letters in them."""
    part = r"[-+*/^().\d ]*"
    for sign in re.finditer(" = ", text):
        left = re.search(part + "$", text[: sign.start()])[0].strip()
        right = re.match(part, text[sign.end() :])[0].strip().rstrip(".").strip()
        if left and right and not re.match(r"[+*/^)]|- ", left) and right[-1] not in "-+*/^(":
            yield left, right


def value(expression):
    return eval(re.sub(r"\d+(\.\d+)?", lambda m: f"Fraction('{m[0]}')", expression.replace("^", "**")))


@pytest.mark.parametrize("row", texts.read_problems(None)[0], ids=lambda row: row["name"])
def test_our_problems_have_the_answers_that_computing_gives(row):
    assert Fraction(row["answer"]) == SOLVED[row["name"]]()
    assert row["solution"].endswith(f"The answer is {row['answer']}.")


@pytest.mark.parametrize("row", texts.read_problems(None)[0], ids=lambda row: row["name"])
def test_every_equality_in_our_solutions_holds(row):
    found = list(equalities(row["solution"]))
    assert len(found) >= 8
    assert [f"{left} = {right}" for left, right in found if value(left) != value(right)] == []


def test_a_wrong_equality_would_be_found():
    found = equalities("So 2 * 3 = 6, and 2^3 = 9. Then k = 3 and (1 + 2) / 3 = 1.")
    assert [value(left) == value(right) for left, right in found] == [True, False, True]


# Problems from a file


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_problems_come_from_a_file_of_json_lines(tmp_path, tokenizer):
    rows = [
        {"problem": f"What is {i} plus {i}? ", "solution": f"It is {2 * i}. " * 40, "answer": f"{2 * i}", "level": 1}
        for i in range(10, 17)
    ]
    path = write(tmp_path / "sums.jsonl", rows)
    prompt = build("cot", tokenizer, problems=path, seed=2)
    assert prompt.params["problems"] == "sums.jsonl" and prompt.params["rows"][:2] == [2, 3]
    assert spans(prompt, tokenizer)[0] == "What is 12 plus 12?" and prompt.params["answers"][0] == "24"
    assert len(prompt.script) >= 600
    alone = build("cot", tokenizer, problems=path, seed=2, scripted=False)
    assert alone.answer == "24" and len(alone.needle) == 1


@pytest.mark.skipif(not MATH500.exists(), reason="MATH-500 does not lie beside the checkout")
def test_math_500_is_read(tokenizer):
    rows, name = texts.read_problems(MATH500)
    assert len(rows) == 500 and name == "math500.jsonl"
    for seed in range(5):
        prompt = build("cot", tokenizer, problems=MATH500, seed=seed)
        assert len(prompt.script) >= 600 and len(prompt.needle) >= 2


# What is refused


@pytest.mark.parametrize(
    "given, said",
    [
        ({"regime": "naih"}, "unknown regime 'naih': did you mean niah"),
        ({"regime": "niah", "seed": -1}, "seed -1"),
        ({"regime": "niah", "length": 0}, "length 0"),
        ({"regime": "niah", "length": -5}, "length -5"),
        ({"regime": "niah", "length": 60}, "larger length"),
        ({"regime": "niah", "length": 380}, "more length"),
        ({"regime": "niah", "length": 9000, "context": 8192}, "length 9000 .* context of 8192"),
        ({"regime": "niah", "length": 8100, "context": 8192}, "prompt of .* script of .* context of 8192"),
        ({"regime": "cot", "context": 500}, "context of 500"),
        ({"regime": "niah", "length": 40_000}, "makes .* tokens, not 40000: give a longer text"),
        ({"regime": "niah", "depth": 1.5}, "depth 1.5"),
        ({"regime": "niah", "depth": math.nan}, "depth nan"),
        ({"regime": "cot", "length": 100}, "length 100: cot has none, leave it out"),
        ({"regime": "multiturn", "depth": 0.5}, "depth 0.5: multiturn has none"),
        ({"regime": "niah", "problems": "x.jsonl"}, "problems x.jsonl: niah has none"),
        ({"regime": "cot", "filler": "x.txt"}, "filler x.txt: cot has none"),
        ({"regime": "niah", "filler": "nowhere.txt"}, "nowhere.txt"),
        ({"regime": "cot", "problems": "nowhere.jsonl"}, "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line_that_names_it(given, said, tokenizer):
    with pytest.raises(InputError, match=said) as error:
        build(tokenizer=tokenizer, **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content, said", [(b"", "is empty"), (b" \n\n ", "is empty"), (b"\xff\xfe\x00", "UTF-8")])
def test_a_text_with_nothing_to_read_is_refused(content, said, tmp_path, tokenizer):
    path = tmp_path / "text"
    path.write_bytes(content)
    for given in ({"regime": "niah", "filler": path}, {"regime": "cot", "problems": path}):
        with pytest.raises(InputError, match=said):
            build(tokenizer=tokenizer, **given)


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"problem": "p", "solution": "s"}', '{"problem": "p", "solution": "s", "answer": 3}']
)
def test_a_line_that_is_no_problem_is_named(line, tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "p", "solution": "s", "answer": "a"}\n\n' + line + "\n")
    with pytest.raises(InputError, match=r"rows.jsonl, line 3"):
        build("cot", tokenizer, problems=path)


def test_a_needle_that_is_absent_or_stands_twice_is_refused(tokenizer):
    text = "one two three two"
    coded = tokenizer(text, return_offsets_mapping=True)
    start, stop = find("three", text, coded.input_ids, coded.offset_mapping, tokenizer)
    assert tokenizer.decode(coded.input_ids[start:stop]) == " three"
    for needle, times in (("four", 0), ("two", 2)):
        with pytest.raises(InputError, match=f"{times} times"):
            find(needle, text, coded.input_ids, coded.offset_mapping, tokenizer)
    with pytest.raises(InputError, match="not whole"):  # offsets that do not belong to these tokens
        find("three", text, coded.input_ids[::-1], coded.offset_mapping, tokenizer)


def test_a_problem_stated_twice_is_refused(tmp_path, tokenizer):
    row = {"problem": "What is it?", "solution": "It is.", "answer": "it"}
    with pytest.raises(InputError, match="2 times"):
        build("cot", tokenizer, problems=write(tmp_path / "twice.jsonl", [row, row]))


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(InputError, match="fast"):
        build("niah", SimpleNamespace(is_fast=False))


@pytest.mark.model
def test_the_default_model_finds_a_hidden_number(smol):
    prompt = build("niah", smol.tokenizer, length=600, scripted=False, context=smol.context)
    ids = torch.tensor([prompt.tokens])
    with torch.no_grad():
        out = smol.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert prompt.answer in smol.tokenizer.decode(out[0, ids.shape[1] :])


@pytest.mark.model
@pytest.mark.parametrize("regime, least", [("niah", 0.7), ("cot", 0.4), ("multiturn", 0.6)])
def test_the_default_model_mostly_agrees_with_a_script(regime, least, smol):
    length = {} if regime == "cot" else {"length": 1200}
    prompt = build(regime, smol.tokenizer, **length)
    script = torch.tensor(prompt.script[:300])
    with torch.no_grad():
        ids = torch.tensor([[*prompt.tokens, *script]])
        logits = smol.model(ids, logits_to_keep=len(script) + 1).logits[0, :-1]
    assert (logits.argmax(-1) == script).float().mean() > least
