"""One notebook: is its source in shape, what does it depend on, and did it really run?

An exit code of 0 and a saved notebook prove little (a cell that calls sys.exit, a killed kernel): what counts is an
execution count on every code cell and the claims file that the last cell writes.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from wakekv.errors import InputError, WakeKVError, lookup
from wakekv.files import ROOT
from wakekv.reproduction.children import end_with_parent
from wakekv.reproduction.recordings import duration
from wakekv.reproduction.sources import files_of

LITERALS = (str, bool, int, float, type(None))
START_S = 300  # until a kernel must answer: its first imports can take long on a busy machine


class NotebookError(WakeKVError):
    """A notebook that ran and failed, or that only seems to have run."""


@dataclass(frozen=True)
class Notebook:
    """A source notebook. `parameters` are the declared ones with their defaults; `code` is every code cell's source."""

    path: Path
    code: tuple[str, ...]
    source_sha256: str  # of all cells, text too
    parameters: dict[str, object]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def claims(self) -> bool:
        """Does it write a claims file?"""
        return any("write_claims(" in cell for cell in self.code)

    def depends(self) -> dict[str, str]:
        """Hash of every file of the package that it imports, directly or through another."""
        return files_of(ast.parse("\n".join(self.code)))


@dataclass(frozen=True)
class Ran:
    """What a run cost: seconds, and the largest resident memory of any of its processes, in bytes."""

    seconds_s: float
    peak_bytes: int


def read(path: Path) -> Notebook:
    """The source notebook at `path`.

    Raises InputError unless it can be run from a clone: plain Python, no outputs, one parameters cell of literals.
    """
    cells = _cells(path)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    if any(cell["outputs"] or cell["execution_count"] for cell in code):
        raise InputError(f"{path} is committed with outputs: strip them (jupyter nbconvert --clear-output --inplace)")
    tags = [tag for cell in cells for tag in cell["metadata"].get("tags", [])]
    if "injected-parameters" in tags:
        raise InputError(
            f"{path} holds parameters that an earlier run injected: they would win over ours; delete that cell"
        )
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        raise InputError(f"{path} must have one code cell tagged 'parameters', and has {len(tagged)}")
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    python = tuple(text for kind, text in texts if kind == "code" and text.strip())
    for number, text in enumerate(python, 1):
        try:
            ast.parse(text)
        except SyntaxError as error:  # a shell command that fails would pass unnoticed
            raise InputError(f"{path}: code cell {number} is not plain Python: {error.msg}: {error.text}") from None
    return Notebook(
        path,
        python,
        hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        _declared(path, "".join(tagged[0]["source"])),
    )


def parameters(notebook: Notebook, given: dict[str, object]) -> dict[str, object]:
    """`given`, checked against what the notebook declares; text is read as the declared type. Raises InputError."""
    checked = {}
    for name, value in given.items():
        default = lookup(name, notebook.parameters, f"parameter of {notebook.name}")
        if isinstance(value, str) and not isinstance(default, str):
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                pass  # stays text, and is refused below
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        endless = isinstance(value, float) and not math.isfinite(value)
        if endless or (default is not None and type(value) is not type(default)):
            raise InputError(f"{notebook.name}: {name} is {type(default).__name__} ({default!r}), not {value!r}")
        checked[name] = value
    return checked


def run(
    notebook: Notebook,
    out: Path,
    given: dict[str, object],
    say: Callable[[str], None] = print,
    expected_s: float | None = None,
) -> Ran:
    """Run it by papermill into OUT/notebooks, in the repository root, with this interpreter's kernel.

    expected_s: how long it took before, for the progress lines; None: as if all cells were alike.
    Raises NotebookError, naming the cell, if any cell failed, never ran, or left no claims file; the copy that shows
    how far it came is then OUT/notebooks/<name>.failed.ipynb.
    """
    if not importlib.util.find_spec("papermill"):
        raise InputError("notebooks need papermill: pip install -r requirements.lock")
    given = parameters(notebook, given)
    out = out.absolute()
    folder, claims = out / "notebooks", out / "claims" / f"{notebook.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    claims.unlink(missing_ok=True)
    unfinished, failed = folder / f".{notebook.name}.{os.getpid()}.ipynb", folder / f"{notebook.name}.failed.ipynb"
    failed.unlink(missing_ok=True)
    for left in folder.glob(f".{notebook.name}.*.ipynb"):
        left.unlink()  # by a run that was killed
    paths = (str(path).replace("{", "{{").replace("}", "}}") for path in (notebook.path.absolute(), unfinished))
    command = [sys.executable, "-m", "papermill", *paths]  # which puts parameters into braces
    command += ["--kernel", "python3", "--language", "python", "--cwd", str(ROOT)]
    command += ["--no-progress-bar", "--request-save-on-cell-execute", "--start-timeout", str(START_S)]
    for name, value in given.items():  # -r is text as it stands; -p reads True, None and numbers back
        command += ["-r" if isinstance(value, str) else "-p", name, str(value)]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            with own_kernel(Path(scratch)) as environment, (Path(scratch) / "log").open("w+", errors="replace") as log:
                status, ran = _watch(command, environment, log, unfinished, notebook, say, expected_s)
                log.seek(0)
                trouble = _trouble(notebook, unfinished, status, log.read())
        if not trouble and notebook.claims and not claims.exists():
            trouble = f"{notebook.name} ended without writing {claims.name}"
        if trouble:
            if unfinished.exists():
                unfinished.replace(failed)
                trouble += f"; see {os.path.relpath(failed)}"
            raise NotebookError(trouble)
        _settle(unfinished)
        unfinished.replace(folder / notebook.path.name)
    finally:
        unfinished.unlink(missing_ok=True)
    return ran


@contextmanager
def own_kernel(scratch: Path) -> Iterator[dict[str, str]]:
    """Environment variables under which `python3` is this interpreter's kernel, whatever else is installed."""
    spec = scratch / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"JUPYTER_PATH": str(scratch), "JUPYTER_RUNTIME_DIR": str(scratch / "runtime"), "PYTHONPATH": paths}
    own |= {"IPYTHONDIR": str(scratch / "ipython"), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    own["SOURCE_DATE_EPOCH"] = os.environ.get("SOURCE_DATE_EPOCH", "0")  # no time of day inside a figure
    yield {**os.environ, **own}


def _watch(command, environment, log, unfinished, notebook, say, expected_s) -> tuple[int, Ran]:
    """Run `command` to its end, with a line after ten seconds and then every half minute.

    Returns exit status (negative: the signal) and cost.
    """
    start = time.monotonic()
    due, done, total = start + 10, 0, len(notebook.code)
    own = {"cwd": ROOT, "env": environment, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    process = subprocess.Popen(command, preexec_fn=end_with_parent, **own)
    try:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.2)
            if (now := time.monotonic()) > due:
                due = now + 30
                done = max(done, min(_executed(unfinished), total))  # a copy that is being written says nothing
                left = _left(now - start, done, total, expected_s)
                say(f"{notebook.name}: {duration(now - start)}, {done} of {total} cells{left}")
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        if process.returncode is None:
            process.kill()  # the kernel ends with its parent
            process.wait()
    unit = 1 if sys.platform == "darwin" else 1024
    return process.returncode, Ran(time.monotonic() - start, usage.ru_maxrss * unit)


def _left(spent_s: float, done: int, total: int, expected_s: float | None) -> str:
    """How long the rest will take, as far as one can tell."""
    if expected_s:
        rest = f"about {duration(expected_s - spent_s)} left" if expected_s > spent_s else ""
        return "; " + (rest or f"longer than the {duration(expected_s)} it took before")
    if not done or done == total:
        return "; not long now" if done else ""
    return f"; about {duration(spent_s * (total - done) / done)} left, if its cells are alike"


def _trouble(notebook: Notebook, copy: Path, status: int, log: str) -> str:
    """What went wrong, in one line; empty if every cell ran. Code cells are counted as in the source."""
    try:
        own = [cell for cell in _cells(copy) if "injected-parameters" not in cell["metadata"].get("tags", [])]
    except InputError:
        own = []
    code = [cell for cell in own if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
    for number, cell in enumerate(code, 1):
        for output in cell["outputs"]:
            if output["output_type"] == "error":
                said = " ".join(f"{output['ename']}: {output['evalue']}".split())
                return f"{notebook.name} failed in code cell {number} of {len(code)}: {said:.400}"
    unrun = next(
        (number for number, cell in enumerate(code, 1) if not cell["execution_count"]), 1 if not code else None
    )
    if status < 0 or status > 128:
        who = f"was killed by signal {-status}" if status < 0 else "lost its kernel, which was killed"
        return f"{notebook.name} {who} (out of memory?): code cell {unrun} of {len(notebook.code)} never finished"
    if status:
        return f"{notebook.name} failed: {' '.join((log.strip().splitlines() or ['no message'])[-1].split()):.400}"
    if unrun:
        return f"{notebook.name} stopped early, without an error: code cell {unrun} of {len(notebook.code)} never ran"
    return ""


def _executed(copy: Path) -> int:
    """Code cells with an execution count so far; 0 while the copy cannot be read."""
    try:
        return sum(bool(cell.get("execution_count")) for cell in _cells(copy))
    except InputError:
        return 0  # being written at this moment


def _settle(copy: Path) -> None:
    """Take times, paths and random ids out of an executed copy, so that equal results are equal bytes."""
    content = json.loads(copy.read_text(encoding="utf-8"))
    content["metadata"].pop("papermill", None)
    for number, cell in enumerate(content["cells"]):
        for volatile in ("papermill", "execution"):
            cell["metadata"].pop(volatile, None)
        if "injected-parameters" in cell["metadata"].get("tags", []):
            cell["id"] = f"injected-{number}"
    copy.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _cells(path: Path) -> list[dict]:
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return [{"metadata": {}, "outputs": [], "execution_count": None, "source": "", **cell} for cell in cells]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a notebook: {type(error).__name__}: {error}") from None


def _declared(path: Path, source: str) -> dict[str, object]:
    found = {}
    for node in ast.parse(source).body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        try:
            value = ast.literal_eval(node.value)
            assert isinstance(target, ast.Name) and isinstance(value, LITERALS)
        except (AttributeError, ValueError, AssertionError):
            raise InputError(
                f"{path}: the parameters cell may only set names to literals, not {ast.unparse(node)!r}"
            ) from None
        found[target.id] = value
    return found
