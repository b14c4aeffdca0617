"""The books of a cache: what was wanted, missed and moved, and how long the model waited for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Books:
    """Sums over KV heads, sequences and steps since the cache was made or reset.

    n_steps         decode steps;  n_wants: pages wanted;  misses: those known and not resident as the step began
    fetched         pages brought from the slow tier for a want or a trim;  fetched_bytes: their bytes
    stall_steps     steps that waited for a fetch;  stall_s: how long, reading and placing, in seconds
    score_s         seconds of ranking pages;  attend_s: of attention;  settle_s: of the policy and the trim
    admitted_bytes  moved into the fast tier as decoding began
    passes_bytes    read from the slow tier by passes of many tokens (prefill in chunks), which see every page
    """

    device: torch.device | None = field(default=None, repr=False)
    n_steps: int = 0
    n_wants: int = 0
    misses: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    stall_steps: int = 0
    stall_s: float = 0.0
    score_s: float = 0.0
    attend_s: float = 0.0
    settle_s: float = 0.0
    admitted_bytes: int = 0
    passes_bytes: int = 0

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Adds the seconds that the block takes to `name`; on a GPU, those until it has finished."""
        start = self._now()
        yield
        setattr(self, name, getattr(self, name) + self._now() - start)

    def _now(self) -> float:
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
