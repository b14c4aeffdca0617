"""A log as a request: what each of its steps brings back under a policy, page by page as the log wanted it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from wakekv.errors import InputError, lookup
from wakekv.learning.learn import part_of
from wakekv.logs.demand import demand
from wakekv.policies import POLICIES, Ledger, Policy
from wakekv.policies.classic import Recency
from wakekv.simulation.residency import Residency

SIGNS = (  # what is known before a step, for foresight.py: all of the past
    "last",  # log of the pages that the step before brought back
    "lately",  # the same, fading by 0.8 a step
    "usual",  # and by 0.98: what the request's steps bring back on average
    "wants",  # log of the pages that the step before wanted
    "fresh",  # share of them that were not wanted the step before it
    "step",  # log of the steps so far
    "full",  # share of the known pages that is resident
)
START = 3  # steps without a past worth the name: not judged by foresight.py


@dataclass(frozen=True)
class Warmed(Recency):
    """Recency whose first order, before any step, is by what the prompt's last rows read: a cache that is warmed.

    InputError on a log without prompt rows."""

    def rank(self, seen: Ledger) -> np.ndarray:
        return seen.prompt_weight if seen.step < 0 else seen.recency


KEPT: dict[str, Policy] = {"reactive": POLICIES["reactive"], "warmed": Warmed(), "full": POLICIES["full"]}


class Step(NamedTuple):
    """What one step of a profile asks, as plain numbers; see there."""

    fetched: int
    layers: int
    foreseen: int
    ahead: int
    resident: int
    ranked: int


@dataclass(frozen=True)
class Profile:
    """What a generation asks of a server, in KV heads; all arrays [step].

    fetched   int64  pages that the step brings back;  layers  uint64  in which layers, one bit each
    foreseen  int64  those of them that were among the pages brought ahead;  ahead int64  how many those were
    resident  int64  pages held as the step ends, which the next one attends to
    ranked    int64  pages among which the step chooses; 0 where all are kept
    signs     float64 [step, sign]: what is known before the step
    prompt    int [token];  part: train, heldout or "" by artifact/split.yaml
    """

    name: str
    regime: str
    part: str
    budget: int
    prompt: np.ndarray
    fetched: np.ndarray
    layers: np.ndarray
    foreseen: np.ndarray
    ahead: np.ndarray
    resident: np.ndarray
    ranked: np.ndarray
    signs: np.ndarray

    @property
    def n_steps(self) -> int:
        return len(self.fetched)

    @property
    def n_prompt(self) -> int:
        return len(self.prompt)

    @cached_property
    def heavy(self) -> np.ndarray:
        """bool [step]: does the step bring back more than this request's steps did so far, on average? What the miss
        model foretells, and two queues keep apart."""
        return self.fetched > np.expm1(self.signs[:, SIGNS.index("usual")]) + 1e-6

    @cached_property
    def steps(self) -> list[Step]:
        """The steps as the server goes through them."""
        return [Step(*row) for row in zip(*(getattr(self, name).tolist() for name in Step._fields))]


def profile(log: Any, budget: int, kept: str = "reactive", steps: int | None = None) -> Profile:
    """The profile of a log (trace.Trace or shipped.Shipped) at `budget` pages a KV head.

    kept   "reactive": after prefill the prompt's newest pages are resident; "warmed": those its last rows read most,
           and reactive from there; "full": all pages, whatever the budget
    steps  the first so many only
    As a step ends, as many pages as it brought back are named to be brought ahead: of those that are not resident, the
    likeliest by reads that fade by 0.6 a step (`pooled`). InputError for what is not in KEPT, or beyond 64 layers.
    """
    rule = lookup(kept, KEPT, "way to keep pages")
    wants = demand(log, "kv_head", "warm")
    wants = wants if steps is None or steps >= wants.n_steps else wants.until(steps)
    of_layer = np.unique(wants.layer, return_inverse=True)[1].astype(np.uint64)
    if of_layer.max() > 63:
        raise InputError(f"a profile tells 64 layers apart, not {of_layer.max() + 1}")
    bit, guess = np.uint64(1) << of_layer, POLICIES["pooled"]
    host = Residency(wants, rule, budget)
    named, before = np.zeros_like(host.resident), np.zeros_like(host.resident)
    past, rows = _Past(), []
    for _ in range(wants.n_steps):
        signs = past.signs(int(host.resident.sum()), int(host.seen.known.sum()))
        done = host.step()
        missed = done.heads[done.missed], done.pages[done.missed]
        now = np.zeros_like(before)
        now[done.heads, done.pages] = True
        past.add(done.fetched, len(done.pages), int((now & ~before).sum()))
        layers = np.bitwise_or.reduce(bit[missed[0]], initial=np.uint64(0))
        held, ranked = int(host.resident.sum()), int(host.seen.known.sum()) if rule.every else 0
        rows.append((done.fetched, layers, int(named[missed].sum()), int(named.sum()), held, ranked, signs))
        named, before = _likeliest(guess.rank(host.seen), host.seen.known & ~host.resident, done.fetched), now
    fetched, layers, foreseen, ahead, resident, ranked, signs = zip(*rows)
    prompt = log.manifest["prompt"]
    return Profile(
        f"{log.manifest['model']['name']} / {prompt['regime']} / {prompt['seed']}", prompt["regime"], part_of(log),
        budget, np.asarray(log.tokens)[: log.n_prompt], np.array(fetched), np.array(layers, np.uint64),
        np.array(foreseen), np.array(ahead), np.array(resident), np.array(ranked), np.array(signs),
    )  # fmt: skip


def profiles(logs: Sequence[Any], budget: int, steps: int | None = None) -> dict[str, list[Profile]]:
    """The profiles of several logs, by what is kept."""
    return {kept: [profile(log, budget, kept, steps) for log in logs] for kept in KEPT}


def _likeliest(rank: np.ndarray, among: np.ndarray, n: int) -> np.ndarray:
    """bool [head, page]: the `n` of highest rank among some, fewer if there are not as many."""
    out, items = np.zeros(among.shape, bool), np.flatnonzero(among)
    best = np.argsort(-rank.reshape(-1)[items], kind="stable")[:n]
    out.reshape(-1)[items[best]] = True
    return out


class _Past:
    """What SIGNS need, brought up to date step by step."""

    def __init__(self):
        self.last = self.wants = self.fresh = self.step = 0
        self.lately = self.usual = 0.0

    def signs(self, resident: int, known: int) -> tuple[float, ...]:
        lately, usual = (x / (1 - keep ** max(self.step, 1)) for x, keep in ((self.lately, 0.8), (self.usual, 0.98)))
        logs = np.log1p([self.last, lately, usual, self.wants])
        return (*logs, self.fresh / max(self.wants, 1), float(np.log1p(self.step)), resident / max(known, 1))

    def add(self, fetched: int, wants: int, fresh: int) -> None:
        self.last, self.wants, self.fresh, self.step = fetched, wants, fresh, self.step + 1
        self.lately += 0.2 * (fetched - self.lately)
        self.usual += 0.02 * (fetched - self.usual)
