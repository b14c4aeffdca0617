"""Made-up measurements of a real cache, and a call of each of its figures and tables."""

from __future__ import annotations

import numpy as np

from wakekv import figures
from wakekv.tables.twins import ARMS

ABOUT = "measured: made-up"


def contest(seeds=(0, 1, 2), regimes=("niah", "multiturn"), budgets=(4, 8), better=0.5):
    """Rows of `trials.contest`: reversible's KL is `better` times destructive's."""
    rng, rows = np.random.default_rng(0), []
    for regime in regimes:
        for seed in seeds:
            for budget in budgets:
                for arm in ARMS:
                    ours = arm == ARMS[0]
                    kl = rng.uniform(0.9, 1) / budget * (better if ours else 1)
                    pages = budget + 2 * arm.endswith("wider")
                    row = {"regime": regime, "seed": seed, "n_prompt": 200, "arm": arm, "budget": budget}
                    row |= {"pages": pages, "bytes": (budget + 2 * (arm != ARMS[1])) * 1000, "n_pages": 20}
                    row |= {
                        "n_tokens": 10,
                        "kl_mean": kl,
                        "kl_p95": 3 * kl,
                        "kl_worst": 5 * kl,
                        "agreement": 1 - kl / 9,
                    }
                    row |= {"n_steps": 10, "n_wants": 400, "misses": int(rng.integers(100, 200))}
                    row |= {"fetched": 100 * ours, "fetched_bytes": 25_600 * ours, "stall_steps": 9 * ours}
                    row |= {"replay_differs": 0, "slots_bytes": 1000 * (pages + 1)}
                    rows.append(row | {"stall_s": 0.02 * ours, "score_s": 0.1, "attend_s": 0.2, "settle_s": 0.01})
    return rows


def watched():
    """What `witness.watch` returns of both arms: page 3 leaves and returns, in one of them."""
    step = {"resident": [2, 3], "wanted": [3], "missed": [], "fetched": [], "demoted": [], "closed": None}
    away = {**step, "wanted": [1], "missed": [1], "fetched": [1], "demoted": [3], "closed": 4}
    back = {**step, "resident": [1, 2], "wanted": [3], "missed": [3], "fetched": [3], "demoted": [2]}
    gone = [{**away, "fetched": [], "demoted": []}, {**step, "wanted": [1, 3], "missed": [1]}]

    def head(steps):
        moved = [
            {"bytes_in": 256 * len(one["fetched"]), "bytes_out": 256 * (one["closed"] is not None)} for one in steps
        ]
        steps = [{"step": 5 + i, **one, **bytes_} for i, (one, bytes_) in enumerate(zip(steps, moved))]
        told = {"head": 1, "layer": 0, "kv_head": 1, "budget": 2, "first_step": 5, "page_bytes": 256, "n_pages": 4}
        return told | {
            "steps": steps,
            "heads": 6,
            "fetched": 2,
            "equal": 2,
            "fetched_bytes": 512,
            "written_bytes": 1536,
        }

    return {"reversible": head([step, away, back]), "destructive": head([step, *gone])}


def timings(contexts=(100, 200)):
    """Rows of `system.measure`."""
    rows = []
    for context in contexts:
        for name, asked in (
            ("dynamic", {}),
            ("policy=reactive", {"policy": "reactive"}),
            ("mode=lagged, every=4", {"mode": "lagged", "every": 4}),
        ):
            row = {"settings": name, "asked": asked, "context": context, "batch": 1, "n_steps": 9, "step_s": 0.01}
            row |= {"step_cpu_s": 0.01, "mean_step_s": 0.012, "bytes": 1000 * (context if name == "dynamic" else 64)}
            parts = {"stall_s": 0.001, "score_s": 0.002, "attend_s": 0.003, "settle_s": 0.001, "miss_rate": 0.2}
            rows.append(row | (parts | {"kl_mean": 0.1} if asked else {}))
    return rows


def needles():
    """Rows of `quality.needles`: full finds all, reversible those at depth 0.9."""
    rows = []
    for arm, budget in ("full", None), *((arm, 8) for arm in ARMS):
        for length, depth in (100, 0.1), (100, 0.9), (200, 0.1), (200, 0.9):
            found = arm == "full" or (arm == ARMS[0] and depth > 0.5)
            row = {"arm": arm, "budget": budget, "length": length, "depth": depth, "seed": 0, "found": found}
            row["as_full"] = arm == "full"
            rows.append(row)
    return rows


def examples():
    """A call of every figure and table of the real cache, by name."""
    rows = contest()
    return {
        "ten_steps": lambda: figures.ten_steps(watched(), ABOUT),
        "equal_memory": lambda: figures.equal_memory(rows, ABOUT, resamples=50),
        "stall_price": lambda: figures.stall_price(rows, ABOUT),
        "step_parts": lambda: figures.step_parts(timings((100,)), ABOUT),
        "needle_map": lambda: figures.needle_map(needles(), ABOUT),
        "cost_growth": lambda: figures.cost_growth(timings(), ABOUT),
        "cache_steps": lambda: figures.TABLES["cache_steps"](watched()),
        "at_equal_memory": lambda: figures.TABLES["at_equal_memory"](rows, resamples=50),
        "needles_found": lambda: figures.TABLES["needles_found"](needles()),
        "stalls": lambda: figures.TABLES["stalls"](rows, resamples=50),
        "cache_costs": lambda: figures.TABLES["cache_costs"](timings()),
    }
