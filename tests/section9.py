"""A small study of one budget for all heads on made-up logs, and a call of each of its figures and tables."""

from __future__ import annotations

from dataclasses import replace

from wakekv import figures, luck
from wakekv.beyond import BY_LAYER, RULES, Counted, count, follow
from wakekv.demand import demand
from wakekv.policies import POLICIES

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
        "where": lambda: figures.TABLES["where"](flows(make_trace)),
    }
