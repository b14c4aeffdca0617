"""Made-up logs of a small study of section 2, and a call of every figure and table over them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wakekv import figures
from wakekv.heads import pools
from wakekv.reproduction.claims import published
from wakekv.tables import measured

REGIMES = ("niah", "cot")
SPOKEN = 12  # different tokens that the made-up texts are made of


def log(make_trace, regime="niah", seed=0, *, model="made-up", text="scripted", flagged=False, n_steps=120):
    """Heads that wake for a few steps at random times, all of them in one step of the log; few different tokens."""
    trace, rng = make_trace(k=16, seed=seed, n_steps=n_steps), np.random.default_rng(seed)
    mass = np.zeros(trace.needle_mass.shape, np.float32)
    for head in range(trace.n_heads):
        for step in [60, *rng.choice(np.arange(10, n_steps), 2, replace=False)]:
            mass[head, step : step + 4] = 0.7
    tokens, zero = trace.tokens.copy(), np.zeros_like(mass)
    tokens[trace.n_prompt :] = rng.integers(0, SPOKEN, n_steps)
    manifest = trace.manifest | {"model": trace.manifest["model"] | {"name": model}, "text": {"mode": text}}
    manifest |= {"prompt": trace.manifest["prompt"] | {"regime": regime}}
    manifest |= {"repetition": {"rate": 0.9 if flagged else 0.0, "rule": "", "flagged": flagged}}
    return replace(trace, manifest=manifest, tokens=tokens, needle_mass=mass, sink_mass=zero, local_mass=zero)


def study(make_trace, n=3):
    """Three prompts a regime, one of them greedy beside, which repeats itself."""
    logs = [log(make_trace, regime, seed) for regime in REGIMES for seed in range(n)]
    return pools.pools([*logs, log(make_trace, "cot", 9, text="greedy", flagged=True)])


def numbers(many):
    """Every DataFrame that the figures and tables are made of, by its function in pools.py."""
    data = published()
    found = {"churn": pools.churn(many, data), "wakeups": pools.wakeups(many, data), "logs": pools.logs(many)}
    found |= {"markers": pools.markers(many, data, draws=20), "bursts": pools.bursts(many, data, draws=20)}
    found["tokens"] = pools.tokens(many, lambda _, token: f"t{token}")
    return found | {"prefetching": pools.prefetching(many, budget=4)}


def examples(many, found):
    """A call of every figure and table of section 2, by name."""
    data, reads = published(), many[0].reads[0]
    return {
        "head_pages": lambda: figures.head_pages(reads, 3),
        "wakers": lambda: figures.wakers([reads]),
        "table_4": lambda: figures.table_4(many, found["churn"], data),
        "drift_settings": lambda: figures.drift_settings(many, data),
        "spells": lambda: figures.spells(many),
        "alarms": lambda: figures.alarms(reads, 3),
        "leads": lambda: figures.leads(many, found["wakeups"], data),
        "forest": lambda: figures.forest(many, found["wakeups"], data),
        "mirage": lambda: figures.mirage(many, data),
        "token_markers": lambda: figures.token_markers(many, found["tokens"]),
        "burst_steps": lambda: figures.burst_steps(many, found["bursts"], data),
        "prefetch_yield": lambda: figures.prefetch_yield(many, found["prefetching"]),
        "pooled_logs": lambda: measured.logs(found["logs"]),
        "churn": lambda: measured.churn(found["churn"], data),
        "wakeups": lambda: measured.wakeups(found["wakeups"], data),
        "markers": lambda: measured.markers(found["markers"], data),
        "tokens": lambda: measured.tokens(found["tokens"]),
        "bursts": lambda: measured.bursts(found["bursts"], data),
        "prefetching": lambda: measured.prefetching(found["prefetching"]),
    }
