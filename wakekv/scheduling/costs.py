"""What an iteration costs: computing as measured in the serving engine, pages over a link that is assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from wakekv.errors import InputError
from wakekv.served import RECORDED, load

BENCHMARK = RECORDED.parent / "vllm-bfloat16.json"  # in the precision of the sweep
KV_HEADS, PAGE = 90, 16  # of the engine's runs: smollm2-135m


@dataclass(frozen=True)
class Costs:
    """Seconds of an iteration, and of bringing pages back.

    step_s     of any decode step;  request_s  more for each request in it
    page_s     more for each page attended to, and rank_s for each page ranked (a page: one KV head's)
    prefill_s  of a prompt token
    bytes_per_s, latency_s  the link: of a batch of pages, and before the first byte of each layer's batch
    """

    step_s: float
    request_s: float
    page_s: float
    rank_s: float
    prefill_s: float
    page_bytes: int
    bytes_per_s: float
    latency_s: float

    def __post_init__(self):
        for name, value in vars(self).items():
            if not value >= 0 or (name in ("page_bytes", "bytes_per_s") and not value > 0):
                raise InputError(f"{name} must be a cost of 0 or more (a page and a bandwidth above 0), not {value!r}")

    def compute(self, n: int, pages: int, ranked: int, prompt_tokens: int = 0) -> float:
        """Seconds of an iteration with `n` requests decoding over `pages` pages, and a piece of prompt."""
        decode = self.step_s + n * self.request_s + pages * self.page_s + ranked * self.rank_s if n else 0.0
        return decode + prompt_tokens * self.prefill_s

    def fetch(self, pages: float, layers: int) -> float:
        """Seconds until `pages` pages are there, in one batch for each of `layers` layers."""
        return pages * self.page_bytes / self.bytes_per_s + layers * self.latency_s

    def faster(self, steps: float, prompts: float) -> Costs:
        """The same with steps and prompts computed so many times as fast, over the same link: what if, no measurement.
        (Accelerators speed prompts up more than steps, which wait for memory.)"""
        sped = {name: getattr(self, name) / steps for name in ("step_s", "request_s", "page_s", "rank_s")}
        return replace(self, **sped, prefill_s=self.prefill_s / prompts)


def rows(sweep: Path | str = RECORDED, benchmark: Path | str = BENCHMARK) -> list[dict]:
    """Measured decode steps of the engine: requests, pages attended to and ranked in a step, step_s (CPU seconds), and
    prefill_s a prompt token (wall; None from the benchmark, whose repeats find their prefixes cached). From the sweep's
    files and the benchmark's, which say on what they ran."""
    found = []
    for row in load(sweep).values():
        settings = row["settings"] or {}
        found += [_row(one, row["requests"], row["length"] + row["n_tokens"] / 2, settings.get("budget"),
                       settings.get("every"), row["length"])
                  for one in row["repeats"] if settings.get("mode", "reactive") == "reactive"]  # fmt: skip
    asked = json.loads(Path(benchmark).read_text(encoding="utf-8"))
    budget, tokens = asked["asked"]["budget"], asked["asked"]["tokens"]
    for measured in asked["measured"]:
        for name, every in (("stock", None), ("r1", 1), ("r16", 16)):
            found += [_row(one, asked["asked"]["requests"], measured["context"] + tokens / 2,
                           budget if every else None, every, None)
                      for one in measured["rows"][name]]  # fmt: skip
    return found


def _row(
    one: Mapping, requests: int, context: float, budget: int | None, every: int | None, prompt: int | None
) -> dict:
    pages = context / PAGE
    return {
        "requests": requests,
        "pages": requests * KV_HEADS * (budget or pages),
        "ranked": requests * KV_HEADS * pages / every if every else 0.0,
        "step_s": one["step_cpu_s"],
        "prefill_s": one["prefill_s"] / (requests * prompt) if prompt else None,
    }


def calibrate(found: Sequence[Mapping], page_bytes: int, bytes_per_s: float, latency_s: float) -> tuple[Costs, float]:
    """(costs, typical relative error of a step) by non-negative least squares on relative errors.

    Prefill is told in wall seconds only, on a machine that others used: the least of all runs is taken. InputError for
    fewer than four measured steps.
    """
    if len(found) < 4:
        raise InputError(f"{len(found)} measured steps cannot settle four costs: measure more (benchmarks/vllm.py)")
    step = np.array([row["step_s"] for row in found])
    parts = np.array([[1.0, row["requests"], row["pages"], row["ranked"]] for row in found])
    scale = parts.max(0)
    fitted = nnls(parts / scale / step[:, None], np.ones(len(step)))[0] / scale
    error = float(np.median(np.abs(parts @ fitted / step - 1)))
    prefill_s = min(row["prefill_s"] for row in found if row["prefill_s"])
    return Costs(*map(float, fitted), prefill_s, page_bytes, bytes_per_s, latency_s), error


def hidden_ratio(d_model: int, n_kv_heads: int, head_dim: int) -> float:
    """Memory of a token's hidden state over that of its keys and values: d_model / (2 * KV heads * head size), all of a
    layer. Above 1 where KV heads are shared by many query heads: then keeping hidden states costs memory *and* time."""
    return d_model / (2 * n_kv_heads * head_dim)
