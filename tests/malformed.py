"""Malformed inputs as a table: what each is, where it is put, and what must be said of it.

A case is made in an empty folder, which is the working directory while it runs. `argv` goes to the command line, in
this process; a `call` is a public function, where an error of ours takes the place of an exit status.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from wakekv.__main__ import main
from wakekv.errors import WakeKVError


@dataclass(frozen=True)
class Case:
    """where: the command, or the function. input: what is malformed, in words. names, way: what the message must hold:
    the input by its name, and the way out."""

    where: str
    input: str
    names: str
    way: str
    argv: tuple[str, ...] = ()
    call: Callable[[], object] | None = None
    make: Callable[[Path], object] | None = None


@dataclass(frozen=True)
class Told:
    """What came of a case: exit status (of a function, the kind of error), what was printed, and files that changed."""

    status: str
    out: str
    err: str
    changed: tuple[str, ...]

    @property
    def message(self) -> str:
        return self.err.removeprefix("wakekv: error: ").removesuffix("\n")


def settled(message: str) -> str:
    """A message without what moves with versions: other libraries' words, which stand in brackets, lists of what is
    known, and sizes of packed files."""
    message = re.sub(r" \(.*\)", " (...)", message)
    message = re.sub(r"(did you mean|known:|known ones are) .*", r"\1 ...", message)
    return re.sub(r"[\d,]+ bytes instead of [\d,]+", "n bytes instead of m", message)


def told(case: Case, folder: Path) -> Told:
    """Run a case whose input lies in `folder`, the working directory."""
    before = dict(snapshot(folder))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = str(main(list(case.argv)) if case.call is None else case.call())
        except SystemExit as stopped:  # argparse
            status = str(stopped.code)
        except WakeKVError as error:
            if case.call is None:
                raise
            status = type(error).__name__
            err.write(f"{error}\n")
    after = dict(snapshot(folder))
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    said = err.getvalue().replace(f"{folder}/", "").replace(str(folder), ".")
    return Told(status, out.getvalue(), said, tuple(changed))


def snapshot(folder: Path) -> Iterator[tuple[str, object]]:
    """Every file and folder below, with its bytes."""
    for path in sorted(folder.rglob("*")):
        yield path.relative_to(folder).as_posix(), path.read_bytes() if path.is_file() else path.is_symlink()
