"""The recorder: decode from a prompt, batch 1, and log what every head reads at every step.

The text is *scripted* (the prompt's own script is fed token by token and the model's choices are only noted), *greedy*,
or *sampled*. Greedy and sampled text ends at the end-of-sequence token or after `steps`; that token is logged like any
other. Runs on any device that torch knows; only the CPU path has been run so far.

Nothing in a finished trace depends on the time, so a recording that was killed and resumed on the same machine, with
the same threads and versions, ends in the same bytes as one that was not: `resume` runs the stored steps again, fed
with the stored tokens, and compares each with what is stored before it goes on.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

import wakekv
from wakekv.errors import InputError, ModelError
from wakekv.files import ROOT
from wakekv.logs.trace import PAGE, PROMPT_ROWS, publish, read_manifest
from wakekv.recording.attention import Reader
from wakekv.recording.journal import FILES, Journal, part_of

STEPS = 256  # steps where neither a script nor the caller says how many: what the paper logged of NIAH
CHUNK = 2048  # prefill rows in one forward pass
BLOCK = 16  # steps in one forward pass where the text is known beforehand
GRAM, LOOPING = 8, 0.3  # the repetition rule
RULE = f"share of emitted {GRAM}-grams that occurred earlier in the emitted text; flagged above {LOOPING}"
SAMPLE = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 0}
CODE = ("recording/record.py", "recording/journal.py", "recording/attention.py", "recording/rows.py", "logs/trace.py")


def record(
    loaded: Any,
    prompt: Any,
    out: str | Path,
    *,
    steps: int | None = None,
    k: int = 64,
    sample: dict[str, float] | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Path:
    """Log one generation into the new directory `out` and return it.

    loaded: models.Loaded. prompt: prompts.Prompt; with a script, its tokens are what is emitted. steps: at most so many
    decode steps (default: the whole script, else 256). k: weights kept per head and step. sample: temperature, top_p,
    repetition_penalty, seed, for sampled text. resume: go on with an unfinished recording if there is one; a finished
    one of the same key is returned as it is. progress: a bar with the time left, on a terminal.
    A script is known beforehand: its steps run through the model 16 in a pass, each row seeing what it would alone; its
    numbers are those of one step at a time up to the rounding of sums.
    Raises InputError (an argument, a taken `out`, a full disk), TraceError (a journal that cannot be resumed, a disk
    that fills up) and ModelError (a model that cannot be logged, or numbers that are not).
    """
    out, plan = Path(out), _plan(loaded, prompt, steps, k, sample)
    if resume and out.is_dir() and read_manifest(out).get("key") == plan.head["key"]:
        return out
    if resume and (part_of(out) / "manifest.json").exists():  # killed between the manifest and the name
        if read_manifest(part_of(out)).get("key") == plan.head["key"]:
            return publish(part_of(out), out, drop=FILES)
    journal = Journal(out, plan.head, resume)
    try:
        with torch.inference_mode():
            return _run(loaded.model, plan, journal, progress)
    finally:
        journal.close()


def recording_key(
    loaded: Any,
    prompt: Any,
    *,
    steps: int | None = None,
    k: int = 64,
    sample: dict[str, float] | None = None,
) -> str:
    """The `key` that `record` with these arguments writes in its manifest: a trace with this key is up to date.

    A hash over the weights and their dtype, prompt, script, settings, kind of device, versions of torch and
    transformers, and the source of the recorder; not over threads, which only move the last bits.
    """
    return _plan(loaded, prompt, steps, k, sample).head["key"]


def repetition(tokens: np.ndarray) -> float:
    """Share of the 8-grams of `tokens` that occurred earlier in them, 0..1; 0 for fewer than 8 tokens."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@dataclass(frozen=True)
class _Plan:
    """A recording as it was asked for: `head` is what its manifest says before the first step."""

    head: dict[str, Any]
    tokens: list[int]
    script: list[int] | None
    ends: frozenset[int]
    sample: dict[str, float] | None


def _plan(loaded: Any, prompt: Any, steps: int | None, k: int, sample: dict[str, float] | None) -> _Plan:
    config, tokens = loaded.model.config.get_text_config(), [int(t) for t in prompt.tokens]
    script = None if prompt.script is None else [int(t) for t in prompt.script]
    if not tokens or script == []:
        raise InputError("the prompt and its script need at least one token each")
    if not (isinstance(k, int) and k >= 1 and (steps is None or (isinstance(steps, int) and steps >= 1))):
        raise InputError(f"k and steps count from 1, not k={k}, steps={steps}")
    if sample is not None and script is not None:
        raise InputError("the prompt is scripted, so its text cannot be sampled: build it with scripted=False")
    n_steps = min(steps or len(script), len(script)) if script else steps or STEPS
    longest = getattr(config, "max_position_embeddings", None)
    if longest and len(tokens) + n_steps > longest:
        raise InputError(
            f"{len(tokens)} prompt tokens and {n_steps} steps exceed the {longest} positions of {loaded.name}: "
            "shorten the prompt, take fewer steps or a model with a longer context"
        )
    if not all(0 <= t < config.vocab_size for t in tokens + (script or [])):
        raise InputError(f"the prompt has token ids that {loaded.name} does not know: build it with this tokenizer")
    needle = [[int(a), int(b)] for a, b in prompt.needle]
    edges = [0, *(edge for span in needle for edge in span), len(tokens)]
    if edges != sorted(edges) or any(a == b for a, b in needle):
        raise InputError(f"the needle {needle} is not made of ascending spans within the prompt's {len(tokens)} tokens")
    mode = "scripted" if script else "greedy" if sample is None else "sampled"
    text = {"mode": mode, "max_steps": n_steps, **({} if sample is None else _sampling(sample))}
    device, parameter = loaded.model.device, next(loaded.model.parameters())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    ends = set() if script else _ends(loaded)
    weights, dtype = weights_sha256(loaded), str(parameter.dtype).removeprefix("torch.")
    code = {name: hashlib.sha256((ROOT / "wakekv" / name).read_bytes()).hexdigest() for name in CODE}
    depends = [weights, dtype, device.type, tokens, script, needle, k, text, sorted(ends), versions, code]
    heads, layers = (getattr(config, name, None) for name in ("num_attention_heads", "num_hidden_layers"))
    groups = getattr(config, "num_key_value_heads", None) or heads
    if not all(isinstance(size, int) and size > 0 for size in (heads, layers, groups)) or heads % groups:
        raise ModelError(
            f"{loaded.name} states {layers} layers of {heads} heads in {groups} groups: "
            "one number of each is needed, and groups of equal size"
        )
    head = {
        "model": {
            "name": loaded.name,
            "source": dict(loaded.source),
            "weights_sha256": weights,
            "dtype": dtype,
            "n_layers": layers,
            "n_heads": layers * heads,
            "n_kv_heads": layers * groups,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        },
        "prompt": {
            "regime": prompt.regime,
            "seed": prompt.seed,
            "text_sha256": hashlib.sha256(prompt.text.encode()).hexdigest(),
            "needle": needle,
            "params": dict(prompt.params),
        },
        "n_prompt": len(tokens),
        "n_steps": n_steps,
        "block": BLOCK if script else 1,  # steps in one forward pass
        "k": k,
        "page_tokens": PAGE,
        "text": text,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            **versions,
            "wakekv": wakekv.__version__,
        },
        "key": hashlib.sha256(json.dumps(depends).encode()).hexdigest(),
    }
    return _Plan(head, tokens, script, frozenset(ends), None if sample is None else _sampling(sample))


def _run(model: torch.nn.Module, plan: _Plan, journal: Journal, progress: bool) -> Path:
    head, hidden = plan.head, None if progress else True  # None: no bar where there is no terminal
    n_prompt, n_steps, size = head["n_prompt"], head["n_steps"], head["model"]
    text = np.array(plan.tokens + (plan.script or [0] * n_steps)[:n_steps], dtype=np.int32)
    reader = Reader(size["n_layers"], n_prompt + n_steps - 1, n_prompt, head["prompt"]["needle"], head["k"])
    with reader.attached(model), tqdm(total=n_prompt - 1, desc="prefill", unit="token", disable=hidden) as bar:
        logged_rows = max(0, n_prompt - 1 - PROMPT_ROWS)
        for first in [*range(0, logged_rows, CHUNK), *([logged_rows] if n_prompt > 1 else [])]:
            reader.mode = "rows" if first == logged_rows else "prefill"
            piece = text[first : n_prompt - 1 if first == logged_rows else min(first + CHUNK, logged_rows)]
            _forward(model, reader, piece)
            bar.update(len(piece))
    reader.mode, step = "step", 0
    with reader.attached(model), tqdm(total=n_steps, desc="record", unit="step", disable=hidden) as bar:
        while step < n_steps and not (step and int(text[n_prompt + step - 1]) in plan.ends):
            bar.set_description("repeat" if step < journal.n_stored else "record", refresh=False)
            rows = min(head["block"], n_steps - step)
            for logits in _forward(model, reader, text[n_prompt + step - 1 :][:rows], rows):
                logged = reader.take()
                reader.check(size["n_heads"], size["n_kv_heads"], size["head_dim"])
                if not np.isfinite(logits).all():
                    raise ModelError(f"the logits of step {step} are not numbers: load the model with dtype float32")
                choice = int(logits.argmax())
                emitted = choice if plan.script is None else plan.script[step]
                if plan.sample:
                    emitted = _draw(logits, text[: n_prompt + step], plan.sample, step)
                journal.put(step, choice, emitted, logged)
                text[n_prompt + step] = emitted
                step += 1
                bar.update()
    return _finish(reader, plan, journal, text[: n_prompt + step])


def _forward(model: torch.nn.Module, reader: Reader, tokens: np.ndarray, rows: int = 1) -> np.ndarray:
    """Feed `tokens`; the logits after each of the last `rows` of them, float32 [row, vocabulary]."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(model.device)
    logits = model(input_ids=ids, past_key_values=reader.cache, use_cache=True, logits_to_keep=rows).logits
    return logits[0].float().cpu().numpy()


def _finish(reader: Reader, plan: _Plan, journal: Journal, tokens: np.ndarray) -> Path:
    head, choice, emitted = plan.head, journal.column("choice"), journal.column("emitted")
    layers, rate = range(head["model"]["n_layers"]), repetition(emitted.tolist())
    pages = np.zeros((head["model"]["n_heads"], PROMPT_ROWS, -(-head["n_prompt"] // PAGE)), np.float16)
    if reader.prompt_pages:
        pages = np.concatenate([reader.prompt_pages[layer] for layer in layers])
    manifest = {
        **head,
        "model": {**head["model"], "windows": [reader.windows[layer] for layer in layers]},
        "n_steps": len(emitted),
        "agreement": float(np.mean(choice == emitted)),
        "repetition": {"rate": rate, "rule": RULE, "flagged": rate > LOOPING},
    }
    key_means = np.concatenate([layer.page_means() for layer in reader.cache.layers])
    arrays = {"tokens": tokens, "choice": choice, "prompt_pages": pages, "key_means": key_means}
    return journal.finish(manifest, arrays)


def _draw(logits: np.ndarray, seen: np.ndarray, sample: dict[str, float], step: int) -> int:
    """A token by nucleus sampling, with a repetition penalty over all tokens seen; seed and step decide the draw."""
    x, known = logits.astype(np.float64), np.unique(seen)
    x[known] = np.where(x[known] > 0, x[known] / sample["repetition_penalty"], x[known] * sample["repetition_penalty"])
    p = np.exp((x - x.max()) / sample["temperature"])
    order = np.argsort(-p, kind="stable")
    total = np.cumsum(p[order] / p.sum())
    total = total[: np.searchsorted(total, sample["top_p"]) + 1]
    draw = np.random.default_rng(np.random.SeedSequence([int(sample["seed"]), step])).random() * total[-1]
    return int(order[np.searchsorted(total, draw, side="right")])


def _sampling(sample: dict[str, float]) -> dict[str, float]:
    odd = sorted(set(sample) - set(SAMPLE))
    if odd:
        raise InputError(f"unknown sampling setting {odd[0]!r}: known are {', '.join(SAMPLE)}")
    s = {**SAMPLE, **sample}
    numbers = all(isinstance(value, int | float) and np.isfinite(value) for value in s.values())
    if not (numbers and s["temperature"] > 0 and 0 < s["top_p"] <= 1 and s["repetition_penalty"] > 0 <= s["seed"]):
        raise InputError(f"sampling needs temperature > 0, 0 < top_p <= 1, repetition_penalty > 0, seed >= 0; not {s}")
    return s


def _ends(loaded: Any) -> set[int]:
    """The end-of-sequence ids that the model's generation settings and its tokenizer name."""
    named = [getattr(loaded.model.generation_config, "eos_token_id", None), loaded.tokenizer.eos_token_id]
    return {int(i) for ids in named if ids is not None for i in (ids if isinstance(ids, list | tuple) else [ids])}


def weights_sha256(loaded: Any) -> str:
    """The SHA-256 that the model's source states, or else that of its tensors in memory."""
    if loaded.source.get("sha256"):
        return loaded.source["sha256"]
    digest = hashlib.sha256()
    for name, tensor in sorted(loaded.model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
