"""Sound: are the numbers of a log such as attention can give? Its bytes are checked elsewhere (trace.verify)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wakekv.errors import TraceError
from wakekv.logs.trace import Trace

TOLERANCE = 0.01  # of a sum of weights, which are rounded to float16 when they are logged


def check(trace: Trace, name: str = "the log") -> None:
    """TraceError that says what is amiss first in `trace`; `name` is what it is called there.

    Positions rise strictly, lie within the context of their step and are padded at the end with no weight. Weights and
    masses are numbers from 0 up and come to no more than 1, and every page row to 1 or nothing. Entropy lies between 0
    and that of an even row. Tokens count from 0; key means are finite.
    """
    for fault in _faults(trace):
        raise TraceError(f"{name}: {fault}; record it again")


def _faults(trace: Trace) -> Iterator[str]:
    context = trace.n_prompt + np.arange(trace.n_steps)
    padding = np.iinfo(trace.positions.dtype).max
    for head in range(trace.n_heads):
        position, weight = np.asarray(trace.positions[head]), np.asarray(trace.weights[head], np.float32)
        real = position != padding
        checks = {
            "positions that do not rise": real[:, 1:] & (position[:, 1:] <= position[:, :-1]),
            "positions beyond the context": real & (position >= context[:, None]),
            "a place of its largest weight beyond the context": trace.top[head] >= context,
            "weights that are negative, infinite or not numbers": ~((weight >= 0) & np.isfinite(weight)),
            "weights on padding": ~real & (weight != 0),
            "weights that come to more than 1": weight.sum(-1) > 1 + TOLERANCE,
        }
        yield from _at(checks, f"head {head}")
    masses = np.stack([trace.needle_mass, trace.sink_mass, trace.local_mass])
    pages = np.asarray(trace.prompt_pages, np.float32)
    sums = pages.sum(-1)
    checks = {
        "masses that are negative or not numbers": ~(masses >= 0).all(0),
        "masses that come to more than 1": masses.sum(0) > 1 + TOLERANCE,
        "entropy that no row of its length has": ~(
            (trace.entropy >= 0) & (trace.entropy <= np.log(context) + TOLERANCE)
        ),
        "prompt page weights that are negative or not numbers": ~(pages >= 0).all(-1),
        "prompt page weights that do not come to 1": (sums != 0) & (np.abs(sums - 1) > TOLERANCE),
        "key means that are not numbers": ~np.isfinite(trace.key_means),
    }
    yield from _at(checks, "it")
    if min(trace.tokens.min(), trace.choice.min()) < 0:
        yield "it has negative token ids"


def _at(checks: dict[str, np.ndarray], who: str) -> Iterator[str]:
    for what, bad in checks.items():
        if bad.any():
            yield f"{who} has {what}, first at {np.argwhere(bad)[0].tolist()}"
