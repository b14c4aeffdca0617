"""Spot checks: a shipped log made again from the model, and compared with what is shipped, in numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wakekv.errors import InputError
from wakekv.logs.demand import demand
from wakekv.logs.shipped import Shipped, code, open_shipped, weight_of
from wakekv.logs.trace import Trace, open_trace
from wakekv.recording import models, prompts
from wakekv.recording.record import record

OURS = "MIT: the measurement, our own words, and the article of 1911, which is in the public domain"


def spotcheck(
    path: Path | str, steps: int | None = None, say: Callable[[str], None] = print, by: Callable[..., Path] = record
) -> dict[str, Any]:
    """Record the first `steps` steps (None: all) of a shipped log anew and compare; a row of plain numbers. by: what
    records, with the arguments of record.record.

    tokens_equal      share of prompt and emitted tokens that are the same
    wants, equal      pages wanted in the shipped log; share wanted in both, of those wanted in either
    order_equal       share of heads' steps whose pages are the same in the same order
    weight_codes      largest difference of a page weight, in eighths of octaves (1 is 9 %), over pages of weight above
                      0.001 wanted in both;  weight: the largest difference of the weights of those codes
    Raises TraceError (no such log), ModelError (a model that is not to be had), InputError.
    """
    log = open_shipped(path)
    n_steps = log.n_steps if steps is None else steps
    if not 1 <= n_steps <= log.n_steps:
        raise InputError(f"steps must be between 1 and {log.n_steps}, the length of {path}, not {steps}")
    name = log.manifest["model"]["name"]
    loaded = models.load(name)
    asked = request(log.manifest)
    mode = log.manifest["text"]["mode"]
    prompt = prompts.build(
        asked.pop("regime"), loaded.tokenizer, scripted=mode == "scripted", context=loaded.context, **asked
    )
    if tuple(prompt.tokens) != tuple(log.tokens[: log.n_prompt].tolist()):
        raise InputError(f"{path}: the prompt that this version writes is another: the log cannot be made again")
    sample = {k: v for k, v in log.manifest["text"].items() if k not in ("mode", "max_steps")} or None
    say(f"{name}: {log.n_prompt} prompt tokens and {n_steps} steps, recorded again")
    with tempfile.TemporaryDirectory() as folder:
        again = open_trace(by(loaded, prompt, Path(folder) / "log", steps=n_steps, k=log.k, sample=sample))
        return {"log": Path(path).name, "model": name, "steps": n_steps, **compare(log, again)}


def compare(log: Shipped, again: Trace) -> dict[str, Any]:
    """What `spotcheck` says of a shipped log and a recording of its first steps (or all)."""
    ours, theirs = demand(log).until(again.n_steps), demand(again)
    n = again.n_prompt + again.n_steps
    tokens_equal = float(np.mean(log.tokens[:n] == again.tokens))
    item = [(w.head_of.astype(np.int64) * w.n_steps + w.step_of) * log.n_pages + w.page for w in (ours, theirs)]
    both, at, where = np.intersect1d(*item, assume_unique=True, return_indices=True)
    cell = [np.diff(w.ptr, axis=1) for w in (ours, theirs)]
    same = cell[0] == cell[1]
    for h, t in np.argwhere(same):
        a, b = ours.ptr[h, t], theirs.ptr[h, t]
        same[h, t] = np.array_equal(ours.page[a : a + cell[0][h, t]], theirs.page[b : b + cell[0][h, t]])
    codes = log.codes[_kept(log, again.n_steps)][at], code(theirs.weight)[where]
    apart = np.abs(codes[0].astype(int) - codes[1])[theirs.weight[where] > 0.001]
    return {
        "tokens_equal": tokens_equal,
        "wants": ours.n_wants,
        "equal": len(both) / (ours.n_wants + theirs.n_wants - len(both)),
        "order_equal": float(same.mean()),
        "weight_codes": int(apart.max(initial=0)),
        "weight": float(np.abs(weight_of(codes[0]) - weight_of(codes[1])).max(initial=0)),
    }


def request(manifest: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `prompts.build` that a log was asked for with, read from its manifest."""
    prompt, params = manifest["prompt"], manifest["prompt"]["params"]
    asked = {"regime": prompt["regime"], "seed": prompt["seed"]}
    asked |= {"length": params["length"]} if params.get("length") else {}
    return asked | ({"depth": params["depths"][0]} if params.get("depths") else {})


def about(manifest: dict[str, Any]) -> dict[str, str]:
    """The licence of a shipped log and the command that records the log it was made from."""
    asked, text = request(manifest), manifest["text"]
    options = {"model": manifest["model"]["name"], **asked, "steps": text["max_steps"], "text": text["mode"]}
    command = " ".join(f"--{name} {value}" for name, value in options.items())
    licence = manifest["model"]["source"].get("licence", "unknown")
    model = f"{manifest['model']['name']}, under {licence}, is not part of it"
    return {"licence": f"{OURS}; {model}", "command": f"python -m wakekv record {command} --out runs/mine/log"}


def pieces(trace: Trace) -> list[str]:
    """The text of each token of a log, so that together they are the text: what a token adds to the one before it."""
    tokenizer, tokens = models.load(trace.manifest["model"]["name"]).tokenizer, np.asarray(trace.tokens).tolist()
    texts = []
    for before, token in zip([None, *tokens], tokens):
        alone = tokenizer.decode([token])
        if before is not None:
            lead, whole = tokenizer.decode([before]), tokenizer.decode([before, token])
            alone = whole[len(lead) :] if whole.startswith(lead) else alone
        texts.append(alone)
    return texts


def _kept(log: Shipped, n_steps: int) -> np.ndarray:
    """bool [want]: wants of the first steps, in the order of `Demand.until`."""
    return np.repeat(np.tile(np.arange(log.n_steps) < n_steps, log.n_heads), log.counts.ravel())
