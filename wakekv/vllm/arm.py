"""One engine in a process of its own: JSON commands come in by line, answers go out by line.

    {"start": {"model": ..., "settings": {...} or null, ...}}    as Engine's arguments
    {"generate": {"prompts": [[...]], "n_tokens": n}}  -> tokens and times
    {"serve": {"requests": [...]}}    as Engine.serve
    {"forced": {"prompts": [[...]], "texts": [[...]], "file": path}}  feeds the texts; log-probabilities go to the file
    {"forget": {}}    what the engine has cached of earlier prompts;  {"free_blocks": {}}    of its cache
    {"set": {...}}, {"books": {}}, {"tiers": {}}, {"demands": {"file": path}}    the plugin's worker; see remote.py
    {"log": {...}}    as RowLog, then {"forced": ...} of one prompt, then {"logged": {"file": path}}

An answer is {"ok": ...}, or {"error": one line}. `Arm` is the other end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from wakekv.errors import WakeKVError
from wakekv.logs.demand import Demand

SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Arm:
    """Another process with an engine. python: one that has vllm; cores: where its threads are bound (the engine's
    VLLM_CPU_OMP_THREADS_BIND; by default nowhere)."""

    def __init__(self, python: str | Path, log: str | Path | None = None, cores: str = "nobind"):
        where = {**os.environ, **SINGLE, "VLLM_CPU_OMP_THREADS_BIND": cores}
        self._log = open(log, "ab") if log else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [str(python), "-m", "wakekv.vllm.arm"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=where, text=True,
        )  # fmt: skip

    def ask(self, what: str, **arguments: Any) -> Any:
        """The answer. WakeKVError with the other end's line where it refused or died."""
        try:
            self._process.stdin.write(json.dumps({what: arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WakeKVError(f"the engine ended with status {self._process.wait()} while asked to {what}: see its log")
        answer = json.loads(line)
        if "error" in answer:
            raise WakeKVError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        if self._log is not subprocess.DEVNULL:
            self._log.close()

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def answer(engine: Any, what: str, arguments: dict) -> tuple[Any, Any]:
    """(engine, answer) of one command."""
    from wakekv.vllm.engine import Engine
    from wakekv.vllm.settings import Settings

    if what == "start":
        settings = arguments.pop("settings", None)
        arguments["logits_processors"] = ["wakekv.vllm.forced:Forced"]
        engine = Engine(settings=None if settings is None else Settings.of(settings), **arguments)
        return engine, {}
    if what == "generate":
        return engine, vars(engine.generate(**arguments))
    if what == "serve":
        return engine, engine.serve(**arguments)
    if what == "forced":
        import torch
        from safetensors.torch import save_file

        from wakekv.vllm.forced import KEPT

        texts = arguments["texts"]
        extra = [{"text": text, "name": str(i)} for i, text in enumerate(texts)]
        batch = engine.generate(arguments["prompts"], len(texts[0]), extra=extra)
        save_file({name: torch.stack(list(rows.values())) for name, rows in KEPT.items()}, arguments["file"])
        KEPT.clear()
        return engine, vars(batch)
    if what == "forget":
        return engine, engine.llm.reset_prefix_cache()
    if what == "free_blocks":
        return engine, engine.free_blocks()
    if what == "logged":
        from safetensors.numpy import save_file

        save_file(engine.ask("logged"), arguments["file"])
        return engine, {}
    if what == "demands":
        write_demands(engine.ask("demands"), arguments["file"])
        return engine, {}
    return engine, engine.ask(what, **arguments)


def write_demands(demands: Mapping[str, Demand], file: str | Path) -> None:
    """What requests wanted, as plain arrays; what is no array stands as JSON beside them."""
    from safetensors.numpy import save_file

    arrays, others = {}, {}
    for name, demand in demands.items():
        values = {field.name: getattr(demand, field.name) for field in fields(demand)}
        others[name] = {field: value for field, value in values.items() if not isinstance(value, np.ndarray)}
        arrays |= {
            f"{name} {field}": np.ascontiguousarray(values[field]) for field in values if field not in others[name]
        }
    save_file(arrays, file, {"others": json.dumps(others)})


def read_demands(file: str | Path) -> dict[str, Demand]:
    """What `write_demands` wrote."""
    from safetensors import safe_open

    names = [field.name for field in fields(Demand)]
    with safe_open(file, "np") as held:
        return {
            name: Demand(**own, **{f: held.get_tensor(f"{name} {f}") for f in names if f not in own})
            for name, own in json.loads(held.metadata()["others"]).items()
        }


def main() -> None:
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the engine prints is no answer
    engine = None
    for line in sys.stdin:
        ((what, arguments),) = json.loads(line).items()
        try:
            engine, ok = answer(engine, what, arguments)
            said = {"ok": ok}
        except Exception as error:  # the other end raises it; the log has the whole of what is not ours
            if not isinstance(error, WakeKVError):
                traceback.print_exc()
            said = {"error": " ".join(str(error).split()) or type(error).__name__}
        out.write(json.dumps(said) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
