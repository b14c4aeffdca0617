"""What every host of the rule of residency does in a real cache: note wants, bring pages, count, go back on failure.

There are two hosts, settling.py for any policy and swapping.py for recency alone. Both leave the pages that `replay`
leaves of the same wants.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import torch

from wakekv.cache import loops
from wakekv.cache.books import Books
from wakekv.cache.layer import PagedLayer
from wakekv.cache.pool import EMPTY
from wakekv.cache.wants import NEVER, Wants
from wakekv.policies import Policy


class Wanted(NamedTuple):
    """A layer's wants of a step, [row, want], each row by ascending weight: page, weight float32, and whether there is
    one at all; absent: not resident as the step began."""

    page: torch.Tensor
    weight: torch.Tensor
    real: torch.Tensor
    absent: torch.Tensor


def choose(
    score: torch.Tensor, n: int, slot_of: torch.Tensor, among: torch.Tensor | None = None, least: float = 0.0
) -> Wanted:
    """The n pages of highest score [row, page], `among` some (bool [row, page]) or all, in the canonical order of
    wants; only those with a weight of `least` times the mean or more. A score is the maximum of a page's bounds over
    the group; -inf says that there is no page."""
    floor = least / (score > -torch.inf).sum(1) if least else score.new_zeros(len(score))  # a row's weights sum to 1
    if among is None and loops.serves(score):
        return _chosen(score, min(n, score.shape[1]), slot_of, floor)
    best = score if among is None else score.masked_fill(~among, -torch.inf)
    page = best.topk(min(n, score.shape[1]), sorted=False).indices.sort(1).values
    weight = torch.softmax(score, 1).gather(1, page)
    order = weight.argsort(dim=1, stable=True)
    page, weight = page.gather(1, order), weight.gather(1, order)
    real = (best.gather(1, page) > -torch.inf) & (weight >= floor[:, None])
    return Wanted(page, weight, real, real & (slot_of.gather(1, page) == EMPTY))


def _chosen(score: torch.Tensor, n: int, slot_of: torch.Tensor, floor: torch.Tensor) -> Wanted:
    page = slot_of.new_empty(len(score), n)
    wanted = Wanted(page, score.new_empty(page.shape), *(page.new_empty(page.shape, dtype=torch.bool) for _ in "ra"))
    bits = (x.contiguous().view(torch.int32).numpy() for x in (score, torch.softmax(score, 1), floor))
    loops.choose(*bits, slot_of.numpy(), wanted.page.numpy(), wanted.weight.view(torch.int32).numpy(),
                 wanted.real.numpy(), wanted.absent.numpy())  # fmt: skip
    return wanted


class Host:
    """What both hosts do: keep `wants` (one Wants a sequence), count, and go back where a step fails.

    layers: those with pages, in order;  budget: pages a head;  lagged: wants take effect as the step ends;  least: the
    least weight of a want, as `choose` has it
    """

    def __init__(
        self, layers: list[PagedLayer], policy: Policy, budget: int, books: Books, lagged: bool, least: float = 0.0
    ):
        self.layers, self.policy, self.budget, self.books = layers, policy, budget, books
        self.lagged, self.least = lagged, least
        first = layers[0]
        pads = [0] * (first.n_rows // first.n_kv) if first.n_pad is None else first.n_pad[:: first.n_kv].tolist()
        self.firsts = [pad // first.sizes.page for pad in pads]  # each sequence's first page that is not all padding
        self.n_known = first.n_closed  # pages that the policy has been told of
        heads = np.repeat([layer.index for layer in layers], [layer.n_kv for layer in layers]).astype(np.int32)
        self.wants = []
        for b, skip in enumerate(self.firsts):
            rows, means = (
                torch.cat([getattr(x, name)[b * x.n_kv : (b + 1) * x.n_kv] for x in layers])
                for name in ("prompt_rows", "means")
            )
            rows, means = (torch.roll(x, -skip, axis).numpy() for x, axis in ((rows, 2), (means, 1)))
            self.wants.append(Wants(heads, first.sizes.page, rows, means))
            self.wants[b].created[: self.n_known - skip] = -1
        self.stalled = False  # this step has waited for a page
        self._wanted: dict[int, Wanted] = {}
        self._before: dict[int, tuple[torch.Tensor, ...]] = {}

    def admit(self) -> None:
        """Fill the pools, as decoding begins; all of it or, where a page cannot be read, none."""
        targets = self.first_pages()
        try:
            for layer, target in zip(self.layers, targets, strict=True):
                rows, pages = torch.nonzero(target, as_tuple=True)
                if len(rows):
                    layer.pool.place(rows, pages, *self.fetch(layer, rows, pages), self.stamps(-1) + pages)
        except BaseException:
            for layer in self.layers:
                layer.unload()
            raise
        if not self.policy.reversible:
            for layer in self.layers:
                destroy_absent(layer)

    def first_pages(self) -> list[torch.Tensor]:
        """bool [row, page] a layer: what is resident as decoding begins. The pools have room for it then."""
        raise NotImplementedError

    def stamps(self, step: int) -> int:
        """The first stamp of a step: for each page, if it is born in the step, then for its wants."""
        return (step + 1) * 2 * self.layers[0].sizes.n_pages

    def bring(self, layer: PagedLayer, wanted: Wanted) -> None:
        """Have wanted pages come, as far as they are to come before the step ends."""
        raise NotImplementedError

    def settle(self, step: int, last: int | None, absent: int) -> int:
        """Trim as the step ends; `last` is the page that it closed, `absent` of the wants were known and not resident.
        Returns the step's misses."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        return self.wants[0].n_steps

    def want(self, layer: PagedLayer, score: torch.Tensor, n: int, among: torch.Tensor | None = None) -> None:
        """A layer wants the n pages of highest score (see `choose`) in this step."""
        if layer.index not in self._before:
            self._before[layer.index] = layer.pool.tables()
        self._wanted[layer.index] = choose(score, n, self._before[layer.index][0], among, self.least)
        self.bring(layer, self._wanted[layer.index])

    def fetch(self, layer: PagedLayer, rows, pages, places=None) -> tuple[torch.Tensor, ...] | None:
        """Keys and values of pages in the slow tier, and the price in the books; straight into places of the pool's
        words if those are given, all as numpy arrays then."""
        if places is None:
            got = layer.reservoir.read(rows, pages)
        else:
            got = layer.reservoir.move(rows, pages, places, layer.pool.words())
        self.charge(layer, len(pages))
        return got

    def charge(self, layer: PagedLayer, n: int) -> None:
        """The price of n pages of a layer that came."""
        self.books.fetched += n
        self.books.fetched_bytes += n * layer.reservoir.page_bytes

    def undo(self) -> None:
        """Back to the step's beginning. A page whose slot was taken is read again; if that fails too it stays, whole,
        in the reservoir alone."""
        for layer in self.layers:
            if layer.index in self._before:
                rows, pages, stamps = layer.pool.restore(self._before[layer.index])
                try:
                    if len(rows):
                        layer.pool.place(rows, pages, *layer.reservoir.read(rows, pages), stamps)
                except Exception:  # the slots are empty then: nothing is lost, and the step's own failure is told
                    continue
        self._wanted, self._before, self.stalled = {}, {}, False

    def commit(self) -> None:
        """The step is over: count the token in, note the wants, trim. What fails leaves the lengths as they were."""
        layers, step = self.layers, self.step
        lengths = [(layer.n_closed, layer.n_open) for layer in layers]
        for layer in layers:
            layer.advance()
        n, wanted = layers[0].n_closed, self._gathered()
        born = [slice(self.n_known - skip, n - skip) for skip in self.firsts]
        for b, (wants, new) in enumerate(zip(self.wants, born, strict=True)):
            wants.created[new] = step
            if new.stop > new.start:
                rows = [x.means[b * x.n_kv : (b + 1) * x.n_kv, self.n_known : n] for x in layers]
                wants.key_means[:, new] = torch.cat(rows).numpy()
            wants.add(*self._noted(wanted, b))
        absent = int((wanted.absent & (wanted.page < self.n_known)).sum())
        try:
            misses = self.settle(step, n - 1 if n > lengths[0][0] else None, absent)
        except BaseException:
            for layer, (layer.n_closed, layer.n_open) in zip(layers, lengths, strict=True):
                layer.drop()
            for wants, new in zip(self.wants, born, strict=True):
                wants.created[new] = NEVER
                wants.drop()
            raise
        books = self.books
        books.n_steps, books.misses, books.n_wants = (
            books.n_steps + 1,
            books.misses + misses,
            books.n_wants + int(wanted.real.sum()),
        )
        books.stall_steps += self.stalled
        self.n_known, self._wanted, self._before, self.stalled = n, {}, {}, False

    def _gathered(self) -> Wanted:
        """The step's wants of all layers, numpy [layer, row, want]; not real where a layer has fewer."""
        found = [self._wanted.get(layer.index) for layer in self.layers]
        k = max((w.page.shape[1] for w in found if w is not None), default=0)
        blank = torch.zeros(self.layers[0].n_rows, k, dtype=torch.bool, device=self.layers[0].digests.device)
        found = [Wanted(blank.long(), blank.float(), blank, blank) if w is None else w for w in found]
        full = (
            torch.stack([torch.nn.functional.pad(x, (0, k - x.shape[1])) if x.shape[1] < k else x for x in field])
            for field in zip(*found, strict=True)
        )
        return Wanted(*(x.cpu().numpy() for x in full))

    def _noted(self, wanted: Wanted, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The step's wants of sequence b: how many of each head, pages, weights."""
        n_kv = self.layers[0].n_kv
        page, weight, real = (x[:, b * n_kv : (b + 1) * n_kv] for x in wanted[:3])
        return real.sum(2).ravel(), page[real] - self.firsts[b], weight[real]

    def select(self, index: list[int]) -> None:
        """Keep the sequences of `index`, in its order."""
        self.wants = [copy.deepcopy(self.wants[b]) for b in index]
        self.firsts = [self.firsts[b] for b in index]


def put_open(layer: PagedLayer, rows: torch.Tensor, page: int, stamps: torch.Tensor | None = None) -> None:
    """Give the page just closed, whose bytes the open place still has, a slot in some rows."""
    layer.pool.place(rows, torch.full_like(rows, page), *(x[rows] for x in layer.pool.open), stamps)


def destroy_absent(layer: PagedLayer) -> None:
    """What is closed and not resident is gone for good."""
    n = layer.n_closed
    gone = layer.reservoir.held[:, :n] & (layer.pool.slot_of[:, :n] == EMPTY).cpu()
    layer.reservoir.destroy(*torch.nonzero(gone, as_tuple=True))
