"""Learned orders beside every baseline, on held-out prompts and on questions about what a policy gave up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.errors import InputError
from wakekv.learning.learn import part_of
from wakekv.logs.demand import Demand, demand
from wakekv.policies import POLICIES, Policy
from wakekv.policies.experts import LeCaR
from wakekv.simulation.residency import Residency
from wakekv.simulation.simulate import curves
from wakekv.simulation.spread import spread
from wakekv.tables import Table

PAPER, BEST = "recency", "optimum"
BASELINES: dict[str, Policy] = {  # one budget for all heads each, as what is learned has
    PAPER: POLICIES["reactive"].but(scope="model"),
    "frequency": POLICIES["lfu"].but(scope="model"),
    "decayed reads": POLICIES["pooled"],
    "LeCaR": LeCaR(),
    "G-KV, reversible": POLICIES["gkv"].but(reversible=True, every=1, scope="model"),
    "commons": POLICIES["commons"],
    BEST: POLICIES["optimum"].but(scope="model"),
}


@dataclass(frozen=True)
class Prompt:
    """A log to learn from or to be judged on: its demand (KV heads, cold), whose it is, and its part in the split."""

    model: str
    regime: str
    seed: int
    wants: Demand
    part: str = ""


def prompt(log: Any, steps: int, every: int = 1) -> Prompt:
    """A log's first `steps` in every so many layers, from the first on, to save time."""
    wants = demand(log, "kv_head").until(steps)
    thinned = np.flatnonzero(np.isin(wants.layer, np.unique(wants.layer)[::every]))
    own = log.manifest["prompt"]
    return Prompt(log.manifest["model"]["name"], own["regime"], own["seed"], wants.select(thinned), part_of(log))


def at_budget(rule: Policy, budget: int) -> Policy:
    """A rule as it is at a budget: LeCaR's experts have to be told."""
    return rule.but(budget=budget) if isinstance(rule, LeCaR) else rule


def contest(
    prompts: Sequence[Prompt], rules: Mapping[str, Sequence[Policy]], budgets: Sequence[int], workers: int = 1
) -> pd.DataFrame:
    """Every rule on every prompt; a rule that was taught from several seeds is several policies, its trials.

    Rows: policy, trial, model, regime, seed, budget, misses, wants, fetched, missed_weight, stall_steps. The same
    numbers whatever the number of workers."""
    return _spread(partial(_counted, _trials(rules), tuple(budgets)), prompts, workers)


def _counted(trials: Sequence[tuple[str, int, Policy]], budgets: Sequence[int], of: Prompt) -> list[dict]:
    rows, inside = [], [b for b in budgets if b <= of.wants.n_pages]
    for name, trial, rule in trials:
        once = None if isinstance(rule, LeCaR) else curves(of.wants, rule, inside)
        for b in inside:
            found = once.at([b]) if once else curves(of.wants, at_budget(rule, b), [b])
            costs = {what: getattr(found, what)[0] for what in ("misses", "fetched", "missed_weight", "stall_steps")}
            own = {"policy": name, "trial": trial, **_whose(of), "budget": b}
            rows.append({**own, **costs, "wants": of.wants.n_wants})
    return rows


def _trials(rules: Mapping[str, Sequence[Policy]]) -> list[tuple[str, int, Policy]]:
    return [(name, trial, rule) for name, several in rules.items() for trial, rule in enumerate(several)]


def questions(
    prompts: Sequence[Prompt], rules: Mapping[str, Sequence[Policy]], budget: int, n: int = 48, workers: int = 1
) -> pd.DataFrame:
    """Questions about what a policy gave up: policy, trial, model, regime, seed, budget, misses, wants, best (misses of
    the optimum on the very same questions). All three count the questions alone.

    The text runs to its middle as it was written. Then `n` of its own steps are asked again, each time the one, of
    those not yet asked again, that wants most of what this policy has not resident. So every want is real, and the
    order is the worst that a step-by-step adversary finds for each policy.
    """
    trials = [(name, trial, rule) for name, trial, rule in _trials(rules) if not rule.offline]
    return _spread(partial(_questioned, trials, budget, n), prompts, workers)


def _questioned(trials: Sequence[tuple[str, int, Policy]], budget: int, n: int, of: Prompt) -> list[dict]:
    rows = []
    for name, trial, rule in trials:
        order, misses, wants = interrogate(of.wants, at_budget(rule, budget), budget, n)
        best = Residency(of.wants.select(steps=order), BASELINES[BEST], budget)
        least = [int(best.step().missed.sum()) for _ in order]
        rows.append({"policy": name, "trial": trial, **_whose(of), "budget": budget, "misses": misses,
                     "wants": wants, "best": sum(least[len(order) - n :])})  # fmt: skip
    return rows


def interrogate(wants: Demand, rule: Policy, budget: int, n: int) -> tuple[np.ndarray, int, int]:
    """(the order in which the log's steps were asked, misses, wants) of `n` questions; see `questions`.
    InputError for more questions than half the log has steps."""
    half = wants.n_steps // 2
    if not 1 <= n <= half:
        raise InputError(f"a log of {wants.n_steps} steps has 1 to {half} steps to ask again, not {n}")
    steps = [wants.at(t) for t in range(half)]
    items = [heads * wants.n_pages + wants.page[entries] for heads, entries in steps]
    of_step = np.repeat(np.arange(half), [len(own) for own in items])
    flat, asked, order = np.concatenate(items), np.zeros(half, bool), list(range(half))
    host = Residency(_Asked(wants, order), rule, budget)
    for _ in range(half):
        host.step()
    misses = total = 0
    for _ in range(n):
        absent = (~host.resident).reshape(-1)[flat]
        count = np.where(asked, -1, np.bincount(of_step, weights=absent, minlength=half))
        order.append(int(count.argmax()))
        asked[order[-1]] = True
        done = host.step()
        misses += int(done.missed.sum())
        total += len(done.pages)
    return np.array(order), misses, total


class _Asked:
    """A demand whose steps come in an order that is still being written."""

    def __init__(self, wants: Demand, order: list[int]):
        self._wants, self._order = wants, order

    def __getattr__(self, name: str):
        return getattr(self._wants, name)

    def at(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return self._wants.at(self._order[step])

    def turn(self, scope: str, heads: np.ndarray, entries: np.ndarray, step: int) -> np.ndarray:
        return self._wants.turn(scope, heads, entries, self._order[step])


def closed(found: pd.DataFrame, resamples: int = stats.RESAMPLES) -> pd.DataFrame:
    """How far from recency to the optimum each policy goes, over the prompts of a model and regime; nothing where the
    two are closer than 0.001 of the wants, as there is no way to go. Columns: policy, model, regime, budget, miss_rate,
    the way (estimate, lo, hi, n, ...: intervals over prompts, misses being means over trials), and the least and the
    most of any trial (seed_lo, seed_hi; n_seeds); cost: what a reward is made of, over recency's (see `_costs`)."""
    group, rows = ["model", "regime", "budget"], []
    cost = found.assign(cost=_costs(found)).groupby([*group, "policy"])["cost"].mean()
    wide = found.pivot_table(index=[*group, "seed"], columns=["policy", "trial"], values="misses", sort=False)
    wants = found[found["policy"] == PAPER].set_index([*group, "seed"])["wants"]
    for at, misses in wide.groupby(level=group, sort=False):
        paper, best = misses[PAPER].mean(axis=1), misses[BEST].mean(axis=1)
        asked = wants.loc[misses.index].sum()
        if (paper - best).sum() < 0.001 * asked:
            continue
        for policy in (name for name in found["policy"].unique() if name not in (PAPER, BEST)):
            own = misses[policy]
            sums = np.column_stack([paper, own.mean(axis=1), best])
            each = [float(_way(np.array([paper.sum(), own[trial].sum(), best.sum()]))) for trial in own]
            rate = own.mean(axis=1).sum() / asked
            rows.append({"policy": policy, **dict(zip(group, at)), "miss_rate": rate, "cost": cost[(*at, policy)],
                         **stats.bootstrap(sums, _way, resamples=resamples).row(),
                         "seed_lo": min(each), "seed_hi": max(each), "n_seeds": len(each)})  # fmt: skip
    return pd.DataFrame(rows)


def _costs(found: pd.DataFrame) -> np.ndarray:
    """float [row]: mean of steps that wait, pages fetched and weight read late, each over recency's on that prompt."""
    which, what = ["model", "regime", "seed", "budget"], ["stall_steps", "fetched", "missed_weight"]
    paper = found[found["policy"] == PAPER].set_index(which)[what]
    same = paper.loc[pd.MultiIndex.from_frame(found[which])].to_numpy(float)
    return (found[what].to_numpy(float) / np.maximum(same, 1e-9)).mean(axis=1)


def _way(total: np.ndarray) -> np.ndarray:
    return (total[..., 0] - total[..., 1]) / (total[..., 0] - total[..., 2])


def eviction(found: pd.DataFrame, resamples: int = stats.RESAMPLES) -> Table:
    """`closed`, a row a policy, model and regime, a column a budget."""
    numbers, rows = closed(found, resamples), []
    for (model, regime, policy), at in numbers.groupby(["model", "regime", "policy"], sort=False):
        row = {"model": model, "regime": regime, "prompts": str(at["n"].max()), "policy": policy}
        rows.append(row | {f"B = {r.budget}": _cell(r) for r in at.itertuples()})
    return Table(numbers, pd.DataFrame(rows).fillna(""))


def _cell(row) -> str:
    span = f" [{row.lo:.0%}, {row.hi:.0%}]" if np.isfinite(row.lo) else ""
    seeds = f", seeds {row.seed_lo:.0%} to {row.seed_hi:.0%}" if row.n_seeds > 1 else ""
    return f"{row.estimate:.0%}{span}{seeds}"


def asked_again(found: pd.DataFrame, resamples: int = stats.RESAMPLES) -> Table:
    """`questions`, a row a policy: its miss rate on them, with its interval over prompts, and the optimum's on the very
    same ones."""
    rows = []
    for policy, at in found.groupby("policy", sort=False):
        mean = at.groupby(["model", "regime", "seed"])[["misses", "best", "wants"]].mean()
        rate, best = (stats.ratio(mean[name], mean["wants"], resamples=resamples) for name in ("misses", "best"))
        each = at.groupby("trial")[["misses", "wants"]].sum()
        each = each["misses"] / each["wants"]
        rows.append({"policy": policy, "budget": at["budget"].iloc[0], **rate.row(), "best": best.value,
                     "seed_lo": each.min(), "seed_hi": each.max(), "n_seeds": len(each)})  # fmt: skip
    numbers = pd.DataFrame(rows).sort_values("estimate", kind="stable")
    shown = pd.DataFrame({
        "policy": numbers["policy"],
        "miss rate on questions": [f"{r.estimate:.3f} [{r.lo:.3f}, {r.hi:.3f}]" for r in numbers.itertuples()],
        "over seeds": [f"{r.seed_lo:.3f} to {r.seed_hi:.3f}" if r.n_seeds > 1 else "" for r in numbers.itertuples()],
        "the optimum on the same": numbers["best"].map("{:.3f}".format),
        "prompts": numbers["n"].astype(str),
    })  # fmt: skip
    return Table(numbers, shown)


def _whose(prompt: Prompt) -> dict:
    return {"model": prompt.model, "regime": prompt.regime, "seed": prompt.seed}


def _spread(task, prompts: Sequence[Prompt], workers: int) -> pd.DataFrame:
    return pd.DataFrame([row for part in spread(task, prompts, workers) for row in part])
