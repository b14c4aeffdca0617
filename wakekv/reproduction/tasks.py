"""A study as independent tasks: every log under every policy, kept by content, run in processes or on a cluster.

A task is one log under one policy: at all budgets where one pass gives them, else at one of them. Its result lies in
OUT/tasks under a hash of the log, the policy with its parameters, the rules of counting and the code that counts, so a
study that was stopped goes on, and one that grows pays for what is new. Workers only read logs; this process alone
writes, as results arrive. What a study finds does not depend on how many workers there were or who was first.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from wakekv import kernels
from wakekv.errors import InputError, WakeKVError, lookup
from wakekv.files import writable, write
from wakekv.logs.blocks import simulate
from wakekv.logs.shipped import BROKEN
from wakekv.policies import POLICIES, Policy
from wakekv.reproduction.places import Place, find, local
from wakekv.reproduction.sources import files_of
from wakekv.simulation.replay import Curves, join
from wakekv.simulation.study import KEY, budgets_of, joined, key, pages
from wakekv.tables import as_csv, rates

CODE = "from wakekv.logs import blocks"
ROUNDS = 3  # times that tasks whose worker died are tried again side by side, before each is tried alone
PER_BUDGET = ("misses", "miss_rate", "mean_pages", "peak_pages", "fetched", "stall_steps")


@dataclass(frozen=True)
class Task:
    """One log under one policy. budget: None for all of them; code: hash of what counts."""

    url: str
    sha256: str
    policy: str
    rule: Policy
    budget: int | None
    unit: str
    first_touch: str
    code: str

    @property
    def key(self) -> str:
        """What the result depends on, as a hash."""
        asked = [self.sha256, _parameters(self.rule), self.budget, self.unit, self.first_touch, self.code]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        at = "" if self.budget is None else f" at {self.budget} pages"
        return f"{self.url.rpartition('/')[2]}, {self.policy}{at}"


def _parameters(rule: Policy) -> list:
    """A policy's class and every field of it, those its repr leaves out, too."""
    kind = type(rule)
    return [f"{kind.__module__}.{kind.__qualname__}", [repr(getattr(rule, f.name)) for f in dataclasses.fields(rule)]]


def tasks(logs: Iterable[Place], policies: Sequence[str], budgets: Sequence[int], unit: str, first_touch: str):
    """The list of Tasks of a study. InputError for an unknown policy."""
    rules, code, made = {name: lookup(name, POLICIES, "policy") for name in policies}, code_sha256(), []
    for log, (name, rule) in itertools.product(logs, rules.items()):
        whole = rule.nested and kernels.AVAILABLE
        for budget in [None] if whole else budgets_of(rule, pages(log), budgets):
            made.append(Task(log.url, log.sha256, name, rule, budget, unit, first_touch, code))
    return made


@functools.cache
def code_sha256() -> str:
    """Hash of all of this package that a result depends on."""
    return hashlib.sha256(json.dumps(files_of(ast.parse(CODE))).encode()).hexdigest()


def run(task: Task) -> tuple[Task, Curves | str]:
    """What a worker does: the task with its result, or with what went wrong, in a line."""
    try:
        if task.code != code_sha256():
            raise WakeKVError("this worker has another version of wakekv: install the same one on all")
        at = None if task.budget is None else [task.budget]
        path = local(task.url, task.sha256)
        return task, simulate(path, task.rule, at, unit=task.unit, first_touch=task.first_touch)
    except Exception as error:  # whatever it is, it ends this task and no other
        kind = "" if isinstance(error, WakeKVError) else f"{type(error).__name__}: "
        return task, kind + " ".join(str(error).split())


def spread(waiting: Iterable[Task], jobs: int = 1, client=None) -> Iterator[tuple[Task, Curves | str]]:
    """Run tasks in `jobs` processes, or on the Dask cluster of `client`, and yield each with its result as it ends.

    Where a worker dies, what it had not finished is run again; a task that ends its worker even alone is yielded with
    a line that says so.
    """
    from joblib import Parallel, delayed, parallel_config

    died: tuple[type[Exception], ...] = (BrokenProcessPool,)
    backend = {"backend": "loky", "n_jobs": jobs}
    if client is not None:
        from distributed.scheduler import KilledWorker

        died, backend = (*died, KilledWorker), {"backend": "dask", "client": client, "n_jobs": -1}

    def parallel(some):
        with parallel_config(**backend):
            yield from Parallel(batch_size=1, return_as="generator_unordered")(delayed(run)(task) for task in some)

    left = {task.key: task for task in waiting}
    for _ in range(ROUNDS):
        try:
            for task, found in parallel(list(left.values())):
                yield left.pop(task.key), found
            return
        except died:
            continue
    for task in left.values():
        try:
            yield next(parallel([task]))
        except died:
            yield task, "the process that ran it was killed (out of memory?)"


class Kept:
    """Results in a folder, one file a task, each whole or not there."""

    def __init__(self, out: Path | str):
        self.folder = Path(out) / "tasks"

    def path(self, task: Task) -> Path:
        return self.folder / f"{task.key}.npz"

    def put(self, task: Task, found: Curves) -> None:
        """Equal results are equal bytes."""
        content = io.BytesIO()
        held = {name: value for name, value in vars(found).items() if name != "policy"}
        np.savez_compressed(content, allow_pickle=False, **held)
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.path(task), content.getvalue())

    def get(self, task: Task) -> Curves | None:
        """None where there is none, or none that can be read."""
        try:
            with open(self.path(task), "rb") as file, np.load(file, allow_pickle=False) as held:
                return Curves(policy=task.rule, **{n: a if a.ndim else a.item() for n, a in dict(held).items()})
        except (*BROKEN, zipfile.BadZipFile, zlib.error):
            return None


def study(
    urls: Sequence[str],
    out: Path | str,
    policies: Sequence[str],
    budgets: Sequence[int],
    models: Sequence[str] = (),
    regimes: Sequence[str] = (),
    unit: str = "head",
    first_touch: str = "cold",
    jobs: int = 1,
    client=None,
    say: Callable[[str], None] = print,
) -> dict[str, str]:
    """Policies over logs, into OUT/study.csv (all prompts of a model and regime together, with intervals) and
    OUT/prompts.csv (each on its own); returns what failed, task -> why.

    urls: as for `find`. models, regimes: only these (all). A log on which every task failed is left out of study.csv,
    and so is a policy that failed on another log of the same model and regime.
    Raises InputError, before anything runs, for names, numbers and places that do not fit.
    """
    if min(budgets, default=0) < 1:
        raise InputError("budgets are pages a head, from 1 on: name at least one")
    writable(out)
    logs = _chosen(_chosen(find(urls), 0, models, "model of these logs"), 1, regimes, "regime of these logs")
    for log in logs:
        if pages(log) < min(budgets):
            raise InputError(
                f"{log.url} has {pages(log)} pages, fewer than the {min(budgets)} of --budgets: ask for fewer"
            )
    asked, kept = tasks(logs, policies, budgets, unit, first_touch), Kept(out)
    waiting, failed = [task for task in asked if kept.get(task) is None], {}
    say(f"{len(logs)} logs, {len(asked)} tasks: {len(asked) - len(waiting)} kept, {len(waiting)} to run")
    if client is None:
        _fetch(logs, {task.url for task in waiting})
    for n, (task, found) in enumerate(spread(waiting, jobs, client), 1):
        if isinstance(found, str):
            failed[task.name] = found
        else:
            kept.put(task, found)
        say(f"{n}/{len(waiting)} {task.name}{': failed' * isinstance(found, str)}")
    if _write(logs, asked, kept, budgets, unit, Path(out)):
        say(f"study.csv, prompts.csv in {out}")
    elif not waiting:
        say("nothing to do: every result is there")
    return dict(sorted(failed.items()))


def _chosen(logs: list[Place], part: int, names: Sequence[str], kind: str) -> list[Place]:
    known = {key(log)[part]: log for log in logs}
    for name in names:
        lookup(name, known, kind)
    return [log for log in logs if not names or key(log)[part] in names]


def _fetch(logs: Iterable[Place], urls: set[str]) -> None:
    """Bring remote logs here once, before several processes want them; what fails will fail in its tasks, and be told
    there."""
    for log in logs:
        if log.url in urls and "://" in log.url:
            try:
                local(log.url, log.sha256)
            except (WakeKVError, OSError):
                pass


def _write(logs, asked, kept: Kept, budgets, unit: str, out: Path) -> bool:
    """The tables, from what is kept; were they other than what lies there?"""
    groups: dict[tuple, list[Place]] = {}
    for log in logs:
        groups.setdefault(key(log), []).append(log)
    pooled, each = [], []
    for group in groups.values():
        found = {log: _results([task for task in asked if task.sha256 == log.sha256], kept) for log in group}
        found = {log: own for log, own in found.items() if own}
        common = [name for name in next(iter(found.values()), ()) if all(name in own for own in found.values())]
        each += [_rows(log, name, one, budgets) for log, own in found.items() for name, one in own.items()]
        if common:
            made = joined(list(found), {name: [own[name] for own in found.values()] for name in common}, unit)
            pooled.append(rates(made, common, budgets))
    changed = [_replace(out / name, parts) for name, parts in (("study.csv", pooled), ("prompts.csv", each))]
    return any(changed)


def _results(asked: Sequence[Task], kept: Kept) -> dict[str, Curves]:
    """What is kept of one log: policy -> Curves, without policies of which a budget is missing."""
    points: dict[str, list[Curves | None]] = {}
    for task in asked:
        points.setdefault(task.policy, []).append(kept.get(task))
    return {name: join(some) for name, some in points.items() if None not in some}


def _rows(log: Place, policy: str, found: Curves, budgets) -> pd.DataFrame:
    own = dict(zip(KEY, key(log))) | {"log": log.name, "policy": policy, "unit": found.unit}
    at = found.at([budget for budget in budgets if budget in found.budgets])
    columns = {"budget": at.budgets, "wants": found.n_wants} | {name: getattr(at, name) for name in PER_BUDGET}
    return pd.DataFrame(own | columns, index=range(len(at.budgets)))


def _replace(path: Path, parts: list[pd.DataFrame]) -> bool:
    """Write a table where it is not there already; was it?"""
    content = as_csv(pd.concat(parts, ignore_index=True)) if parts else b""
    if path.exists() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content)
    return True
