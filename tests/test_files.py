"""A file is written whole or not at all; a place is tried before the work begins; a manifest tells what is wrong."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from wakekv.errors import InputError
from wakekv.files import ROOT, difference, entries, refuse_taken, replacing, sha256, writable, write, write_json


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_there_and_nothing_else(tmp_path):
    assert write(tmp_path / "a", "déjà vu") == tmp_path / "a"
    write(tmp_path / "a", b"\x00")
    write_json(tmp_path / "b.json", {"é": 1})
    assert (tmp_path / "a").read_bytes() == b"\x00" and (tmp_path / "b.json").read_text() == '{\n "é": 1\n}\n'
    assert names(tmp_path) == ["a", "b.json"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, error):
    write(tmp_path / "a", "old")
    with pytest.raises(type(error)), replacing(tmp_path / "a") as part:
        part.write_text("ne")
        raise error
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_a_number_that_json_has_not_leaves_what_was_there(tmp_path):
    write(tmp_path / "a", "old")
    with pytest.raises(ValueError):
        write_json(tmp_path / "a", float("nan"))
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_a_full_disk_leaves_what_was_there(tmp_path):
    """A limit on the size of files stands in for the end of the disk: the system refuses the rest of the write."""
    write(tmp_path / "a", "old")
    code = (
        "import resource, sys; from wakekv.files import write; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); write(sys.argv[1], 'x' * 5000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True)
    assert done.returncode == 1 and "File too large" in done.stderr
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_what_a_killed_process_left_is_cleared_away_and_what_a_living_one_writes_is_not(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for left in (f".a.{dead.pid}.part", f".a.{os.getppid()}.part", ".a.x.part", f".b.{dead.pid}.part"):
        (tmp_path / left).touch()
    write(tmp_path / "a", "new")
    assert names(tmp_path) == sorted([f".a.{os.getppid()}.part", f".b.{dead.pid}.part", "a"])


def test_a_place_is_tried_in_the_nearest_folder_and_nothing_is_made(tmp_path):
    assert writable(tmp_path / "not" / "yet") == tmp_path / "not" / "yet"
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="file.* cannot be written .*: choose another place"):
            writable(path)
    assert names(tmp_path) == ["file"]


def test_a_place_that_may_only_be_read_is_named():
    """Root may write whatever the modes say, so a file system that takes no files is asked."""
    with pytest.raises(InputError, match="/proc/log cannot be written"):
        writable("/proc/log")


def test_a_place_too_small_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3_000_000))
    assert writable(tmp_path / "log", 2_000_000)
    with pytest.raises(InputError, match="needs up to 5 MB and its disk has 3 MB left: free some"):
        writable(tmp_path / "log", 5_000_000)


def test_what_is_there_is_not_written_over(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="link exists already"):
        refuse_taken(tmp_path / "link")
    assert refuse_taken(tmp_path / "free") == tmp_path / "free"


@pytest.mark.parametrize("path", sorted((ROOT / "wakekv").rglob("*.py")), ids=lambda path: path.name)
def test_nothing_is_pickled(path):
    tree = ast.parse(path.read_text())
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {
        node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    assert not imported & {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    for call in calls:
        name = ast.unparse(call.func)
        assert name not in ("torch.load", "torch.save", "pd.read_pickle", "joblib.load", "joblib.dump")
        if name in ("np.load", "np.lib.format.read_array", "np.lib.format.write_array", "np.save"):
            assert ast.unparse(call).endswith("allow_pickle=False)"), ast.unparse(call)


LINK = "is a link or a folder, not a file"


@pytest.fixture
def listed(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    return {name: {"bytes": 3, "sha256": sha256(tmp_path / name)} for name in ("one", "two")}


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda p: None, None),
        (lambda p: (p / "two").write_text("tw"), ("two", "has 2 bytes instead of 3")),
        (lambda p: (p / "two").write_text("twö"[:2] + "x"), ("two", "does not match its sha256")),
        (lambda p: (p / "one").unlink(), ("one", "is missing")),
        (lambda p: (p / "six").touch(), ("six", "is not in the manifest")),
        (lambda p: ((p / "one").unlink(), (p / "one").symlink_to(p / "two")), ("one", LINK)),
        (lambda p: ((p / "one").unlink(), (p / "one").mkdir()), ("one", LINK)),
    ],
    ids=["whole", "cut", "flipped", "missing", "extra", "link", "folder"],
)  # fmt: skip
def test_files_that_are_cut_flipped_missing_or_foreign_are_told_apart(listed, tmp_path, damage, said):
    damage(tmp_path)
    assert difference(tmp_path, listed, names(tmp_path)) == said


def test_a_name_that_leads_out_of_the_folder_is_never_opened(listed, tmp_path):
    (tmp_path / "inside").mkdir()
    assert difference(tmp_path / "inside", {"../one": listed["one"]}, []) == ("../one", "is missing")


@pytest.mark.parametrize(
    "manifest", [None, [], {}, {"files": []}, {"files": {"a": 3}}, {"files": {"a": {"bytes": "3", "sha256": ""}}}]
)
def test_a_manifest_without_sizes_and_hashes_is_refused(manifest):
    with pytest.raises(ValueError, match="lists no files|lacks bytes or sha256"):
        entries(manifest)
