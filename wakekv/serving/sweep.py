"""What residency costs and buys in a serving engine: a sweep over configurations, one JSON file each.

The engine is `Pair`, which runs vLLM in processes of its own (wakekv/vllm/arm.py), the untouched one and one with the
plugin, so that this file needs none of its packages; or `generation.Transformers`, which answers the same.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wakekv.errors import InputError, lookup
from wakekv.files import ROOT, write_json
from wakekv.serving.loads import Load, Question
from wakekv.vllm.arm import Arm, read_demands
from wakekv.vllm.engine import installed
from wakekv.vllm.settings import Settings

WARM = 2  # decode steps left out of a median


def configurations(budget: int, timing: str = "lagged", page: int = 16) -> dict[str, dict | None]:
    """The sweep of the paper's Table 2 by name, with the plugin's settings; None: the untouched engine, dense.

    timing  of the reactive ones: "lagged" as the paper deploys it, or "exact". flexicache still lacks its profile.
    """
    table: dict[str, dict | None] = {"stock": None}
    table["flexicache"] = {"mode": "flexicache", "budget": budget, "every": 16, "timing": "lagged", "page": page}
    for every in (1, 2, 4, 8, 16):
        table[f"reactive-r{every}"] = {"budget": budget, "every": every, "timing": timing, "page": page}
    table["destructive"] = {"mode": "destructive", "budget": budget, "every": 1, "timing": timing, "page": page}
    return table


def engine_python() -> Path:
    """A Python that has the engine: this one, or that of .venv-vllm in the checkout. InputError if neither."""
    if installed() is not None:
        return Path(sys.executable)
    beside = ROOT / ".venv-vllm" / "bin" / "python"
    if not beside.exists():
        raise InputError("the engine vllm is not installed: make .venv-vllm/installed, or pip install 'wakekv[vllm]'")
    return beside


def hardware() -> dict[str, Any]:
    """What a number of seconds depends on beside the code."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"device": name, "cores": os.cpu_count(), "threads": 1}


class Pair:
    """The untouched engine and one with the plugin, each started when first asked for. alone: one ends before the other
    starts, where a device has no room for two."""

    def __init__(
        self, model: str, *, python: Path | None = None, logs: Path | None = None, page: int = 16, alone: bool = False,
        **start: Any,
    ):  # fmt: skip
        self._python, self._logs, self._page, self._alone = python or engine_python(), logs, page, alone
        self._start, self._arms = {"model": model, **start}, {}

    def arm(self, settings: Mapping | None) -> Arm:
        name = "stock" if settings is None else "plugin"
        if name not in self._arms:
            if self._alone and self._arms:
                self._arms.popitem()[1].close()
            log = None if self._logs is None else self._logs / f"{name}.log"
            arm = self._arms[name] = Arm(self._python, log)
            first = None if settings is None else {"page": self._page, "budget": 1}
            arm.ask("start", settings=first, **self._start)
        if settings is not None:
            self._arms[name].ask("set", **asdict(Settings.of(settings)))
            self._arms[name].ask("books")
        return self._arms[name]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: Any) -> None:
        for arm in self._arms.values():
            arm.close()

    def run(self, settings: Mapping | None, load: Load, *, cold: bool = True) -> dict[str, Any]:
        """One batch. cold: nothing of its prompts is cached, so that prefill is part of it."""
        arm = self.arm(settings)
        if cold:
            arm.ask("forget")
        row = timed(arm.ask("generate", prompts=load.prompts, n_tokens=load.n_tokens))
        if settings is not None:
            books, tiers = arm.ask("books"), arm.ask("tiers")
            row |= told(books, tiers) | {"preempted": books["preempted"]}
        return row

    def forced(self, settings: Mapping | None, load: Load, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Log-probabilities by request, [token] of float32 [vocabulary], as the texts are fed after the prompts."""
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory() as folder:
            self.arm(settings).ask("forced", prompts=load.prompts, texts=texts, file=f"{folder}/kept")
            return load_file(f"{folder}/kept")

    def answers(self, settings: Mapping | None, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[list[int]]:
        """Greedy text of n_tokens after each prompt."""
        return self.arm(settings).ask("generate", prompts=prompts, n_tokens=n_tokens)["tokens"]

    def demands(self, settings: Mapping, load: Load) -> list[Any]:
        """What a batch wanted, one Demand a request."""
        arm = self.arm({**settings, "record": True})
        with tempfile.TemporaryDirectory() as folder:
            arm.ask("generate", prompts=load.prompts, n_tokens=load.n_tokens)
            arm.ask("demands", file=f"{folder}/demands")
            return list(read_demands(f"{folder}/demands").values())


def timed(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a batch's times, given as vllm.engine.Batch has them: tokens a second of all of it, prefill included,
    and of decoding alone, by the median step but the first WARM."""
    steps, cpu = batch["step_s"][WARM:], batch["cpu_step_s"][WARM:]
    if not steps:
        raise InputError(
            f"only {batch['reached']} of {len(batch['tokens'])} requests ever decoded together: give the engine a "
            "larger cache (reservoir_gib), or ask for fewer requests or shorter ones"
        )
    step_s = statistics.median(steps)
    return {
        "elapsed_s": batch["elapsed_s"],
        "tokens_per_s": sum(len(tokens) for tokens in batch["tokens"]) / batch["elapsed_s"],
        "prefill_s": batch["prefill_s"],
        "step_s": step_s,
        "step_cpu_s": statistics.median(cpu),
        "decode_tokens_per_s": batch["reached"] / step_s,
        "reached": batch["reached"],
        "n_steps": len(steps),
    }


def told(books: Mapping[str, float], tiers: Mapping[str, Any]) -> dict[str, Any]:
    """What a tier's books and sizes add to a row: seconds, bytes and pages a step, and bytes on the fast tier."""
    each = ("stall_s", "score_s", "attend_s", "place_s", "fetched_bytes", "misses", "wants")
    row = {name: books[name] / books["steps"] for name in each}
    row["miss_rate"] = books["misses"] / max(books["wants"], 1)
    return row | {"resident_bytes": sum(tiers[name] for name in ("pages", "digests", "tables")), "tiers": dict(tiers)}


def profiled(engine: Any, load: Load, budget: int, page: int = 16) -> list[int]:
    """FlexiCache's profile: the quarter of the KV heads whose pages change most, by its own rule, over a calibration
    load that should be another text than what is measured. Ranked at every step with this budget of wants."""
    from wakekv.policies import POLICIES

    demands = engine.demands({"budget": budget, "page": page}, load)
    return list(POLICIES["flexicache"].fit(*demands).profile)


def divergence(full: Mapping[str, Sequence], some: Mapping[str, Sequence]) -> dict[str, float]:
    """KL(full || some) in nats a token over all requests: mean, 95th percentile, and how often both think the same."""
    import numpy as np
    import torch

    kl, same = [], []
    for name, rows in full.items():
        p, q = (torch.stack(list(x)).double() for x in (rows, some[name]))
        kl += torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1).clamp(min=0).tolist()  # 0 log 0 is 0
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
    return {"kl_mean": float(np.mean(kl)), "kl_p95": float(np.quantile(kl, 0.95)), "agreement": float(np.mean(same)),
            "n_tokens": len(kl)}  # fmt: skip


def graded(
    engine: Any, settings: Mapping | None, questions: Sequence[Question], tokenizer: Any, full: Mapping | None
) -> dict[str, Any]:
    """Scores of greedy answers, 0 to 100: of each task, their mean over tasks, and how many samples each had; the
    answers themselves. full: stock's own grades, without which none of this says anything; `as_full` is the share of
    answers that are stock's to the letter. None: these are stock's."""
    texts, scores = [], {}
    for task, some in itertools.groupby(questions, key=lambda question: question.task):
        some = list(some)
        written = engine.answers(settings, [question.prompt for question in some], some[0].n_tokens)
        for question, tokens in zip(some, written, strict=True):
            ends = [*(i for i, token in enumerate(tokens) if token == tokenizer.eos_token_id), len(tokens)]
            texts.append(tokenizer.decode(tokens[: ends[0]], skip_special_tokens=True))
            scores.setdefault(task, []).append(100 * question.score(texts[-1]))
    means = {task: statistics.mean(values) for task, values in scores.items()}
    found = {"tasks": means, "samples": {task: len(values) for task, values in scores.items()}}
    found |= {"mean": statistics.mean(means.values()), "texts": texts}
    full = full or found
    as_full = statistics.mean(a == b for a, b in zip(texts, full["texts"], strict=True))
    return found | {"full": full["mean"], "as_full": as_full}


def sweep(
    engine: Any, chosen: Mapping[str, Mapping | None], load: Load, out: str | Path, *, repeats: int, about: Mapping,
    texts: Sequence[Sequence[int]] = (), questions: Sequence[Question] = (), tokenizer: Any = None,
    say: Callable[[str], None] = print,
) -> dict[str, dict]:  # fmt: skip
    """Every configuration `repeats` times, taking turns; one JSON file each in `out`, rewritten after every batch, so
    that a run that was stopped goes on with what is left. chosen: by name, stock first. texts: also how far each strays
    from stock on these; questions: also how well it answers, beside stock.

    Raises InputError where a file in `out` is of another load, hardware or setting.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, settings in chosen.items():
        asked = {"configuration": name, "settings": settings, "load": load.source, "key": load.key, **about}
        path = out / f"{name}.json"
        found[name] = _earlier(path) if path.exists() else {**asked, "repeats": []}
        other = [key for key in asked if json.dumps(found[name].get(key)) != json.dumps(asked[key])]
        if other:
            raise InputError(f"{path} is of another {other[0]}: choose another --out, or remove it")

    def keep(name: str, said: str) -> None:
        write_json(out / f"{name}.json", summarised(found[name]))
        say(f"{name}{said}")

    for turn in range(repeats):
        for name, settings in chosen.items():
            if len(found[name]["repeats"]) <= turn:
                row = engine.run(settings, load)
                found[name]["repeats"].append(row)
                speed = f"{row['tokens_per_s']:.1f} tokens/s, a step {row['step_s']:.3f} s"
                keep(name, f", {turn + 1} of {repeats}: {speed}")
    if texts and any("quality" not in row for row in found.values()):
        full = engine.forced(None, load, texts)
        for name, settings in chosen.items():
            if "quality" not in found[name]:
                some = full if settings is None else engine.forced(settings, load, texts)
                found[name]["quality"] = divergence(full, some)
                keep(name, f": KL from stock {found[name]['quality']['kl_mean']:.4f} nats a token")
    for name, settings in chosen.items() if questions else ():
        if "answers" not in found[name]:
            full = None if settings is None else found["stock"]["answers"]
            found[name]["answers"] = graded(engine, settings, questions, tokenizer, full)
            keep(name, ": {mean:.1f} of 100 points, stock {full:.1f}".format(**found[name]["answers"]))
    return found


def _earlier(path: Path) -> dict:
    """What an earlier run found. InputError where the file is damaged: nothing writes over it."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if not all(type(repeat) is dict for repeat in row["repeats"]):
            raise TypeError("its repeats are no rows")
        return row
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}): remove it, and it is measured again") from None


def summarised(row: dict) -> dict:
    """With the median, smallest and largest of every number over the repeats."""
    numbers = [name for name, x in row["repeats"][0].items() if isinstance(x, (int, float))] if row["repeats"] else []
    row["summary"] = {
        name: {"median": statistics.median(xs), "min": min(xs), "max": max(xs)}
        for name in numbers
        for xs in [[repeat[name] for repeat in row["repeats"]]]
    }
    return row


def chosen(names: Sequence[str], table: Mapping[str, Any]) -> dict[str, Any]:
    """Some rows of a table of configurations, all if none is named. InputError for one that is none."""
    return {name: lookup(name, table, "configuration") for name in names} if names else dict(table)
