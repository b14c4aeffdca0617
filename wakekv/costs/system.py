"""What a cache costs in time and memory: steps, stalls and bytes by tier, beside transformers' own caches.

All caches of one measurement hold the same prefilled text, are fed the same tokens and take turns, step by step, so
that whatever else the machine does meets them alike. What each says is compared with what the first of transformers'
own does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

import wakekv
from wakekv.cache import ReversibleCache
from wakekv.costs.quality import divergence
from wakekv.costs.rivals import RIVALS, rivals
from wakekv.errors import InputError
from wakekv.files import write
from wakekv.recording.texts import read_filler

WARM = 2  # steps left out of all that is timed
PARTS = ("stall_s", "score_s", "attend_s", "settle_s")  # what the books of a cache time
MOVING = ("stall_s", "score_s", "settle_s")  # of these, what ranks, chooses, moves and trims pages


def environment(model: torch.nn.Module) -> dict[str, Any]:
    """What a number of seconds depends on beside the code."""
    cuda = model.device.type == "cuda"
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    cpu = cpu[1] if cpu else platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(model.device) if cuda else cpu,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # how many processes wanted one in the last minute
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": Path(getattr(model.config, "name_or_path", "")).name or type(model).__name__,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "wakekv": wakekv.__version__,
        },
    }


def passages(tokenizer: PreTrainedTokenizerBase, n_sequences: int, n_tokens: int) -> torch.Tensor:
    """int64 [sequence, token]: passages of the article that prompts are made of, begun as far apart as it allows; they
    overlap where it is short. InputError where it is too short for one."""
    article = "".join(read_filler(None, lambda sentence: 0).sentences)
    ids = torch.tensor(tokenizer(article, add_special_tokens=False, verbose=False).input_ids)
    if len(ids) < n_tokens:
        raise InputError(f"the article has {len(ids)} tokens, not {n_tokens}: ask for a shorter context")
    firsts = np.linspace(0, len(ids) - n_tokens, n_sequences).astype(int)
    return torch.stack([ids[first : first + n_tokens] for first in firsts])


@dataclass
class Arm:
    """One cache of a measurement and what each of its steps took. asked: the settings that it differs in."""

    name: str
    cache: Cache
    asked: Mapping[str, Any] = field(default_factory=dict)
    allocated: int = 0  # bytes on a GPU
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    parts: list[list[float]] = field(default_factory=list)  # seconds of PARTS
    kl: list[np.ndarray] = field(default_factory=list)
    agreed: list[float] = field(default_factory=list)

    @torch.inference_mode()
    def step(self, model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Feed ids [sequence, 1]; logits [sequence, vocabulary]. Attaching to the model is not timed."""
        with self.cache.attached(model) if isinstance(self.cache, ReversibleCache) else nullcontext():
            before, held = self._books(), _allocated(model)
            cpu, wall = time.process_time(), time.perf_counter()
            logits = model(ids, past_key_values=self.cache).logits[:, -1]
            if model.device.type == "cuda":
                torch.cuda.synchronize(model.device)
            self.wall.append(time.perf_counter() - wall)
            self.cpu.append(time.process_time() - cpu)
            self.parts.append([new - old for new, old in zip(self._books(), before)])
            self.allocated += _allocated(model) - held
        return logits.float().cpu()

    def _books(self) -> list[float]:
        return [getattr(self.cache.books, name) for name in PARTS] if isinstance(self.cache, ReversibleCache) else []

    def row(self) -> dict[str, Any]:
        row = {"settings": self.name, "asked": {name: _plain(value) for name, value in self.asked.items()}}
        row |= {"n_steps": len(self.wall), "step_s": float(np.median(self.wall[WARM:]))}
        row |= {"step_cpu_s": float(np.median(self.cpu[WARM:])), "mean_step_s": float(np.mean(self.wall[WARM:]))}
        row["mean_step_cpu_s"] = float(np.mean(self.cpu[WARM:]))
        if self.kl:
            kl = np.concatenate(self.kl)
            row |= {"n_tokens": len(kl), "kl_mean": float(kl.mean()), "kl_p95": float(np.quantile(kl, 0.95))}
            row |= {"kl_worst": float(kl.max()), "agreement": float(np.mean(self.agreed))}
        if not isinstance(self.cache, ReversibleCache):
            layers = self.cache.layers
            return row | {"bytes": sum(x.numel() * x.element_size() for y in layers for x in (y.keys, y.values))}
        books, tiers = self.cache.books, self.cache.tiers()
        parts = dict(zip(PARTS, np.mean(self.parts[WARM:], 0).tolist()))
        row |= {"bytes": sum(tiers[name] for name in FAST), **parts}
        row["moving_share"] = sum(parts[name] for name in MOVING) / row["mean_step_s"]
        row |= {"fetched_bytes": books.fetched_bytes / books.n_steps, "miss_rate": books.misses / max(books.n_wants, 1)}
        row |= {"misses": books.misses / books.n_steps, "stall_steps": books.stall_steps / books.n_steps}
        row |= {
            "tiers": tiers,
            "over_budget": over_budget(self.cache),
            "slow_tier": self.cache.paged[0].reservoir.where,
        }
        return row | ({"allocated_bytes": self.allocated} if torch.cuda.is_available() and self.allocated else {})


FAST = ("pages", "digests", "tables", "windows")  # of the tiers that a cache counts, those on the fast one


def over_budget(cache: ReversibleCache) -> float:
    """Bytes of all that layers with pages hold on the fast tier, over those of the budget, its digests and the open
    page: 1 where nothing else is there."""
    tiers, layers = cache.tiers(), cache.paged
    page = sum(layer.n_rows * layer.reservoir.page_bytes for layer in layers)
    digests = sum(layer.digests.numel() * layer.digests.element_size() for layer in layers)
    held = sum(tiers[name] for name in FAST if name != "windows")
    return held / ((cache.steps.budget + 1) * page + digests)


def measure(
    model: torch.nn.Module,
    start: ReversibleCache,
    tokens: Sequence[int] | Sequence[Sequence[int]],
    caches: Iterable[Mapping[str, Any]],
    *,
    batch: int = 1,
    beside: Collection[str] = RIVALS,
) -> list[dict[str, Any]]:
    """One row a cache: the RIVALS in `beside`, then those of settings that differ from `start`'s.

    All are held at once and take turns. Each sequence of start is there `batch` times; tokens are fed to all alike, or
    given as [sequence, token].
    Columns: settings, asked (the same, for a program), context, batch (sequences), n_steps; medians over steps
    but the first WARM: step_s, step_cpu_s (seconds, and those the process had a core), tokens_per_s, and the means,
    mean_step_s, mean_step_cpu_s; bytes (of a full cache; of ours, on the fast tier). Against the first of `beside`, if
    there is one: n_tokens, kl_mean, kl_p95, kl_worst (nats a token), agreement (share of equal likeliest tokens).
    For ours, means over the same steps: stall_s, score_s, attend_s, settle_s, and moving_share, what is not attention
    of those over mean_step_s; over all steps: fetched_bytes and misses (a step), miss_rate, stall_steps (share of
    steps); bytes by tier (tiers), over_budget (see there), the slow tier named (slow_tier); on a GPU allocated_bytes,
    what it takes.
    InputError for too few tokens to time, or tokens of another number of sequences.
    """
    n = start.n_sequences * batch
    ids = torch.as_tensor(tokens, device=model.device)
    ids = ids.expand(n, -1) if ids.ndim == 1 else ids
    if ids.shape[1] <= WARM:
        raise InputError(f"{ids.shape[1]} tokens are too few to time: the first {WARM} steps are left out")
    if len(ids) != n:
        raise InputError(f"tokens for {len(ids)} sequences, and the cache holds {n}: give a row for each, or one list")
    arms = [Arm(name, cache) for name, cache in rivals(start, batch, ids.shape[1], beside)]
    for asked in caches:
        held = _allocated(model)
        cache = start.again(**asked)
        if batch > 1:
            cache.batch_repeat_interleave(batch)
        name = ", ".join(f"{name}={value}" for name, value in asked.items())
        arms.append(Arm(name, cache, asked, allocated=_allocated(model) - held))
    for t in range(ids.shape[1]):
        full = None
        for arm in arms:
            logits = arm.step(model, ids[:, t : t + 1])
            if full is not None:
                arm.kl.append(divergence(full, logits))
                arm.agreed.append(float((full.argmax(-1) == logits.argmax(-1)).float().mean()))
            full = logits if beside and full is None else full
    rows, context = [], start.get_seq_length()
    for arm in arms:
        row = arm.row()
        rows.append({**row, "context": context, "batch": n, "tokens_per_s": n / row["step_s"]})
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
    """The rows of `measure` for every batch and context (tokens of `passages`, a different one for each sequence; the
    longer contexts go on from the shorter ones).

    loaded: models.Loaded.  caches: settings that differ from `settings`; see ReversibleCache.
    """
    rows, contexts = [], sorted(contexts)
    for batch in batches:
        ids = passages(loaded.tokenizer, batch, contexts[-1] + steps).to(loaded.model.device)
        start = ReversibleCache(loaded.model.config, **{"budget": 1, "max_tokens": ids.shape[1], **settings})
        for context in contexts:
            read(loaded.model, start, ids[:, :context], chunk)
            rows += measure(loaded.model, start, ids[:, context : context + steps], caches)
    return rows


def read(model: torch.nn.Module, cache: ReversibleCache, ids: torch.Tensor, chunk: int = 1024) -> ReversibleCache:
    """The cache, having read on in ids [sequence, token] from where it is, in chunks of tokens."""
    with cache.attached(model):
        cache.prefill(model, ids[:, cache.get_seq_length() :], chunk=chunk)
    return cache


def _allocated(model: torch.nn.Module) -> int:
    return torch.cuda.memory_allocated(model.device) if model.device.type == "cuda" else 0


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | type(None)) else repr(value)


def save(
    path: str | Path, model: torch.nn.Module, start: ReversibleCache, rows: Sequence[Mapping[str, Any]], **more: Any
) -> Path:
    """One JSON file with everything needed to run a measurement again, written whole or not at all: environment, start
    (its settings), rows, and what else is given."""
    path = Path(path)
    asked = {name: _plain(value) for name, value in dataclasses.asdict(start.settings).items() if name != "policy"}
    asked |= {"policy": repr(start.settings.policy), "slow": None if start.settings.slow is None else "file"}
    text = json.dumps({**more, "environment": environment(model), "start": asked, "rows": list(rows)}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write(path, text + "\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): name another file") from error
