"""What the repository shows of the reference run, byte for byte: a manifest of the shipped files, and its check."""

from __future__ import annotations

import json
from pathlib import Path

from wakekv.claims import ROOT
from wakekv.errors import InputError, WakeKVError
from wakekv.files import sha256, write_json

SHOWN = ("artifact", "figures")  # folders whose every file is shipped
MANIFEST = "artifact/manifest.json"
AGAIN = "python -m wakekv document writes the manifest anew"


class ArtifactError(WakeKVError):
    """A shipped file that is not what the manifest says."""


def shipped(root: Path = ROOT) -> dict[str, Path]:
    """Every shipped file by its name from the root, in order; the manifest itself is not among them."""
    paths = sorted(path for folder in SHOWN for path in (root / folder).rglob("*") if path.is_file())
    named = {path.relative_to(root).as_posix(): path for path in paths if not path.name.startswith(".")}
    return {name: path for name, path in named.items() if name != MANIFEST and "__pycache__" not in name}


def write_manifest(root: Path = ROOT) -> Path:
    """artifact/manifest.json: size in bytes and sha256 of every shipped file."""
    files = {name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for name, path in shipped(root).items()}
    write_json(root / MANIFEST, {"files": files})
    return root / MANIFEST


def check(root: Path = ROOT) -> int:
    """How many shipped files there are, each as the manifest says.

    Raises ArtifactError naming the first that is missing, changed or not in it; InputError without a manifest.
    """
    path = root / MANIFEST
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        raise InputError(f"{MANIFEST} is missing: shipped files are checked in a checkout; {AGAIN}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{MANIFEST} is damaged ({error}): git checkout {MANIFEST} brings it back") from None
    there = shipped(root)
    for name in sorted(listed.keys() | there.keys()):
        if name not in there:
            raise ArtifactError(f"{name} is missing: git checkout {name} brings it back")
        if name not in listed:
            raise ArtifactError(f"{name} is not in {MANIFEST}: remove it, or, if it is meant to be shipped, {AGAIN}")
        size = there[name].stat().st_size
        if size != listed[name]["bytes"]:
            raise ArtifactError(f"{name} has {size} bytes, not {listed[name]['bytes']}: {_back(name)}")
        if sha256(there[name]) != listed[name]["sha256"]:
            raise ArtifactError(f"{name} is not what was shipped: its sha256 differs; {_back(name)}")
    return len(listed)


def _back(name: str) -> str:
    return f"git checkout {name} brings it back; if it was changed on purpose, {AGAIN}"
