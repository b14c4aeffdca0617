"""Reproduce: record what a profile needs, run the notebooks in order, and say where the results are.

A notebook is left out only if nothing it depends on has changed since it last ran to its end: its cells, parameters and
inputs, the package's files it imports, the pins, and the outputs it left. `OUT/run.json` holds those hashes.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock, Timeout

from wakekv.errors import InputError, lookup
from wakekv.files import ROOT, writable, write_json
from wakekv.reproduction import notebooks, recordings
from wakekv.reproduction.claims import hardware, table
from wakekv.reproduction.notebooks import Notebook
from wakekv.reproduction.profiles import PROFILES, Profile
from wakekv.verdicts import VERDICTS

KEPT = (
    ".ci",
    ".git",
    ".venv",
    "artifact",
    "benchmarks",
    "figures",
    "notebooks",
    "tests",
    "wakekv",
)  # no run writes here
VERSIONS = ("wakekv", "numpy", "scipy", "statsmodels", "pandas", "numba", "matplotlib", "torch", "transformers")
RESULTS = ("figures", "tables", "claims", "notebooks")  # folders of a run, beside traces/ and run.json


def reproduce(
    profile: str = "default",
    out: Path | str | None = None,
    *,
    only: Iterable[str] = (),
    force: bool = False,
    settings: dict[str, str] | None = None,
    folder: Path | str = ROOT / "notebooks",
    say: Callable[[str], None] = print,
) -> Path:
    """Run the notebooks of `folder` for one profile into `out` (default: runs/<profile>) and return `out`.

    only: notebooks to run, by name or leading number; the others are left as they are. force: run even what is up to
    date. settings: further parameters, given to each notebook that declares them.
    Raises InputError before anything runs (profile, out, notebook or parameter that is not to be used), WakeKVError
    naming the logs that could not be recorded, NotebookError naming the first notebook that failed.
    """
    chosen = lookup(profile, PROFILES, "profile")
    out = _result_folder(Path(out or ROOT / "runs" / profile))
    books = _books(Path(folder), only)
    record = _open_record(out, profile)
    for name in {"profile", "out"} & set(settings or {}):
        raise InputError(f"-p {name} would be another run's: give --{name} instead")
    given = {book.name: _given(book, chosen, out, settings or {}) for book in books}
    unknown = set(settings or {}) - {name for values in given.values() for name in values}
    if unknown:
        raise InputError(f"no notebook declares the parameter {', '.join(sorted(unknown))}: see their first cells")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / ".lock", timeout=0):
            say(f"profile {profile} ({chosen.about}) into {_shown(out)}, on {hardware()}")
            if any(_reads_logs(book) for book in books):
                _record(chosen, out, record, say)
            for number, book in enumerate(books, 1):
                place = f"[{number}/{len(books)}] "
                _stage(book, given[book.name], out, chosen, record, force, lambda text, at=place: say(at + text))
    except Timeout:
        raise InputError(f"another run is writing into {_shown(out)}: wait for it, or give another --out") from None
    say(summary(out))
    return out


def summary(out: Path) -> str:
    """Where the results of a run lie, and how many claims came out how."""
    lines = []
    for folder in RESULTS:
        files = [path.name for path in sorted((out / folder).glob("[!.]*"))]
        if files:
            lines.append(f"{folder:<10} {_shown(out / folder)}: {', '.join(files)}")
    rows = table(out)
    counts = ", ".join(
        f"{n} {verdict}" for verdict in VERDICTS if (n := sum(row["verdict"] == verdict for row in rows))
    )
    lines.append(f"{'verdicts':<10} {counts} (python -m wakekv claims --out {_shown(out)})")
    failed = [row["id"] for row in rows if row["failed"]]
    return "\n".join([*lines, *([f"declared to hold, and failed: {', '.join(failed)}"] if failed else [])])


def _stage(book: Notebook, given: dict, out: Path, profile: Profile, record: dict, force: bool, say) -> None:
    """Run one notebook if it must be, and write down what it depended on and what it left."""
    inputs = _inputs(book, given, out, profile)
    why = "asked to (--force)" if force else _stale(record["stages"].get(book.name), inputs, out)
    if not why:
        say(f"{book.name}: up to date")
        return
    expected_s = _expected(book.name, record)
    say(f"{book.name}: runs, {why}" + (f"; took {recordings.duration(expected_s)} before" if expected_s else ""))
    kept = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (out / "measured").glob("[!.]*.json")}
    before, earlier = _stamps(out), record["stages"].pop(book.name, {"outputs": {}})["outputs"]
    cost = notebooks.run(book, out, given, say, expected_s)
    left = sorted(path for path, stamp in _stamps(out).items() if before.get(path) != stamp)
    for name in earlier.keys() - left:
        (out / name).unlink(missing_ok=True)  # it writes this no longer
    outputs = {name: _sha256(out / name) for name in left}
    record["stages"][book.name] = {"inputs": inputs, "outputs": outputs, **_circumstances(given, profile)}
    finished = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record["volatile"][book.name] = {
        **asdict(cost), "kept_s": _kept_s(kept), "finished": finished, "hardware": hardware()
    }  # fmt: skip
    write_json(out / "run.json", record)
    say(f"{book.name}: done in {cost.seconds_s:.0f} s, at most {cost.peak_bytes / 1e9:.1f} GB")


def _record(profile: Profile, out: Path, record: dict, say) -> None:
    """Make the logs that are missing, and write down how long that took in all, interruptions left out."""
    told: list[str] = []
    start = time.monotonic()
    try:
        recordings.record_all(profile, out, say=lambda text: (told.append(text), say(text)))
    finally:
        done = sum(" recorded in " in text for text in told)
        if done:
            earlier = record["volatile"].get("recordings", {"seconds_s": 0.0, "logs": 0})
            total = earlier["seconds_s"] + time.monotonic() - start
            record["volatile"]["recordings"] = {"seconds_s": total, "logs": earlier["logs"] + done}
            write_json(out / "run.json", record)


def _kept_s(before: dict[Path, tuple[int, bytes]]) -> float:
    """Seconds that measurements took which were there before a notebook ran, and which it used (see results.py)."""
    return sum(
        json.loads(was)["seconds_s"]
        for path, (stamp, was) in before.items()
        if path.exists() and path.stat().st_mtime_ns != stamp and path.read_bytes() == was
    )


def _expected(name: str, record: dict) -> float | None:
    """Seconds that a notebook took before: here, or in the reference run if that was of the same profile, and then with
    what went into measurements that it found made."""
    if earlier := record["volatile"].get(name):
        return earlier["seconds_s"]
    path = ROOT / "artifact" / "run.json"
    reference = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"profile": ""}
    earlier = reference["volatile"].get(name) if reference["profile"] == record["profile"] else None
    return earlier["seconds_s"] + earlier.get("kept_s", 0.0) if earlier else None


def _stale(stage: dict | None, inputs: dict[str, str], out: Path) -> str:
    """Why a stage must run, in a few words; empty if it need not."""
    if stage is None:
        return "never finished here"
    for name in sorted(inputs.keys() | stage["inputs"].keys()):
        if inputs.get(name) != stage["inputs"].get(name):
            return f"{name} {'changed' if name in inputs and name in stage['inputs'] else 'came or went'}"
    for name, sha256 in stage["outputs"].items():
        if not (out / name).exists() or _sha256(out / name) != sha256:
            return f"its {name} is {'not what it left' if (out / name).exists() else 'gone'}"
    return ""


def _inputs(book: Notebook, given: dict, out: Path, profile: Profile) -> dict[str, str]:
    """Hash of all a notebook depends on, by name: cells, parameters, code, pins, claims, and logs if it reads any."""
    files = [ROOT / "requirements.lock", ROOT / "artifact" / "claims.yaml", ROOT / "artifact" / "published.json"]
    named = {_shown(path): path for path in files}
    if _reads_logs(book):
        named |= {f"log {log.name}": out / "traces" / log.name / "manifest.json" for log in profile.logs}
    named |= {name: ROOT / name for name in _named(book)}
    if not book.claims:  # it may tabulate what the notebooks before it found
        named |= {f"claims/{path.name}": path for path in (out / "claims").glob("*.json") if path.stem < book.name}
    parameters = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
    fixed = {"cells": book.source_sha256, "parameters": parameters, "Python": platform.python_version()}
    return fixed | book.depends() | {name: _sha256(path) for name, path in named.items() if path.exists()}


def _named(book: Notebook) -> set[str]:
    """Files of artifact/ that its code names, such as an example that it imports."""
    return {name for cell in book.code for name in re.findall(r"\bartifact/[\w./-]+\.\w+", cell)}


def _circumstances(given: dict, profile: Profile) -> dict[str, dict]:
    """What a notebook was run with, to be read by people and by `compare`: parameters, seeds, versions."""
    versions = {"python": platform.python_version()} | {name: version(name) for name in VERSIONS if _installed(name)}
    return {
        "parameters": {name: value for name, value in given.items() if name != "out"},
        "seeds": {log.name: log.seed for log in profile.logs},
        "versions": versions,
    }


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _reads_logs(book: Notebook) -> bool:
    return "wakekv/reproduction/recordings.py" in book.depends()


def _books(folder: Path, only: Iterable[str]) -> list[Notebook]:
    """The notebooks to run, in order, each checked. `only` names them whole or by their number."""
    paths = {path.stem: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    if not paths:
        raise InputError(f"{folder} holds no notebooks: reproduce runs from a checkout of the repository")
    wanted = set(only)
    names = {path: {path, path.split("_")[0]} for path in paths}
    for name in wanted:
        lookup(name, {alias: None for aliases in names.values() for alias in aliases}, "notebook")
    return [notebooks.read(paths[stem]) for stem in paths if not wanted or wanted & names[stem]]


def _given(book: Notebook, profile: Profile, out: Path, settings: dict[str, str]) -> dict[str, object]:
    """What a notebook is run with. It must declare profile and out; a setting it does not declare is another's."""
    for name in ("profile", "out"):
        if name not in book.parameters:
            raise InputError(f"{book.path} must declare the parameter {name}")
    asked = {name: value for name, value in settings.items() if name in book.parameters}
    return notebooks.parameters(book, {"profile": profile.name, "out": _shown(out), **asked})


def _result_folder(out: Path) -> Path:
    """`out`, made absolute. Raises InputError where a run would write over the repository's own files."""
    out = out.resolve()
    if out == ROOT or out in ROOT.parents or any(out.is_relative_to(ROOT / name) for name in KEPT):
        raise InputError(f"{_shown(out)} belongs to the repository: give another --out, such as runs/mine")
    if out.exists() and not out.is_dir():
        raise InputError(f"{_shown(out)} is a file: give a folder as --out")
    return writable(out)


def _open_record(out: Path, profile: str) -> dict:
    """What OUT/run.json says of earlier runs, or what a first one begins with. One folder holds one profile."""
    path = out / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        was, stages, costs = record["profile"], record["stages"], record["volatile"]
        for stage in stages.values():
            stage["inputs"].keys()
            if any(map(_outside, stage["outputs"].keys())):
                raise ValueError("it names files that no notebook leaves")
        if any(float(cost["seconds_s"]) < 0 for cost in costs.values()):
            raise ValueError("nothing takes less than no time")
    except FileNotFoundError:
        was, record = profile, {"profile": profile, "stages": {}, "volatile": {}}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{_shown(path)} is damaged: remove it, and every notebook will run again") from None
    if was != profile:
        raise InputError(f"{_shown(out)} holds a run of profile {was}: give another --out for {profile}")
    return record


def _outside(name: str) -> bool:
    """Is a file's name none of those that lie in a run's folders? What a notebook leaves no more is removed by it."""
    return name.split("/")[0] not in RESULTS or ".." in name.split("/")


def _stamps(out: Path) -> dict[str, tuple[int, int]]:
    files = [path for folder in RESULTS for path in (out / folder).rglob("*") if path.is_file()]
    return {path.relative_to(out).as_posix(): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _shown(path: Path) -> str:
    """A path as a reader would type it: from the repository's root where it lies inside."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
