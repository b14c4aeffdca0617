"""Reproduce: record what a profile needs, run the notebooks in order, and say where the results are.

A notebook is left out only if nothing it depends on has changed since it last ran to its end: its cells, parameters and
inputs, the package's files it imports, the pins, and the outputs it left. `OUT/run.json` holds those hashes.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from wakekv import notebooks, recordings
from wakekv.claims import ROOT, VERDICTS, hardware, table, write_json
from wakekv.errors import InputError, lookup
from wakekv.notebooks import Notebook
from wakekv.profiles import PROFILES, Profile

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
    given = {book.name: _given(book, chosen, out, settings or {}) for book in books}
    unknown = set(settings or {}) - {name for values in given.values() for name in values}
    if unknown:
        raise InputError(f"no notebook declares the parameter {', '.join(sorted(unknown))}")
    try:
        with FileLock(out / ".lock", timeout=0):
            say(f"profile {profile} ({chosen.about}) into {_shown(out)}, on {hardware()}")
            if any(_reads_logs(book) for book in books):
                recordings.record_all(chosen, out, say=say)
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
    say(f"{book.name}: runs, {why}")
    before, earlier = _stamps(out), record["stages"].pop(book.name, {"outputs": {}})["outputs"]
    cost = notebooks.run(book, out, given, say)
    left = sorted(path for path, stamp in _stamps(out).items() if before.get(path) != stamp)
    for name in earlier.keys() - left:
        (out / name).unlink(missing_ok=True)  # it writes this no longer
    record["stages"][book.name] = {"inputs": inputs, "outputs": {name: _sha256(out / name) for name in left}}
    finished = datetime.now(timezone.utc).isoformat(timespec="seconds")
    record["volatile"][book.name] = {**asdict(cost), "finished": finished}
    write_json(out / "run.json", record)
    say(f"{book.name}: done in {cost.seconds_s:.0f} s, at most {cost.peak_bytes / 1e9:.1f} GB")


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
    if not book.claims:  # it may tabulate what the notebooks before it found
        named |= {f"claims/{path.name}": path for path in (out / "claims").glob("*.json") if path.stem < book.name}
    parameters = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
    fixed = {"cells": book.source_sha256, "parameters": parameters, "Python": platform.python_version()}
    return fixed | book.depends() | {name: _sha256(path) for name, path in named.items() if path.exists()}


def _reads_logs(book: Notebook) -> bool:
    return "wakekv/recordings.py" in book.depends()


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
    return out


def _open_record(out: Path, profile: str) -> dict:
    """What OUT/run.json says of earlier runs, made if there is none. One folder holds one profile."""
    path = out / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        was, _, _ = record["profile"], record["stages"], record["volatile"]
    except FileNotFoundError:
        was, record = profile, {"profile": profile, "stages": {}, "volatile": {}}
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{_shown(path)} is damaged: remove it, and every notebook will run again") from None
    if was != profile:
        raise InputError(f"{_shown(out)} holds a run of profile {was}: give another --out for {profile}")
    out.mkdir(parents=True, exist_ok=True)
    return record


def _stamps(out: Path) -> dict[str, tuple[int, int]]:
    files = [path for folder in RESULTS for path in (out / folder).rglob("*") if path.is_file()]
    return {path.relative_to(out).as_posix(): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _shown(path: Path) -> str:
    """A path as a reader would type it: from the repository's root where it lies inside."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
