"""Processes that a run begins: none outlives it, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def one_thread() -> None:
    """For a worker that has not yet loaded torch: one thread, so that workers share the cores and sums come out the
    same; and it ends with its run."""
    os.environ["OMP_NUM_THREADS"] = "1"
    end_with_parent()


def end_with_parent() -> None:
    """Be killed when the process that began this one is, so that nothing writes beside the next run. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
