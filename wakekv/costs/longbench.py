"""LongBench (arXiv 2308.14508) from its own files: answers through a cache, scored only beside the full cache's.

Prompts, lengths of answers, truncation, normalisation and metrics are the benchmark's (github.com/THUDM/LongBench, its
dataset2prompt.json, dataset2maxlen.json, pred.py and metrics.py); the code is ours. One thing differs: the benchmark
takes ROUGE-L from the package `rouge` (last released in 2021), which goes sentence by sentence and counts a word once;
here it is rouge-score's, the longest common subsequence of both whole texts. The values differ: of 30 samples of
multi_news, the first 200 words of each context as its answer, 0.273 there and 0.195 here. So ROUGE-L can be compared
between caches, and not with numbers printed elsewhere.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rouge_score.rouge_scorer import RougeScorer

from wakekv import stats
from wakekv.costs.quality import BOOKS, answer, arms, prefilled
from wakekv.errors import InputError, lookup

ROOM = 596  # tokens the benchmark leaves of a context for template and answer: it truncates to 3500 of 4096


@dataclass(frozen=True)
class Task:
    """prompt: with places for {context} and {input};  n_tokens: of an answer, at most;  metric: of (answer, reference);
    chat: whether the prompt goes into the chat template;  first_line: whether that is all of an answer that counts."""

    prompt: str
    n_tokens: int
    metric: Callable[[str, str], float]
    chat: bool = True
    first_line: bool = False


@dataclass(frozen=True)
class Sample:
    """One line of a file: what is asked (`input`) about a context, and the answers that are right."""

    task: str
    id: str
    context: str
    input: str
    answers: tuple[str, ...]


def normalised(text: str) -> list[str]:
    """Words as SQuAD compares them: lower case, without punctuation and articles."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def f1(answer: str, reference: str) -> float:
    """F1 of the words that two texts have in common, each as often as both have it."""
    ours, right = normalised(answer), normalised(reference)
    common = (Counter(ours) & Counter(right)).total()
    return 2 * common / (len(ours) + len(right)) if common else 0.0


def rouge_l(answer: str, reference: str) -> float:
    """F of the longest common subsequence of words (rouge-score, without stemming)."""
    return RougeScorer(["rougeL"]).score(reference, answer)["rougeL"].fmeasure


def read(paths: Iterable[str | Path], first: int | None = None) -> list[Sample]:
    """The samples of the benchmark's JSON-lines files, in order; of each file the first so many, by default all.

    InputError names the file and line at fault.
    """
    if first is not None and first < 1:
        raise InputError(f"{first} samples of a file are none: ask for 1 or more")
    samples = []
    for path in map(Path, paths):
        try:
            lines = path.read_text("utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path} cannot be read ({error}): give JSON lines in UTF-8") from error
        before = len(samples)
        for i, line in enumerate(lines, 1):
            if line.strip() and (first is None or len(samples) < before + first):
                samples.append(_sample(line, f"{path}, line {i}"))
        if len(samples) == before:
            raise InputError(f"{path} is empty: one JSON object a line is needed")
    return samples


def _sample(line: str, where: str) -> Sample:
    try:
        row = json.loads(line)
        texts = {name: row[name] for name in ("context", "input")}
        task, answers = row["dataset"], tuple(row["answers"])
        known = answers and all(isinstance(x, str) for x in (*texts.values(), *answers, task))
        "".join((*texts.values(), *answers) if known else ()).encode()  # half a surrogate is no text
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{where}: LongBench's fields context, input, answers, dataset are needed") from error
    if not known or not isinstance(row["answers"], list):
        raise InputError(f"{where}: context, input and dataset must be texts, and answers a list of them, not empty")
    try:
        lookup(task, TASKS, "task")
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return Sample(task, str(row.get("_id", where)), **texts, answers=answers)


def tokens_of(sample: Sample, tokenizer: Any, length: int) -> list[int]:
    """The prompt of a sample; of one longer than `length` tokens the first and last half are kept, before the template.

    A chat template is used where the tokenizer has one and the task wants it. InputError for length < 2.
    """
    if length < 2:
        raise InputError(f"length {length}: a prompt keeps its first and last half, so 2 tokens at least are needed")
    task = TASKS[sample.task]
    text = task.prompt.format(context=sample.context, input=sample.input)
    ids = tokenizer(text, add_special_tokens=True).input_ids
    if len(ids) > length:
        half = length // 2
        text = "".join(tokenizer.decode(some, skip_special_tokens=True) for some in (ids[:half], ids[-half:]))
    if task.chat and tokenizer.chat_template:
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    return list(tokenizer(text, add_special_tokens=True).input_ids)


def score(sample: Sample, text: str) -> float:
    """How right an answer is, from 0 to 1: the best over the references."""
    task = TASKS[sample.task]
    text = text.lstrip("\n").split("\n")[0] if task.first_line else text
    return max(task.metric(text, reference) for reference in sample.answers)


def answers(
    loaded: Any,
    samples: Sequence[Sample],
    *,
    budgets: Sequence[int],
    length: int | None = None,
    chunk: int = 1024,
    **settings: Any,
) -> pd.DataFrame:
    """Greedy answers through every arm of quality.ARMS at every budget, and the full cache's. A prompt is read once.

    loaded: models.Loaded;  length: tokens to truncate a prompt to (default: the context but 596, as the benchmark does
    with 4096; the model's own limit otherwise);  chunk, settings: as for `quality.prefilled`. One row a sample and arm:
    task, id, arm, budget, pages, bytes, n_prompt (tokens), text, score, as_full (text as full's), and the books, all as
    in `quality.needles`.
    """
    model, tokenizer, rows, full = loaded.model, loaded.tokenizer, [], None
    if length is None and loaded.context is None:
        raise InputError(f"{loaded.name} does not say how long a text it reads: give a length")
    length = loaded.context - ROOM if length is None else length
    ends = frozenset({tokenizer.eos_token_id} - {None})
    for sample in samples:
        *start, last = tokens_of(sample, tokenizer, length)
        n_tokens = TASKS[sample.task].n_tokens
        held = prefilled(model, start, chunk=chunk, **{"max_tokens": len(start) + 1 + n_tokens, **settings})
        own = {"task": sample.task, "id": sample.id, "n_prompt": len(start) + 1}
        for arm, budget, cache, size in arms(held, budgets):
            said = answer(model, cache, last, n_tokens, ends)
            text = tokenizer.decode(said, skip_special_tokens=True)
            full = text if arm == "full" else full
            row = {**own, "arm": arm, "budget": budget, **size, "text": text, "score": score(sample, text)}
            books = {name: getattr(cache.books, name) for name in BOOKS}
            rows.append({**row, "as_full": text == full, **books, "n_steps": cache.books.n_steps})
    return pd.DataFrame(rows)


def scores(rows: pd.DataFrame) -> pd.DataFrame:
    """A task's score by arm and budget, each beside the full cache's own on the same samples; 0 to 100, as printed by
    the benchmark.

    rows: those of `answers`. Columns: task, metric, arm, budget, n, score and its interval lo, hi (bootstrap over
    samples), full (the full cache's score), difference with lo and hi of its own (paired), retained (score / full; nan
    where full is 0), n_as_full, miss_rate. InputError where a sample has no row of the full cache, or has two.
    """
    full = rows[rows["arm"] == "full"].set_index(["task", "id"])["score"]
    others = rows[rows["arm"] != "full"]
    lacking = [key for key in others.set_index(["task", "id"]).index.unique() if key not in full.index]
    if lacking or not len(full):
        name = " ".join(lacking[0]) if lacking else "of any sample"
        raise InputError(f"the full cache's answer {name} is missing: a score says nothing without it beside")
    if full.index.has_duplicates:
        raise InputError(f"sample {' '.join(full.index[full.index.duplicated()][0])} was answered twice: give it once")
    out = []
    for (task, arm, budget), some in rows.groupby(["task", "arm", "budget"], sort=False, dropna=False):
        right = full.loc[list(zip(some["task"], some["id"]))].to_numpy()
        mine, apart = (stats.mean(100 * x, unit="samples") for x in (some["score"], some["score"].to_numpy() - right))
        row = {"task": task, "metric": METRICS[TASKS[task].metric], "arm": arm, "budget": budget, "n": len(some)}
        row |= {"score": mine.value, "lo": mine.lo, "hi": mine.hi, "full": 100 * right.mean()}
        row |= {"difference": apart.value, "difference_lo": apart.lo, "difference_hi": apart.hi}
        row["retained"] = some["score"].mean() / right.mean() if right.any() else math.nan
        row["n_as_full"] = int(some["as_full"].sum())
        out.append(row | {"miss_rate": some["misses"].sum() / max(some["n_wants"].sum(), 1)})
    return pd.DataFrame(out)


METRICS: Mapping[Callable, str] = {f1: "F1", rouge_l: "ROUGE-L"}
_BRIEF = (  # of two tasks, word for word
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)
_ONLY = "Only give me the answer and do not output any other words."
TASKS: dict[str, Task] = {  # the four of the paper; prompts from the benchmark's dataset2prompt.json
    "qasper": Task(
        f"You are given a scientific article and a question. Answer the question {_BRIEF}\n\nArticle: {{context}}\n\n "
        f"Answer the question based on the above article {_BRIEF}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        f1,
    ),
    "triviaqa": Task(
        f"Answer the question based on the given passage. {_ONLY} The following are some examples.\n\n"
        "{context}\n\n{input}",
        32,
        f1,
        chat=False,
        first_line=True,
    ),
    "2wikimqa": Task(
        f"Answer the question based on the given passages. {_ONLY}\n\n"
        "The following are given passages.\n{context}\n\n"
        f"Answer the question based on the given passages. {_ONLY}\n\nQuestion: {{input}}\nAnswer:",
        32,
        f1,
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        rouge_l,
    ),
}
