"""Whatever happens to a cache, in whatever order, no byte of a page changes and none is lost."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from wakekv.cache import loops
from wakekv.cache.books import Books
from wakekv.cache.layer import PagedLayer, Sizes
from wakekv.cache.pool import EMPTY, Pool
from wakekv.cache.reading import How
from wakekv.cache.reservoir import TRIES, Reservoir
from wakekv.cache.settling import Settling
from wakekv.cache.shared import Shared
from wakekv.cache.swapping import Swapping
from wakekv.errors import CacheError
from wakekv.kernels import AVAILABLE
from wakekv.policies import POLICIES

OPERATIONS = int(os.environ.get("WAKEKV_OPERATIONS", "3000"))  # in all, at least; 10^6 to be thorough
STEPS, EACH = 50, 2  # rules in one example; operations that a rule is, at least
DONE = Counter()  # operations by name: tokens appended, pages wanted, read, trimmed, sequences reordered, all reset
HOW, PAGE, N_PAGES, N_KV, D, BUDGET = How(1.0, None), 2, 24, 2, 2, 3


class Caches(RuleBasedStateMachine):
    """Two layers that are fed, ranked, trimmed, reordered and reset, over a slow tier that fails when told to."""

    @initialize(name=st.sampled_from(["reactive", "evict", "lfu", "flexicache-m0-r2", "h2o", "pooled", "commons"]),
                lagged=st.booleans(),
                seed=st.integers(0, 2**32 - 1), pad=st.sampled_from([None, (0, 1), (3, 0)]),
                compiled=st.booleans())  # fmt: skip
    def begin(self, name, lagged, seed, pad, compiled):
        loops.AVAILABLE = compiled and AVAILABLE
        self.policy, self.lagged, self.pad, self.notes = POLICIES[name], lagged, pad, name == "h2o"
        self.rng = np.random.default_rng(seed)
        self.layers = [PagedLayer(i, Sizes(PAGE, N_PAGES, 2, None)) for i in (0, 3)]
        self.clear()
        self.prompt(5)

    def teardown(self):
        loops.AVAILABLE = AVAILABLE

    def clear(self):
        self.host, self.failures, self.books = None, 0, Books()
        self.written = [np.zeros((2, N_KV, 0, 2 * D), np.float32) for _ in self.layers]

    def feed(self, n):
        """Hand every layer n random tokens, not yet counted in."""
        fresh = []
        for layer in self.layers:
            new = self.rng.normal(size=(len(self.written[0]), N_KV, n, 2 * D)).astype(np.float32)
            layer.update(*torch.from_numpy(new).split(D, -1))
            if self.pad is not None and layer.n_pad is None:
                layer.n_pad = torch.tensor(self.pad).repeat_interleave(N_KV)
            layer.reservoir._get = self.get(layer.reservoir)
            fresh.append(new)
        return fresh

    def get(self, reservoir):
        def read(*what):
            if self.failures:
                DONE["failing fetch"] += 1
                self.failures -= 1
                raise OSError("the disk is gone")
            DONE["fetch"] += 1
            return Reservoir._get(reservoir, *what)

        return read

    def count(self, fresh):
        self.written = [np.concatenate([old, new], 2) for old, new in zip(self.written, fresh, strict=True)]

    @property
    def room(self):
        return N_PAGES * PAGE - self.written[0].shape[2]

    @rule(n=st.integers(2, 7))
    def prompt(self, n):
        if self.room < n:
            self.reset()
        DONE["append"] += 1
        fresh = self.feed(n)
        for layer in self.layers:
            layer.keep(torch.zeros(layer.n_rows, 1, n, D), HOW, note_rows=self.host is None and self.notes)
            layer.advance()
        self.count(fresh)

    @rule(wants=st.integers(0, BUDGET), failures=st.sampled_from([0, 0, 0, TRIES - 1, TRIES, 3 * TRIES]))
    def step(self, wants, failures):
        """A token, with wants; fetches fail `failures` times, and a step that cannot be taken is taken again."""
        if not self.room:
            self.reset()
        DONE["append"] += 1
        before = self.picture()
        self.failures = failures
        fresh = self.feed(1)
        try:
            self.take(wants)
        except CacheError:
            DONE["undo"] += 1
            assert failures >= TRIES
            self.failures = 0
            for layer in self.layers:
                layer.drop()
            if self.host is not None:
                self.host.undo()
            self.same(before, exactly=failures == TRIES)
            if self.host is None:
                return
            fresh = self.feed(1)
            self.take(wants)
        self.failures = 0
        self.count(fresh)
        resident = torch.stack([x.pool.slot_of != EMPTY for x in self.layers]).sum(2)  # [layer, row]
        if self.policy.scope == "model":
            resident = resident.view(len(self.layers), -1, N_KV).sum((0, 2)) / (len(self.layers) * N_KV)
        assert self.policy.every != 1 or float(resident.max()) <= BUDGET

    def take(self, wants):
        if self.host is None:
            kind = Swapping if Swapping.serves(self.policy) else Settling
            host = kind(self.layers, self.policy, BUDGET, self.books, self.lagged)
            host.admit()
            self.host = host
        for layer in self.layers:
            if wants and layer.n_closed:
                score = torch.from_numpy(self.rng.normal(size=(layer.n_rows, layer.n_closed)).astype(np.float32))
                DONE["want"] += 1
                self.host.want(layer, score.masked_fill(~layer.real_pages(0, layer.n_closed), -torch.inf), wants)
        DONE["trim"] += 1
        self.host.commit()

    def picture(self):
        tables = [(x.n_closed, x.n_open, x.pool.slot_of >= 0, x.reservoir.held.clone()) for x in self.layers]
        return tables, None if self.host is None else [w.n_steps for w in self.host.wants]

    def same(self, before, exactly):
        """As before the step; where the fetch that undoes a swap fails as well, pages may have left the fast tier."""
        now = self.picture()
        assert now[1] == before[1]
        for (closed, n_open, there, held), (closed0, n_open0, there0, held0) in zip(now[0], before[0], strict=True):
            assert (closed, n_open) == (closed0, n_open0)
            n = closed
            assert torch.equal(held[:, :n], held0[:, :n])
            assert torch.equal(there, there0) if exactly else bool((there <= there0).all())

    @rule(index=st.lists(st.integers(0, 1), min_size=2, max_size=2))
    def reorder(self, index):
        DONE["reorder"] += 1
        for layer in self.layers:
            layer.select(torch.tensor(index))
            layer.reservoir._get = self.get(layer.reservoir)
        if self.host is not None:
            self.host.select(index)
        self.written = [x[index] for x in self.written]
        if self.pad is not None:
            self.pad = tuple(self.pad[i] for i in index)

    @rule()
    def reset(self):
        DONE["reset"] += 1
        for layer in self.layers:
            layer.reset()
        self.clear()
        self.prompt(4)

    @invariant()
    def every_byte_is_where_it_should_be(self):
        if not hasattr(self, "layers"):
            return
        for layer, truth in zip(self.layers, self.written, strict=True):
            n, pool = layer.n_closed, layer.pool
            assert layer.get_seq_length() == truth.shape[2] == n * PAGE + layer.n_open
            truth = truth.reshape(-1, truth.shape[2], 2 * D)
            pages = truth[:, : n * PAGE].reshape(len(truth), n, PAGE, 2 * D)
            slow = torch.cat([layer.reservoir.keys, layer.reservoir.values], -1)[:, :n].numpy()
            held, real = layer.reservoir.held[:, :n].numpy(), layer.real_pages(0, n).numpy()
            assert (slow[held] == pages[held]).all()
            resident = (pool.slot_of[:, :n] != EMPTY).numpy()
            for row, at in zip(*np.nonzero(resident), strict=True):
                fast = torch.cat(pool.take(pool.slot_of[:, at : at + 1]), -1)[row, 0].numpy()
                assert (fast == pages[row, at]).all()
            assert resident.sum() == int((pool.slot_of != EMPTY).sum())
            if isinstance(pool, Pool):
                assert resident.sum() == int((pool.page_of != EMPTY).sum())
            if self.policy.reversible:
                assert (held == real).all()  # everything written is in the reservoir
            elif self.host is not None:  # what is neither resident nor newly come is gone
                known = np.arange(n) < self.host.n_known
                assert (resident == held)[:, known].all()
            open_page = torch.cat(pool.open, -1)[:, : layer.n_open].numpy()
            assert (open_page == truth[:, n * PAGE :]).all()
        for store in {layer.pool.store for layer in self.layers if isinstance(layer.pool, Shared)}:
            blocks = store.slot_of[store.slot_of != EMPTY].tolist()  # every block has one page, or is free
            assert sorted(blocks + store._free) == list(range(store.n_blocks))


Caches.TestCase.settings = settings(
    max_examples=max(1, OPERATIONS // EACH // STEPS),
    stateful_step_count=STEPS,
    suppress_health_check=list(HealthCheck),
)


class TestCaches(Caches.TestCase):
    def runTest(self):
        DONE.clear()
        for _ in range(10):  # an example may end early: go on until as many are done as were asked for
            super().runTest()
            if DONE.total() >= OPERATIONS:
                break
        print("operations:", DONE.total(), dict(DONE))
        assert DONE.total() >= OPERATIONS


@pytest.mark.parametrize("n, fails", [(TRIES - 1, False), (TRIES, True)])
def test_a_read_is_tried_again_and_then_given_up(n, fails):
    like = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 3)
    reservoir, left = Reservoir(2, 4, 2, like, None), [n]
    keys, values = torch.arange(8.0).view(2, 1, 2, 2), torch.arange(12.0).view(2, 1, 2, 3)
    reservoir.write(1, keys, values, torch.ones(2, 1, dtype=torch.bool))

    def flaky(rows, pages):
        if left[0]:
            left[0] -= 1
            raise OSError("not now")
        return Reservoir._get(reservoir, rows, pages)

    reservoir._get = flaky
    if fails:
        with pytest.raises(CacheError, match="could not be fetched.*not now.*taken again"):
            reservoir.read(torch.tensor([1]), torch.tensor([1]))
    got = reservoir.read(torch.tensor([1]), torch.tensor([1]))
    assert torch.equal(got[0][0], keys[1, 0]) and torch.equal(got[1][0], values[1, 0])


def test_a_page_that_was_destroyed_cannot_be_fetched():
    like = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    reservoir = Reservoir(1, 4, 2, like, None)
    reservoir.write(0, torch.ones(1, 2, 2, 2), torch.ones(1, 2, 2, 2), torch.ones(1, 2, dtype=torch.bool))
    reservoir.destroy(torch.tensor([0]), torch.tensor([1]))
    assert not reservoir.keys[0, 1].any()
    with pytest.raises(CacheError, match="page 1 was destroyed"):
        reservoir.read(torch.tensor([0, 0]), torch.tensor([0, 1]))


def test_a_file_holds_the_same_bytes_and_leaves_nothing_behind(tmp_path):
    like = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    reservoir = Reservoir(1, 4, 2, like, tmp_path)
    keys = torch.randn(1, 3, 2, 2).bfloat16()
    reservoir.write(1, keys, -keys, torch.ones(1, 3, dtype=torch.bool))
    got = reservoir.read(torch.tensor([0, 0]), torch.tensor([3, 1]))
    assert torch.equal(got[0], keys[0, [2, 0]]) and torch.equal(got[1], -keys[0, [2, 0]])
    assert reservoir.where == "memory-mapped file" and not list(tmp_path.iterdir())
