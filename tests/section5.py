"""A small study of matched comparisons on made-up logs, and a call of each of its figures and tables."""

from __future__ import annotations

from wakekv import figures
from wakekv.policies import POLICIES
from wakekv.reproduction.claims import published
from wakekv.simulation.study import studies
from wakekv.tables.contests import EVERY_8, SEVEN, SURVEY

BUDGETS = (2, 4, 8)


def examples(traces):
    """A call of every figure and table of matched comparisons, by name."""
    data = published()
    rules = {name: POLICIES[name] for name in (*SEVEN, "optimum")} | EVERY_8
    every = studies(traces, rules, slow_budgets=BUDGETS)
    surveyed = studies(traces, list(SURVEY), slow_budgets=BUDGETS, held_out=True)
    drawn = ("frozen", "evict", "snapkv", "rkv", "rkv-every-8", "reasonalloc-every-8")
    return {
        "figure_1a": lambda: figures.figure_1a(surveyed, BUDGETS, resamples=50),
        "margins": lambda: figures.margins(every, data, BUDGETS, drawn, resamples=50),
        "headline": lambda: figures.headline(every, BUDGETS, data, resamples=50),
        "seven": lambda: figures.seven(every, BUDGETS, data, resamples=50),
        "systems": lambda: figures.systems(surveyed, BUDGETS, resamples=50),
        "sensitivity": lambda: figures.sensitivity(traces[:2], BUDGETS, resamples=50),
    }
