"""What residency costs and buys in a serving engine: a sweep over configurations, one JSON file each.

Engines run in processes of their own (wakekv/vllm/arm.py), the untouched one and one with the plugin, and take turns.
Everything here runs without the engine's packages, in whichever environment asks.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wakekv.errors import InputError, lookup
from wakekv.vllm.arm import Arm
from wakekv.vllm.engine import installed
from wakekv.vllm.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
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
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts {path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix not in (".jsonl", ".json"):
        return from_text(text, tokenizer, requests, length, n_tokens, path.name)
    prompts = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or len(prompts) == requests:
            continue
        try:
            row = json.loads(line)
            said = next(row[name] for name in ("input", "prompt", "context") if len(row.get(name) or "") > 200)
        except (ValueError, StopIteration, AttributeError, TypeError):
            raise InputError(
                f"{path}, line {number}: an object with a long input, prompt or context is needed"
            ) from None
        prompts.append(tuple(tokenizer(said, verbose=False).input_ids[:length]))
    if len(prompts) < requests:
        raise InputError(f"{path} has {len(prompts)} prompts, not {requests}: ask for fewer --requests")
    return Load(path.name, tuple(prompts), n_tokens)


def bundled(tokenizer: Any, requests: int, length: int, n_tokens: int) -> Load:
    """Passages of the article that the prompts of this package are made of."""
    from wakekv.texts import read_filler

    article = read_filler(None, lambda sentence: 0)
    return from_text("".join(article.sentences), tokenizer, requests, length, n_tokens, article.name)


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
        batch = arm.ask("generate", prompts=load.prompts, n_tokens=load.n_tokens)
        steps, cpu = batch["step_s"][WARM:], batch["cpu_step_s"][WARM:]
        n = sum(len(tokens) for tokens in batch["tokens"])
        row = {
            "elapsed_s": batch["elapsed_s"],
            "tokens_per_s": n / batch["elapsed_s"],
            "prefill_s": batch["prefill_s"],
            "step_s": statistics.median(steps),
            "step_cpu_s": statistics.median(cpu),
            "decode_tokens_per_s": batch["reached"] / statistics.median(steps),
            "reached": batch["reached"],
            "n_steps": len(steps),
        }
        if settings is not None:
            books, tiers = arm.ask("books"), arm.ask("tiers")
            parts = ("stall_s", "score_s", "attend_s", "place_s")
            row |= {name: books[name] / books["steps"] for name in (*parts, "fetched_bytes", "misses", "wants")}
            row |= {"miss_rate": books["misses"] / max(books["wants"], 1), "preempted": books["preempted"]}
            row |= {"resident_bytes": sum(tiers[name] for name in ("pages", "digests", "tables")), "tiers": tiers}
        return row

    def forced(self, settings: Mapping | None, load: Load, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Log-probabilities by request, [token] of float32 [vocabulary], as the texts are fed after the prompts."""
        with tempfile.TemporaryDirectory() as folder:
            self.arm(settings).ask("forced", prompts=load.prompts, texts=texts, file=f"{folder}/kept")
            return pickle.loads(Path(folder, "kept").read_bytes())  # from our own other process

    def demands(self, settings: Mapping, load: Load) -> list[Any]:
        """What a batch wanted, one Demand a request."""
        arm = self.arm({**settings, "record": True})
        with tempfile.TemporaryDirectory() as folder:
            arm.ask("generate", prompts=load.prompts, n_tokens=load.n_tokens)
            arm.ask("demands", file=f"{folder}/demands")
            return list(pickle.loads(Path(folder, "demands").read_bytes()).values())


def profiled(pair: Pair, load: Load, budget: int, page: int = 16) -> list[int]:
    """FlexiCache's profile: the quarter of the KV heads whose pages change most, by its own rule, over a calibration
    load that should be another text than what is measured. Ranked at every step with this budget of wants."""
    from wakekv.policies import POLICIES

    demands = pair.demands({"budget": budget, "page": page}, load)
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


def sweep(
    pair: Pair, chosen: Mapping[str, Mapping | None], load: Load, out: str | Path, *, repeats: int, about: Mapping,
    texts: Sequence[Sequence[int]] = (), say: Callable[[str], None] = print,
) -> dict[str, dict]:  # fmt: skip
    """Every configuration `repeats` times, taking turns; one JSON file each in `out`, rewritten after every batch, so
    that a run that was stopped goes on with what is left. texts: also how far each strays from stock on these.

    Raises InputError where a file in `out` is of another load, hardware or setting.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, settings in chosen.items():
        asked = {"configuration": name, "settings": settings, "load": load.source, "key": load.key, **about}
        path = out / f"{name}.json"
        found[name] = json.loads(path.read_text()) if path.exists() else {**asked, "repeats": []}
        other = [key for key in asked if json.dumps(found[name].get(key)) != json.dumps(asked[key])]
        if other:
            raise InputError(f"{path} is of another {other[0]}: choose another --out, or remove it")
    for turn in range(repeats):
        for name, settings in chosen.items():
            if len(found[name]["repeats"]) <= turn:
                row = pair.run(settings, load)
                found[name]["repeats"].append(row)
                save(out / f"{name}.json", summarised(found[name]))
                say(
                    f"{name}, {turn + 1} of {repeats}: {row['tokens_per_s']:.1f} tokens/s, a step {row['step_s']:.3f} s"
                )
    if texts and any("quality" not in row for row in found.values()):
        full = pair.forced(None, load, texts)
        for name, settings in chosen.items():
            if "quality" not in found[name]:
                some = full if settings is None else pair.forced(settings, load, texts)
                found[name]["quality"] = divergence(full, some)
                save(out / f"{name}.json", summarised(found[name]))
                say(f"{name}: KL from stock {found[name]['quality']['kl_mean']:.4f} nats a token")
    return found


def summarised(row: dict) -> dict:
    """With the median, smallest and largest of every number over the repeats."""
    numbers = [name for name, x in row["repeats"][0].items() if isinstance(x, (int, float))] if row["repeats"] else []
    row["summary"] = {
        name: {"median": statistics.median(xs), "min": min(xs), "max": max(xs)}
        for name in numbers
        for xs in [[repeat[name] for repeat in row["repeats"]]]
    }
    return row


def save(path: Path, row: Mapping) -> None:
    """Written whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(row, indent=1), encoding="utf-8")
    os.replace(part, path)


def as_text(found: Mapping[str, Mapping]) -> str:
    """The table of a sweep: throughput with prefill and of decoding alone, against stock and against flexicache."""
    lines = [f"{'configuration':<14}{'tok/s':>8}{'decode':>9}{'x stock':>9}{'x flexi':>9}{'stall ms':>10}{'KL':>9}"]
    base = {name: found[name]["summary"]["step_s"]["median"] for name in ("stock", "flexicache") if name in found}
    for name, row in found.items():
        s = {key: x["median"] for key, x in row["summary"].items()}
        ratios = "".join(f"{base[b] / s['step_s']:>9.2f}" if b in base else f"{'':>9}" for b in ("stock", "flexicache"))
        kl = row.get("quality", {}).get("kl_mean")
        stall = f"{1e3 * s['stall_s']:>10.2f}" if "stall_s" in s else f"{'':>10}"
        lines.append(
            f"{name:<14}{s['tokens_per_s']:>8.1f}{s['decode_tokens_per_s']:>9.1f}{ratios}{stall}"
            + (f"{kl:>9.4f}" if kl is not None else "")
        )
    return "\n".join(lines)


def chosen(names: Sequence[str], table: Mapping[str, Any]) -> dict[str, Any]:
    """Some rows of a table of configurations, all if none is named. InputError for one that is none."""
    return {name: lookup(name, table, "configuration") for name in names} if names else dict(table)
