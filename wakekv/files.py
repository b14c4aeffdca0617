"""Files: written whole or not at all, never over what was not asked for, told apart by their sha256."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from wakekv.errors import InputError

ROOT = Path(__file__).resolve().parent.parent  # the checkout: where artifact/, figures/ and notebooks/ lie


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A hidden name beside `path` to write to. It takes the place of `path` when the block ends, and is gone if that
    fails: a reader sees the old file or the new one. What killed processes left there is cleared away."""
    path = Path(path)
    for left in path.parent.glob(f".{escape(path.name)}.*.part"):
        if not _alive(left.name.split(".")[-2]):
            left.unlink(missing_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:  # alive, and another user's
        pass
    return True


def write(path: str | Path, content: bytes | str) -> Path:
    """Write a file, text as UTF-8, all or nothing; returns its path."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
    return Path(path)


def write_json(path: str | Path, value: Any) -> Path:
    """Write `value` as JSON, all or nothing; returns the path. ValueError for numbers that JSON has not."""
    return write(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def writable(path: str | Path, n_bytes: int = 0) -> Path:
    """`path`, if files of `n_bytes` in all can be made there, or in the nearest folder above it that exists.

    To be asked before the work whose results shall lie there begins: makes nothing. InputError otherwise.
    """
    folder = Path(path).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        raise InputError(f"{path} cannot be written ({folder}: {error.strerror}): choose another place") from None
    if free < n_bytes:
        raise InputError(
            f"{path} needs up to {n_bytes / 1e6:,.0f} MB and its disk has {free / 1e6:,.0f} MB left: "
            "free some or choose another place"
        )
    return Path(path)


def refuse_taken(path: str | Path) -> Path:
    """`path`, unless something is there: then InputError."""
    if os.path.lexists(path):
        raise InputError(f"{path} exists already and is never overwritten: remove it or choose another name")
    return Path(path)


def sha256(file: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(file, "rb") as f:
        while piece := f.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def difference(folder: Path, listed: Mapping[str, Mapping], there: Collection[str]) -> tuple[str, str] | None:
    """(name, what is wrong with it) of the first file in `folder` that is not as a manifest lists it; None if all are.

    listed: {name: {"bytes": .., "sha256": ..}}. there: the names of the files that are in the folder; no other is
    opened, whatever the manifest names.
    """
    for name in [*listed, *sorted(set(there) - set(listed))]:
        file = folder / name
        if name not in listed:
            return name, "is not in the manifest"
        if name not in there or not os.path.lexists(file):
            return name, "is missing"
        if file.is_symlink() or not file.is_file():
            return name, "is a link or a folder, not a file"
        if file.stat().st_size != listed[name]["bytes"]:
            return name, f"has {file.stat().st_size:,} bytes instead of {listed[name]['bytes']:,}"
        if sha256(file) != listed[name]["sha256"]:
            return name, "does not match its sha256"
    return None


def entries(manifest: Any) -> dict[str, dict[str, Any]]:
    """What `difference` takes, out of a manifest's `files`. ValueError where an entry is not {"bytes", "sha256"}."""
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        raise ValueError("it lists no files")
    for name, entry in files.items():
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int or type(entry.get("sha256")) is not str:
            raise ValueError(f"its entry {name!r} lacks bytes or sha256")
    return files
