"""A served model's log: what record.py makes of a model of transformers, made by the engine vLLM with the plugin."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from wakekv.errors import InputError
from wakekv.logs.trace import Trace, save_trace
from wakekv.recording.record import LOOPING, RULE, _plan, repetition
from wakekv.serving.sweep import engine_python
from wakekv.serving.table2 import model_folder
from wakekv.vllm.arm import Arm
from wakekv.vllm.engine import VERSION

DTYPE = "float32"  # what the recorder logs in, too


def record(
    loaded: Any, prompt: Any, out: str | Path, *, steps: int | None = None, k: int = 64, sample: Any = None
) -> Path:
    """Log a scripted prompt into the new directory `out`, as `record.record` does; returns it. It can be packed.

    loaded: models.Loaded, for its tokenizer and configuration; the weights that are read are the engine's own copy of
    the same model. InputError for a prompt without a script: the engine is fed one.
    """
    if not prompt.script or sample is not None:
        raise InputError("the engine is fed its text, so it logs scripted prompts only: build one with a script")
    head = _plan(loaded, prompt, steps, k, None).head  # what is checked and written there is checked and written here
    *read, last = prompt.tokens
    script = list(prompt.script)[: head["n_steps"]]
    with tempfile.TemporaryDirectory() as folder, Arm(engine_python()) as arm:
        from safetensors.numpy import load_file

        n_fed, start = len(read) + len(script), {"settings": {"budget": 1}, "dtype": DTYPE, "batch": 1}
        arm.ask("start", model=str(model_folder(loaded.name)), max_tokens=n_fed + 1, **start)
        arm.ask("log", n_read=len(read), n_tokens=n_fed, needle=list(prompt.needle), k=k)
        kept, arrays = f"{folder}/kept", f"{folder}/arrays"
        arm.ask("forced", prompts=[read], texts=[[last, *script]], file=kept)
        arm.ask("logged", file=arrays)
        choice = load_file(kept)["0"][1:].argmax(-1).astype(np.int32)
        logged = load_file(arrays)
    emitted = np.array(script, np.int32)
    rate, layers = repetition(script), head["model"]["n_layers"]
    manifest = {
        **head,
        "model": {**head["model"], "dtype": DTYPE, "windows": [None] * layers},
        "versions": {**head["versions"], "vllm": VERSION},
        "key": hashlib.sha256(f"vllm {VERSION} {head['key']}".encode()).hexdigest(),
        "agreement": float(np.mean(choice == emitted)),
        "repetition": {"rate": rate, "rule": RULE, "flagged": rate > LOOPING},
    }
    tokens = np.array([*prompt.tokens, *script], np.int32)
    return save_trace(Trace(manifest, tokens=tokens, choice=choice, **logged), out)
