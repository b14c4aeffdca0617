"""The server: iterations of decoding and pieces of prompts, and the waits for pages between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import pandas as pd

from wakekv.errors import InputError, WakeKVError
from wakekv.scheduling.costs import Costs
from wakekv.scheduling.profile import Profile, Step
from wakekv.scheduling.store import Store


@dataclass(eq=False)
class Request:
    """One generation asked of the server, and how far it is.

    of       its log's profile, of which `n_tokens` steps are asked
    ttft_s, tbt_s  objectives: seconds to the first token, and between two tokens (met by 99 % of its gaps)
    chance   float [step]: how likely each step is to bring back much, as a scheduler may believe
    came     times of its tokens;  held: it has memory on the fast tier;  out: it had, and its pages must come back
    skipped  prompt tokens whose pages another request has stored already;  ready: pages that came ahead of its step
    """

    number: int
    of: Profile
    arrival_s: float
    n_tokens: int
    ttft_s: float
    tbt_s: float
    chance: np.ndarray
    agent: str = ""
    hidden: bool = False
    held: bool = False
    out: bool = False
    sat_out: bool = False
    prefilled: int = 0
    skipped: int = 0
    ready: float = 0.0
    came: list[float] = field(default_factory=list)
    pages: int = field(init=False)  # of the fast tier, at most: what is set aside for it

    def __post_init__(self):
        if not 1 <= self.n_tokens <= self.of.n_steps:
            raise InputError(f"{self.of.name} has 1 to {self.of.n_steps} tokens to give, not {self.n_tokens}")
        self.pages = int(self.of.resident[: self.n_tokens].max())

    @property
    def step(self) -> Step:
        """What it asks next."""
        return self.of.steps[len(self.came)]

    @property
    def last_s(self) -> float:
        """Since when its user waits."""
        return self.came[-1] if self.came else self.arrival_s

    @property
    def due_s(self) -> float:
        return self.last_s + (self.tbt_s if self.came else self.ttft_s)

    @property
    def unread(self) -> int:
        """Prompt tokens still to be computed; the last one is the first step's."""
        return self.of.n_prompt - 1 - self.prefilled

    @property
    def decoding(self) -> bool:
        return self.unread == 0


@dataclass(frozen=True)
class Server:
    """pages: of the fast tier;  chunk: prompt tokens an iteration takes;  hidden: memory of hidden states over that of
    keys and values (costs.hidden_ratio), and seconds to make a page's keys and values from them at every step (None:
    hidden states are never kept);  shares: pages of equal prefixes are stored, and computed, once."""

    costs: Costs
    pages: int
    chunk: int = 128
    hidden: tuple[float, float] | None = None
    shares: bool = False
    page_tokens: int = 16

    def memory(self, request: Request) -> float:
        return request.pages * (self.hidden[0] if request.hidden and self.hidden else 1.0)


class Choice(NamedTuple):
    """What an iteration does: who holds memory, and who of them computes; prompts are read in the order of `run`."""

    hold: Sequence[Request]
    run: Sequence[Request]


class Scheduler(Protocol):
    """Sees the requests that are there and not done; `brings` says what comes ahead of a step that sits out an
    iteration: "nothing", the pages "named" for it, or just those it will want ("exact", which nobody can know)."""

    brings: str

    def choose(self, now: float, there: Sequence[Request], server: Server) -> Choice: ...


@dataclass(frozen=True)
class Served:
    """requests: a row a request (agent, regime, n_tokens, arrival_s, ttft_s, tbt_s: its 99th percentile, met_ttft,
    met_tbt, met, end_s);  gaps: float [gap], seconds between tokens, all requests';  iterations: a row an iteration
    (start_s, compute_s, wait_s, running, prompt_tokens, waiting, held_pages, fetched_pages, stored, unshared)."""

    requests: pd.DataFrame
    gaps: np.ndarray
    iterations: pd.DataFrame


def simulate(requests: Sequence[Request], scheduler: Scheduler, server: Server) -> Served:
    """Run all requests to their end (they are used up). The same input gives the same output.

    In an iteration the prompts that run take up to `chunk` tokens between them, one after the other; what has no prompt
    left takes a step, for which the server waits until its pages are there, layer by layer, all requests' together.
    WakeKVError where a scheduler holds more than there is, or lets everything wait for ever.
    """
    coming, there, done, log, now = sorted(requests, key=lambda r: (r.arrival_s, r.number)), [], [], [], 0.0
    store = Store(server.page_tokens)
    while coming or there:
        while coming and coming[0].arrival_s <= now:
            there.append(coming.pop(0))
        choice = scheduler.choose(now, there, server) if there else Choice((), ())
        if not choice.run:
            if not coming:
                raise WakeKVError(f"{len(there)} requests wait for ever: one asks for more than {server.pages:,} pages")
            now = coming[0].arrival_s
            continue
        held = sum(server.memory(r) for r in choice.hold)
        if held > server.pages + 1e-6 or not set(choice.run) <= set(choice.hold):
            raise WakeKVError(f"{scheduler!r} holds {held:,.0f} pages of {server.pages:,}, or runs what holds none")
        _hold(there, choice.hold, store, server)
        tokens = _read(choice.run, server.chunk)
        steps = [r for r in choice.run if r.decoding]
        pages, layers = _missing(steps, scheduler.brings)
        wait_s = server.costs.fetch(pages, layers)
        compute_s = _compute(steps, tokens, server)
        waiting = len(there) - len(choice.hold)
        log.append((now, compute_s, wait_s, len(steps), tokens, waiting, held, pages, len(store), store.unshared))
        now += wait_s + compute_s
        _bring(choice, scheduler.brings, compute_s * server.costs.bytes_per_s / server.costs.page_bytes)
        for r in steps:
            r.came.append(now)
            if len(r.came) == r.n_tokens:
                there.remove(r)
                done.append(r)
                store.drop(r.number)
    columns = "start_s compute_s wait_s running prompt_tokens waiting held_pages fetched_pages stored unshared".split()
    rows, gaps = [_row(r) for r in sorted(done, key=lambda r: r.number)], [np.diff(r.came) for r in done]
    return Served(pd.DataFrame(rows), np.concatenate(gaps), pd.DataFrame(log, columns=columns))


def alone(of: Profile, n_tokens: int, costs: Costs) -> np.ndarray:
    """float [token]: when each token comes if the server has nothing else to do, in seconds from arrival; in closed
    form what `simulate` does with one request."""
    steps = of.steps[:n_tokens]
    took = [costs.compute(1, s.resident, s.ranked) + costs.fetch(s.fetched, s.layers.bit_count()) for s in steps]
    return np.cumsum(took) + (of.n_prompt - 1) * costs.prefill_s


def _hold(there: Sequence[Request], hold: Sequence[Request], store: Store, server: Server) -> None:
    """Give and take memory. What gives it up keeps its pages in the reservoir, and fetches them when it goes on."""
    holding = set(hold)
    for r in there:
        if r.held and r not in holding:
            r.out, r.held, r.ready = r.prefilled > 0, False, 0.0
    for r in hold:
        if not r.held and r.number not in store:
            stored = store.add(r.number, r.of.prompt)
            if server.shares:
                r.skipped = r.prefilled = min(stored * server.page_tokens, r.unread)
        r.held = True


def _read(run: Sequence[Request], left: int) -> int:
    """Compute up to `left` prompt tokens; how many it were."""
    start = left
    for r in run:
        part = min(r.unread, left)
        r.prefilled += part
        left -= part
    return start - left


def _missing(steps: Sequence[Request], brings: str) -> tuple[float, int]:
    """(pages, layers) that the steps of this iteration wait for."""
    pages, layers = 0.0, 0
    for r in steps:
        step, came = r.step, 0.0
        if r.out:
            pages += r.of.steps[max(len(r.came) - 1, 0)].resident
            layers |= int(np.bitwise_or.reduce(r.of.layers))
        if r.ready:
            came = min(r.ready, step.fetched) if brings == "exact" else step.foreseen * min(1.0, r.ready / step.ahead)
        pages += step.fetched - came
        if came < step.fetched:
            layers |= step.layers
        r.out, r.ready, r.sat_out = False, 0.0, False
    return pages, layers.bit_count()


def _compute(steps: Sequence[Request], tokens: int, server: Server) -> float:
    asked = [r.step for r in steps]
    spent = server.costs.compute(len(steps), sum(s.resident for s in asked), sum(s.ranked for s in asked), tokens)
    remade = sum(s.resident for r, s in zip(steps, asked) if r.hidden)
    return spent + remade * (server.hidden[1] if server.hidden else 0.0)


def _bring(choice: Choice, brings: str, room: float) -> None:
    """While the others compute, the link brings pages for those that sit out: as many as it has time for."""
    running = set(choice.run)
    for r in choice.hold:
        if r in running or not r.decoding:
            continue
        r.sat_out = True
        if brings != "nothing" and not r.out:
            wanted = r.step.fetched if brings == "exact" else r.step.ahead
            part = min(room, wanted - r.ready)
            r.ready += part
            room -= part


def _row(r: Request) -> dict:
    gaps = np.diff(r.came)
    ttft, tbt = r.came[0] - r.arrival_s, float(np.quantile(gaps, 0.99)) if len(gaps) else 0.0
    met = {"met_ttft": ttft <= r.ttft_s, "met_tbt": tbt <= r.tbt_s}
    own = {"number": r.number, "agent": r.agent, "regime": r.of.regime, "n_tokens": r.n_tokens, "skipped": r.skipped}
    own |= {"arrival_s": r.arrival_s, "ttft_s": ttft, "tbt_s": tbt, "end_s": r.came[-1]}
    return own | met | {"met": met["met_ttft"] and met["met_tbt"]}
