"""Logs wherever they lie: paths of this machine, and whatever fsspec reads (s3://, gs://, memory://)."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wakekv.errors import InputError, TraceError, WakeKVError
from wakekv.files import sha256
from wakekv.logs import trace
from wakekv.logs.shipped import AGAIN, BROKEN, SUFFIX
from wakekv.logs.sound import stated
from wakekv.recording.fetch import cache


@dataclass(frozen=True)
class Place:
    """A log, by where it lies and what it is: sha256 of its manifest, which names the sha256 of all else, or of the
    file, for a shipped one."""

    url: str
    sha256: str
    manifest: dict[str, Any] = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2].removesuffix(SUFFIX)


def find(urls: Iterable[str]) -> list[Place]:
    """The logs at some paths or URLs: each a log, a pattern with * in it, or a folder of logs. Each log once, in an
    order that does not depend on that of `urls`; of a log that is there whole and shipped, the whole one.

    Raises InputError where no log lies, or a URL's protocol is unknown or takes a package that is missing; TraceError
    for a log whose manifest is damaged.
    """
    found = {}
    for url in urls:
        files, root = _store(url)
        try:
            names = [root] if files.exists(root) else files.glob(root.rstrip("/"))
            here = [place for path in names for place in _logs(files, path.rstrip("/"))]
        except (WakeKVError, OSError):
            raise
        except Exception as error:  # a store's own client raises what it likes
            raise InputError(f"{url} cannot be read ({_line(error)}): name logs here, or mend the URL") from None
        if not here:
            raise InputError(f"no log at {url}: name one, or a folder of them")
        found.update({place.sha256: place for place in here})
    whole = [place for place in found.values() if str(place.manifest.get("log_sha256")) not in found]
    return sorted(whole, key=lambda place: (place.name, place.sha256))


def _store(url: str) -> tuple:
    """(the fsspec file system of a path or URL, its path there)."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(str(url))
    except Exception as error:  # ImportError, ValueError, or what a store's own client raises
        raise InputError(
            f"{url} cannot be read ({_line(error)}): name logs here, or in a store that fsspec has"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _logs(files, path: str) -> list[Place]:
    """The log at `path`, or those in that folder."""
    if not files.isdir(path):
        return [_place(files, path)] if path.endswith(SUFFIX) else []
    if _is_log(files, path):
        return [_place(files, path)]
    inside = [one.rstrip("/") for one in files.ls(path, detail=False)]
    return [_place(files, one) for one in inside if one.endswith(SUFFIX) or _is_log(files, one)]


def _is_log(files, path: str) -> bool:
    if not files.exists(f"{path}/manifest.json"):
        return False
    manifest = _manifest(files, path)
    return isinstance(manifest, dict) and manifest.get("format") == trace.FORMAT


def _manifest(files, path: str) -> Any:
    try:
        return json.loads(files.cat_file(f"{path}/manifest.json"))
    except (ValueError, RecursionError, OSError) as error:
        raise TraceError(f"{path}: manifest.json is not JSON ({error}); record it again") from None


def _place(files, path: str) -> Place:
    url = path if _is_here(files) else files.unstrip_protocol(path)
    if not path.endswith(SUFFIX):
        manifest = _manifest(files, path)
        try:
            _checked(manifest)
            if type(manifest.get("sha256")) is not str:
                raise ValueError("it lacks its own sha256")
        except BROKEN as error:
            raise TraceError(f"{url}: manifest.json lacks or garbles an entry ({error!r}); record it again") from None
        return Place(url, manifest["sha256"], manifest)
    try:
        content = files.cat_file(path)
        with zipfile.ZipFile(io.BytesIO(content)) as held:
            manifest = json.loads(held.read("manifest.json"))
        return Place(url, hashlib.sha256(content).hexdigest(), _checked(manifest))
    except (*BROKEN, zipfile.BadZipFile, zlib.error) as error:
        raise TraceError(f"{url} is damaged or no shipped log ({_line(error)}): {AGAIN}") from None


def _checked(manifest: Any) -> dict[str, Any]:
    """A manifest that says what a study groups logs by. One of BROKEN otherwise."""
    trace.layout(manifest)
    stated(manifest)
    return manifest


def _is_here(files) -> bool:
    return "file" in ((files.protocol,) if isinstance(files.protocol, str) else files.protocol)


@functools.cache
def local(url: str, expected: str) -> Path:
    """A log as files of this machine, compared with its sha256: where it lies, or a copy in the cache of fetched files.

    Raises TraceError for one that is damaged or is not the one expected.
    """
    files, root = _store(url)
    if _is_here(files):
        _check(Path(root), expected)
        return Path(root)
    kept = cache() / "logs" / (expected + SUFFIX * root.endswith(SUFFIX))
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            part = Path(folder) / kept.name
            files.get(root, str(part), recursive=True)
            _check(part, expected)
            try:
                os.rename(part, kept)
            except OSError:  # another process was faster
                if not kept.exists():
                    raise
    return kept


def _check(path: Path, expected: str) -> None:
    if path.suffix == SUFFIX and path.is_file():
        found = sha256(path)
    else:
        trace.verify(path)
        found = trace.read_manifest(path)["sha256"]
    if found != expected:
        raise TraceError(f"{path} has changed since the study began: start it again")
