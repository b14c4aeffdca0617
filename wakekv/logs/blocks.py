"""Logs larger than memory: a few heads at a time, straight from disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from wakekv.logs.demand import Demand, demand
from wakekv.logs.shipped import open_log
from wakekv.logs.trace import Trace, open_trace
from wakekv.policies import Policy
from wakekv.simulation.replay import Curves
from wakekv.simulation.simulate import curves, streamed, streams

READS = 1 << 22  # logged weights of a block, about: a quarter of a gigabyte while they become wants


def blocks(path: Path | str, reads: int = READS, **options) -> Iterator[Demand]:
    """The wants of the log at `path` in blocks of whole KV heads, in order; a shipped log is one block, whole.

    Without prompt rows and key means, which take longer to read than a long prompt's wants. The log is opened anew for
    each block, so that what was mapped of it leaves memory again.
    options: as for `demand` (unit, first_touch, page_tokens, k). Raises what `open_log` and `demand` raise.
    """
    log = open_log(path)
    if not isinstance(log, Trace):
        yield demand(log, **options)
        return
    at_once = max(1, reads // (log.group * log.n_steps * log.k))
    for first in range(0, log.n_kv_heads, at_once):
        yield _block(open_trace(path), first, min(first + at_once, log.n_kv_heads), options)


def simulate(path: Path | str, policy: Policy, budgets=None, convention: str = "batch", **options) -> Curves:
    """`curves` of the log at `path`, in the memory of one block where the policy allows it (Policy.alone): equal but
    for the last bits of sums of weights. Raises what `blocks` and `curves` raise."""
    if convention == "batch" and streams(policy):
        return streamed(blocks(path, **options), policy, budgets)
    return curves(demand(open_log(path), **options), policy, budgets, convention)


def _block(log: Trace, first: int, stop: int, options: dict) -> Demand:
    """The wants of KV heads first..stop-1 alone."""
    heads = slice(first * log.group, stop * log.group)
    one_layer = log.manifest | {"model": log.manifest["model"] | {"n_layers": 1}}  # the layers follow below
    reads = {name: getattr(log, name)[heads] for name in ("positions", "weights")}
    none = {"prompt_pages": log.prompt_pages[heads, :0], "key_means": log.key_means[first:stop, :, :0]}
    wants = demand(replace(log, manifest=one_layer, **reads, **none), **options)
    layer = log.layer[heads][:: log.group if wants.unit == "kv_head" else 1]
    return replace(wants, layer=layer.astype(wants.layer.dtype), prompt_rows=None, key_means=None)
