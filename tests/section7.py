"""A made-up sweep of a serving engine and its growth, and a call of each of their figures."""

from __future__ import annotations

from wakekv import figures
from wakekv.serving.sweep import summarised

STEPS = {"stock": 4.0, "flexicache": 3.0, "reactive-r1": 2.0, "reactive-r16": 1.0}  # seconds; twice that in repeat 2


def sweep() -> dict[str, dict]:
    """What `served.load` finds of four configurations, two repeats each."""
    about = {"model": "m", "dtype": "d", "requests": 2, "length": 3, "n_tokens": 1, "made": "up"}
    about["hardware"] = {"device": "made-up", "threads": 1}
    found = {}
    for name, step in STEPS.items():
        told = {} if name == "stock" else {"stall_s": 0.001, "score_s": 0.5, "misses": 7.0}
        repeats = [
            {"tokens_per_s": 1 / s, "step_s": s, "step_cpu_s": s, "decode_tokens_per_s": 2 / s, "reached": 2, **told}
            for s in (step, 2 * step)
        ]
        row = {"configuration": name, "settings": None if name == "stock" else {}, "repeats": repeats, **about}
        row |= {"quality": {"kl_mean": 4 - step, "agreement": 0.9}, "answers": {"mean": 20.0, "full": 40.0}}
        found[name] = summarised(row)
    return found


def growth() -> dict:
    """What benchmarks/growth.py leaves: stock's step grows with context and requests, the others' with requests."""
    rows = [
        {"context": context, "requests": n, "configuration": name, "repeat": turn,
         "step_s": n * (context / 1024 if name == "stock" else step) * (1 + turn / 10), "step_cpu_s": n * step}
        for context in (1024, 2048) for n in (1, 2) for turn in (0, 1) for name, step in STEPS.items()
    ]  # fmt: skip
    about = {"model": "m", "dtype": "d", "budget": 3, "hardware": {"device": "made-up", "threads": 1}}
    return {**about, "rows": rows}


def examples():
    """A call of every figure of the serving engine, by name."""
    published = [{"config": "stock", "rerank": 16, "speedup": 1.0, "longbench_pct": 100.0},
                 {"config": "reactive", "rerank": 1, "speedup": 1.3, "longbench_pct": 97.0}]  # fmt: skip
    return {
        "engine_front": lambda: figures.engine_front(sweep(), published),
        "engine_parts": lambda: figures.engine_parts(sweep()),
        "engine_growth": lambda: figures.engine_growth(growth()),
    }
