"""Sound: are the numbers of a log such as attention can give, and does its manifest say what it is? Its bytes are
checked elsewhere (trace.verify)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wakekv.errors import TraceError
from wakekv.logs.trace import PAGE, Trace, open_trace

TOLERANCE = 0.01  # of a sum of weights, which are rounded to float16 when they are logged
SAID = {  # of what a manifest says beside sizes: where it stands, and of which kind it is
    "model.name": str, "model.dtype": str, "model.source": dict, "model.windows": list, "prompt.regime": str,
    "prompt.seed": int, "prompt.params": dict, "text.mode": str, "device": str, "repetition.flagged": bool,
}  # fmt: skip


def check(trace: Trace, name: str = "the log") -> None:
    """TraceError that says what is amiss first in `trace`; `name` is what it is called there.

    Positions rise strictly, lie within the context of their step and are padded at the end with no weight. Weights and
    masses are numbers from 0 up and come to no more than 1, and every page row to 1 or nothing. Entropy lies between 0
    and that of an even row. Tokens count from 0; key means are finite.
    """
    for fault in _faults(trace):
        raise TraceError(f"{name}: {fault}; record it again")


def stated(manifest: Mapping[str, Any]) -> None:
    """ValueError that names the first entry of a manifest, beside its sizes, that is missing or of another kind."""
    for name, kind in SAID.items():
        here: Any = manifest
        for step in name.split("."):
            here = here.get(step) if isinstance(here, Mapping) else None
        if type(here) is not kind:
            raise ValueError(f"{name} is {here!r:.40}, not of type {kind.__name__}")
    model, params = manifest["model"], manifest["prompt"]["params"]
    windows, depths = model["windows"], params.get("depths") or []
    if len(windows) != model["n_layers"] or any(type(one) is not int for one in windows if one is not None):
        raise ValueError(f"model.windows is {windows!r:.40}, not a number or null for each of the layers")
    if not isinstance(depths, list) or any(type(one) not in (int, float) for one in depths):
        raise ValueError(f"prompt.params.depths is {depths!r:.40}, not a list of numbers")


def open_whole(path: str | Path) -> Trace:
    """The trace in directory `path`, as `open_trace` has it; TraceError, too, where its manifest does not say what the
    log is of."""
    trace = open_trace(path)
    try:
        stated(trace.manifest)
    except ValueError as error:
        raise TraceError(f"{path}: manifest.json lacks or garbles an entry ({error}); record it again") from None
    return trace


def of_pages(counts: np.ndarray, page: np.ndarray, created: np.ndarray, n_prompt: int) -> str:
    """What is amiss with a log at page level, if anything: pages that are not there as their tokens come, and wants,
    counts [head, step] of them, of a page before that, or twice in a step, for which no compiled loop has room."""
    if not np.array_equal(created, np.maximum(np.arange(len(created)) * PAGE - (n_prompt - 1), -1)):
        return "its pages are not there as their tokens come"
    at = 0
    for head, wanted in enumerate(counts):
        own = page[at : at + int(wanted.sum())]
        at, step = at + len(own), np.repeat(np.arange(len(wanted)), wanted)
        if (created[own] > step).any():
            return f"head {head} wants a page before it is there"
        seen = np.zeros((len(wanted), len(created)), bool)
        seen[step, own] = True
        if seen.sum() < len(own):
            return f"head {head} wants a page twice in a step"
    return ""


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
