"""What engines are asked in a sweep: prompts whose text is timed, and questions whose answers are scored."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakekv.errors import InputError


@dataclass(frozen=True)
class Load:
    """What all configurations are given: prompts, of token ids, and how many tokens follow each; from where."""

    source: str
    prompts: tuple[tuple[int, ...], ...]
    n_tokens: int

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([self.prompts, self.n_tokens]).encode()).hexdigest()[:16]


def from_text(text: str, tokenizer: Any, requests: int, length: int, n_tokens: int, source: str) -> Load:
    """Passages of one text, begun as far apart as it allows; they overlap where it is short."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < length:
        raise InputError(f"{source} has {len(ids)} tokens, not {length}: ask for a shorter --input")
    step = (len(ids) - length) / max(requests - 1, 1)
    starts = [int(i * step) for i in range(requests)]
    return Load(source, tuple(tuple(ids[s : s + length]) for s in starts), n_tokens)


def from_file(path: str | Path, tokenizer: Any, requests: int, length: int, n_tokens: int) -> Load:
    """Prompts of a file: JSON lines with `input`, `prompt` or `context` (L-Eval, LongBench), one a request, longer ones
    cut to `length` tokens; or any text, in passages. InputError naming the line."""
    path = Path(path)
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts {path} cannot be read ({error}): give a text in UTF-8") from error
    if path.suffix not in (".jsonl", ".json"):
        return from_text(text, tokenizer, requests, length, n_tokens, path.name)
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or len(prompts) == requests:
            continue
        try:
            row = json.loads(line)
            texts = [row.get(name) for name in ("input", "prompt", "context")]
            said = next(text for text in texts if isinstance(text, str) and len(text) > 200)
            said.encode()  # half a surrogate is no text
        except (ValueError, StopIteration, AttributeError, RecursionError):
            raise InputError(
                f"{path}, line {number}: an object with a long input, prompt or context is needed"
            ) from None
        prompts.append(tuple(tokenizer(said, verbose=False).input_ids[:length]))
    if len(prompts) < requests:
        raise InputError(f"{path} has {len(prompts)} prompts, not {requests}: ask for fewer --requests")
    return Load(path.name, tuple(prompts), n_tokens)


def bundled(tokenizer: Any, requests: int, length: int, n_tokens: int) -> Load:
    """Passages of the article that the prompts of this package are made of."""
    from wakekv.recording.texts import read_filler

    article = read_filler(None, lambda sentence: 0)
    return from_text("".join(article.sentences), tokenizer, requests, length, n_tokens, article.name)


def calibration(tokenizer: Any, length: int, n_tokens: int) -> Load:
    """Conversations to profile heads on: another text than any load's."""
    from wakekv.recording.prompts import build

    prompts = [build("multiturn", tokenizer, seed=seed, length=1200).tokens[:length] for seed in range(4)]
    return Load("multiturn", tuple(map(tuple, prompts)), n_tokens)


@dataclass(frozen=True)
class Question:
    """task: for whose score it counts;  prompt: token ids;  n_tokens: of an answer, at most;  score: of an answer's
    text, from 0 to 1."""

    task: str
    prompt: tuple[int, ...]
    n_tokens: int
    score: Callable[[str], float]


def longbench(paths: Iterable[str | Path], first: int, tokenizer: Any, length: int) -> list[Question]:
    """The first samples of each file of the benchmark; prompts and answers together have about `length` tokens."""
    from functools import partial

    from wakekv.costs.longbench import TASKS, read, score, tokens_of

    questions = []
    for sample in read(paths, first):
        n_tokens = TASKS[sample.task].n_tokens
        prompt = tuple(tokens_of(sample, tokenizer, length - n_tokens))
        questions.append(Question(sample.task, prompt, n_tokens, partial(score, sample)))
    return questions


def needles(n: int, tokenizer: Any, length: int, n_tokens: int = 24) -> list[Question]:
    """n prompts of the package's own, each with one number hidden at a quarter, a half or three quarters of its length,
    and asked for; an answer is right if it holds it."""
    from wakekv.recording.prompts import build

    questions = []
    for seed, depth in itertools.islice(itertools.product(range(n), (0.25, 0.5, 0.75)), n):
        prompt = build("niah", tokenizer, seed=seed, length=length, depth=depth, scripted=False)
        right = prompt.answer
        score = lambda text, right=right: float(right in text)  # noqa: E731
        questions.append(Question("needles", prompt.tokens, n_tokens, score))
    return questions
