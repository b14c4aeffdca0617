"""A small study of one budget for all heads on made-up logs, and a call of each of its figures and tables."""

from __future__ import annotations

from dataclasses import replace

from wakekv import figures
from wakekv.learning import luck
from wakekv.logs.demand import demand
from wakekv.policies import POLICIES
from wakekv.simulation.beyond import BY_LAYER, RULES, Counted, count, follow

BUDGETS, WITHIN = (4, 6, 8), (4, 8)


def cases(make_trace) -> list[Counted]:
    """Three prompts of one regime and two of another, one of each for training, in both head units."""
    found = []
    for regime, seeds in ("niah", (0, 1, 2)), ("cot", (3, 4)):
        for seed in seeds:
            trace = make_trace(k=8, seed=seed, n_steps=24)
            for unit in ("head", "kv_head"):
                one = count(trace, unit, RULES | (BY_LAYER if unit == "kv_head" else {}))
                found.append(replace(one, regime=regime, part="train" if seed in (0, 4) else "heldout"))
    return found


def flows(make_trace):
    return [replace(follow(make_trace(k=8, seed=s, n_steps=24), 6), regime=r) for s, r in ((1, "niah"), (3, "cot"))]


def pools():
    """Rows of `trials.pools`: a pool misses less, and takes longer."""
    rows = []
    for seed in (1, 2):
        for budget in (4, 8):
            for i, arm in enumerate(("reactive", "pooled", "pooled, destructive")):
                row = {"regime": "niah", "seed": seed, "budget": budget, "arm": arm, "misses": 90.0 - 20 * i + seed}
                row |= {"miss_rate": row["misses"] / 200, "fetched_bytes": 1e4 * row["misses"], "over_budget": 1.0 + i}
                row |= {"kl_mean": 0.1 * (1 + i) / budget, "agreement": 0.9, "stall_s": 0.002, "settle_s": 0.001 * i}
                rows.append(row | {"step_cpu_s": 0.03 + 0.01 * i, "step_s": 0.03, "tokens_per_s": 33.0})
    return rows


def foreseen():
    """Rows of `trials.foreseen`."""
    said = {"log_fetches": 12.0, "log_stall_ms": 1.0, "wants_fetches": 10.0, "wants_stall_ms": 0.8}
    asked = {"policy": "pooled", "budget": 4, "wants": 3, "n_steps": 9}
    return [{**asked, **said, "fetches": 10.0, "stall_ms": 2.0}]


def grown():
    """Rows of the growth that benchmarks/scale.py measures: time in proportion to heads, and to nothing else."""
    sizes = {"tokens": (1, 2, 4), "heads": (1, 2, 4), "budgets": (1, 16)}
    return [
        {"grows": name, "at": 64 * at, "policy": "reactive", "cpu_seconds": 0.1 * (at if name == "heads" else 1),
         "peak_bytes": 3e8}
        for name, values in sizes.items() for at in values
    ]  # fmt: skip


def examples(make_trace):
    """A call of every figure and table of the pool, by name."""
    counted, trace = cases(make_trace), make_trace(k=8, n_steps=24)
    drawn = {"made up": luck.drawn(demand(trace), POLICIES["commons"])}
    orders = [count(trace, "head", RULES)]
    return {
        "gap_closed": lambda: figures.gap_closed(counted, within=WITHIN, resamples=20),
        "pool_map": lambda: figures.pool_map(flows(make_trace)),
        "beyond": lambda: figures.TABLES["beyond"](counted, BUDGETS, resamples=20),
        "goal": lambda: figures.TABLES["goal"](counted, within=WITHIN),
        "tried": lambda: figures.TABLES["tried"](orders, BUDGETS),
        "chance": lambda: figures.TABLES["chance"](drawn, BUDGETS),
        "pool_price": lambda: figures.pool_price(pools(), "measured: made-up", resamples=20),
        "pools": lambda: figures.TABLES["pools"](pools(), resamples=20),
        "pools_timed": lambda: figures.TABLES["pools_timed"](pools(), resamples=20),
        "pools_saved": lambda: figures.TABLES["pools_saved"](pools(), resamples=20),
        "predicted": lambda: figures.TABLES["predicted"](foreseen()),
        "where": lambda: figures.TABLES["where"](flows(make_trace)),
        "scale_growth": lambda: figures.scale_growth(grown(), "measured: made-up"),
    }
