"""A small scheduling study on made-up logs, orders taught on one, and a call of each of their figures and tables."""

from __future__ import annotations

from wakekv import figures
from wakekv.learning import reinforce, taught
from wakekv.learning.taught import BASELINES, Prompt
from wakekv.logs.demand import demand
from wakekv.scheduling import foresight, study
from wakekv.scheduling.agents import Agent
from wakekv.scheduling.costs import Costs
from wakekv.scheduling.profile import profiles
from wakekv.scheduling.server import Server

COSTS, STAMP = Costs(0.01, 0.002, 1e-5, 1e-6, 0.001, 4096, 1e8, 1e-4), "simulated from logs of 3 prompts: made-up"
AGENTS = (Agent("a", 20, share=3), Agent("b", 20))


def examples(make_trace):
    """A call of every figure and table of scheduling and of learned eviction, by name."""
    kept = profiles([make_trace(k=8, seed=seed, n_steps=24) for seed in range(3)], budget=4)
    of, server = kept["reactive"], Server(COSTS, 100, 64)
    model = foresight.fit(of)
    cases = {"made up": study.study(kept, model, server, [0.5, 2.0], [0, 1], n=6)}
    drawn = study.traffic(of, 6, 0)
    runs = {name: study.run(kept, model, server, name, 1.0, drawn) for name in ("first come", "two queues, prefetch")}
    shared = study.tenants(of, model, server, AGENTS, 1.0, [0, 1], n=6)
    prompts = [Prompt("made-up", "niah", s, demand(make_trace(k=8, seed=s, n_steps=24), "kv_head")) for s in range(2)]
    imitated, learned = reinforce.teach([reinforce.lesson(prompts[0].wants, (2,))], imitate=5, improve=1, span=4)
    rules = {name: [rule] for name, rule in BASELINES.items()} | {
        "imitated": [imitated],
        "learned": [learned, imitated],
    }
    contest = taught.contest(prompts, rules, (3, 5))
    asked = taught.questions(prompts, rules, 3, n=4)
    return {
        "load_curves": lambda: figures.load_curves(cases, STAMP),
        "request_waits": lambda: figures.request_waits(runs, STAMP),
        "said_and_came": lambda: figures.said_and_came(
            foresight.reliability(model, of), foresight.brier(model, of, 20), STAMP
        ),
        "fairness": lambda: figures.fairness(shared, STAMP),
        "taught_orders": lambda: figures.taught_orders(taught.closed(contest, 20), STAMP),
        "server_costs": lambda: figures.TABLES["server_costs"](COSTS, 0.1, [{}]),
        "scheduled": lambda: figures.TABLES["scheduled"](cases),
        "foreseen": lambda: figures.TABLES["foreseen"](model, of, 20),
        "hidden": lambda: figures.TABLES["hidden"]({"made-up": (64, 2, 16), "other": (64, 4, 16)}),
        "tenants": lambda: figures.TABLES["tenants"](shared),
        "eviction": lambda: figures.TABLES["eviction"](contest, 20),
        "asked_again": lambda: figures.TABLES["asked_again"](asked, 20),
    }
