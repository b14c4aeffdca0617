"""The same work for many logs, in several processes: the results are those of one, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from wakekv.logs.trace import Trace, open_trace


def spread(task: Callable[[Any], Any], items: Iterable[Any], workers: int = 1) -> list[Any]:
    """[task(item) for item in items], `workers` at a time. With more than one, task and items are sent to processes
    that begin anew: give logs as `source` has them."""
    items = list(items)
    if min(workers, len(items)) <= 1:
        return [task(item) for item in items]
    with ProcessPoolExecutor(min(workers, len(items)), mp_context=get_context("spawn")) as pool:
        return list(pool.map(task, items))


def source(trace: Trace) -> Trace | Path:
    """The folder of a trace that `open_trace` mapped, to be sent in its place; the trace itself if it is in memory."""
    mapped = isinstance(trace, Trace) and isinstance(trace.positions, np.memmap)
    return Path(trace.positions.filename).parent if mapped else trace


def opened(log: Trace | Path | str) -> Trace:
    """The trace itself, or the one in a folder."""
    return open_trace(log) if isinstance(log, Path | str) else log
