"""A disk that is full, or may only be read: one line, nothing half-written, and the same bytes once there is room.

The disk is a tmpfs of a few MB, and what fills it is another file on it. Mounting one needs root; without, these tests
are skipped, and say so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from malformed_logs import packed, trace
from malformed_models import COT, place
from test_kills import results
from test_reproduce import TABLE, book

from wakekv.__main__ import main
from wakekv.errors import WakeKVError
from wakekv.logs.trace import save_trace
from wakekv.recording import journal, spotcheck
from wakekv.reproduction.reproduce import reproduce

RECORD = ["record", "--model", "model", *COT, "--resume", "--out", "disk/out"]
STUDY = ["study", "x.npz", "--policies", "reactive,evict", "--budgets", "4,8", "--out", "disk/out"]


def log(folder: Path) -> None:
    save_trace(trace(), folder / "log")


# What is made beside the disk first, and the command that then writes to it.
COMMANDS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "record": (place, RECORD),
    "tables": (packed, ["tables", "x.npz", "--out", "disk/out"]),
    "study": (packed, STUDY),
    "pack": (log, ["pack", "log", "--out", "disk/out"]),
}


@dataclass
class Disk:
    path: Path
    mb: int = 8

    def mount(self, *options: str) -> None:
        argv = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={self.mb}M", *options]), "wakekv-test", str(self.path)]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no disk to fill: mount said {' '.join(done.stderr.split())!r}")

    @property
    def free(self) -> int:
        return shutil.disk_usage(self.path).free

    def leave(self, n_bytes: int) -> None:
        """Fill it up to `n_bytes`, rounded up to whole blocks."""
        with open(self.path / "ballast", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(self.free - n_bytes, 1))

    def make_room(self) -> None:
        (self.path / "ballast").unlink()


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Iterator[Disk]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spotcheck, "pieces", lambda made: [str(token) for token in made.tokens])
    monkeypatch.setattr(spotcheck, "about", lambda manifest: {})
    made = Disk(tmp_path / "disk")
    made.path.mkdir()
    made.mount()
    yield made
    subprocess.run(["umount", "--lazy", str(made.path)], check=True)


def ordinary(argv: list[str]) -> dict[str, bytes]:
    """What a command writes where there is room."""
    assert main([word.replace("disk/", "") for word in argv]) == 0
    return results(Path("."))


def written() -> dict[str, bytes]:
    """What is in its place; of a recording that is not finished, nothing is."""
    return results(Path("disk")) if Path("disk/out").exists() else {}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_command_without_room_says_so_and_ends_well_with_it(disk, command, share, tmp_path, capsys):
    make, argv = COMMANDS[command]
    make(tmp_path)
    wanted = ordinary(argv)
    disk.leave(int(share * sum(map(len, wanted.values()))))
    capsys.readouterr()
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("wakekv: error: ") and said.count("\n") == 1
    assert "disk/out" in said and "free some" in said
    assert written().items() <= wanted.items(), "what is in its place is whole"
    disk.make_room()
    assert main(argv) == 0
    assert written() == wanted
    left = [path.name for path in disk.path.rglob("*") if path.is_file() and path.name not in (".lock",)]
    assert not [name for name in left if name.endswith((".part", ".new"))]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_disk_that_fills_while_it_records_costs_no_step(disk, step, tmp_path, monkeypatch, capsys):
    """Before the second or third step, and before the log is put in order after the last."""
    place(tmp_path)
    wanted, put, finish = ordinary(RECORD), journal.Journal.put, journal.Journal.finish

    def filled(do: Callable, at: int) -> Callable:
        def then(self, *args):
            if self.n_steps == at and not (disk.path / "ballast").exists():
                disk.leave(0)
            return do(self, *args)

        return then

    monkeypatch.setattr(journal.Journal, "put", filled(put, step))
    monkeypatch.setattr(journal.Journal, "finish", filled(finish, step))
    assert main(RECORD) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "out.part: the disk is full: free some space and resume, no step is lost" in said
    assert written() == {} and (disk.path / "out.part" / "start.json").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    disk.make_room()
    assert main(RECORD) == 0
    assert written() == wanted and not (disk.path / "out.part").exists()


def test_a_run_without_room_says_so_and_goes_on(disk, tmp_path):
    book(tmp_path / "notebooks", "00_table", "from pathlib import Path", TABLE)
    out = disk.path / "out"
    disk.leave(4 << 10)
    with pytest.raises((WakeKVError, OSError), match="^[^\n]*No space left[^\n]*$"):
        reproduce("smoke", out, folder=tmp_path / "notebooks")
    assert not any(path.stat().st_size for path in out.rglob("t.csv")) and not (out / "run.json").exists()
    disk.make_room()
    reproduce("smoke", out, folder=tmp_path / "notebooks")
    assert (out / "tables" / "t.csv").read_text() == "smoke" and (out / "notebooks" / "00_table.ipynb").exists()
    assert json.loads((out / "run.json").read_text())["stages"].keys() == {"00_table"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_may_only_be_read_is_named_before_the_work_begins(disk, command, tmp_path, capsys):
    make, argv = COMMANDS[command]
    make(tmp_path)
    disk.mount("remount,ro")
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "disk/out" in said.err and "Read-only file system): choose another place" in said.err
    assert list(disk.path.iterdir()) == []


def test_logs_on_a_disk_that_may_only_be_read_are_read(disk, capsys):
    log(disk.path)
    packed(disk.path)
    disk.mount("remount,ro")
    for argv in (["verify", "disk/log"], ["verify", "disk/x.npz"]):
        assert main(argv) == 0
    for name in ("disk/log", "disk/x.npz"):
        assert main(["simulate", name, "--policy", "reactive", "--budgets", "4"]) == 0
    assert capsys.readouterr().err == ""
