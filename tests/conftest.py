"""What several test files share: traces that no model had to make, and the default model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

from wakekv.logs.trace import PAGE, PROMPT_ROWS, Trace, position_dtype

settings.register_profile("wakekv", deadline=None)  # a busy machine is no defect
settings.load_profile("wakekv")


def _log_rows(rows, needle, k, dtype):
    """One step's log by definition, from whole rows of attention weights [head, context]: the slow, plain reference."""
    n_heads, n = rows.shape
    place = np.full(n, "", dtype="U6")
    place[max(0, n - 32) :] = "local"
    place[:4] = "sink"
    for start, stop in needle:
        place[start:stop] = "needle"
    positions = np.full((n_heads, k), np.iinfo(dtype).max, dtype)
    weights = np.zeros((n_heads, k), np.float16)
    for h, row in enumerate(rows):
        best = sorted(range(n), key=lambda i: (-row[i], i))[:k]
        positions[h, : len(best)] = sorted(best)
        weights[h, : len(best)] = row[sorted(best)]
    mass = {f"{name}_mass": rows[:, place == name].sum(1).astype(np.float32) for name in ("needle", "sink", "local")}
    entropy = -np.sum(rows * np.log(np.where(rows > 0, rows, 1)), axis=1, dtype=np.float64)
    return dict(
        positions=positions,
        weights=weights,
        top=rows.argmax(1).astype(dtype),
        entropy=entropy.astype(np.float32),
        **mass,
    )


def _make_trace(
    n_layers=2,
    heads_per_layer=4,
    kv_per_layer=2,
    n_prompt=200,
    n_steps=40,
    k=16,
    seed=0,
    needle=((50, 62),),
    head_dim=8,
) -> Trace:
    """A valid trace of made-up attention: a sink, a local window, pages that drift, a needle read in bursts."""
    rng = np.random.default_rng(seed)
    n_heads, n_kv_heads = n_layers * heads_per_layer, n_layers * kv_per_layer
    total = n_prompt + n_steps
    needle = [[a, b] for a, b in needle if b <= n_prompt]
    dtype = position_dtype(total)
    taste = rng.normal(0, 1.5, (n_heads, total))
    steps = []
    for t in range(n_steps):
        n = n_prompt + t
        taste += rng.normal(0, 0.3, taste.shape)
        logits = taste[:, :n].copy()
        logits[:, 0] += 3
        logits[:, -8:] += 2
        for start, stop in needle:
            logits[rng.random(n_heads) < 0.2, start:stop] += 4
        rows = np.exp(logits - logits.max(1, keepdims=True))
        steps.append(_log_rows((rows / rows.sum(1, keepdims=True)).astype(np.float32), needle, k, dtype))
    logged = {name: np.stack([s[name] for s in steps], axis=1) for name in steps[0]}
    tokens = rng.integers(0, 1000, total, dtype=np.int32)
    n_pages = -(-n_prompt // PAGE)
    manifest = {
        "model": {
            "name": "made-up", "source": {}, "weights_sha256": "0" * 64, "dtype": "float32", "n_layers": n_layers,
            "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim, "windows": [None] * n_layers,
        },
        "prompt": {"regime": "niah", "seed": seed, "text_sha256": "0" * 64, "needle": needle, "params": {}},
        "n_prompt": n_prompt, "n_steps": n_steps, "k": k, "page_tokens": PAGE, "text": {"mode": "greedy"},
        "agreement": 1.0, "repetition": {"rate": 0.0, "rule": "", "flagged": False},
        "device": "none", "threads": 1, "versions": {}, "key": "0" * 64,
    }  # fmt: skip
    return Trace(
        manifest,
        tokens=tokens,
        choice=tokens[n_prompt:].copy(),
        prompt_pages=rng.dirichlet(np.ones(n_pages), (n_heads, PROMPT_ROWS)).astype(np.float16),
        key_means=rng.normal(size=(n_kv_heads, -(-(total - 1) // PAGE), head_dim)).astype(np.float16),
        **logged,
    )


@pytest.fixture(scope="session")
def log_rows():
    return _log_rows


@pytest.fixture(scope="session")
def make_trace():
    """make_trace(n_layers=2, heads_per_layer=4, kv_per_layer=2, n_prompt=200, n_steps=40, k=16, seed=0) -> Trace"""
    return _make_trace


@pytest.fixture(scope="session")
def smol():
    """The default language model, fetched once and then offline."""
    from wakekv.recording import models

    return models.load("smollm2-135m")
