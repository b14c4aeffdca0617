"""Beyond the paper's rule: one budget for all heads against a budget each, on prompts that nothing was chosen on.

What a rule gains is told as the part of the way it goes from the paper's rule (reactive) to the optimum that may move
memory between heads as it may. Budgets are totals, in pages a head: B pages a head are B times the heads' pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.errors import InputError, lookup
from wakekv.learning.learn import part_of
from wakekv.logs.demand import UNITS, demand
from wakekv.logs.trace import Trace
from wakekv.policies import POLICIES, Policy
from wakekv.policies.history import Faded, Rhythm, Twice
from wakekv.simulation.replay import replay
from wakekv.simulation.simulate import curves
from wakekv.simulation.spread import opened, spread

PAPER, OURS, RANGE = "reactive", "commons", (16, 64)  # pages a head, both ends: the range of the goal
GOAL = 0.7  # of the way from the paper's rule to the optimum
RULES: dict[str, Policy] = {  # what is compared on every prompt
    PAPER: POLICIES["reactive"],
    "commons": POLICIES["commons"],
    "pooled": POLICIES["pooled"],
    "optimum": POLICIES["optimum"].but(scope="model"),
}
BY_LAYER: dict[str, Policy] = {  # where a budget cannot leave its layer
    "commons, layer": POLICIES["commons"].but(scope="layer"),
    "optimum, layer": POLICIES["optimum"].but(scope="layer"),
}
TRIED: dict[str, Policy] = {  # on training prompts only
    "commons": POLICIES["commons"],
    "pooled (reads, fading by 0.6)": POLICIES["pooled"],
    "reads, fading by 0.3": POLICIES["pooled"].but(keep=0.3),
    "reads, fading by 0.8": POLICIES["pooled"].but(keep=0.8),
    "reads, fading by 0.9": POLICIES["pooled"].but(keep=0.9),
    "recency": POLICIES["reactive"].but(scope="model"),
    "weight, fading by 0.6": Faded(),
    "reads and weight, 0.7 : 0.3": Faded(blend=0.3),
    "weight and reads, 0.8 : 0.2, fading by 0.8": Faded(blend=0.8, keep=0.8),
    "last read but one (LRU-2)": Twice(),
    "expected wait, by gaps": Rhythm(),
    "commons, bringing pages ahead of their reads": POLICIES["commons"].but(fetch="trim"),
    "commons, each head at least a fifth of its share": POLICIES["commons"].but(floor=0.2),
    "commons, a budget a layer": POLICIES["commons"].but(scope="layer"),
    "commons, a budget a head": POLICIES["commons"].but(scope="head"),
}


@dataclass(frozen=True)
class Counted:
    """One log in one head unit under some rules.

    misses, pages  rule -> int, float [budget]: misses, and mean resident pages over all heads, at budgets 1, 2, ...
                   (nan where a rule was run at a few only)
    by_head        int32 [head, budget]: misses of the paper's rule by head, for splits of the budget among heads
    wants int64 [head];  layer int [head];  part: train or heldout
    """

    model: str
    regime: str
    seed: int
    part: str
    unit: str
    wants: np.ndarray
    layer: np.ndarray
    misses: dict[str, np.ndarray]
    pages: dict[str, np.ndarray]
    by_head: np.ndarray

    @property
    def n_pages(self) -> int:
        return self.by_head.shape[1]

    @property
    def name(self) -> str:
        return f"{self.model} / {self.regime}"


def count(
    log: Trace | Path | str,
    unit: str,
    rules: Mapping[str, Policy] = RULES,
    slow: Sequence[int] = (),
    steps: int | None = None,
) -> Counted:
    """A log (or its first `steps`) under the paper's rule and others at every budget; those with a floor at `slow`."""
    trace = opened(log)
    wants = demand(trace, unit)
    wants = wants if steps is None or steps >= wants.n_steps else wants.until(steps)
    found = {PAPER: curves(wants, POLICIES[PAPER])}
    for name, rule in rules.items():
        if name != PAPER:
            at = [b for b in slow if b <= wants.n_pages] if rule.floor and rule.scope != "head" else None
            found[name] = curves(wants, rule, at)
    prompt = trace.manifest["prompt"]
    return Counted(
        trace.manifest["model"]["name"], prompt["regime"], prompt["seed"], part_of(trace), unit,
        wants.ptr[:, -1] - wants.ptr[:, 0], wants.layer,
        {name: _everywhere(one.budgets, one.misses, wants.n_pages) for name, one in found.items()},
        {name: _everywhere(one.budgets, one.mean_pages, wants.n_pages) for name, one in found.items()},
        found[PAPER].head_misses.astype(np.int32),
    )  # fmt: skip


def _everywhere(budgets: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    if len(budgets) == n:
        return values
    out = np.full(n, np.nan)
    out[budgets - 1] = values
    return out


def count_all(
    paths: Iterable[Path | str],
    rules: Mapping[str, Policy] = RULES,
    more: Mapping[str, Mapping[str, Policy]] | None = None,
    units: Sequence[str] = UNITS,
    slow: Sequence[int] = (),
    steps: int | None = None,
    workers: int = 1,
) -> list[Counted]:
    """`count` of every log in each unit, `workers` at a time; more: further rules of a unit. The same numbers whatever
    the number of workers."""
    tasks = [(path, unit, {**rules, **(more or {}).get(unit, {})}, slow, steps) for path in paths for unit in units]
    return spread(_count, tasks, workers)


def _count(task: tuple) -> Counted:
    return count(*task)


# A fixed split: each head its own budget, settled once.


def best_splits(by_head: np.ndarray, totals: Sequence[int]) -> np.ndarray:
    """int [total, head]: budgets of 1 page and more that add up to each of `totals` at most, and under which per-head
    recency misses least in all, from its misses by head and budget (greedy along each head's lower hull, where gains
    only fall; the last step is taken in part).

    InputError if one of `totals` is below a page a head.
    """
    n_heads, n = by_head.shape
    if min(totals) < n_heads:
        raise InputError(f"{min(totals)} pages are less than one for each of {n_heads} heads")
    gains, heads, steps = [], [], []
    for h in range(n_heads):
        at = 0
        while at < n - 1 and by_head[h, at] > by_head[h, -1]:
            slope = (by_head[h, at] - by_head[h, at + 1 :]) / np.arange(1, n - at)
            best = len(slope) - 1 - int(np.argmax(slope[::-1]))
            gains.append(slope[best])
            heads.append(h)
            steps.append(best + 1)
            at += best + 1
    order = np.argsort(-np.array(gains), kind="stable")
    head, step = np.array(heads, int)[order], np.array(steps, int)[order]
    spent, out = np.cumsum(step), np.ones((len(totals), n_heads), np.int64)
    for budget, total in zip(out, totals):
        left = total - n_heads
        whole = int(np.searchsorted(spent, left, side="right"))
        np.add.at(budget, head[:whole], step[:whole])
        if whole < len(step):
            budget[head[whole]] += left - (spent[whole - 1] if whole else 0)
    return out


def split_misses(by_head: np.ndarray, budget: np.ndarray) -> int:
    """Misses of per-head recency under a split; a head's budget beyond the log's pages keeps all."""
    return int(by_head[np.arange(len(budget)), np.minimum(budget, by_head.shape[1]) - 1].sum())


def splits(cases: Sequence[Counted], budgets: Sequence[int]) -> pd.DataFrame:
    """Misses of the best fixed split of each log: its own, another prompt's of the regime, another regime's (means over
    those there are). Rows: model, regime, seed, part, unit, budget, own, other_prompt, other_regime, wants.
    """
    rows = []
    for unit, model in dict.fromkeys((case.unit, case.model) for case in cases):
        group = [case for case in cases if (case.unit, case.model) == (unit, model)]
        of = [best_splits(case.by_head, [b * len(case.wants) for b in budgets]) for case in group]
        for i, budget in enumerate(budgets):
            for case, own in zip(group, of):
                moved = {"other_prompt": [], "other_regime": []}
                for other, split in zip(group, of):
                    if other is not case:
                        kind = "other_prompt" if other.regime == case.regime else "other_regime"
                        moved[kind].append(split_misses(case.by_head, split[i]))
                row = {"model": model, "regime": case.regime, "seed": case.seed, "part": case.part, "unit": unit}
                row |= {"budget": budget, "own": split_misses(case.by_head, own[i]), "wants": case.wants.sum()}
                rows.append(row | {kind: np.mean(misses) if misses else np.nan for kind, misses in moved.items()})
    return pd.DataFrame(rows)


def gap(cases: Sequence[Counted], rule: str, budget: int, floor: str = "optimum", resamples: int = stats.RESAMPLES):
    """(miss rate, share of misses saved, part of the way to the optimum): an Estimate over prompts each."""
    counts = np.array(
        [[case.misses[name][budget - 1] for name in (PAPER, rule, floor)] + [case.wants.sum()] for case in cases], float
    )
    return measures(counts, resamples)


def measures(counts: np.ndarray, resamples: int = stats.RESAMPLES) -> list[stats.Estimate]:
    """As `gap`, from counts [prompt, 4]: misses of the paper's rule, of the rule and of the optimum, and wants."""
    return [stats.bootstrap(counts, what, resamples=resamples) for what in (_rate, _saved, _closed)]


def _rate(total):
    return total[..., 1] / total[..., 3]


def _saved(total):
    return (total[..., 0] - total[..., 1]) / total[..., 0]


def _closed(total):
    """nan where the paper's rule misses no more than the optimum: there is no way to go."""
    way = total[..., 0] - total[..., 2]
    return np.where(way > 0, (total[..., 0] - total[..., 1]) / np.where(way > 0, way, 1.0), np.nan)


def groups(cases: Sequence[Counted]) -> dict[tuple[str, str, str, str], list[Counted]]:
    """(model, regime, part, unit) -> its cases; what is neither train nor heldout is left out."""
    found: dict[tuple[str, str, str, str], list[Counted]] = {}
    for case in cases:
        if case.part:
            found.setdefault((case.model, case.regime, case.part, case.unit), []).append(case)
    return found


def floor_of(rule: str) -> str:
    """The optimum of a rule's own scope."""
    return "optimum, layer" if rule.endswith(", layer") else "optimum"


def pick(cases: Sequence[Counted], unit: str, part: str = "heldout") -> list[Counted]:
    """Those of a unit and part, first come first."""
    lookup(unit, dict.fromkeys(UNITS), "head unit")
    return [case for case in cases if case.unit == unit and case.part == part]


@dataclass(frozen=True)
class Flow:
    """Where a pool's memory is: pages int32 [head, step], resident as each step ends, at one total budget."""

    model: str
    regime: str
    unit: str
    budget: int
    layer: np.ndarray
    pages: np.ndarray

    def by_layer(self) -> np.ndarray:
        """float [layer, step]: pages a head."""
        layers, of = np.unique(self.layer, return_inverse=True)
        total = np.zeros((len(layers), self.pages.shape[1]))
        np.add.at(total, of, self.pages)
        return total / np.bincount(of)[:, None]

    def moved(self) -> float:
        """Share of the pool that is elsewhere than its own mean over time would have it, mean over steps."""
        mean = self.pages.mean(1, keepdims=True)
        return float((np.abs(self.pages - mean).sum(0) / 2 / np.maximum(self.pages.sum(0), 1)).mean())


def follow(log: Trace | Path | str, budget: int, unit: str = "kv_head", rule: Policy | None = None) -> Flow:
    """Replay a pooled rule (commons unless given) step by step, and note what each head holds."""
    trace = opened(log)
    wants, held = demand(trace, unit), []
    replay(wants, rule or POLICIES[OURS], budget, on_step=lambda step, resident, missed: held.append(resident.sum(1)))
    own = trace.manifest["model"]["name"], trace.manifest["prompt"]["regime"]
    return Flow(*own, unit, budget, wants.layer, np.array(held, np.int32).T)
