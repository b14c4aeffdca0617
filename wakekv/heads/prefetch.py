"""What would prediction have to reach? Reactive residency with a prefetcher that acts on alarms.

After an alarm at step s, and before step s + 1, a head brings back the pages it demoted last, at most `ask` of them.
They enter at the front of its recency order and, like a step's wants, are trimmed to the budget as the step ends: for
that one step they come on top of it, which is kind to the predictor. A page that is wanted before it is demoted again
was used; the others moved in vain, and pushed out pages that may be missed in turn.

Two ceilings. "perfect_when" alarms exactly one step before each wake-up and fetches by the same rule. "perfect_what"
knows the next step's wants and fetches those alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wakekv import stats
from wakekv.errors import InputError
from wakekv.heads.grading import woke_recently
from wakekv.heads.reads import Reads, label, poolable
from wakekv.heads.wakeups import ALARM, FIRST, events, zscores
from wakekv.kernels.jit import njit
from wakekv.logs.demand import Demand, demand

BUDGET, ASK = 32, 8  # pages per head; pages a head asks for at an alarm


@dataclass(frozen=True, eq=False)
class Prefetched:
    """What one log's replay counts. misses int32 [head, step]; moved, used int32 [head, step]: pages prefetched before
    the step, and prefetched pages first wanted in it."""

    misses: np.ndarray
    moved: np.ndarray
    used: np.ndarray


def prefetch(wants: Demand, alarm: np.ndarray, budget: int = BUDGET, ask: int = ASK, exact: bool = False) -> Prefetched:
    """Replays reactive (batch convention, `replay` of the policy "reactive") with prefetches after each alarm.

    alarm: bool [head, step]. exact: prefetch what the next step wants and is in the reservoir, the heaviest first,
    instead of what was demoted last. No alarm gives reactive's own misses. Compiled where numba is installed; without
    it the same loop runs as plain Python, some hundred times slower. Raises InputError for a misfit or a bad number.
    """
    if alarm.shape != (wants.n_heads, wants.n_steps):
        raise InputError(f"alarms {alarm.shape} do not fit wants of {wants.n_heads} heads and {wants.n_steps} steps")
    if budget < 1 or ask < 0:
        raise InputError(f"a budget is at least one page and a request at least none, not {budget} and {ask}")
    counts = np.zeros((3, *alarm.shape), np.int32)
    cold = wants.first_touch == "cold"
    _replay(wants.ptr, wants.page, wants.created, cold, budget, np.ascontiguousarray(alarm), ask, exact, *counts)
    return Prefetched(*counts)


@njit(cache=True)
def _push(after, before, ring, p):
    """Puts page p first in a ring, a doubly linked list closed by the node `ring`."""
    after[p], before[p] = after[ring], ring
    before[after[p]] = p
    after[ring] = p


@njit(cache=True)
def _drop(after, before, p):
    after[before[p]], before[after[p]] = after[p], before[p]


@njit(cache=True)
def _replay(ptr, page, created, cold, budget, alarm, ask, exact, misses, moved, used):
    n_heads, n_steps, n_pages = ptr.shape[0], ptr.shape[1] - 1, len(created)
    resident, reservoir = n_pages, n_pages + 1  # the two rings: most recently used first, most recently demoted first
    after, before = np.zeros(n_pages + 2, np.int64), np.zeros(n_pages + 2, np.int64)
    place, ahead = np.zeros(n_pages, np.int64), np.zeros(n_pages, np.bool_)  # place: a ring, or -1 while unknown
    for h in range(n_heads):
        for ring in (resident, reservoir):
            after[ring] = before[ring] = ring
        place[:], ahead[:], held = -1, False, 0
        for t in range(-1, n_steps):
            if t > 0 and alarm[h, t - 1]:
                if exact:
                    for i in range(ptr[h, t + 1] - 1, ptr[h, t] - 1, -1):
                        p = page[i]
                        if place[p] == reservoir and moved[h, t] < ask:
                            _drop(after, before, p)
                            _push(after, before, resident, p)
                            place[p], ahead[p] = resident, True
                            moved[h, t] += 1
                else:
                    p = reservoir
                    while moved[h, t] < ask and after[p] != reservoir:
                        p = after[p]
                        moved[h, t] += 1
                    while p != reservoir:  # back again, so that the page demoted last ends most recent
                        last = before[p]
                        _drop(after, before, p)
                        _push(after, before, resident, p)
                        place[p], ahead[p] = resident, True
                        p = last
                held += moved[h, t]
            if t >= 0:
                for i in range(ptr[h, t], ptr[h, t + 1]):
                    p = page[i]
                    misses[h, t] += place[p] == reservoir
                    if ahead[p]:
                        used[h, t] += 1
                        ahead[p] = False
            if not cold:
                for p in range(n_pages):  # the prompt's pages at t = -1, then those that decoding creates
                    if created[p] == t:
                        _push(after, before, resident, p)
                        place[p] = resident
                        held += 1
            if t >= 0:
                for i in range(ptr[h, t], ptr[h, t + 1]):
                    p = page[i]
                    held += place[p] != resident
                    if place[p] >= 0:
                        _drop(after, before, p)
                    _push(after, before, resident, p)
                    place[p] = resident
            while held > budget:
                p = before[resident]
                _drop(after, before, p)
                _push(after, before, reservoir, p)
                place[p], ahead[p] = reservoir, False
                held -= 1


def predictors(reads: Reads) -> dict[str, np.ndarray]:
    """Alarms of one log, bool [head, step], by who raises them: every signal's causal z, and what it must beat."""
    event = events(reads.score)
    found = {name: z > ALARM for name, z in zscores(reads).items()}
    found["woke_recently"] = woke_recently(event)
    found["always"] = np.ones(event.shape, bool)
    found["perfect_when"] = np.pad(event[:, 1:], ((0, 0), (0, 1)))
    found["perfect_what"] = found["always"]
    for alarm in found.values():
        alarm[:, :FIRST] = False  # nobody before the signals have warmed up
    return found


_COLUMNS = ("wants", "misses", "with_it", "moved", "used", "at_wakeups", "at_wakeups_with_it", "with_random", "steps")
_METRICS: dict[str, Callable[[dict], np.ndarray]] = {
    "miss_rate": lambda n: n["with_it"] / n["wants"],
    "misses_saved": lambda n: (n["misses"] - n["with_it"]) / n["misses"],
    "misses_saved_at_wakeups": lambda n: (n["at_wakeups"] - n["at_wakeups_with_it"]) / n["at_wakeups"],
    "pages_used": lambda n: n["used"] / n["moved"],
    "pages_in_vain_per_step": lambda n: (n["moved"] - n["used"]) / n["steps"],
}
_BESIDE_RANDOM: dict[str, Callable[[dict], np.ndarray]] = {
    "misses_saved_by_random": lambda n: (n["misses"] - n["with_random"]) / n["misses"],
    "misses_saved_above_random": lambda n: (n["with_random"] - n["with_it"]) / n["misses"],
}
UNRIVALLED = ("always", "perfect_when", "perfect_what")  # predictors that random alarms at their rate say nothing about


def prefetch_table(
    many: Sequence[Reads],
    *,
    budget: int = BUDGET,
    ask: int = ASK,
    first_touch: str = "cold",
    flagged: bool = False,
    seed: int = 0,
) -> list[dict]:
    """Rows model, regime, predictor, budget, ask, metric, estimate, lo, hi, n ..., n_moved, n_saved.

    Counts are over the steps that a first prefetch can reach. misses_saved is a share of reactive's misses, net of
    those that prefetched pages cause by displacing others, so it can be negative; *_at_wakeups: misses of a head in the
    step in which it wakes; *_random: one seeded draw a log of random alarms at the predictor's own rate.
    """
    kept = poolable(many, flagged=flagged)
    model, regime = label(kept[0].trace)
    sums: dict[str, list] = {}
    late = np.s_[:, FIRST + 1 :]
    for reads, seeds in zip(kept, np.random.SeedSequence(seed).spawn(len(kept)), strict=True):
        rng, event = np.random.default_rng(seeds), events(reads.score)[late]
        wants = demand(reads.trace, "head", first_touch, k=reads.trace.k)
        n_wants = np.diff(wants.ptr, axis=1)[late].sum()
        reactive = prefetch(wants, np.zeros(reads.score.shape, bool), budget).misses[late]
        for name, alarm in predictors(reads).items():
            run = prefetch(wants, alarm, budget, ask, exact=name == "perfect_what")
            misses, with_random = run.misses[late], 0
            if name not in UNRIVALLED:
                twin = rng.random(alarm.shape) * alarm[:, FIRST:].size < alarm.sum()
                twin[:, :FIRST] = False
                with_random = prefetch(wants, twin, budget, ask).misses[late].sum()
            pages = run.moved.sum(), run.used.sum(), reactive[event].sum(), misses[event].sum()
            row = n_wants, reactive.sum(), misses.sum(), *pages, with_random, reactive.shape[1]
            sums.setdefault(name, []).append(row)
    rows = []
    for name, counted in sums.items():
        total = _named(np.sum(counted, axis=0))
        cells = {"model": model, "regime": regime, "predictor": name, "budget": budget, "ask": ask}
        counts = {"n_moved": int(total["moved"]), "n_saved": int(total["misses"] - total["with_it"])}
        for metric, of in (_METRICS | ({} if name in UNRIVALLED else _BESIDE_RANDOM)).items():
            estimate = stats.bootstrap(np.array(counted, float), lambda t, of=of: of(_named(t)), seed=seed)
            rows.append({**cells, "metric": metric, **estimate.row(), **counts, "n_flagged": len(many) - len(kept)})
    return rows


def _named(totals: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip(_COLUMNS, np.moveaxis(totals, -1, 0), strict=True))
