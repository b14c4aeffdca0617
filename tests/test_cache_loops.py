"""The compiled loops of the cache equal their twins in plain torch, and move the same bytes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from wakekv.cache import host, loops
from wakekv.cache.books import Books
from wakekv.cache.layer import PagedLayer, Sizes
from wakekv.cache.pool import EMPTY
from wakekv.cache.reading import How, best_bounds, bounds, digest, over_arrays, over_slots
from wakekv.cache.shared import Shared, Store
from wakekv.cache.swapping import Swapping
from wakekv.policies import POLICIES

pytestmark = pytest.mark.skipif(not loops.AVAILABLE, reason="numba is not installed, so there are no compiled loops")


@pytest.fixture
def plainly(monkeypatch):
    """Calls a function without the compiled loops."""

    def call(function, *args):
        with monkeypatch.context() as without:
            without.setattr(loops, "AVAILABLE", False)
            return function(*args)

    return call


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("group, n, d", [(1, 5, 8), (3, 22, 16), (4, 23, 7)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_and_bounds_are_those_of_torch(group, n, d, softcap):
    query, keys, values = random(3, group, d), random(3, 24, d, seed=1), random(3, 24, d + 1, seed=2)
    hidden, how = torch.zeros(3, n, dtype=torch.bool), How(0.3, softcap)
    hidden[1, :2] = True
    for mask in (None, hidden):
        ours = over_arrays(query, keys.numpy(), values.numpy(), n, mask, how)
        for a, b in zip(ours, over_slots(query, keys[:, :n], values[:, :n], mask, how), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    digests = digest(random(3, 9, 4, d, seed=3))
    twin = bounds(query, digests[:, :7], how).amax(1)
    torch.testing.assert_close(best_bounds(query, digests.numpy(), 7, how), twin, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("pad", [None, (0, 9)])
def test_attention_over_blocks_is_that_of_torch_where_rows_differ_in_length(softcap, pad, plainly):
    layer, there = PagedLayer(0, Sizes(4, 12, 2, None)), torch.rand(4, 8, generator=torch.Generator().manual_seed(5))
    layer.update(*random(2, 2, 2, 34, 6))
    layer.n_pad = None if pad is None else torch.tensor(pad).repeat_interleave(2)
    layer.keep(torch.zeros(4, 1, 34, 6), How(1.0, None), note_rows=True)
    layer.advance()
    rows, pages = torch.nonzero((there < torch.tensor([[0.9], [0.5], [0.2], [0.0]])) & layer.real_pages(0, 8)).T
    layer.pool = Shared(Store(1, 12, layer.pool.open), 0, layer.pool.open)
    layer.pool.place(rows, pages, *layer.reservoir.read(rows, pages))
    layer.update(*random(2, 2, 2, 1, 6, seed=1))
    query, how = random(4, 3, 6, seed=2), How(0.3, softcap)
    ours, twin = layer.over_slots(query, how), plainly(layer.over_slots, query, how)
    for a, b in (ours[0], twin[0]), (x.sort(-1).values for x in (ours[1], twin[1])):  # gaps lie elsewhere
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    lengths = torch.bincount(rows, minlength=4) * 4 + 3
    if pad is None:
        assert ((ours[1] > -torch.inf).sum(2) == lengths[:, None]).all()


def test_a_view_follows_its_tensor_and_is_not_taken_along_by_a_copy():
    views, first = loops.Views(), torch.zeros(2)
    first += 1
    assert views.of("x", first).tolist() == [1, 1] and views.of("x", first) is views.of("x", first)
    assert views.of("x", first + 1).tolist() == [2, 2]
    own, copied = copy.deepcopy((views, first))
    copied += 4
    assert own.of("x", copied).tolist() == [5, 5] and first.tolist() == [1, 1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [1, 6, 40, 50])
@pytest.mark.parametrize("least", [0.0, 1.5])
def test_what_is_chosen_is_what_torch_chooses(seed, n, least, plainly):
    score = random(7, 40, seed=seed) * (300 if seed == 4 else 1)  # weights that are 0 in float32 as well
    score[2, :30] = -torch.inf
    slot_of = torch.from_numpy(np.random.default_rng(seed).integers(-1, 2, (7, 64)))
    asked = score, n, slot_of, None, least
    ours, twin = host.choose(*asked), plainly(host.choose, *asked)
    assert least or torch.equal(ours.real, score.gather(1, ours.page) > -torch.inf)
    for r in range(7):  # pages that do not exist are in no order
        for a, b in zip(ours, twin, strict=True):
            assert torch.equal(a[r][ours.real[r]], b[r][twin.real[r]])


def moved(name, compiled, monkeypatch):
    """What forty steps of random wants leave in every slot: {page: bytes} of each row, and the books."""
    monkeypatch.setattr(loops, "AVAILABLE", compiled)
    rng, layers = np.random.default_rng(3), [PagedLayer(i, Sizes(2, 40, 2, None)) for i in range(2)]
    books = Books()

    def feed(n):
        for layer in layers:
            layer.update(*torch.from_numpy(rng.normal(size=(2, 2, n, 6)).astype(np.float32)).split(3, -1))

    feed(31)
    for layer in layers:
        layer.keep(torch.zeros(4, 1, 31, 3), How(1.0, None), note_rows=True)
        layer.advance()
    swapping = Swapping(layers, POLICIES[name], 6, books, lagged=False)
    swapping.admit()
    for _ in range(40):
        feed(1)
        for layer in layers:
            swapping.want(layer, torch.from_numpy(rng.normal(size=(4, layer.n_closed)).astype(np.float32)), 5)
        swapping.commit()
    held = [
        {int(p): x.pool.keys[r, s].tolist() for s, p in enumerate(x.pool.page_of[r]) if p != EMPTY}
        for x in layers
        for r in range(4)
    ]
    return held, [getattr(books, name) for name in ("misses", "fetched", "fetched_bytes", "n_wants", "stall_steps")]


@pytest.mark.parametrize("name", ["reactive", "evict"])
def test_the_same_pages_with_the_same_bytes_are_resident(name, monkeypatch):
    assert moved(name, True, monkeypatch) == moved(name, False, monkeypatch)
