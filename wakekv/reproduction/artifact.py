"""What the repository shows of the reference run, byte for byte: a manifest of the shipped files, and its check."""

from __future__ import annotations

import json
from pathlib import Path

from wakekv.errors import InputError, WakeKVError
from wakekv.files import ROOT, difference, entries, sha256, write_json

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
        listed = entries(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(f"{MANIFEST} is missing: shipped files are checked in a checkout; {AGAIN}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ArtifactError(f"{MANIFEST} is damaged ({error}): git checkout {MANIFEST} brings it back") from None
    if found := difference(root, listed, shipped(root)):
        name, what = found
        way = f"git checkout {name} brings it back" if name in listed else "remove it"
        raise ArtifactError(f"{name} {what}: {way}; if that is meant to be, {AGAIN}")
    return len(listed)
