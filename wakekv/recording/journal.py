"""The journal of a recording in progress: fixed-size records in `OUT.part`, appended a step at a time, never rewritten.

A killed process loses at most the step in hand; a machine that loses power, at most the last second. When the recording
is done the records are turned head-major, block by block, the manifest is written, and the directory gets its name.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from wakekv.errors import InputError, TraceError
from wakekv.files import refuse_taken, writable
from wakekv.logs.trace import layout, publish, write_array, write_manifest

BLOCK_BYTES = 32 << 20  # how much of an array is in memory while it is turned head-major
FILES = ("start.json", "steps.bin", "lock")
LOGGED = ("positions", "weights", "top", "needle_mass", "sink_mass", "local_mass", "entropy")


def part_of(out: Path) -> Path:
    """Where a recording to `out` is kept until it is finished."""
    return out.with_name(f"{out.name}.part")


class Journal:
    """Records of one recording. `n_stored` of them were there when it was opened.

    head: the part of the manifest that is known before the first step. A journal begun under another one is not
    resumed (TraceError). InputError if `out` is taken or cannot be made, if a journal is there and `resume` is not set,
    if another process writes it, or if the disk cannot hold the log.
    """

    def __init__(self, out: Path, head: dict[str, Any], resume: bool) -> None:
        self.out, self.part, self.head = refuse_taken(out), part_of(out), json.loads(json.dumps(head))
        sizes = layout(self.head)
        fields = [("choice", "<i4", ()), ("emitted", "<i4", ())]
        fields += [(name, sizes[name][0], (sizes[name][1][0], *sizes[name][1][2:])) for name in LOGGED]
        self.record = np.dtype([*fields, ("crc", "<u4", ())])
        if self.part.exists() and not resume:
            raise InputError(f"{self.part} holds an unfinished recording: resume it, or remove it to begin anew")
        n_bytes = sum(dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for dtype, shape in sizes.values())
        steps = self.part / "steps.bin"
        left = self.head["n_steps"] * self.record.itemsize - (steps.stat().st_size if steps.exists() else 0)
        writable(out, n_bytes + left + (1 << 20))
        self.part.mkdir(parents=True, exist_ok=resume)
        self._lock = FileLock(self.part / "lock", timeout=0)  # held until `close`, or until this process ends
        try:
            self._lock.acquire()
            self.n_stored = self.n_steps = self._stored()
            with self._on_disk():
                self._begin()
                self._fd = os.open(steps, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
                os.ftruncate(self._fd, self.n_stored * self.record.itemsize)
        except Timeout:
            raise InputError(f"{self.part}: another process records there: wait for it, or name another log") from None
        except BaseException:
            self._release()
            raise
        self._synced = time.monotonic()

    def put(self, step: int, choice: int, emitted: int, logged: dict[str, np.ndarray]) -> None:
        """Append step `step`, or, where it is stored already, check that the repetition gave the same bytes."""
        record = np.zeros((), self.record)
        record["choice"], record["emitted"] = choice, emitted
        for name in LOGGED:
            record[name] = logged[name]
        record["crc"] = zlib.crc32(record.tobytes())
        data = record.tobytes()
        if step < self.n_stored:
            if data != os.pread(self._fd, len(data), step * len(data)):
                raise TraceError(
                    f"{self.part}: repeating step {step} gave other numbers than are stored, so the machine, the "
                    "threads or the versions differ from when it began: resume there, or remove it and record anew"
                )
            return
        with self._on_disk():
            if os.fstat(self._fd).st_size != step * len(data):
                raise TraceError(f"{self.part}: another process records to the same directory; stop one of the two")
            if os.write(self._fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if time.monotonic() - self._synced > 1:
                os.fsync(self._fd)
                self._synced = time.monotonic()
        self.n_steps = step + 1

    def emitted(self, step: int) -> int | None:
        """The token that a stored step emitted; None for a step that is not stored."""
        if step >= self.n_stored:
            return None
        at = step * self.record.itemsize + self.record.fields["emitted"][1]
        return int(np.frombuffer(os.pread(self._fd, 4, at), "<i4")[0])

    def column(self, name: str) -> np.ndarray:
        """One small field of every record, e.g. "emitted": int32 [step]."""
        return np.array(self._records()[name])

    def finish(self, manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
        """Turn the records head-major, add the other `arrays` and the manifest, and give the directory its name."""
        with self._on_disk():
            for name, (dtype, shape) in layout(manifest).items():
                blocks = self._head_major(name) if name in LOGGED else iter([arrays[name]])
                write_array(self.part, name, blocks, dtype, shape)
            write_manifest(self.part, manifest)
            return publish(self.part, self.out, drop=FILES)

    def close(self) -> None:
        """Let go of the journal; of one without a step nothing is left."""
        os.close(self._fd)
        self._release()
        if not self.n_steps:
            shutil.rmtree(self.part, ignore_errors=True)

    def _release(self) -> None:
        (self.part / "lock").unlink(missing_ok=True)
        self._lock.release(force=True)

    def _records(self) -> np.ndarray:
        return np.memmap(self.part / "steps.bin", self.record, "r")

    def _head_major(self, name: str) -> Iterator[np.ndarray]:
        records = self._records()
        n_heads = records[name].shape[1]
        n = max(1, BLOCK_BYTES // (records[name].nbytes // n_heads))
        for first in range(0, n_heads, n):
            yield np.ascontiguousarray(records[name][:, first : first + n].swapaxes(0, 1))

    def _begin(self) -> None:
        start = self.part / "start.json"
        if start.exists():
            return
        with open(start.with_suffix(".new"), "w", encoding="utf-8") as file:
            json.dump(self.head, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(start.with_suffix(".new"), start)

    def _stored(self) -> int:
        """Whole records in the journal, up to the first that a power cut garbled. TraceError if begun otherwise."""
        if not (self.part / "start.json").exists():
            return 0  # killed before it had begun
        try:
            begun = json.loads((self.part / "start.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise TraceError(f"{self.part}: start.json is damaged ({error}): remove the folder to begin anew") from None
        difference = _difference(begun, self.head)
        if difference:
            raise TraceError(
                f"{self.part} was begun with another {difference}: repeat that, or remove it to begin anew"
            )
        if not (self.part / "steps.bin").exists():
            return 0
        size, n = self.record.itemsize, 0
        with open(self.part / "steps.bin", "rb") as file:
            while len(data := file.read(size)) == size:
                record = np.frombuffer(data, self.record)[0].copy()
                crc, record["crc"] = int(record["crc"]), 0
                if zlib.crc32(record.tobytes()) != crc:
                    break
                n += 1
        return n

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "the disk is full: free some space" if full else f"{error.strerror}: mend that"
            raise TraceError(f"{self.part}: {why} and resume, no step is lost") from None


def _difference(then: Any, now: Any, name: str = "") -> str | None:
    """The first entry in which two JSON values differ, as "name (a then, b now)"; None if they are equal."""
    if then == now:
        return None
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*then, *now]:
            found = _difference(then.get(key), now.get(key), f"{name}.{key}".lstrip("."))
            if found:
                return found
    return f"{name} ({str(then)[:80]} then, {str(now)[:80]} now)"
