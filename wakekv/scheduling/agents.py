"""Several agents on one pool: each has a minimum that is always its own, and the rest goes where it is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from wakekv.errors import InputError
from wakekv.scheduling.schedulers import admitted
from wakekv.scheduling.server import Choice, Request, Server


@dataclass(frozen=True)
class Agent:
    """reserved: pages that are its own whenever it asks;  weight: of its claim to the rest;  patience: its objectives,
    as multiples of what its requests take alone;  share: of all requests, those that are its."""

    name: str
    reserved: int
    weight: float = 1.0
    patience: float = 5.0
    share: float = 1.0


def fair_shares(
    demands: Sequence[float], minima: Sequence[float], weights: Sequence[float], total: float
) -> np.ndarray:
    """float [agent]: pages for each: its minimum, or its demand if that is less, and the rest by weighted max-min.

    No agent gets more than it asks for, and none that asks for more could get more without taking from one that has
    less over its minimum for its weight (water filling: Bertsekas and Gallager, Data Networks, 6.5.2).
    InputError for minima above the total, or weights that are not above 0.
    """
    demands, minima, weights = (np.asarray(x, float) for x in (demands, minima, weights))
    if minima.sum() > total or (weights <= 0).any():
        raise InputError(f"minima of {minima.sum():,.0f} pages need a pool of as many ({total:,.0f}), weights above 0")
    given = np.minimum(demands, minima)
    left, wanting = total - given.sum(), demands > given
    while left > 1e-9 and wanting.any():
        rise = min(left / weights[wanting].sum(), ((demands - given)[wanting] / weights[wanting]).min())
        given[wanting] += rise * weights[wanting]
        left -= rise * weights[wanting].sum()
        wanting &= demands - given > 1e-9
    return given


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all are alike, 1 / n if one has everything (R. Jain, D. M. Chiu and W. R. Hawe,
    DEC TR-301, 1984); 1 where all are 0."""
    x = np.asarray(values, float)
    return float(x.sum() ** 2 / (len(x) * (x**2).sum())) if x.any() else 1.0


@dataclass(frozen=True)
class Reserved:
    """Each agent has its fair share of the pool at this moment, and within it serves first come first.

    A request is let in if its agent's share has room for it, and if the link would not have to bring more in an
    iteration, by what the requests' steps bring back on average, than `load` of the tightest objective of a gap
    allows. An agent that has more than its share gives back its newest requests' memory only if another needs it for
    its minimum; their pages stay in the reservoir.
    """

    agents: Mapping[str, Agent] = field(default_factory=dict)
    load: float = 0.5
    brings: str = "nothing"

    def choose(self, now: float, there: Sequence[Request], server: Server) -> Choice:
        own = {name: [r for r in there if r.agent == name] for name in self.agents}
        demands = [sum(server.memory(r) for r in of) for of in own.values()]
        minima, weights = zip(*((agent.reserved, agent.weight) for agent in self.agents.values()))
        shares = dict(zip(own, fair_shares(demands, minima, weights, server.pages)))
        hold = [r for r in there if r.held]
        for name in sorted(own, key=lambda name: self._has(name, hold, server) - self.agents[name].reserved):
            hold = self._admit(name, own[name], hold, shares, server)
        return Choice(hold, hold)

    def _has(self, name: str, hold: Sequence[Request], server: Server) -> float:
        return sum(server.memory(r) for r in hold if r.agent == name)

    def _admit(self, name, own, hold, shares, server) -> list[Request]:
        for r in (r for r in own if not r.held):
            need, has = server.memory(r), self._has(name, hold, server)
            free = server.pages - sum(server.memory(r) for r in hold)
            if need > free and has + need <= self.agents[name].reserved:
                hold, free = self._taken_back(need - free, name, hold, shares, server)
            if need > free or (has and has + need > shares[name]) or not self._link_bears([*hold, r], server):
                break
            hold = [*hold, r]
        return hold

    def _taken_back(self, need, name, hold, shares, server) -> tuple[list[Request], float]:
        """`hold` without the newest requests of agents above their minima, until `need` pages are free."""
        hold = list(hold)
        for r in sorted(hold, key=lambda r: (-r.arrival_s, -r.number)):
            if need <= 0:
                break
            if r.agent != name and self._has(r.agent, hold, server) > self.agents[r.agent].reserved:
                hold.remove(r)
                need -= server.memory(r)
        return hold, server.pages - sum(server.memory(r) for r in hold)

    def _link_bears(self, hold: Sequence[Request], server: Server) -> bool:
        pages = sum(float(r.of.fetched[: r.n_tokens].mean()) for r in hold)
        return len(hold) == 1 or server.costs.fetch(pages, 1) <= self.load * min(r.tbt_s for r in hold)


@dataclass(frozen=True)
class Split:
    """Each agent has a fixed part of the pool, whether it uses it or not: the control without sharing."""

    agents: Mapping[str, Agent] = field(default_factory=dict)
    brings: str = "nothing"

    def choose(self, now: float, there: Sequence[Request], server: Server) -> Choice:
        total, hold = sum(agent.weight for agent in self.agents.values()), []
        for name, agent in self.agents.items():
            own = [r for r in there if r.agent == name]
            part = replace(server, pages=server.pages * agent.weight / total)
            hold += admitted([r for r in own if not r.held], [r for r in own if r.held], part)
        return Choice(hold, hold)
