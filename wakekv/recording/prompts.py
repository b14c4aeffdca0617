"""What a model is asked, and where in its prompt the answer stands.

Three regimes. *niah*: facts hidden in a long article, asked for at the end. *cot*: problems to be worked out.
*multiturn*: facts told early, other talk between, recalled at the end. Each comes in two kinds. Scripted: a right
answer is written here and fed to the model token by token, since small models left to themselves soon repeat a phrase.
Otherwise, as in the paper, the model is asked once and goes its own way. All follows from the seed, and
`Prompt.params` names every choice.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from wakekv.errors import InputError, lookup
from wakekv.recording.texts import Filler, prose, read_filler, read_problems

N_NEEDLES = 4  # hidden facts of a scripted niah prompt
N_QUOTE = 55  # tokens that a quoted sentence should have
N_COT = 600  # tokens that a cot script has at least: as many problems, two or more, as that takes


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised, ready to be recorded."""

    regime: str
    seed: int
    text: str
    tokens: tuple[int, ...]
    needle: tuple[tuple[int, int], ...]  # token spans [start, stop), ascending
    script: tuple[int, ...] | None  # the tokens to feed as the answer; None: the model chooses
    answer: str | None  # what a right answer contains; None where there are several: see params["answers"]
    params: dict


@dataclass(frozen=True)
class Ask:
    """What a regime is given to write a prompt from."""

    seed: int
    scripted: bool
    length: int | None
    depth: float | None
    n_filler: int  # tokens
    filler: Filler | None
    problems: Path | None
    n_tokens: Callable[[str], int]

    def rng(self, what: str) -> random.Random:
        return random.Random(f"{what} {self.seed}")


@dataclass(frozen=True)
class Draft:
    """What a regime gives back: turns (role, content), the last the user's; needles, each in the text once."""

    turns: Sequence[tuple[str, str]]
    needles: Sequence[str]
    script: str | None
    answers: Sequence[str]
    params: dict


@dataclass(frozen=True)
class Regime:
    """A way to write prompts, and its defaults; None: it takes no such argument."""

    draft: Callable[[Ask], Draft]
    length: int | None = None
    depth: float | None = None


def build(
    regime: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    length: int | None = None,
    depth: float | None = None,
    scripted: bool = True,
    filler: str | Path | None = None,
    problems: str | Path | None = None,
    context: int | None = None,
) -> Prompt:
    """The prompt of a regime in `REGIMES`.

    length: tokens of the whole prompt, met to within a sentence or two from below (niah 5000, multiturn 3000).
    depth: where in the article the first needle stands, from 0 to 1 (niah 0.5); the others are spread around it.
    scripted: with an answer to be fed; otherwise one question, and the model answers.
    filler: a text file for the article; by default the one of 1911. problems: a JSON-lines file with fields problem,
    solution and answer, as MATH-500 has them; by default our own ten.
    context: the most tokens the model can hold; prompt and script must fit.
    Raises InputError, naming the argument, and ModelError if the default article cannot be fetched.
    """
    kind = lookup(regime, REGIMES, "regime")
    _check(regime, kind, seed, length, depth, filler, problems)
    if not tokenizer.is_fast:
        raise InputError("the tokenizer cannot say where its tokens stand in a text: a fast one is needed")
    target = length or kind.length
    if target and context and target > context:
        raise InputError(f"length {target} is beyond the model's context of {context} tokens: ask for less")

    def n_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    if not tokenizer.chat_template:
        logging.getLogger("wakekv").warning("the tokenizer has no chat template: the prompt is plain text")
    hay = read_filler(filler, n_tokens) if target else None
    n_filler = min(target, sum(hay.n_tokens)) if hay else 0
    depth = kind.depth if depth is None else depth
    ask = Ask(seed, scripted, target, depth, n_filler, hay, Path(problems) if problems else None, n_tokens)
    prompt = _finish(regime, ask, tokenizer)
    if hay and n_filler < target and len(prompt.tokens) < target:
        raise InputError(f"all of {hay.name} makes {len(prompt.tokens)} tokens, not {target}: give a longer text")
    while target and len(prompt.tokens) > target:
        ask = replace(ask, n_filler=ask.n_filler - (len(prompt.tokens) - target))
        prompt = _finish(regime, ask, tokenizer)
    n_prompt, n_script = len(prompt.tokens), len(prompt.script or ())
    if context and n_prompt + n_script > context:
        raise InputError(
            f"a {regime} prompt of {n_prompt} tokens and its script of {n_script} are beyond the model's context of "
            f"{context}: ask for a smaller length, or take another model"
        )
    return prompt


def _check(regime, kind, seed, length, depth, filler, problems) -> None:
    if not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed {seed!r}: a whole number from 0 up is needed")
    none = f"{regime} has none, leave it out"
    if length is not None and (kind.length is None or not isinstance(length, int) or length < 1):
        raise InputError(f"length {length!r}: " + ("tokens, at least 1" if kind.length else none))
    if depth is not None and (kind.depth is None or not 0 <= depth <= 1):
        raise InputError(f"depth {depth!r}: " + ("from 0 to 1" if kind.depth else none))
    if filler and kind.length is None:
        raise InputError(f"filler {filler}: {none}")
    if problems and kind.length is not None:
        raise InputError(f"problems {problems}: {none}")


def _finish(regime: str, ask: Ask, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A draft in the model's own chat template, tokenised, with its needles found in the tokens."""
    draft = REGIMES[regime].draft(ask)
    if chat := bool(tokenizer.chat_template):
        messages = [{"role": role, "content": content} for role, content in draft.turns]
        try:  # transformers renders it in a sandbox
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise InputError(f"the tokenizer's chat template fails ({error}): use another tokenizer or none") from error
    else:
        text = "".join(f"{role.capitalize()}: {content}\n\n" for role, content in draft.turns) + "Assistant:\n"
    coded = tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)
    script = tokenizer(draft.script, add_special_tokens=False).input_ids if draft.script else None
    params = {
        "scripted": ask.scripted,
        "length": ask.length,
        "template": "chat" if chat else "plain text: the tokenizer has no chat template",
        **draft.params,
        "answers": list(draft.answers),
        "script": draft.script,
    }
    return Prompt(
        regime,
        ask.seed,
        text,
        tuple(coded.input_ids),
        tuple(sorted(find(needle, text, coded.input_ids, coded.offset_mapping, tokenizer) for needle in draft.needles)),
        tuple(script) if script else None,
        draft.answers[0] if len(draft.answers) == 1 else None,
        params,
    )


def find(needle: str, text: str, tokens: Sequence[int], offsets, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The span [start, stop) of the tokens that hold a needle, which must stand in the text exactly once."""
    if text.count(needle) != 1:
        raise InputError(f"needle {needle[:60]!r} stands {text.count(needle)} times in the text, not once: change it")
    start = text.index(needle)
    inside = [i for i, (a, b) in enumerate(offsets) if a < start + len(needle) and b > start and a < b]
    span = (inside[0], inside[-1] + 1) if inside else (0, 0)
    if needle not in tokenizer.decode(tokens[slice(*span)], clean_up_tokenization_spaces=False):
        raise InputError(f"the needle {needle[:60]!r} is not whole in its tokens: use another tokenizer or text")
    return span


def _quotes(ask: Ask, filler: Filler, n: int) -> list[tuple[str, str]]:
    """n sentences of the filler, near N_QUOTE tokens, in random order, each with opening words that no other has."""
    found = []
    for sentence, _ in sorted(zip(filler.sentences, filler.n_tokens), key=lambda pair: abs(pair[1] - N_QUOTE)):
        opening = " ".join(sentence.split()[:5])
        if opening[0].isalpha() and '"' not in opening and sum(s.count(opening) for s in filler.sentences) == 1:
            found.append((opening, sentence.strip()))
    if len(found) < n:
        raise InputError(f"{len(filler.sentences)} sentences do not suffice to quote {n}: ask for more length")
    return ask.rng("quotes").sample(found[: 3 * n], n)


def _recall(ask: Ask, filler: Filler, asked: Sequence[tuple[str, str]]) -> tuple[str, str, list[str]]:
    """Questions with a sentence to copy after each answer, the script that answers them, and the sentences."""
    quotes = _quotes(ask, filler, len(asked))
    questions, script = [], []
    for i, ((question, reply), (opening, sentence)) in enumerate(zip(asked, quotes, strict=True), 1):
        questions.append(f'{i}. {question} Then copy the sentence that begins with "{opening}".')
        script.append(f"{i}. {reply} The sentence is: {sentence}")
    return "\n".join(questions), "\n\n".join(script), [sentence for _, sentence in quotes]


def niah(ask: Ask) -> Draft:
    """Pass numbers hidden among the sentences of an article. Scripted: four, asked for in turn, quotations between."""
    rng, words = ask.rng("niah"), prose()
    start, article = ask.filler.cut(ask.rng("niah filler"), ask.n_filler)
    n = N_NEEDLES if ask.scripted else 1
    choices = words["places"], words["keepers"], range(100_000, 1_000_000)
    places, keepers, numbers = (rng.sample(choice, n) for choice in choices)
    needles = [
        f"The pass number of the {place} is {number}, and {keeper} knows it."
        for place, keeper, number in zip(places, keepers, numbers)
    ]
    depths = [ask.depth] + [(ask.depth + i / n + rng.uniform(-0.3, 0.3) / n) % 1 for i in range(1, n)]
    seen = list(accumulate(article.n_tokens, initial=0))
    pieces = list(article.sentences)
    for depth, needle in sorted(zip(depths, needles), reverse=True):
        pieces.insert(min(range(len(seen)), key=lambda i: abs(seen[i] - depth * seen[-1])), needle + " ")
    asked = [
        (f"What is the pass number of the {place}?", f"The pass number of the {place} is {number}.", str(number))
        for place, number in zip(places, numbers)
    ]
    rng.shuffle(asked)
    params = {"filler": ask.filler.name, "filler_sha256": ask.filler.sha256, "first_sentence": start, "depths": depths}
    if ask.scripted:
        questions, script, params["quotes"] = _recall(ask, article, [(q, reply) for q, reply, _ in asked])
        task = f"Now answer these questions about the text, one after the other.\n{questions}"
    else:
        script, task = None, f"Now answer this question about the text. {asked[0][0]}"
    content = f"Read this text. I will ask about it afterwards.\n\n{''.join(pieces).strip()}\n\n{task}"
    return Draft([("user", content)], needles, script, [number for _, _, number in asked], params)


def cot(ask: Ask) -> Draft:
    """Problems to be worked out; the needle is their statements. Scripted: several, with written-out solutions."""
    rows, name = read_problems(ask.problems)
    first = ask.seed * max(1, len(rows) // 5) + ask.seed // 5  # five seeds, five places far apart
    chosen, n_script = [], 0
    while not chosen or (ask.scripted and len(chosen) < len(rows) and (len(chosen) < 2 or n_script < N_COT)):
        chosen.append((first + len(chosen)) % len(rows))
        n_script += ask.n_tokens(rows[chosen[-1]]["solution"])
    picked = [rows[i] for i in chosen]
    params = {"problems": name, "rows": chosen}
    needles, answers = [row["problem"] for row in picked], [row["answer"] for row in picked]
    if not ask.scripted:
        content = f"{needles[0]}\n\nReason step by step, and end with the answer."
        return Draft([("user", content)], needles, None, answers, params)
    listed = "\n\n".join(f"Problem {i}. {problem}" for i, problem in enumerate(needles, 1))
    content = (
        f"Solve these problems one after the other. Reason step by step, and end each with its answer.\n\n{listed}"
    )
    script = "\n\n".join(f"Problem {i}. {row['solution']}" for i, row in enumerate(picked, 1))
    return Draft([("user", content)], needles, script, answers, params)


def multiturn(ask: Ask) -> Draft:
    """A conversation: four facts in the first turns, unrelated passages after them, then recall."""
    conversations = prose()["conversations"]
    chat = conversations[ask.seed % len(conversations)]
    facts, asides = chat["facts"], prose()["asides"]
    start, passages = ask.filler.cut(ask.rng("multiturn filler"), ask.n_filler)
    turns = []
    for i, fact in enumerate(facts):
        greeting = "Please remember what I tell you now, because I will ask you about it later. " if i == 0 else ""
        turns += [("user", greeting + fact["fact"]), ("assistant", fact["ack"])]
    share = -(-len(passages.sentences) // len(asides))
    for i, (lead, reply) in enumerate(asides):
        if passage := "".join(passages.sentences[i * share : (i + 1) * share]).strip():
            turns += [("user", f"{lead}\n\n{passage}"), ("assistant", reply)]
    order = ask.rng("recall").sample(facts, len(facts) if ask.scripted else 1)
    params = {"filler": ask.filler.name, "filler_sha256": ask.filler.sha256, "first_sentence": start}
    params["conversation"] = chat["name"]
    if ask.scripted:
        questions, script, params["quotes"] = _recall(ask, passages, [(fact["ask"], fact["reply"]) for fact in order])
        task = f"Now back to what I told you at first. Answer these questions, one after the other.\n{questions}"
    else:
        script, task = None, f"Now back to what I told you at first. {order[0]['ask']}"
    needles = [fact["fact"] for fact in (facts if ask.scripted else order)]
    return Draft([*turns, ("user", task)], needles, script, [fact["answer"] for fact in order], params)


REGIMES: dict[str, Regime] = {
    "niah": Regime(niah, length=5000, depth=0.5),
    "cot": Regime(cot),
    "multiturn": Regime(multiturn, length=3000),
}
