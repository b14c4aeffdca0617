"""The paper's Table 2: throughput and quality of reactive residency over rerank intervals, here or on its own hardware.

One profile holds the paper's run exactly and needs its GPU; the others run the same code on whatever this machine is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakekv import serving
from wakekv.errors import InputError, lookup
from wakekv.serving import Load, Pair


@dataclass(frozen=True)
class Run:
    """What a sweep is asked.

    model: a name in MODELS or a folder;  requests: prompts of `length` tokens, each followed by n_tokens
    max_tokens: of a sequence;  budget: pages a KV head;  timing: of the reactive configurations
    reservoir_gib: of the engine's own cache;  gpu: what the device's name must hold, None for any device
    longbench: tasks whose files it wants, and samples of each;  published_s: what the paper's own run took
    """

    about: str
    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    requests: int = 8
    length: int = 2048
    n_tokens: int = 64
    max_tokens: int | None = None
    budget: int = 32
    timing: str = "lagged"
    repeats: int = 3
    reservoir_gib: int = 1
    gpu: str | None = None
    longbench: tuple[str, ...] = ()
    samples: int = 30
    published_s: float = 0.0


PROFILES = {
    "smoke": Run("minutes, tiny; its numbers mean nothing", requests=2, length=256, n_tokens=8, budget=4, repeats=1),
    "cpu": Run("the small model and bundled prose, on two cores"),
    "a30": Run(
        "the paper's own run: Mistral-7B, L-Eval 8k to 1000, on one A30 of 24 GB. The paper does not state how many "
        "pages a head keeps; 64 is ours",
        model="mistral-7b", requests=24, length=8192, n_tokens=1000, max_tokens=10240, budget=64, repeats=1,
        reservoir_gib=16, gpu="A30", longbench=("triviaqa", "multi_news", "qasper", "2wikimqa"),
        published_s=209.8 + 156.2 + 124.1 + 106.1 + 94.4 + 90.0,
    ),
}  # fmt: skip


def fitting(run: Run, name: str) -> str:
    """The device a run will be timed on. InputError, before anything is fetched or written, if it needs another."""
    import torch

    here = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    if run.gpu is None or (here and run.gpu in here):
        return here or serving.hardware()["device"]
    found = f"this machine has {here}" if here else "this machine has no GPU"
    raise InputError(
        f"system --profile {name} needs one NVIDIA {run.gpu}, and {found}: run it there (about "
        f"{2 * run.published_s / 60:.0f} minutes), or --profile cpu here"
    )


def calibration(tokenizer: Any, length: int, n_tokens: int) -> Load:
    """Conversations to profile heads on: another text than any load's."""
    from wakekv.prompts import build

    prompts = [build("multiturn", tokenizer, seed=seed, length=1200).tokens[:length] for seed in range(4)]
    return Load("multiturn", tuple(map(tuple, prompts)), n_tokens)


def sweep(
    run: Run, out: str | Path, *, prompts: str | None = None, longbench: Sequence[str] = (), only: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> dict[str, dict]:  # fmt: skip
    """The sweep in the serving engine; one JSON a configuration in `out`. prompts, longbench: files."""
    from transformers import AutoTokenizer

    from wakekv.longbench import read

    table = serving.chosen(only, serving.configurations(run.budget, run.timing))
    if only and "stock" not in table:
        raise InputError("everything is measured against stock: name it among the configurations, too")
    samples = read(longbench, run.samples) if longbench else []
    python = serving.engine_python()
    folder = model_folder(run.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ask = run.requests, run.length + (0 if prompts else run.n_tokens), run.n_tokens
    load = serving.from_file(prompts, tokenizer, *ask) if prompts else serving.bundled(tokenizer, *ask)
    texts = [] if prompts else [prompt[run.length :] for prompt in load.prompts]
    load = dataclasses.replace(load, prompts=tuple(prompt[: run.length] for prompt in load.prompts))
    longest = run.max_tokens or run.length + run.n_tokens + 16
    about = {"model": run.model, "dtype": run.dtype, "hardware": serving.hardware(), "requests": run.requests,
             "length": run.length, "n_tokens": run.n_tokens, "measured": True}  # fmt: skip
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    start = {"dtype": run.dtype, "max_tokens": longest, "batch": run.requests, "reservoir_gib": run.reservoir_gib}
    start["alone"] = run.gpu is not None
    with Pair(str(folder), python=python, logs=out, **start) as pair:
        if "flexicache" in table:
            table["flexicache"]["profile"] = profile(pair, tokenizer, run, out)
        found = serving.sweep(pair, table, load, out, repeats=run.repeats, about=about, texts=texts, say=say)
        if "reactive-r1" in table and not (out / "predicted.json").exists():
            predicted(pair, table["reactive-r1"], load, found["reactive-r1"], out)
        for name in found if samples else ():
            if "longbench" not in found[name]:
                found[name]["longbench"] = tasks(pair, table[name], samples, tokenizer, run.length)
                serving.save(out / f"{name}.json", found[name])
                say(f"{name}: LongBench {found[name]['longbench']['mean']:.2f}")
    return found


def predicted(pair: Pair, settings: Any, load: Load, measured: Any, out: Path) -> None:
    """What the simulator expects of the other configurations, from one more run of R = 1 that is recorded."""
    from wakekv.served import predict

    demands = pair.demands(settings, load)
    medians = {name: x["median"] for name, x in measured["summary"].items()}
    serving.save(out / "predicted.json", predict(demands, settings["budget"], medians))


def profile(pair: Pair, tokenizer: Any, run: Run, out: Path) -> list[int]:
    """FlexiCache's profile of this model, kept in `out`, since another one would be another configuration."""
    path = out / "profile.json"
    if not path.exists():
        load = calibration(tokenizer, min(run.length, 1024), min(run.n_tokens, 48))
        heads = serving.profiled(pair, load, run.budget)
        serving.save(path, {"heads": heads, "load": load.source, "key": load.key, "budget": run.budget})
    return json.loads(path.read_text())["heads"]


def tasks(pair: Pair, settings: Any, samples: Sequence[Any], tokenizer: Any, length: int) -> dict[str, Any]:
    """LongBench's score of each task, 0 to 100, and their mean; greedy answers, prompts cut to `length` tokens."""
    from wakekv.longbench import TASKS, score, tokens_of

    by_task: dict[str, list[float]] = {}
    arm = pair.arm(settings)
    for task in dict.fromkeys(sample.task for sample in samples):
        some = [sample for sample in samples if sample.task == task]
        prompts = [tokens_of(sample, tokenizer, length - TASKS[task].n_tokens) for sample in some]
        batch = arm.ask("generate", prompts=prompts, n_tokens=TASKS[task].n_tokens)
        for sample, tokens in zip(some, batch["tokens"], strict=True):
            ends = [i for i, token in enumerate(tokens) if token == tokenizer.eos_token_id]
            text = tokenizer.decode(tokens[: ends[0]] if ends else tokens, skip_special_tokens=True)
            by_task.setdefault(task, []).append(100 * score(sample, text))
    means = {task: sum(values) / len(values) for task, values in by_task.items()}
    counts = {task: len(values) for task, values in by_task.items()}
    return {"tasks": means, "samples": counts, "mean": sum(means.values()) / len(means)}


def in_transformers(run: Run, out: str | Path, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """The same sweep with the cache for transformers (no flexicache: it has no profile there), beside transformers' own
    caches; one JSON a configuration."""
    from wakekv import models, system

    loaded = models.load(run.model, dtype="auto" if run.gpu else "float32")
    ours = {"budget": run.budget, "wants": run.budget}
    caches = [{**ours, "mode": "exact"}] + [{**ours, "mode": "lagged", "every": every} for every in (1, 2, 4, 8, 16)]
    caches.append({**ours, "mode": "exact", "policy": "evict"})
    sizes = {"contexts": [run.length], "batches": [run.requests], "steps": run.n_tokens}
    rows = system.sweep(loaded, caches, **sizes, budget=run.budget)
    Path(out).mkdir(parents=True, exist_ok=True)
    for row in rows:
        name = "-".join(part.strip().replace("=", "") for part in row["settings"].split(","))
        serving.save(Path(out) / f"{name}.json", {"environment": system.environment(loaded.model), **row})
        say(f"{row['settings']}: {row['tokens_per_s']:.1f} tokens/s")
    return rows


def model_folder(name: str) -> Path:
    """A model's folder: one of MODELS, fetched if need be, or a local one."""
    from wakekv.models import MODELS, fetch

    return Path(name) if name not in MODELS and (Path(name) / "config.json").is_file() else fetch(name)


def published(path: Path = serving.ROOT / "artifact" / "published.json") -> list[dict[str, Any]]:
    """The rows that the paper printed, measured on its own hardware."""
    return json.loads(path.read_text())["table2_system"]["rows"]


def with_changes(name: str, **changes: Any) -> Run:
    """A profile with some numbers of the caller's own. The paper's run takes none: changed, it would be another."""
    run = lookup(name, PROFILES, "profile")
    asked = {key: value for key, value in changes.items() if value is not None}
    if run.gpu and asked:
        raise InputError(f"profile {name} is the paper's run exactly: leave --{min(asked).replace('_', '-')} out")
    return dataclasses.replace(run, **asked)


def asked(options: argparse.Namespace) -> None:
    """What `python -m wakekv system` does; see its --help."""
    names = ("model", "dtype", "requests", "length", "n_tokens", "budget", "timing", "repeats")
    run = with_changes(options.profile, **{name: getattr(options, name) for name in names})
    if options.engine == "transformers" and (options.prompts or options.longbench or options.only):
        raise InputError("--engine transformers runs the bundled passages: leave --prompts, --longbench, --only out")
    device = fitting(run, options.profile)
    if run.gpu and not (options.prompts and len(options.longbench or ()) == len(run.longbench)):
        raise InputError(
            f"profile {options.profile}: give --prompts, L-Eval's, and --longbench, files of its four tasks"
        )
    print(f"{run.about}; on {device}")
    out = options.out or f"runs/system/{options.engine}-{options.profile}"
    if options.engine == "transformers":
        in_transformers(run, out)
        return
    only = [name for name in options.only.split(",") if name]
    found = sweep(run, out, prompts=options.prompts, longbench=options.longbench or (), only=only)
    print(json.dumps(found) if options.json else serving.as_text(found))
