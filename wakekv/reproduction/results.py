"""What the real cache costs, measured for a profile: made where it is missing or stale, and kept as JSON.

OUT/measured/NAME.json holds one result and the key of what it depends on: what was asked, the code, the versions, the
machine. A run that was stopped goes on with what is missing; remove the folder to measure again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from wakekv.errors import WakeKVError, lookup
from wakekv.files import write_json
from wakekv.reproduction.children import one_thread
from wakekv.reproduction.claims import hardware
from wakekv.reproduction.profiles import PROFILES, Profile
from wakekv.reproduction.sources import files_of

HOMES = {"tiers": "wakekv.tiers.trial"}  # kinds of trials that are not in wakekv.costs.trials


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Lengths in tokens, budgets in pages per KV head.

    length, seeds, budgets, n_tokens  the contest: prompts of each regime, and tokens fed to each cache
    needle_*  the map of needles;  contexts: growth;  timed: the context of the split of a step
    budget, steps  of what is timed;  exact, greedy: tokens of a prompt, and after it, compared with a full cache
    watched   tokens fed before and while one head is watched
    pool_*    one budget for all heads: prompts of each regime (seeds held out)
    tier_*    the tiers: passages (those that are kept as codes and merged too), tokens that count, thresholds of a* and
              its window in steps
    """

    length: int
    seeds: tuple[int, ...]
    regimes: tuple[str, ...]
    budgets: tuple[int, ...]
    n_tokens: int
    needle_lengths: tuple[int, ...]
    needle_depths: tuple[float, ...]
    needle_seeds: tuple[int, ...]
    needle_budgets: tuple[int, ...]
    needle_tokens: int
    contexts: tuple[int, ...]
    timed: int
    budget: int
    steps: int
    exact: int
    greedy: int
    watched: int
    pool_length: int
    pool_seeds: tuple[int, ...]
    pool_budgets: tuple[int, ...]
    pool_tokens: int
    tier_length: int
    tier_seeds: tuple[int, ...]
    tier_coded: tuple[int, ...]
    tier_tokens: int
    tier_thresholds: tuple[float, ...]
    tier_window: int


@dataclass(frozen=True)
class Bench:
    """The measurements of one profile, each a method that returns what is kept or measures it now.

    workers: processes for what is counted (the contest, the needles); what is only timed runs alone.
    """

    profile: Profile
    out: Path
    sizes: Sizes
    workers: int = 1

    def ten_steps(self) -> dict[str, dict]:
        """twin -> `trials.watch` of one head, the same for both."""
        asked = {"length": min(800, self.sizes.length), "n_tokens": self.sizes.watched, "budget": 16, "wants": 8}
        return self._one("ten_steps", "watch", asked)

    def exactness(self) -> list[dict]:
        """Rows of `trials.exactness`."""
        return self._one("exactness", "exactness", {"length": self.sizes.exact, "n_tokens": self.sizes.greedy})

    def contest(self) -> list[dict]:
        """Rows of `trials.contest`, all prompts."""
        s = self.sizes
        asked = {"length": s.length, "budgets": s.budgets, "n_tokens": s.n_tokens}
        return self._each_prompt("contest", s.seeds, asked)

    def parts(self) -> list[dict]:
        """Rows of `system.measure`: ways to decide, one context."""
        s = self.sizes
        return self._one("parts", "parts", {"context": s.timed, "budget": s.budget, "steps": s.steps})

    def needles(self) -> list[dict]:
        """Rows of `quality.needles`, all lengths and depths."""
        s = self.sizes
        asked = {"seeds": s.needle_seeds, "budgets": s.needle_budgets, "n_tokens": s.needle_tokens}
        jobs = {
            f"needles_{length}_d{round(100 * depth):02d}": {"length": length, "depth": depth, **asked}
            for length in s.needle_lengths
            for depth in s.needle_depths
        }
        return sum(self._all("needles", jobs), [])

    def growth(self) -> list[dict]:
        """Rows of `system.measure`: some caches, all contexts."""
        s = self.sizes
        return self._one("growth", "growth", {"contexts": s.contexts, "budget": s.budget, "steps": s.steps})

    def pools(self) -> list[dict]:
        """Rows of `trials.pools`, all prompts."""
        s = self.sizes
        asked = {"length": s.pool_length, "budgets": s.pool_budgets, "n_tokens": s.pool_tokens}
        return self._each_prompt("pools", s.pool_seeds, asked)

    def pool_needles(self) -> list[dict]:
        """Rows of `quality.needles` under the rules of `trials.POOLS`, all depths."""
        s = self.sizes
        asked = {"seeds": s.pool_seeds[:1], "budgets": s.pool_budgets[:1], "n_tokens": s.needle_tokens}
        asked |= {"length": s.needle_lengths[-1], "least": 1.0, "among": "pools"}
        jobs = {f"pool_needles_d{round(100 * depth):02d}": {"depth": depth, **asked} for depth in s.needle_depths}
        return sum(self._all("needles", jobs), [])

    def foreseen(self) -> list[dict]:
        """Rows of `trials.foreseen`, one prompt."""
        s = self.sizes
        asked = {"regime": s.regimes[0], "seed": s.pool_seeds[0], "length": s.length, "n_tokens": s.n_tokens}
        return self._one("foreseen", "foreseen", {**asked, "budget": s.pool_budgets[-1]})

    def tiers(self) -> list[dict]:
        """What `tiers.trial.contest` returns, of each passage and two families of methods at a time; what is not exact
        has no need of more than half the tokens."""
        s = self.sizes
        exact, less = ("sentences", "pages"), ("codes", "merging")
        parts = [("exact", exact, s.tier_tokens, seed) for seed in s.tier_seeds]
        parts += [("less", less, s.tier_tokens // 2, seed) for seed in s.tier_coded]
        asked = {"length": s.tier_length, "thresholds": s.tier_thresholds, "at": 0.02, "window": s.tier_window}
        jobs = {
            f"tiers_s{seed}_{name}": {"seed": seed, "families": families, "n_tokens": n_tokens, **asked}
            for name, families, n_tokens, seed in parts
        }
        return self._all("tiers", jobs)

    @property
    def about(self) -> str:
        """What was measured on what, for the foot of a picture."""
        return f"measured: {self.profile.model}, one thread of {hardware()}; slow tier: host memory"

    def _each_prompt(self, kind: str, seeds: tuple[int, ...], asked: Mapping) -> list[dict]:
        """The rows of one kind over prompts of every regime."""
        jobs = {
            f"{kind}_{regime}_s{seed}": {"regime": regime, "seed": seed, **asked}
            for regime in self.sizes.regimes
            for seed in seeds
        }
        return sum(self._all(kind, jobs), [])

    def _one(self, name: str, kind: str, asked: Mapping) -> Any:
        return self._all(kind, {name: asked})[0]

    def _all(self, kind: str, jobs: Mapping[str, Mapping]) -> list:
        """The results of several jobs of one kind, in order; those missing are measured, `workers` at a time."""
        model = {"model": self.profile.model, "dtype": self.profile.dtype, "device": self.profile.device}
        folder = self.out / "measured"
        keys = {name: _key(kind, asked, model) for name, asked in jobs.items()}
        missing = [name for name, key in keys.items() if _kept(folder / f"{name}.json", key) is None]
        for name in keys.keys() - set(missing):
            (folder / f"{name}.json").touch()  # so that the runner sees which are in use
        for name, result, took in _measured(kind, {name: jobs[name] for name in missing}, model, self.workers):
            folder.mkdir(parents=True, exist_ok=True)
            about = {"kind": kind, "asked": dict(jobs[name]), **model, "machine": hardware(), **took}
            write_json(folder / f"{name}.json", {"key": keys[name], **about, "result": result})
        return [_kept(folder / f"{name}.json", key) for name, key in keys.items()]


def bench(profile: str, out: Path | str) -> Bench:
    """The measurements of a profile, kept under `out`. InputError for an unknown profile."""
    chosen = lookup(profile, PROFILES, "profile")
    return Bench(chosen, Path(out), SIZES[profile], 1 if profile == "full" else chosen.workers)


def _measured(kind: str, jobs: Mapping[str, Mapping], model: Mapping, workers: int) -> Iterator:
    """(name, result, seconds it took) of each job, as they end."""
    if min(workers, len(jobs)) <= 1:
        for name, asked in jobs.items():
            yield name, *_timed(kind, asked, model)
        return
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=one_thread)
    with pool:
        running = {name: pool.submit(_timed, kind, asked, model) for name, asked in jobs.items()}
        for name, future in running.items():
            try:
                yield name, *future.result()
            except BrokenProcessPool:
                raise WakeKVError(
                    f"a process that measured {name} was killed (out of memory?): the same run goes on from there"
                ) from None


def _timed(kind: str, asked: Mapping, model: Mapping) -> tuple[Any, dict[str, float]]:
    wall, cpu = time.monotonic(), time.process_time()
    trials = importlib.import_module(_home(kind)).TRIALS  # torch: only where something is measured
    result = trials[kind](_loaded(**model), **asked)
    return result, {"seconds_s": time.monotonic() - wall, "cpu_s": time.process_time() - cpu}


@functools.lru_cache(maxsize=1)
def _loaded(model: str, dtype: str, device: str):
    import torch

    from wakekv.recording.models import load

    torch.set_num_threads(1)
    return load(model, dtype=dtype, device=device)


def _home(kind: str) -> str:
    return HOMES.get(kind, "wakekv.costs.trials")


@functools.cache
def _code(home: str) -> dict[str, str]:
    versions = {package: version(package) for package in ("torch", "transformers")}
    return versions | files_of(ast.parse(f"import wakekv.recording.models, {home}")) | {"machine": hardware()}


def _key(kind: str, asked: Mapping, model: Mapping) -> str:
    return hashlib.sha256(json.dumps([kind, asked, model, _code(_home(kind))], sort_keys=True).encode()).hexdigest()


def _kept(path: Path, key: str) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found["result"] if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # none, or cut short: it is measured again


SIZES = {
    "smoke": Sizes(
        length=550, seeds=(0,), regimes=("niah",), budgets=(8, 16), n_tokens=6,
        needle_lengths=(300,), needle_depths=(0.5,), needle_seeds=(0,), needle_budgets=(8,), needle_tokens=20,
        contexts=(128, 256), timed=256, budget=8, steps=5, exact=300, greedy=8, watched=14,
        pool_length=550, pool_seeds=(1,), pool_budgets=(8,), pool_tokens=6,
        tier_length=200, tier_seeds=(0,), tier_coded=(0,), tier_tokens=4, tier_thresholds=(0.02,), tier_window=4,
    ),
    "default": Sizes(
        length=2000, seeds=(0, 1, 2), regimes=("niah", "multiturn"), budgets=(8, 16, 32, 64), n_tokens=48,
        needle_lengths=(1000, 2000), needle_depths=(0.1, 0.5, 0.9), needle_seeds=(0,), needle_budgets=(8, 32),
        needle_tokens=24, contexts=(1000, 2000, 4000, 8000), timed=2000, budget=64, steps=18,
        exact=800, greedy=24, watched=40,
        pool_length=2000, pool_seeds=(1, 2), pool_budgets=(32,), pool_tokens=50,
        tier_length=800, tier_seeds=(0, 1, 2), tier_coded=(0,), tier_tokens=128, tier_thresholds=(0.01, 0.02, 0.05),
        tier_window=32,
    ),
    "full": Sizes(
        length=5000, seeds=(0, 1, 2, 3, 4), regimes=("niah", "multiturn"), budgets=(8, 16, 32, 64, 128), n_tokens=128,
        needle_lengths=(2000, 4000, 8000), needle_depths=(0.1, 0.3, 0.5, 0.7, 0.9), needle_seeds=(0, 1, 2),
        needle_budgets=(8, 32, 128), needle_tokens=32, contexts=(1000, 2000, 4000, 8000, 16000),
        timed=8000, budget=64, steps=34, exact=2000, greedy=64, watched=40,
        pool_length=5000, pool_seeds=(1, 2, 3, 4), pool_budgets=(32, 64, 128), pool_tokens=130,
        tier_length=4000, tier_seeds=(0, 1, 2, 3, 4), tier_coded=(0, 1, 2, 3, 4), tier_tokens=256,
        tier_thresholds=(0.01, 0.02, 0.03, 0.05), tier_window=32,
    ),
}  # fmt: skip
