"""Who holds memory, and who computes next: first come, value per memory, two queues, and two that know.

To add one: a class with `brings` and `choose`, and a line at the foot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wakekv.scheduling.server import Choice, Request, Server

LATE = 0.1  # what a request past its objective counts, of what it would: a choice of ours, Apt-Serve only says less


def admitted(waiting: Sequence[Request], held: Sequence[Request], server: Server) -> list[Request]:
    """`held`, and of `waiting`, in their order, as many as fit before the first that does not."""
    hold, room = list(held), server.pages - sum(server.memory(r) for r in held)
    for r in waiting:
        room -= server.memory(r)
        if room < 0:
            break
        hold.append(r)
    return hold


@dataclass(frozen=True)
class FirstCome:
    """Requests get memory in the order in which they came, keep it to their end, and all of them compute."""

    brings: str = "nothing"

    def choose(self, now: float, there: Sequence[Request], server: Server) -> Choice:
        hold = admitted([r for r in there if not r.held], [r for r in there if r.held], server)
        return Choice(hold, hold)


class Option(NamedTuple):
    """One way to serve a request for an iteration: what it is worth, and the pages it takes."""

    request: int
    value: float
    pages: float
    hidden: bool = False


def greedy(options: Sequence[Option], room: float) -> list[Option]:
    """At most one option a request within `room` pages: by value per page, at least half as good as the best choice.

    A request's options are taken in steps, from the smallest to better ones, along their upper hull, so that value per
    page only falls; all requests' steps in one order, whatever fits is taken. Then the better of that and the single
    best option: the steps up to the first that does not fit, with it, are worth no less than the best choice, and that
    one alone no more than a single option (the bound of the fractional knapsack; Apt-Serve, section 5, without hidden
    states). Options that are worth nothing, or fit nowhere, or take more for less, are left out.
    """
    useful = [o for o in options if o.value > 0 and o.pages <= room]
    steps: list[tuple[float, float, Option, Option | None]] = []
    for number in dict.fromkeys(o.request for o in useful):
        last = None
        for o in _hull([o for o in useful if o.request == number]):
            value, pages = (o.value, o.pages) if last is None else (o.value - last.value, o.pages - last.pages)
            steps.append((value / pages if pages else float("inf"), pages, o, last))
            last = o
    taken: dict[int, Option] = {}
    for _, pages, o, last in sorted(steps, key=lambda step: -step[0]):
        if pages <= room and taken.get(o.request) is last:
            taken[o.request] = o
            room -= pages
    best = max(useful, key=lambda o: o.value, default=None)
    if best and best.value > sum(o.value for o in taken.values()):
        return [best]
    return list(taken.values())


def _hull(options: Sequence[Option]) -> list[Option]:
    """Those that some price of a page makes the best, by rising pages."""
    hull: list[Option] = []
    for o in sorted(options, key=lambda o: (o.pages, -o.value)):
        if hull and o.value <= hull[-1].value:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], o):
            hull.pop()
        if len(hull) == 1 and hull[0].value * o.pages <= o.value * hull[0].pages:
            hull.pop()
        hull.append(o)
    return hull


def _slope(a: Option, b: Option) -> float:
    return (b.value - a.value) / (b.pages - a.pages)


@dataclass(frozen=True)
class ValuePerMemory:
    """Apt-Serve's rule: in every iteration whoever is worth most per page of memory, and nobody else holds any.

    A request is worth its user's wait as a share of the objective; past that, a tenth, as it is lost already. Where the
    server may keep hidden states, a request may take that much less memory for the time that it costs.
    """

    brings: str = "nothing"

    def choose(self, now: float, there: Sequence[Request], server: Server) -> Choice:
        ends = now + server.costs.compute(1, 0, 0, server.chunk)  # or whoever came this instant is worth nothing
        options = [o for i, r in enumerate(there) for o in self._options(i, r, ends, server)]
        hold = []
        for o in greedy(options, server.pages):
            there[o.request].hidden = o.hidden
            hold.append(there[o.request])
        return Choice(hold, hold)

    def _options(self, i: int, r: Request, ends: float, server: Server) -> list[Option]:
        objective = r.tbt_s if r.came else r.ttft_s

        def worth(extra_s: float) -> float:
            share = (ends - r.last_s) / objective
            return share * (LATE if share > 1 else 1.0) - extra_s / objective

        found = [Option(i, worth(0.0), r.pages)]
        if server.hidden:
            found.append(Option(i, worth(r.pages * server.hidden[1]), r.pages * server.hidden[0], True))
        return found


@dataclass(frozen=True)
class TwoQueues:
    """As Apt-Serve is retold: steps that will likely hit go first, those that will likely miss wait for their pages.

    Memory goes to whoever is due first. A request whose next step is likelier than not to bring back much (its
    `chance`) sits out one iteration, never two in a row, while the link brings what is foreseen; if only such requests
    are there, they go.
    """

    brings: str = "named"

    def choose(self, now: float, there: Sequence[Request], server: Server) -> Choice:
        waiting = sorted((r for r in there if not r.held), key=lambda r: (r.due_s, r.number))
        hold = admitted(waiting, [r for r in there if r.held], server)
        hold.sort(key=lambda r: (r.due_s, r.number))
        run = [r for r in hold if not r.decoding or r.sat_out or r.chance[len(r.came)] <= 0.5]
        return Choice(hold, run or hold)


class Way(NamedTuple):
    """A scheduler, the profiles it is served from (profile.KEPT), and whether it knows what only hindsight knows."""

    scheduler: Callable[[], FirstCome | ValuePerMemory | TwoQueues]
    kept: str = "reactive"
    knows: bool = False


SCHEDULERS: dict[str, Way] = {
    "first come, full cache": Way(FirstCome, "full"),
    "first come": Way(FirstCome),
    "value per memory": Way(ValuePerMemory),
    "two queues": Way(lambda: TwoQueues("nothing")),
    "two queues, prefetch": Way(TwoQueues),
    "two queues, prefetch, warmed": Way(TwoQueues, "warmed"),
    "two queues, oracle": Way(lambda: TwoQueues("exact"), "warmed", True),
}
