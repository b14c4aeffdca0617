"""Teach an order of pages: first by imitating the optimum, then by policy gradient on what an eviction costs.

Demand does not depend on what a reversible cache keeps, so a log replays exactly under any policy: every roll-out is
what would have happened, and no importance weight is needed. A step's evictions are drawn one after the other, in
proportion to exp(-score), among what is resident (Plackett and Luce's model); of several roll-outs of the same steps
each is judged against the mean of the others (Kool, van Hoof and Welling, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from wakekv.errors import InputError
from wakekv.logs.demand import Demand
from wakekv.policies import POLICIES, Ledger
from wakekv.policies.learned import FEATURES, HIDDEN, Learned, features
from wakekv.simulation.simulate import curves

WARM_UP = 8  # steps of a log before anything is learned from it


@dataclass(frozen=True)
class Lesson:
    """A training log, step by step: its demand, and of each step what `features` says as it ends.

    items int64, values float32 [item, feature] of each step; next_use int32 [item]: the step of the next want
    scale  budget -> float [3]: what a step costs on average under recency: layers that wait, pages fetched, attention
           weight read late. A reward is minus the mean of the three, each over this: no factor between them is chosen
    """

    wants: Demand
    items: list[np.ndarray]
    values: list[np.ndarray]
    next_use: list[np.ndarray]
    scale: dict[int, np.ndarray]


def lesson(wants: Demand, budgets: Sequence[int]) -> Lesson:
    """What is to be learned from a log (demand with a cold start), at budgets in pages a head, over the whole model.
    InputError for a log that is too short."""
    if wants.n_steps <= 2 * WARM_UP:
        raise InputError(f"a log of {wants.n_steps} steps is too short to learn from: {2 * WARM_UP + 1} at least")
    seen, items, values, next_use = Ledger(wants, scope="model", future=True), [], [], []
    for _ in range(wants.n_steps):
        seen.observe()
        own, value = features(seen)
        items.append(own)
        values.append(value.T.copy())
        next_use.append(seen.next_use.reshape(-1)[own])
    scale = {}
    for budget in budgets:
        paper = curves(wants, POLICIES["reactive"].but(scope="model"), [budget])
        layers = len(np.unique(wants.layer))
        cost = np.array([layers * paper.stall_steps[0], paper.fetched[0], paper.missed_weight[0]]) / wants.n_steps
        scale[budget] = np.maximum(cost, 1e-6)
    return Lesson(wants, items, values, next_use, scale)


def teach(
    lessons: Sequence[Lesson], seed: int = 0, imitate: int = 400, improve: int = 150, span: int = 8, rollouts: int = 6,
    rate: float = 2e-4, discount: float = 0.8,
) -> tuple[Learned, Learned]:  # fmt: skip
    """(the order after imitation, the order after the policy gradient). The same seed gives the same orders.

    imitate, improve  updates of each kind;  span: steps of a roll-out;  discount: of costs to come, a step
    InputError where no log has more pages than a budget holds.
    """
    cases = [case for of in lessons for case in _pressed(of, span)]
    if not cases:
        raise InputError("no training log has more pages than its budgets hold: there is no eviction to learn")
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(len(FEATURES), HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1, bias=False))
    sample = np.concatenate([own[:: 1 + len(own) // 200] for of in lessons for own in of.values])
    mean, scale = sample.mean(0), sample.std(0) + 1e-3

    def score(values: np.ndarray) -> torch.Tensor:
        return net(torch.from_numpy((values - mean) / scale)).squeeze(-1)

    _imitate(cases, net, score, rng, imitate)
    imitated = _as_policy(net, mean, scale)
    adam = torch.optim.Adam(net.parameters(), lr=rate)
    for _ in range(improve):
        of, budget, earliest = cases[rng.integers(len(cases))]
        first = int(rng.integers(earliest, of.wants.n_steps - span + 1))
        start = _resident(of, score, first, budget)
        drawn = [_roll(of, score, first, first + span, budget, start, generator) for _ in range(rollouts)]
        costs = np.array([own for _, own in drawn])  # [roll-out, step]
        after = np.zeros_like(costs)  # what a step's evictions bring about: costs of later steps
        for t in range(costs.shape[1] - 1, 0, -1):
            after[:, t - 1] = costs[:, t] + discount * after[:, t]
        better = (after.sum(0) - after) / (rollouts - 1) - after  # than the other roll-outs
        adam.zero_grad()
        _log_odds(drawn, better / (better.std() + 1e-9), score).backward()
        adam.step()
    return imitated, _as_policy(net, mean, scale)


def _pressed(of: Lesson, span: int) -> list[tuple[Lesson, int, int]]:
    """(lesson, budget, earliest step) wherever, from that step on, a log knows more pages than the budget holds, and
    `span` steps are left."""
    found = []
    for budget in of.scale:
        more = np.array([len(items) for items in of.items]) > budget * of.wants.n_heads
        earliest = max(WARM_UP, int(more.argmax()) + 1)
        if more.any() and earliest + span <= of.wants.n_steps:
            found.append((of, budget, earliest))
    return found


def _imitate(cases, net, score, rng, updates: int, batch: int = 2048) -> None:
    """Which pages would the optimum keep? At a random step and budget, those whose next wants come first."""
    adam, loss = torch.optim.Adam(net.parameters(), lr=1e-2), nn.BCEWithLogitsLoss()
    for _ in range(updates):
        of, budget, earliest = cases[rng.integers(len(cases))]
        t = int(rng.integers(earliest, of.wants.n_steps))
        room = budget * of.wants.n_heads
        last = np.partition(of.next_use[t], room - 1)[room - 1]  # ties are as good as one another: all are kept
        kept = (of.next_use[t] <= last).astype(np.float32)
        young = np.argsort(of.values[t][:, FEATURES.index("age")], kind="stable")[: 2 * room]  # where it is decided
        some = np.concatenate([rng.choice(young, batch // 2), rng.integers(len(kept), size=batch // 2)])
        adam.zero_grad()
        loss(score(of.values[t][some]), torch.from_numpy(kept[some])).backward()
        adam.step()


def _resident(of: Lesson, score, step: int, budget: int) -> np.ndarray:
    """bool [head * page]: what the order as it is would hold as `step` begins."""
    out = np.zeros(of.wants.n_heads * of.wants.n_pages, bool)
    with torch.no_grad():
        values = score(of.values[step - 1]).numpy()
    out[of.items[step - 1][np.argsort(-values, kind="stable")[: budget * of.wants.n_heads]]] = True
    return out


def _roll(of: Lesson, score, first: int, last: int, budget: int, start: np.ndarray, generator):
    """([(values of what was resident, in the order in which it went, then the rest; how many went)], cost [step])."""
    wants, resident, choices, costs = of.wants, start.copy(), [], []
    room, known = budget * wants.n_heads, np.zeros(len(start), bool)
    known[of.items[first - 1]] = True
    for t in range(first, min(last, wants.n_steps)):
        heads, entries = wants.at(t)
        items = heads * wants.n_pages + wants.page[entries]
        missed = known[items] & ~resident[items]
        spent = len(np.unique(wants.layer[heads[missed]])), missed.sum(), wants.weight[entries][missed].sum()
        costs.append(float(np.mean(np.array(spent) / of.scale[budget])))
        resident[items] = known[items] = True
        held = np.flatnonzero(resident)
        go = len(held) - room
        if go <= 0:
            continue
        values = of.values[t][np.searchsorted(of.items[t], held)]
        with torch.no_grad():
            noise = torch.rand(len(held), generator=generator).clamp_(1e-9, 1 - 1e-7)
            order = (-score(values) - torch.log(-torch.log(noise))).argsort(descending=True).numpy()
        resident[held[order[:go]]] = False
        choices.append((t - first, values[order], go))
    return choices, costs


def _log_odds(drawn, better: np.ndarray, score) -> torch.Tensor:
    """Minus the log odds of what was drawn, each step's by how much better than others it came out, a choice."""
    all_values = [values for choices, _ in drawn for _, values, _ in choices]
    leave = -score(np.concatenate(all_values))
    ends, total, n = [0, *np.cumsum([len(v) for v in all_values])], torch.zeros(()), 0
    choices = [(who, *choice) for who, (own, _) in enumerate(drawn) for choice in own]
    for (who, t, _, go), (a, b) in zip(choices, pairwise(ends)):
        left = torch.logcumsumexp(leave[a:b].flip(0), 0).flip(0)[:go]
        total = total - float(better[who, t]) * (leave[a : a + go] - left).sum()
        n += go
    return total / max(n, 1)


def _as_policy(net: nn.Sequential, mean: np.ndarray, scale: np.ndarray) -> Learned:
    inner, inner_bias, outer = (
        part.detach().numpy().copy() for part in (net[0].weight.T, net[0].bias, net[2].weight[0])
    )
    return Learned(mean=mean, scale=scale, inner=inner, inner_bias=inner_bias, outer=outer)
