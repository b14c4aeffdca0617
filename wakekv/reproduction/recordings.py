"""Recordings: the logs of a profile, made where they are missing and found where they lie.

A log is made again only if something it depends on changed: its entry in the profile, the code that records, torch or
transformers. A recording that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from wakekv.errors import InputError, WakeKVError, lookup
from wakekv.files import ROOT, write_json
from wakekv.reproduction.children import one_thread
from wakekv.reproduction.profiles import PROFILES, SAMPLING, Log, Profile
from wakekv.reproduction.sources import files_of


def ensure(log: Log, out: Path | str, *, device: str = "auto", dtype: str = "auto", progress: bool = True) -> Path:
    """The directory of `log` under OUT/traces, recorded now if it is missing, unfinished or stale.

    Raises ModelError (model not to be had), InputError (a log that cannot be made), TraceError (a full disk).
    """
    path = _path(log, out)
    if _fresh(log, path):
        return path
    from wakekv.recording import prompts, record  # torch: only where something is recorded

    loaded = _loaded(log.model, dtype, device)
    scripted = log.text == "scripted"
    prompt = prompts.build(
        log.regime,
        loaded.tokenizer,
        seed=log.seed,
        length=log.length,
        depth=log.depth,
        scripted=scripted,
        context=loaded.context,
    )
    sample = {**SAMPLING, "seed": log.seed} if log.text == "sampled" else None
    settings = {"steps": log.steps, "sample": sample}
    beside, part = _beside(path), path.with_name(path.name + ".part")
    if _noted(path).get("request") != _request(log):
        if path.exists() and _manifest_key(path) != record.recording_key(loaded, prompt, **settings):
            shutil.rmtree(path)
        shutil.rmtree(part, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(beside, {"request": _request(log)})
    record.record(loaded, prompt, path, resume=True, progress=progress, **settings)
    write_json(beside, {"request": _request(log), "key": _manifest_key(path)})
    return path


def record_all(
    profile: Profile | str,
    out: Path | str,
    *,
    workers: int | None = None,
    regime: str | None = None,
    model: str | None = None,
    say: Callable[[str], None] = print,
) -> list[tuple[Log, Path]]:
    """Every log of the profile (or of one regime or model), recorded where it must be; returns what `logs` returns.

    Runs `workers` processes of one thread each and says after each log how long the rest will take. A log that fails
    does not stop the others; at the end a WakeKVError names each that failed and why.
    """
    profile = _profile(profile)
    wanted = _chosen(profile, regime, model)
    missing = [log for log in wanted if not _fresh(log, _path(log, out))]
    if missing:
        workers = min(workers or profile.workers, len(missing))
        say(
            f"{len(wanted)} logs: {len(wanted) - len(missing)} are there, {len(missing)} to record, {workers} at a time"
        )
        _prefetch({log.model for log in missing}, say)
        _record(missing, out, profile, workers, say)
    return logs(out, profile, regime=regime, model=model)


def logs(
    out: Path | str, profile: Profile | str, *, regime: str | None = None, model: str | None = None
) -> list[tuple[Log, Path]]:
    """(log, directory) of the profile's logs, all there and up to date. Raises InputError naming one that is not."""
    profile = _profile(profile)
    found = [(log, _path(log, out)) for log in _chosen(profile, regime, model)]
    for log, path in found:
        if not _fresh(log, path):
            why = "out of date" if path.exists() else "missing"
            raise InputError(
                f"the log {path} is {why}: python -m wakekv reproduce --profile {profile.name} --out {out} --only 01"
            )
    return found


def _record(missing: list[Log], out: Path | str, profile: Profile, workers: int, say, job=None) -> None:
    """Record `missing` in worker processes by `job` (a test's stand-in; else `_timed`)."""
    start, total, done, failed = time.monotonic(), sum(map(_work, missing)), 0.0, []
    order = sorted(missing, key=lambda log: (log.model, -_work(log)))
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=one_thread)
    try:
        running = {pool.submit(job or _timed, log, str(out), profile.device, profile.dtype): log for log in order}
        n_done, waiting = 0, set(running)
        while waiting:
            ended, waiting = wait(waiting, timeout=30, return_when=FIRST_COMPLETED)
            if not ended:
                spent = time.monotonic() - start
                left = f"; about {duration(max(0, spent * (total / done - 1)))} left" if n_done else ""
                say(f"recording for {duration(spent)}, {n_done} of {len(missing)} logs done{left}")
            for future in ended:
                log, error = running[future], future.exception()
                n_done, done = n_done + 1, done + _work(log)
                told = f"recorded in {duration(future.result())}" if error is None else f"FAILED: {_why(error)}"
                failed += [] if error is None else [f"{log.name}: {_why(error)}"]
                left = (time.monotonic() - start) * (total / done - 1)
                say(
                    f"[{n_done}/{len(missing)}] {log.name} {told}"
                    + (f"; about {duration(left)} left" if n_done < len(missing) else "")
                )
    except BaseException:  # interrupted: what is half recorded stays, to be gone on with
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    if failed:
        raise WakeKVError(f"{len(failed)} of {len(missing)} logs failed: {'; '.join(failed)}")


def _why(error: BaseException) -> str:
    if isinstance(error, BrokenProcessPool):
        return "its process was killed (out of memory?); the same run goes on from there"
    return str(error) if isinstance(error, WakeKVError) else f"{type(error).__name__}: {error}"


def _timed(log: Log, out: str, device: str, dtype: str) -> float:
    start = time.monotonic()
    ensure(log, out, device=device, dtype=dtype, progress=False)
    return time.monotonic() - start


def _prefetch(models: set[str], say) -> None:
    """Fetch models here, before the workers start, so that a failure is told once and at once."""
    from wakekv.recording.models import describe, fetch

    absent = {row["name"]: row["size"] for row in describe() if not row["cached"]}
    for model in sorted(models):
        if model in absent:
            say(f"fetching {model}, {absent[model]}: once, and kept for later runs")
        fetch(model)


@functools.lru_cache(maxsize=1)
def _loaded(model: str, dtype: str, device: str):
    from wakekv.recording.models import load

    return load(model, dtype=dtype, device=device)


def _work(log: Log) -> float:
    """Rough cost of a log in decode steps without context: decoding slows as it grows, a prompt is read in blocks."""
    context = log.length or 1500
    return log.steps * (1 + context / 2500) + context / 20


@functools.cache
def _recorder() -> dict[str, str]:
    """What every recording depends on: the code, the texts beside it, and the versions it runs on."""
    versions = {}
    for package in ("torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "absent"
    beside = sorted((ROOT / "wakekv" / "recording").glob("*.json"))
    texts = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in beside}
    return versions | texts | files_of(ast.parse("from wakekv.recording import models, prompts, record"))


def _request(log: Log) -> str:
    return hashlib.sha256(json.dumps([asdict(log), _recorder()], sort_keys=True).encode()).hexdigest()


def _fresh(log: Log, path: Path) -> bool:
    noted = _noted(path)
    return (
        noted.get("request") == _request(log) and noted.get("key") is not None and noted["key"] == _manifest_key(path)
    )


def _noted(path: Path) -> dict:
    try:
        return {**json.loads(_beside(path).read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}  # no note, or one cut short: the log is checked against the recorder's own key instead


def _manifest_key(path: Path) -> str | None:
    try:
        return json.loads((path / "manifest.json").read_text(encoding="utf-8"))["key"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _path(log: Log, out: Path | str) -> Path:
    return Path(out) / "traces" / log.name


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _profile(profile: Profile | str) -> Profile:
    return profile if isinstance(profile, Profile) else lookup(profile, PROFILES, "profile")


def _chosen(profile: Profile, regime: str | None, model: str | None) -> list[Log]:
    """The profile's logs of a regime and a model; InputError, naming what there is, if there are none."""
    for what, value in ("regime", regime), ("model", model):
        if value is not None:
            lookup(value, {getattr(log, what): log for log in profile.logs}, f"{what} of profile {profile.name}")
    return [log for log in profile.logs if regime in (None, log.regime) and model in (None, log.model)]


def duration(seconds: float) -> str:
    """In words: "40 s", "12 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
