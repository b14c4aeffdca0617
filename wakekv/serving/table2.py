"""The paper's Table 2: throughput and quality of reactive residency over rerank intervals, here or on its own hardware.

One profile holds the paper's run exactly and needs its GPU; the others run the same code on whatever this machine is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from wakekv.errors import InputError, lookup
from wakekv.files import writable, write_json
from wakekv.serving import loads
from wakekv.serving import sweep as serving
from wakekv.serving.sweep import Pair
from wakekv.tables import served
from wakekv.vllm.engine import VERSION


@dataclass(frozen=True)
class Run:
    """What a sweep is asked.

    model: a name in MODELS or a folder;  requests: prompts of `length` tokens, each followed by n_tokens
    max_tokens: of a sequence;  budget: pages a KV head;  timing: of the reactive configurations
    reservoir_gib: of the engine's own cache;  gpu: what the device's name must hold, None for any device
    needles: prompts of our own to be answered, where no LongBench files are given
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
    needles: int = 0
    longbench: tuple[str, ...] = ()
    samples: int = 30
    published_s: float = 0.0


PROFILES = {
    "smoke": Run(
        "minutes, tiny; its numbers mean nothing", requests=2, length=256, n_tokens=8, budget=4, repeats=1, needles=1
    ),
    "cpu": Run("the small model and bundled prose, on two cores", needles=9),
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


def sweep(
    run: Run, engine: str, out: str | Path, *, prompts: str | None = None, longbench: Sequence[str] = (),
    only: Sequence[str] = (), say: Callable[[str], None] = print,
) -> dict[str, dict]:  # fmt: skip
    """The sweep in an engine of ENGINES; one JSON a configuration in `out`. prompts, longbench: files."""
    table = serving.chosen(only, serving.configurations(run.budget, run.timing))
    if "stock" not in table:
        raise InputError("everything is measured against stock: name it among the configurations, too")
    out = writable(out)
    started, tokenizer, own = ENGINES[engine](run, out)
    questions = loads.longbench(longbench, run.samples, tokenizer, run.length) if longbench else []
    questions = questions or loads.needles(run.needles, tokenizer, run.length)
    whole = run.requests, run.length + run.n_tokens, run.n_tokens
    load = loads.from_file(prompts, tokenizer, *whole) if prompts else loads.bundled(tokenizer, *whole)
    texts = [prompt[run.length :] for prompt in load.prompts]
    if any(len(text) < run.n_tokens for text in texts):  # the prompts end before: there is no text to go on with
        texts = []
    load = dataclasses.replace(load, prompts=tuple(prompt[: run.length] for prompt in load.prompts))
    about = {**own, "model": run.model, "hardware": serving.hardware(), "requests": run.requests,
             "length": run.length, "n_tokens": run.n_tokens, "measured": True}  # fmt: skip
    pages = -(-(min(map(len, load.prompts)) + run.n_tokens) // 16)
    if run.budget > pages:
        raise InputError(
            f"budget {run.budget} is more than all {pages} pages of a request: ask for less, or a longer one"
        )
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out), started as arms:
        say(f"{run.about}; on {about['hardware']['device']}")
        if "flexicache" in table:
            table["flexicache"]["profile"] = profile(arms, tokenizer, run, out)
        found = serving.sweep(
            arms, table, load, out, repeats=run.repeats, about=about, texts=texts, questions=questions,
            tokenizer=tokenizer, say=say,
        )  # fmt: skip
        if "reactive-r1" in table and not (out / "predicted.json").exists():
            demands = arms.demands(table["reactive-r1"], load)  # one more run, recorded
            write_json(out / "predicted.json", {"misses": served.predict(demands, run.budget)})
    return found


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Nobody else writes into `out` meanwhile: each would undo what the other has measured. InputError otherwise."""
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        raise InputError(f"another run is writing into {out}: wait for it, or give another --out") from None


def profile(engine: Any, tokenizer: Any, run: Run, out: Path) -> list[int]:
    """FlexiCache's profile of this model, kept in `out`, since another one would be another configuration."""
    path = out / "profile.json"
    if not path.exists():
        load = loads.calibration(tokenizer, min(run.length, 1024), min(run.n_tokens, 48))
        heads = serving.profiled(engine, load, run.budget)
        write_json(path, {"heads": heads, "load": load.source, "key": load.key, "budget": run.budget})
    try:
        return json.loads(path.read_text(encoding="utf-8"))["heads"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}): remove it, and it is made again") from None


def in_vllm(run: Run, out: Path) -> tuple[Pair, Any, dict[str, str]]:
    """The engine, not started yet, the model's tokenizer, and what the engine is."""
    from transformers import AutoTokenizer

    python = serving.engine_python()
    folder = model_folder(run.model)
    longest = run.max_tokens or run.length + run.n_tokens + 64  # questions have a chat template around them
    start = {"dtype": run.dtype, "max_tokens": longest, "batch": run.requests, "reservoir_gib": run.reservoir_gib}
    pair = Pair(str(folder), python=python, logs=out, alone=run.gpu is not None, **start)
    return pair, AutoTokenizer.from_pretrained(folder), {"engine": f"vllm {VERSION}", "dtype": run.dtype}


def in_transformers(run: Run, out: Path) -> tuple[Any, Any, dict[str, str]]:
    """As `in_vllm`, of transformers' generation with our cache."""
    import torch
    import transformers

    from wakekv.recording import models
    from wakekv.serving.generation import Transformers

    torch.set_num_threads(1)  # as the engine has
    loaded = models.load(run.model, dtype=run.dtype)
    dtype = str(loaded.model.dtype).removeprefix("torch.")  # float32 where the processor has no bfloat16
    engine = f"transformers {transformers.__version__}"
    return Transformers(loaded, run.requests), loaded.tokenizer, {"engine": engine, "dtype": dtype}


ENGINES = {"vllm": in_vllm, "transformers": in_transformers}


def model_folder(name: str) -> Path:
    """A model's folder: one of MODELS, fetched if need be, or a local one."""
    from wakekv.recording.models import MODELS, fetch

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
    for key, value in asked.items():
        if isinstance(value, int) and value < (key != "needles"):
            raise InputError(f"--{key.replace('_', '-')} counts from 1, not {value}")
    return dataclasses.replace(run, **asked)


def asked(options: argparse.Namespace) -> None:
    """What `python -m wakekv system` does; see its --help."""
    names = ("model", "dtype", "requests", "length", "n_tokens", "budget", "timing", "repeats", "needles", "samples")
    run = with_changes(options.profile, **{name: getattr(options, name) for name in names})
    fitting(run, options.profile)
    if run.gpu and not (options.prompts and len(options.longbench or ()) == len(run.longbench)):
        raise InputError(
            f"profile {options.profile}: give --prompts, L-Eval's, and --longbench, files of its four tasks"
        )
    out = options.out or f"runs/system/{options.engine}-{options.profile}"
    only = [name for name in options.only.split(",") if name]
    files = {"prompts": options.prompts, "longbench": options.longbench or ()}
    found = sweep(run, options.engine, out, **files, only=only)
    print(json.dumps(found) if options.json else served.as_text(found))
