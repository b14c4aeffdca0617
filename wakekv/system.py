"""What a cache costs in time and memory: steps, stalls and bytes by tier, beside transformers' own caches.

All of one measurement hold the same prefilled text and are fed the same tokens. A batch is one sequence, repeated.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

import wakekv
from wakekv.cache import ReversibleCache
from wakekv.cache.layer import PagedLayer
from wakekv.errors import InputError
from wakekv.prompts import build
from wakekv.quality import prefilled

WARM = 2  # steps left out of a median


def environment(model: torch.nn.Module) -> dict[str, Any]:
    """What a number of seconds depends on beside the code."""
    cuda = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device) if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": Path(getattr(model.config, "name_or_path", "")).name or type(model).__name__,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "wakekv": wakekv.__version__,
        },
    }


def rivals(start: ReversibleCache, batch: int, steps: int) -> Iterator[tuple[str, Cache]]:
    """transformers' caches, holding what `start` does, one at a time: dynamic; static (preallocated; for models without
    window layers); offloaded (whole layers moved to host memory and back; where there is a GPU)."""
    whole = [_tokens(layer) if isinstance(layer, PagedLayer) else layer for layer in start.layers]
    on_gpu = start.paged[0].digests.is_cuda
    kinds = {"dynamic": lambda: DynamicCache(config=start.config)}
    if len(start.paged) == len(start.layers):
        room = start.get_seq_length() + steps
        kinds["static"] = lambda: StaticCache(config=start.config, max_cache_len=room)
    if on_gpu:
        kinds["offloaded"] = lambda: DynamicCache(config=start.config, offloading=True)
    for name, kind in kinds.items():
        cache = kind()
        with torch.inference_mode():
            for i, held in enumerate(whole):
                if isinstance(held, tuple):
                    cache.update(*(x.repeat_interleave(batch, 0) for x in held), i)
                else:
                    cache.layers[i] = copy.deepcopy(held)
                    cache.layers[i].batch_repeat_interleave(batch)
        yield name, cache


def _tokens(layer: PagedLayer) -> tuple[torch.Tensor, ...]:
    """Keys and values [sequence, kv_head, token, d] of all that a layer holds."""
    tiers = ((layer.reservoir.keys, layer.pool.keys), (layer.reservoir.values, layer.pool.values))
    rows = (
        torch.cat([x[:, : layer.n_closed].flatten(1, 2).to(y.device), y[:, -1, : layer.n_open]], 1) for x, y in tiers
    )
    return tuple(x.unflatten(0, (-1, layer.n_kv)) for x in rows)


@torch.inference_mode()
def step_seconds(model: torch.nn.Module, cache: Cache, tokens: Sequence[int], batch: int) -> list[float]:
    """Seconds of each step: the token fed to every sequence, the logits there."""
    spent = []
    for token in tokens:
        ids = torch.full((batch, 1), token, device=model.device)
        start = time.perf_counter()
        model(ids, past_key_values=cache)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        spent.append(time.perf_counter() - start)
    return spent


def measure(
    model: torch.nn.Module,
    start: ReversibleCache,
    tokens: Sequence[int],
    caches: Iterable[Mapping[str, Any]],
    *,
    batch: int = 1,
    beside: bool = True,
) -> list[dict[str, Any]]:
    """One row a cache: transformers' own (if `beside`), then those of settings that differ from `start`'s.

    Columns: settings, context, batch, n_steps, step_s (median), tokens_per_s, bytes (keys and values, of all layers);
    for ours, a step: stall_s, score_s, attend_s, settle_s, fetched_bytes; miss_rate, stall_steps (share of steps);
    bytes by tier (tiers), the slow one named (slow_tier); on a GPU allocated_bytes, what the cache takes there.
    start holds one sequence. InputError for too few tokens to time, or another number of sequences.
    """
    if len(tokens) <= WARM:
        raise InputError(f"{len(tokens)} tokens are too few to time: the first {WARM} steps are left out")
    if start.n_sequences != 1:
        raise InputError(f"this cache holds {start.n_sequences} sequences: measure from one, it is repeated")
    rows = []

    def row(settings: str, spent: list[float]) -> dict[str, Any]:
        step = statistics.median(spent[WARM:])
        rows.append(
            {"settings": settings, "context": start.get_seq_length(), "batch": batch, "n_steps": len(spent)}
            | {"step_s": step, "tokens_per_s": batch / step}
        )
        return rows[-1]

    for name, cache in rivals(start, batch, len(tokens)) if beside else ():
        found = row(name, step_seconds(model, cache, tokens, batch))
        found["bytes"] = sum(x.numel() * x.element_size() for y in cache.layers for x in (y.keys, y.values))
        del cache
    for settings in caches:
        before = _allocated(model)
        cache = start.again(**settings)
        cache.batch_repeat_interleave(batch)
        with cache.attached(model):
            spent = step_seconds(model, cache, tokens, batch)
        books, tiers = cache.books, cache.tiers()
        found = row(", ".join(f"{name}={value}" for name, value in settings.items()), spent)
        found["bytes"] = sum(n for name, n in tiers.items() if name != "slow")
        for name in ("stall_s", "score_s", "attend_s", "settle_s", "fetched_bytes"):
            found[name] = getattr(books, name) / books.n_steps
        found["miss_rate"] = books.misses / max(books.n_wants, 1)
        found["stall_steps"] = books.stall_steps / books.n_steps
        found["moving_share"] = (books.stall_s + books.score_s + books.settle_s) / sum(spent)
        found |= {"tiers": tiers, "slow_tier": cache.paged[0].reservoir.where}
        if before is not None:
            found["allocated_bytes"] = _allocated(model) - before
    return rows


def sweep(
    loaded: Any,
    caches: Sequence[Mapping[str, Any]],
    *,
    contexts: Sequence[int],
    batches: Sequence[int] = (1,),
    steps: int = 16,
    chunk: int = 1024,
    **settings: Any,
) -> list[dict[str, Any]]:
    """The rows of `measure` for every context (tokens of a niah prompt) and batch; each context is read once.

    loaded: models.Loaded.  caches: settings that differ from `settings`; see ReversibleCache.
    """
    rows = []
    for context in contexts:
        prompt = build("niah", loaded.tokenizer, length=context)
        *text, last = prompt.tokens
        tokens = [last, *prompt.script][:steps]
        room = {"max_tokens": len(text) + steps}
        start = prefilled(loaded.model, text, chunk=chunk, **{**room, **settings})
        for batch in batches:
            rows += measure(loaded.model, start, tokens, caches, batch=batch)
    return rows


def _allocated(model: torch.nn.Module) -> int | None:
    return torch.cuda.memory_allocated(model.device) if model.device.type == "cuda" else None


def save(path: str | Path, model: torch.nn.Module, start: ReversibleCache, rows: Sequence[Mapping[str, Any]]) -> Path:
    """One JSON file with everything needed to run a measurement again, written whole or not at all."""
    path = Path(path)
    asked = {k: v for k, v in dataclasses.asdict(start.settings).items() if k != "policy"}
    asked |= {"policy": repr(start.settings.policy), "slow": None if start.settings.slow is None else "file"}
    text = json.dumps({"environment": environment(model), "start": asked, "rows": list(rows)}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): name another file") from error
    return path
