"""The explorer's data: some heads of a shipped log, compact enough for a page that asks nothing of the network.

Every head of a log would be too much to load. Of those ranked by reactive's misses at 32 pages, evenly spread ones are
taken, and any that a figure shows.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from wakekv.logs.demand import Demand, demand
from wakekv.logs.shipped import Shipped
from wakekv.policies import POLICIES
from wakekv.simulation.simulate import curves

NAMES = ("reactive", "evict", "frozen", "optimum", "lfu", "fifo", "full")  # replay.js knows the same
HEADS, BUDGET = 48, 32


def script(name: str, log: Shipped, also: Iterable[int] = (), n_heads: int = HEADS) -> str:
    """A script that hands one log to explorer.js. also: heads that must be among the `n_heads`."""
    return f"WakeKV.log({json.dumps(content(name, log, also, n_heads), ensure_ascii=False)});\n"


def content(name: str, log: Shipped, also: Iterable[int] = (), n_heads: int = HEADS) -> dict[str, Any]:
    """What replay.js unpacks: sizes, texts, the heads, and `data`: deflated counts [head, step] (uint8), pages of all
    wants (low bytes, high bytes) and misses [policy, head, budget from 1] (uint32), in base64."""
    wants, manifest = demand(log), log.manifest
    found = {policy: curves(wants, POLICIES[policy]).head_misses for policy in NAMES}
    budget = min(BUDGET, wants.n_pages)
    heads = choose(found["reactive"][:, budget - 1] / np.maximum(1, _wants(wants)), also, n_heads)
    whole = set(POLICIES["frozen"].fit(wants).profile)
    rows = [slice(wants.ptr[h, 0], wants.ptr[h, -1]) for h in heads]
    page = np.concatenate([wants.page[row] for row in rows])
    counts = np.diff(wants.ptr, axis=1)[heads]
    misses = np.stack([of[heads] for of in found.values()]).astype("<u4")
    raw = [counts.astype(np.uint8), (page & 255).astype(np.uint8), (page >> 8).astype(np.uint8), misses]
    if counts.max(initial=0) > 255:
        raise ValueError(f"{name}: a head wants {counts.max()} pages in a step; the explorer counts to 255")
    per_layer = log.n_heads // log.n_layers
    # curves are read as whole numbers of four bytes: they start where JavaScript has copied them to, so need no padding
    return {
        "name": name,
        "model": manifest["model"]["name"],
        "regime": manifest["prompt"]["regime"],
        "recorded": f"{manifest['text']['mode']} text, {manifest['model']['dtype']} on {manifest['device']}",
        "nPrompt": log.n_prompt,
        "nSteps": log.n_steps,
        "nPages": wants.n_pages,
        "nHeads": log.n_heads,
        "pageTokens": wants.page_tokens,
        "needle": log.needle,
        "pieces": log.pieces,
        "policies": list(NAMES),
        "heads": [{"id": int(h), "layer": int(h // per_layer), "whole": bool(h in whole)} for h in heads],
        "data": base64.b64encode(zlib.compress(b"".join(part.tobytes() for part in raw), 9)).decode(),
    }


def choose(rate: np.ndarray, also: Iterable[int] = (), n_heads: int = HEADS) -> list[int]:
    """Heads to show, ascending: those of `also`, and evenly spread ranks of `rate` [head]."""
    order = np.argsort(-rate, kind="stable")
    picked = order[np.unique(np.linspace(0, len(order) - 1, min(n_heads, len(order))).round().astype(int))]
    return sorted({int(h) for h in picked} | {h for h in also if 0 <= h < len(rate)})


def _wants(wants: Demand) -> np.ndarray:
    return wants.ptr[:, -1] - wants.ptr[:, 0]
