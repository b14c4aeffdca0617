"""The fast tier of an engine: a pool of B pages a KV head, digests of every page, tables, and the books.

The engine's own cache is the reservoir: its block tables say where each page's exact bytes lie, and it lies outside the
fast tier (cpu.py, cuda.py). Nothing here depends on the engine; backend.py brings the two together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from wakekv.errors import CacheError, InputError
from wakekv.logs.demand import Demand
from wakekv.vllm import kernels, scoring
from wakekv.vllm.settings import Settings

if TYPE_CHECKING:
    from wakekv.vllm.steps import Step

NOTHING = np.zeros((0, 0, 0), np.float32)


BOOKS = {  # sums over sequences, layers and KV heads since they were last taken
    "steps": "decode steps, of the engine",
    "tokens": "of sequences",
    "score_s": "seconds of ranking",
    "stall_s": "seconds in which a step waited for pages",
    "attend_s": "seconds of attention",
    "place_s": "seconds of open and closed pages",
    "admitted": "pages moved in as decoding began",
    "admit_s": "how long that took",
    "preempted": "requests that lost their place and begin anew",
}


@dataclass
class Sequence:
    """A request that decodes. slot: its place in the tables; prompt_pages: closed as decoding began; step: decode steps
    begun; held: slots in use as the next step begins. With a record: pages closed by step, wants by step and layer."""

    name: str
    slot: int
    prompt_pages: int
    step: int = 0
    held: int = 0
    closed: dict[int, int] = field(default_factory=dict)
    first: dict[int, np.ndarray] = field(default_factory=dict)
    wants: list[dict[int, tuple]] = field(default_factory=list)


class FastTier:
    """layers  the engine's cache, [block, KV head, page, 2 d] of each layer: the reservoir
    n_heads query heads;  n_sequences: that decode at a time, at most;  n_tokens: of a sequence, at most
    digests of pages that are in the reservoir already, from another tier on the same layers
    """

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)

    def __init__(
        self, settings: Settings, layers: dict[str, torch.Tensor], n_heads: int, n_sequences: int, n_tokens: int,
        digests: torch.Tensor | None = None,
    ):  # fmt: skip
        self.settings, self.names = settings, {name: i for i, name in enumerate(layers)}
        first = next(iter(layers.values()))
        blocks, self.n_kv, page, double = first.shape
        self.d, self.group, self.dtype = double // 2, n_heads // self.n_kv, first.dtype
        if page != settings.page:
            raise InputError(
                f"the engine's blocks have {page} tokens, the settings' pages {settings.page}: make them equal"
            )
        if self.dtype not in self.dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            raise InputError(f"a cache of {self.dtype} has no kernels here: run the engine in {names}")
        n_layers, self.n_pages = len(layers), -(-n_tokens // page)
        self.budget = min(settings.budget, self.n_pages)
        slots = self.n_slots = min(settings.n_slots, self.n_pages + 1) if self.trims else self.budget
        self.dense = np.zeros((n_layers, self.n_kv), bool)
        if settings.profile:
            if max(settings.profile) >= self.dense.size:
                raise InputError(
                    f"the profile names KV head {max(settings.profile)} and this model has {self.dense.size}: "
                    "calibrate on it"
                )
            self.dense.flat[list(settings.profile)] = True
        self.device, self.reversible = first.device, settings.policy.reversible
        self.reservoirs = [self.words(x, blocks * self.n_kv) for x in layers.values()]
        shape = n_layers, blocks, self.n_kv, 2, self.d
        fresh = digests is None
        self.digests = torch.zeros(shape, dtype=self.dtype, device=self.device) if fresh else digests
        self.where = np.full((n_layers, n_sequences * self.n_kv, self.n_pages + 1), -1, np.int32)
        self.found = np.zeros((n_sequences, self.n_kv), np.int64)
        self.n_wants = min(settings.n_wants, self.n_pages)
        self.wants = np.zeros((n_sequences, self.n_kv, self.n_wants), np.int32)
        shared = settings.record or settings.least or settings.mode == "pooled"
        self.shares = np.zeros((n_sequences, self.n_kv, self.n_wants if shared else 0), np.float32)
        self.moves = np.zeros((n_sequences * self.n_kv * max(slots + 1, self.n_pages + 1), 5), np.int64)
        self.counts = np.zeros(3, np.int64)
        self.furnish(n_sequences)
        self.pool_words = [self.words(x, len(x)) for x in self.pools]
        self.page_bytes = self.pool_words[0].shape[1] * 8
        self.books, self.free, self.sequences = Counter(), list(range(n_sequences))[::-1], {}
        self.finished: dict[str, Sequence] = {}

    def furnish(self, n_sequences: int) -> None:
        """Pools, and tables of what is in them."""
        width = np.where(self.dense, self.n_pages, self.n_slots) + 1  # places of a row: its slots and the open page
        ends = np.cumsum(np.tile(width, (1, n_sequences)), axis=1)
        self.open_at, self.first = ends - 1, ends - np.tile(width, (1, n_sequences))
        self.pools = [self.pages(int(n)) for n in ends[:, -1]]
        self.page_of = np.full((*ends.shape, self.n_slots), -1, np.int32)
        self.stamp = np.full(self.page_of.shape, -1, np.int64)

    def pages(self, n: int) -> torch.Tensor:
        """Room for n pages on the fast tier."""
        return torch.zeros(n, *self.page_shape, dtype=self.dtype, device=self.device)

    late = False  # do pages that were wanted come only as the step ends, with those that closed?

    @property
    def trims(self) -> bool:
        """FlexiCache's rule rather than recency's."""
        return self.settings.mode == "flexicache"

    def begin(self, name: str, position: int) -> tuple[Sequence, bool]:
        """The sequence of a request that decodes the token at `position`, and whether that is its first."""
        sequence = self.sequences.get(name)
        if sequence is not None:
            return sequence, False
        if not self.free:
            raise CacheError("more requests decode at a time than the engine said it would take")
        sequence = self.sequences[name] = Sequence(name, self.free.pop(), position // self.settings.page)
        sequence.held = min(self.budget, sequence.prompt_pages)
        return sequence, True

    def release(self, names) -> None:
        """These requests have ended, were cancelled or are preempted: their pages on the fast tier are free."""
        for name in names:
            sequence = self.sequences.pop(name, None)
            if sequence is None:
                continue
            self.free.append(sequence.slot)
            self.vacate(slice(sequence.slot * self.n_kv, (sequence.slot + 1) * self.n_kv))
            if self.settings.record:
                self.finished[name] = sequence

    def vacate(self, rows: slice) -> None:
        """These rows have no pages any more."""
        self.page_of[:, rows], self.stamp[:, rows], self.where[:, rows] = -1, -1, -1

    def admit(self, step: Step, layer: int, i: int) -> int:
        """Decoding begins for the i-th sequence of a step: the number of `moves` that fill its rows."""
        return kernels.admit(
            layer, step.seqs[i], step.blocks[i], step.closed[i], step.held[i], self.dense[layer],
            self.page_of, self.stamp, self.where, self.moves,
        )  # fmt: skip

    def rank(self, layer: int, seqs, blocks, closed, newborn, base, scored: tuple, counts, scale: float) -> int:
        """Rank the pages of some sequences, as kernels.rank; the number of `moves`."""
        return kernels.rank(
            layer, seqs, blocks, closed, newborn, base, *scored, self.n_wants, self.settings.least, self.budget,
            self.reversible, self.trims, self.dense[layer], self.page_of, self.stamp, self.where, scale,
            self.wants, self.found, self.shares, self.moves, counts,
        )  # fmt: skip

    def table(self, step: Step, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where attention finds the pages of each row, int32 [i * KV heads, place] with the open page last, and how
        many tokens it sees, int32 [i * KV heads] on the host; the same object where they are the same in all layers."""
        if step.table is None or self.dense.any():
            out = np.zeros((len(step.seqs) * self.n_kv, self.n_slots + 1), np.int32)
            kernels.tables(
                layer,
                step.seqs,
                step.held,
                self.dense[layer],
                self.first[layer],
                self.open_at[layer],
                self.page_of,
                out,
            )
            lengths = np.repeat(step.held * self.settings.page + step.tokens, self.n_kv).astype(np.int32)
            lengths = torch.from_numpy(lengths) if step.table is None else step.table[1]
            step.table = torch.from_numpy(out).to(self.device), lengths
        return step.table

    def settle(self, step: Step, layer: int) -> int:
        """A layer's part of the step is over: the number of `moves` by which pages that closed stay."""
        some = np.flatnonzero(step.newborn >= 0)
        if not len(some):
            return 0
        return kernels.close(
            layer, step.seqs[some], step.newborn[some], step.held[some], step.base[some], self.trims,
            self.dense[layer], self.page_of, self.stamp, self.where, self.moves,
        )  # fmt: skip

    def take_books(self) -> dict[str, float]:
        """BOOKS, which start again from nothing, and pages wanted, missed, fetched, and the bytes that moved."""
        books, self.books = {name: self.books[name] for name in BOOKS}, Counter()
        books |= zip(("wants", "misses", "fetched"), self.counts.tolist())
        self.counts[:] = 0
        return books | {f"{name}_bytes": books[name] * self.page_bytes for name in ("fetched", "admitted")}

    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        return self.page_of, self.stamp, self.where

    def tiers(self) -> dict[str, int]:
        """Bytes: on the fast tier pools, digests and tables; slow: the reservoir, all of the engine's own cache."""
        tables, pools = self.tables, {x.data_ptr(): x for x in self.pools}.values()
        return {
            "pages": sum(x.numel() * x.element_size() for x in pools),
            "digests": self.digests.numel() * self.digests.element_size(),
            "tables": sum(x.nbytes for x in tables),
            "slow": sum(x.nbytes for x in self.reservoirs),
        }

    def demand(self, name: str) -> Demand:
        """What a finished (or running) request wanted, for the simulator. CacheError if it was not recorded."""
        sequence = self.finished.get(name) or self.sequences.get(name)
        if sequence is None or not sequence.wants:
            raise CacheError(f"nothing is recorded of {name!r}: ask for record=True, and let it decode")
        n_layers, steps = len(self.names), len(sequence.wants)
        counts = np.zeros((n_layers * self.n_kv, steps), np.int64)
        pages, weights = [[] for _ in counts], [[] for _ in counts]
        for t, step in enumerate(sequence.wants):
            for layer, (wants, found, shares) in step.items():
                for h, n in enumerate(found):
                    head = layer * self.n_kv + h
                    counts[head, t] = n
                    pages[head].append(wants[h, :n])
                    weights[head].append(shares[h, :n])
        ends = np.cumsum(counts).reshape(counts.shape)
        starts = np.concatenate([[0], ends[:-1, -1]])[:, None]
        n_pages = sequence.prompt_pages + len(sequence.closed)
        created = np.full(n_pages, -1, np.int32)
        for page, step in sequence.closed.items():
            created[page] = step
        rows = None
        if sequence.first:  # the order in which the first ranking, as decoding began, had the pages
            rows = np.zeros((len(counts), 1, n_pages), np.float32)
            for layer, (wants, found) in sequence.first.items():
                for h, n in enumerate(found):
                    rows[layer * self.n_kv + h, 0, wants[h, :n]] = np.arange(1, n + 1)
        return Demand(
            ptr=np.concatenate([starts, ends], axis=1),
            page=np.concatenate([x for head in pages for x in head] or [np.zeros(0, np.int32)]),
            weight=np.concatenate([x for head in weights for x in head] or [np.zeros(0, np.float32)]),
            created=created,
            layer=np.repeat(np.arange(n_layers, dtype=np.int32), self.n_kv),
            first_touch="warm",
            prompt_rows=rows,
            unit="kv_head",
            page_tokens=self.settings.page,
        )

    # What follows a GPU does in another way (cuda.py).

    @property
    def page_shape(self) -> tuple[int, ...]:
        """A page of one KV head, as the engine's kernel of this device sees it."""
        return 1, 2 * self.settings.page, self.d

    def words(self, x: torch.Tensor, n: int) -> np.ndarray:
        """A view as n pages of opaque 8-byte words, [n, word]."""
        return x.view(torch.int64).view(n, -1).numpy()

    def note_keys(self, layer: int, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Keys [token, KV head, d] are being written to `slots` int64 [token]: keep their pages' bounds."""
        n = min(len(keys), len(slots))
        scoring.note_keys(bits(keys[:n]), slots[:n].numpy(), self.settings.page, bits(self.digests[layer]))

    def scored(self, layer: int, query: torch.Tensor, blocks: np.ndarray, closed: np.ndarray) -> tuple:
        """What `kernels.rank` scores by: queries and bounds, or scores."""
        return query.float().contiguous().numpy(), bits(self.digests[layer]), NOTHING

    def move(self, layer: int, n: int) -> None:
        """The first n of `moves`."""
        if n:
            kernels.move(
                self.moves, n, self.first[layer], self.open_at[layer], self.reservoirs[layer], self.pool_words[layer]
            )

    def copy_open(self, layer: int, seqs: np.ndarray, blocks: np.ndarray) -> None:
        """The open page of each sequence, with the token just written, as the engine's cache has it."""
        kernels.copy_open(seqs, blocks, self.n_kv, self.open_at[layer], self.reservoirs[layer], self.pool_words[layer])


def bits(x: torch.Tensor) -> np.ndarray:
    """The same memory for the kernels: float32, or the uint16 of bfloat16."""
    return x.numpy() if x.dtype == torch.float32 else x.view(torch.uint16).numpy()
