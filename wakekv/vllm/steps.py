"""One decode step on the fast tier: what every layer does with the sequences that decode in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from wakekv.vllm.tier import FastTier


@dataclass
class Step:
    """The sequences of a decode step, [i] in the order of their queries.

    names; seqs int64 [i]: their slots; blocks int32 [i, page]: where the reservoir has their pages
    closed int64 [i]: pages that are full;  newborn: the page that this step's token closes, or -1
    held   int64 [i]: slots in use;  base: the first stamp of the step;  due bool [i]: ranks in this step
    fresh  which begin to decode with this step
    open_blocks int64 [i]: where the open page is;  tokens int64 [i]: that it has, with this step's
    table  once there is one, and all layers have the same: as FastTier.table gives it
    """

    names: list[str]
    seqs: np.ndarray
    blocks: np.ndarray
    closed: np.ndarray
    newborn: np.ndarray
    held: np.ndarray
    base: np.ndarray
    due: np.ndarray
    fresh: np.ndarray
    open_blocks: np.ndarray
    tokens: np.ndarray
    table: tuple[torch.Tensor, torch.Tensor] | None = None


def plan(tier: FastTier, names: Sequence[str], positions: np.ndarray, blocks: np.ndarray) -> Step:
    """Begin a step in which these requests decode the tokens at `positions`, with block tables `blocks`."""
    settings, page, n = tier.settings, tier.settings.page, len(names)
    closed, offset = positions // page, positions % page
    newborn = np.where(offset == page - 1, closed, -1)
    seqs, held, step = (np.empty(n, np.int64) for _ in range(3))
    fresh = np.zeros(n, bool)
    for i, name in enumerate(names):
        sequence, fresh[i] = tier.begin(name, int(positions[i]))
        seqs[i], held[i], step[i] = sequence.slot, sequence.held, sequence.step
        if newborn[i] >= 0:
            sequence.closed[int(newborn[i])] = sequence.step
        sequence.step += 1
        if settings.record:
            sequence.wants.append({})
    late = tier.trims  # FlexiCache has ranked as decoding began, and ranks as a round of R steps ends
    due = ((step + late) % settings.every == 0) & (closed > 0)
    after = closed + (newborn >= 0)
    following = np.where(due | ~np.bool_(late), np.minimum(tier.budget, after), held + (newborn >= 0))
    for name, slots in zip(names, following, strict=True):
        tier.sequences[name].held = int(slots)
    tier.books["steps"] += 1
    tier.books["tokens"] += n
    return Step(
        list(names), seqs, blocks, closed, newborn, held, (step + 1) * 2 * tier.n_pages, due, fresh,
        blocks[np.arange(n), closed].astype(np.int64), offset + 1,
    )  # fmt: skip


def decode(
    tier: FastTier, step: Step, layer: int, query: torch.Tensor, attend: Callable[[torch.Tensor, torch.Tensor], None],
    scale: float,
) -> None:  # fmt: skip
    """A layer's part: query [i, head, d]; attend(table, lengths) reads the pool where the table says."""
    books, clock = tier.books, time.perf_counter
    start = clock()
    if step.fresh.any():
        _admit(tier, step, layer, query, scale)
        now = clock()
        books["admit_s"], start = books["admit_s"] + now - start, now
    tier.copy_open(layer, step.seqs, step.open_blocks)
    books["place_s"] += clock() - start
    ranks = bool(step.due.any())
    if ranks and tier.settings.timing == "exact":
        _rank(tier, step, layer, query, scale)
    start = clock()
    attend(*tier.table(step, layer))
    now = clock()
    books["attend_s"] += now - start
    if ranks and tier.settings.timing == "lagged":
        _rank(tier, step, layer, query, scale)
    start = clock()
    tier.move(layer, tier.settle(step, layer))
    books["stall_s" if tier.late else "place_s"] += clock() - start


def _admit(tier: FastTier, step: Step, layer: int, query: torch.Tensor, scale: float) -> None:
    books = tier.books
    some = np.flatnonzero(step.fresh)
    for i in some:
        n = tier.admit(step, layer, i)
        tier.move(layer, n)
        books["admitted"] += n
    if tier.trims:  # its first choice is by rank, too
        counts = np.zeros(3, np.int64)
        n = _ranked(tier, step, some, layer, query, np.full(len(some), -1), counts, scale)
        tier.move(layer, n)
        books["admitted"] += int(counts[2])
        if tier.settings.record:
            for k, i in enumerate(some):
                sequence = tier.sequences[step.names[i]]
                sequence.first[layer] = (tier.wants[k].copy(), tier.found[k].copy())


def _rank(tier: FastTier, step: Step, layer: int, query: torch.Tensor, scale: float) -> None:
    books, clock = tier.books, time.perf_counter
    start, some = clock(), np.flatnonzero(step.due)
    n = _ranked(tier, step, some, layer, query, step.newborn[some], tier.counts, scale)
    now = clock()
    tier.move(layer, n)
    books["score_s"] += now - start
    books["stall_s"] += clock() - now
    if tier.settings.record:
        for k, i in enumerate(some):
            tier.sequences[step.names[i]].wants[-1][layer] = (
                tier.wants[k].copy(), tier.found[k].copy(), tier.shares[k].copy(),
            )  # fmt: skip


def _ranked(tier, step, some, layer, query, newborn, counts, scale) -> int:
    """Rank and plan, for some of the sequences; the number of moves."""
    if len(some) == len(step.seqs):
        seqs, blocks, closed, base = step.seqs, step.blocks, step.closed, step.base + tier.n_pages
    else:
        seqs, blocks, closed, base = (x[some] for x in (step.seqs, step.blocks, step.closed, step.base + tier.n_pages))
        query = query[torch.from_numpy(some).to(query.device)]
    scored = tier.scored(layer, query, blocks, closed)
    return tier.rank(layer, seqs, blocks, closed, newborn, base, scored, counts, scale)


def reference(tier: FastTier, step: Step, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
    """Scores of all closed pages by their bounds, float32 [i, KV head, page], in plain torch: what the kernels must
    equal. -inf beyond a sequence's own pages."""
    out = torch.full((len(step.seqs), tier.n_kv, int(step.closed.max(initial=0))), -torch.inf)
    for i, n in enumerate(step.closed):
        bounds = tier.digests[layer][
            torch.from_numpy(step.blocks[i, :n].astype(np.int64))
        ].float()  # [page, head, 2, d]
        q = query[i].float().view(tier.n_kv, tier.group, 1, tier.d)
        highest = torch.maximum(
            q * bounds[:, :, 0].transpose(0, 1)[:, None], q * bounds[:, :, 1].transpose(0, 1)[:, None]
        )
        out[i, :, :n] = highest.sum(-1).amax(1) * scale
    return out
