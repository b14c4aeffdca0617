"""What an iteration costs: computing as measured in the serving engine, pages over a link that is assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from wakekv.errors import InputError
from wakekv.tables.served import GROWTH, RECORDED, load

KV_HEADS, PAGE = 90, 16  # of the engine's runs: smollm2-135m
RANKED = {"stock": None, "reactive-r1": 1, "reactive-r16": 16}  # configuration -> steps between rankings, None: none


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


def rows(growth: Path | str = GROWTH) -> list[dict]:
    """Measured decode steps of the engine, of benchmarks/growth.py: one machine, one precision, several contexts and
    numbers of requests. A dict each: requests, pages attended to and ranked in a step, step_s (CPU seconds)."""
    found = json.loads(Path(growth).read_text(encoding="utf-8"))
    made = []
    for row in (row for row in found["rows"] if row["configuration"] in RANKED):
        every, heads = RANKED[row["configuration"]], row["requests"] * KV_HEADS
        pages = (row["context"] + found["n_tokens"] / 2) / PAGE
        made.append({
            "requests": row["requests"],
            "pages": heads * (found["budget"] if every else pages),
            "ranked": heads * pages / every if every else 0.0,
            "step_s": row["step_cpu_s"],
        })  # fmt: skip
    return made


def prompt_token(sweep: Path | str = RECORDED) -> float:
    """Seconds of a prompt token: the least of all runs of a sweep, as those are wall seconds (benchmarks/growth.py
    times decoding alone)."""
    return min(
        one["prefill_s"] / (row["requests"] * row["length"]) for row in load(sweep).values() for one in row["repeats"]
    )


def calibrate(
    found: Sequence[Mapping], prefill_s: float, page_bytes: int, bytes_per_s: float, latency_s: float
) -> tuple[Costs, float]:
    """(costs, typical relative error of a step): of `rows` by non-negative least squares on relative errors; the rest
    as given. InputError for fewer than four measured steps."""
    if len(found) < 4:
        raise InputError(f"{len(found)} measured steps cannot settle four costs: measure more (benchmarks/growth.py)")
    step = np.array([row["step_s"] for row in found])
    parts = np.array([[1.0, row["requests"], row["pages"], row["ranked"]] for row in found])
    scale = parts.max(0)
    fitted = nnls(parts / scale / step[:, None], np.ones(len(step)))[0] / scale
    error = float(np.median(np.abs(parts @ fitted / step - 1)))
    return Costs(*map(float, fitted), prefill_s, page_bytes, bytes_per_s, latency_s), error


def hidden_ratio(d_model: int, n_kv_heads: int, head_dim: int) -> float:
    """Memory of a token's hidden state over that of its keys and values: d_model / (2 * KV heads * head size), all of a
    layer. Above 1 where KV heads are shared by many query heads: then keeping hidden states costs memory *and* time."""
    return d_model / (2 * n_kv_heads * head_dim)
