"""Schedulers on the same requests, load by load: who keeps their objectives, and how much work is worth having."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.errors import InputError
from wakekv.scheduling.agents import Agent, Reserved, Split, jain
from wakekv.scheduling.foresight import MissModel
from wakekv.scheduling.profile import Profile
from wakekv.scheduling.schedulers import SCHEDULERS, FirstCome
from wakekv.scheduling.server import Request, Served, Server, alone, simulate

ENOUGH = 0.9  # of the requests keep their objectives: what effective throughput asks for (Apt-Serve)


@dataclass(frozen=True)
class Traffic:
    """Requests by chance: which log, how many tokens, and when, in units of the mean gap between arrivals.

    The same draw serves every scheduler and load. log int, tokens int, gap float, agent int, all [request].
    """

    log: np.ndarray
    tokens: np.ndarray
    gap: np.ndarray
    agent: np.ndarray


def traffic(of: Sequence[Profile], n: int, seed: int, agents: Sequence[Agent] = (), least: int = 16) -> Traffic:
    """`n` requests: logs alike, lengths uniform from `least` tokens to a log's steps, exponential gaps (a Poisson
    stream), agents by their shares."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    log = rng.integers(0, len(of), n)
    steps = np.array([p.n_steps for p in of])[log]
    tokens = rng.integers(np.minimum(least, steps), steps + 1)
    share = np.array([agent.share for agent in agents] or [1.0])
    return Traffic(log, tokens, rng.exponential(1.0, n), rng.choice(len(share), n, p=share / share.sum()))


def work_s(of: Sequence[Profile], drawn: Traffic, server: Server) -> float:
    """Seconds of the server that a request takes, mean, when as many decode together as the memory holds: load 1 is a
    request in each of these."""
    chosen = [of[i] for i in drawn.log]
    together = max(1.0, server.pages / np.mean([p.resident[:k].max() for p, k in zip(chosen, drawn.tokens)]))
    costs, spent = server.costs, 0.0
    for p, k in zip(chosen, drawn.tokens):
        step = costs.step_s / together + costs.request_s + costs.fetch(p.fetched[:k].mean(), 0)
        step += costs.page_s * p.resident[:k].mean() + costs.rank_s * p.ranked[:k].mean()
        spent += (p.n_prompt - 1) * costs.prefill_s + k * step
    return spent / len(chosen)


def requests(
    of: Sequence[Profile], drawn: Traffic, every_s: float, server: Server, chances: Sequence[np.ndarray],
    like: Sequence[Profile] | None = None, patience: float = 5.0, agents: Sequence[Agent] = (),
) -> list[Request]:  # fmt: skip
    """Requests that come every `every_s` seconds on average, served from the profiles `of`.

    Objectives: `patience` times the first token alone, and times a fifth of that a step alone with a chunk of prompt,
    both by the profiles `like` (those of reactive), so that every scheduler is held to the same. InputError for
    patience that nobody could keep to.
    """
    if min([patience, *(agent.patience for agent in agents)]) <= 1:
        raise InputError("objectives of no more than what a request takes alone cannot be kept: patience above 1")
    arrival, made = np.cumsum(drawn.gap) * every_s, []
    for i, (log, tokens) in enumerate(zip(drawn.log, drawn.tokens)):
        agent = agents[drawn.agent[i]] if agents else None
        by, bears = alone((like or of)[log], tokens, server.costs), agent.patience if agent else patience
        step = float(np.median(np.diff(by))) if tokens > 1 else 0.0
        gap = step + server.chunk * server.costs.prefill_s
        made.append(Request(i, of[log], float(arrival[i]), int(tokens), bears * float(by[0]), bears / 2 * gap,
                            chances[log], agent.name if agent else ""))  # fmt: skip
    return made


def run(
    kept: Mapping[str, Sequence[Profile]], model: MissModel, server: Server, name: str, load: float, drawn: Traffic
) -> Served:
    """One scheduler of SCHEDULERS at one load."""
    way = SCHEDULERS[name]
    of = kept[way.kept]
    chances = [p.heavy.astype(float) if way.knows else model.probability(p) for p in of]
    every_s = work_s(kept["reactive"], drawn, server) / load
    asked = requests(of, drawn, every_s, server, chances, kept["reactive"])
    return simulate(asked, way.scheduler(), server)


def study(
    kept: Mapping[str, Sequence[Profile]], model: MissModel, server: Server, loads: Sequence[float],
    seeds: Sequence[int], n: int = 40,
) -> pd.DataFrame:  # fmt: skip
    """Every scheduler at every load and seed: scheduler, load, seed, and shares of requests that met the first
    objective, the second, both (attainment); ttft_s and tbt_s (medians), effective (requests a second that met both),
    throughput (requests a second), waited (share of the time in which the server waited for pages)."""
    rows = []
    for seed in seeds:
        drawn = traffic(kept["reactive"], n, seed)
        for load in loads:
            for name in SCHEDULERS:
                found = summary(run(kept, model, server, name, load, drawn))
                rows.append({"scheduler": name, "load": load, "seed": seed, **found})
    return pd.DataFrame(rows)


def summary(done: Served) -> dict[str, float]:
    """Of one run, as `study` has it."""
    own, lines = done.requests, done.iterations
    took = own["end_s"].max() - own["arrival_s"].min()
    busy = lines["compute_s"].sum() + lines["wait_s"].sum()
    return {
        "met_ttft": own["met_ttft"].mean(), "met_tbt": own["met_tbt"].mean(), "attainment": own["met"].mean(),
        "ttft_s": own["ttft_s"].median(), "tbt_s": own["tbt_s"].median(), "effective": own["met"].sum() / took,
        "throughput": len(own) / took, "waited": lines["wait_s"].sum() / busy,
    }  # fmt: skip


def attainment(found: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds with intervals: scheduler, load, estimate, lo, hi, ... and effective throughput."""
    rows, how = [], {"unit": "streams of requests"}
    for (name, load), at in found.groupby(["scheduler", "load"], sort=False):
        effective = stats.mean(at["effective"], **how)
        spread = {"effective": effective.value, "effective_lo": effective.lo, "effective_hi": effective.hi}
        rows.append({"scheduler": name, "load": load, **stats.mean(at["attainment"], **how).row(), **spread})
    return pd.DataFrame(rows)


def bearable(found: pd.DataFrame, enough: float = ENOUGH) -> pd.Series:
    """scheduler -> the highest load up to which `enough` of the requests keep their objectives, mean over seeds; 0 if
    there is none among those tried."""
    mean = found.pivot_table(index="scheduler", columns="load", values="attainment", sort=False).sort_index(axis=1)
    kept = (mean >= enough).cumprod(axis=1).astype(bool)
    return pd.Series({name: max(row.index[row], default=0.0) for name, row in kept.iterrows()})


def tenants(
    of: Sequence[Profile], model: MissModel, server: Server, agents: Sequence[Agent], load: float, seeds: Sequence[int],
    n: int = 40,
) -> pd.DataFrame:  # fmt: skip
    """Agents on one pool under three rules, with prefixes stored once: rule, seed, agent, attainment, of all agents the
    worst and Jain's index; stored and unshared: pages in the slow tier at the fullest moment, and what they would be if
    every request stored its own."""
    named = {agent.name: agent for agent in agents}
    rules = {
        "one queue for all": FirstCome(),
        "a fixed part each": Split(named),
        "minima and fair shares": Reserved(named),
    }
    server, rows = replace(server, shares=True), []
    for seed in seeds:
        drawn = traffic(of, n, seed, agents)
        every_s = work_s(of, drawn, server) / load
        for rule, scheduler in rules.items():
            asked = requests(of, drawn, every_s, server, [model.probability(p) for p in of], agents=agents)
            done = simulate(asked, scheduler, server)
            by_agent = done.requests.groupby("agent")["met"].mean()
            lines = {"rule": rule, "seed": seed, "worst": by_agent.min(), "jain": jain(by_agent)}
            lines |= {"stored": done.iterations["stored"].max(), "unshared": done.iterations["unshared"].max()}
            rows += [{**lines, "agent": name, "attainment": met} for name, met in by_agent.items()]
    return pd.DataFrame(rows)
