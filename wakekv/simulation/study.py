"""A study: policies run over every log of one model and regime. What the figures and tables of policies are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.errors import InputError, lookup
from wakekv.logs.demand import demand
from wakekv.logs.trace import PAGE, Trace
from wakekv.policies import POLICIES, Policy
from wakekv.simulation import match
from wakekv.simulation.replay import Curves
from wakekv.simulation.simulate import curves
from wakekv.simulation.spread import opened, source, spread

PAPER = ("full", "frozen", "reactive", "evict", "optimum")  # the paper's four (section 5.1) and the floor below them
KEY = ("model", "regime", "text")


@dataclass(frozen=True)
class Study:
    """One model and regime under several policies.

    curves   policy -> one Curves a prompt, in the order of the logs
    wants    int64 [head]: wants of each head, summed over prompts;  layer int [head]
    text     how the logs' text was made: scripted, greedy or sampled;  flagged: logs whose text repeats itself
    machine  what the logs were recorded on, in words
    """

    model: str
    regime: str
    text: str
    machine: str
    unit: str
    layer: np.ndarray
    wants: np.ndarray
    curves: dict[str, list[Curves]]
    n_pages: int  # of the shortest log: budgets beyond it are no choice
    flagged: int = 0

    @property
    def name(self) -> str:
        return f"{self.model} / {self.regime}"

    @property
    def n_prompts(self) -> int:
        return len(next(iter(self.curves.values())))

    def curve(self, policy: str) -> match.Curve:
        """All prompts pooled: misses over wants, memory averaged over prompts, at the budgets all of them have."""
        return match.pooled(policy, self._of(policy))

    def rates(self, policy: str, budgets: Sequence[int] | None = None, *, resamples: int = stats.RESAMPLES):
        """DataFrame budget, mean_pages, miss_rate, lo, hi, n, unit, method: `curve` with intervals over prompts.

        mean_pages: mean resident pages, summed over heads. lo, hi: bootstrap over prompts, nan where there is one.
        Budgets beyond the pages of the logs are left out: nothing ever leaves there.
        """
        pooled = self.curve(policy)
        if budgets is not None:
            inside = {budget for budget in budgets if budget <= self.n_pages}
            absent = sorted(inside - set(pooled.budgets.tolist()))
            if absent:
                raise InputError(f"budget {absent[0]} was not simulated for {self.name}: 1..{pooled.budgets[-1]} were")
            pooled = pooled.at(budgets)
        each = [one.at(pooled.budgets) for one in self._of(policy)]
        n_wants, misses = [one.n_wants for one in each], np.array([one.misses for one in each])
        found = [stats.ratio(misses[:, b], n_wants, resamples=resamples).row() for b in range(len(pooled.budgets))]
        table = pd.DataFrame(found).rename(columns={"estimate": "miss_rate"}).drop(columns="descriptive")
        table.insert(0, "budget", pooled.budgets)
        table.insert(1, "mean_pages", pooled.memory)
        return table

    def head_rates(self, policy: str, budget: int) -> np.ndarray:
        """float [head]: each head's misses over its wants at one budget, all prompts together."""
        misses = sum(one.at(budget).head_misses[:, 0] for one in self._of(policy))
        return misses / np.maximum(self.wants, 1)

    def _of(self, policy: str) -> list[Curves]:
        return lookup(policy, self.curves, "policy of this study")


def studies(
    traces: Iterable[Trace],
    policies: Sequence[str] | Mapping[str, Policy] = PAPER,
    budgets: Sequence[int] | None = None,
    convention: str = "batch",
    *,
    slow_budgets: Sequence[int] | None = None,
    held_out: bool = False,
    workers: int = 1,
    **options,
) -> list[Study]:
    """One Study for each model, regime and kind of text among the logs, in order of appearance.

    policies      by their names in POLICIES, or as a table of your own, name -> Policy
    budgets, convention: as for `curves`
    slow_budgets  budgets for policies that need a run each (those with a floor); None: as for the others
    held_out      calibrate what is calibrated on another prompt of the study, not on the one it runs on
    workers       logs at a time; the numbers do not depend on it
    options: as for `demand` (unit, first_touch, page_tokens, k).
    """
    rules = policies if isinstance(policies, Mapping) else {name: lookup(name, POLICIES, "policy") for name in policies}
    groups: dict[tuple, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(key(trace), []).append(trace)
    tasks = []
    for group in groups.values():
        for i, trace in enumerate(group):
            beside = source(group[i - 1]) if held_out and len(group) > 1 else None
            tasks.append((source(trace), beside))
    run = partial(_counted, rules, budgets, slow_budgets, convention, options)
    each, made = iter(spread(run, tasks, workers)), []
    for group in groups.values():
        own = [next(each) for _ in group]
        found = {name: [one[name] for one in own] for name in rules}
        made.append(joined(group, found, options.get("unit", "head"), options.get("page_tokens", PAGE)))
    return made


def _counted(rules: Mapping[str, Policy], budgets, slow_budgets, convention, options, logs) -> dict[str, Curves]:
    """Policy -> Curves of the first of two logs; on the second, if there is one, what is calibrated is calibrated."""
    wants, beside = (None if log is None else demand(opened(log), **options) for log in logs)
    own = rules if beside is None else {name: rule.held_out(beside) for name, rule in rules.items()}
    asked = {name: budgets_of(rule, wants.n_pages, budgets, slow_budgets) for name, rule in own.items()}
    return {name: curves(wants, rule, asked[name], convention) for name, rule in own.items()}


def joined(group: Sequence[Trace], found: dict[str, list[Curves]], unit: str, page_tokens: int = PAGE) -> Study:
    """The Study of logs of one model, regime and kind of text; found: policy -> one Curves a log, in their order."""
    model, regime, text = key(group[0])
    wants = np.sum([one.head_wants for one in next(iter(found.values()))], axis=0)
    layer = np.arange(len(wants)) // (len(wants) // group[0].manifest["model"]["n_layers"])
    return Study(
        model=model, regime=regime, text=text, machine=machine(group[0]), unit=unit, layer=layer, wants=wants,
        curves=found, n_pages=min(pages(trace, page_tokens) for trace in group),
        flagged=sum(trace.manifest["repetition"]["flagged"] for trace in group),
    )  # fmt: skip


def budgets_of(rule: Policy, n_pages: int, budgets, slow_budgets=None) -> list[int] | None:
    """The budgets to run a policy at, those beyond the pages of the log left out; None: all, in one pass."""
    asked = slow_budgets if slow_budgets is not None and not rule.nested else budgets
    return None if asked is None else [b for b in asked if b <= n_pages] or [n_pages]


def pages(trace: Trace, page_tokens: int = PAGE) -> int:
    """Pages of a log, by its manifest."""
    return -(-(trace.manifest["n_prompt"] + trace.manifest["n_steps"]) // page_tokens)


def key(trace: Trace) -> tuple[str, str, str]:
    """What logs are pooled by: model, regime, kind of text."""
    manifest = trace.manifest
    return manifest["model"]["name"], manifest["prompt"]["regime"], manifest["text"]["mode"]


def machine(trace: Trace) -> str:
    """What a log was recorded on, in words."""
    return f"{trace.manifest['model']['dtype']} on {trace.manifest['device']}"
