"""One rule, two hosts: what a real cache wanted, replayed by the simulator, misses and keeps the same pages."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from wakekv.cache import ReversibleCache, loops
from wakekv.errors import InputError
from wakekv.policies import POLICIES
from wakekv.simulation.replay import replay

BUDGET, PROMPT, TURN = 4, 50, 66
IDS = torch.randint(0, 64, (2, 90), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(IDS)
PADDED[1, :11] = 0  # so that the second sequence begins within its third page
MODEL = tiny.model("llama", num_hidden_layers=2)
MODEL.set_attn_implementation("sdpa")


def decode(policy, padding=PADDED, **settings):
    """A prompt in chunks, steps, a second turn, more steps. Returns the cache and what was resident after each step."""
    cache, seen = ReversibleCache(MODEL.config, BUDGET, page=4, max_tokens=96, policy=policy, wants=3, **settings), []
    with torch.inference_mode(), cache.attached(MODEL):
        cache.prefill(MODEL, IDS[:, :PROMPT], padding[:, :PROMPT], chunk=23)
        for t in [*range(PROMPT, TURN), None, *range(TURN + 11, IDS.shape[1])]:
            start, stop = (TURN, TURN + 11) if t is None else (t, t + 1)
            MODEL(IDS[:, start:stop], attention_mask=padding[:, :stop], past_key_values=cache)
            if t is not None:
                seen.append([x.numpy() for x in cache.resident()])
    return cache, seen


@pytest.fixture(scope="module")
def elsewhere():
    """What another run wanted, for policies that are calibrated."""
    return decode("full")[0].demands()[0]


def assert_replayed(policy, cache, seen):
    misses = 0
    for b, demand in enumerate(cache.demands()):
        kept = []

        def keep(step, resident, missed, kept=kept):
            kept.append(resident.copy())

        misses += replay(demand, policy, BUDGET, on_step=keep).misses[0]
        assert len(kept) == len(seen) == cache.books.n_steps
        for resident, real in zip(kept, seen, strict=True):
            n = real[b].shape[1]
            assert (resident[:, :n] == real[b]).all() and not resident[:, n:].any()
    assert misses == cache.books.misses
    assert sum(demand.n_wants for demand in cache.demands()) == cache.books.n_wants


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_misses_and_keeps_what_the_simulator_says(name, elsewhere):
    policy = POLICIES[name]
    if policy.offline:
        with pytest.raises(InputError, match="held_out"):
            ReversibleCache(MODEL.config, BUDGET, policy=policy)
        policy = policy.held_out(elsewhere)
        if policy.offline:  # it needs the future itself
            with pytest.raises(InputError, match="which a real cache cannot"):
                ReversibleCache(MODEL.config, BUDGET, policy=policy)
            return
    assert_replayed(policy, *decode(policy))


@pytest.mark.parametrize("name", ["reactive", "evict", "lfu", "flexicache-m0-r4", "shadow", "pooled"])
@pytest.mark.parametrize("every", [1, 3])
def test_ranking_after_attention_follows_the_same_rule(name, every):
    assert_replayed(POLICIES[name], *decode(name, mode="lagged", every=every))


@pytest.mark.parametrize("name", ["reactive", "pooled"])
def test_heads_that_want_different_numbers_of_pages_follow_the_same_rule(name):
    cache, seen = decode(name, least=1.0)
    counts = np.diff(cache.demands()[1].ptr, axis=1)
    assert counts.min() < counts.max() <= 3
    assert_replayed(POLICIES[name], cache, seen)


@pytest.mark.parametrize("name", ["reactive", "evict", "pooled"])
@pytest.mark.parametrize("settings", [{}, {"mode": "lagged", "every": 3}])
def test_without_compiled_loops_the_rule_is_the_same(name, settings, monkeypatch):
    monkeypatch.setattr(loops, "AVAILABLE", False)
    assert_replayed(POLICIES[name], *decode(name, **settings))


@pytest.mark.parametrize("name", ["reactive", "lfu", "pooled"])
def test_fetching_until_the_error_is_small_follows_the_same_rule(name):
    cache, seen = decode(name, mode="eps", eps=0.5)
    assert cache.books.n_wants > cache.books.n_steps * 2 * 4 * 3  # more than the three that each head wants anyway
    assert_replayed(POLICIES[name], cache, seen)


@pytest.mark.parametrize("name", ["reactive", "pooled", "commons"])
@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("changes", [{}, {"floor": 0.3}, {"reversible": False}, {"every": 3}])
def test_a_budget_shared_by_heads_follows_the_same_rule_and_is_kept(name, scope, changes):
    """Within each sequence of a batch: the total of the heads that share it, not each head's part."""
    policy = POLICIES[name].but(scope=scope, **changes)
    cache, seen = decode(policy)
    assert_replayed(policy, cache, seen)
    n_kv, n_layers = cache.paged[0].n_kv, len(cache.paged)
    of_heads = np.array([[x.sum(1) for x in step] for step in seen]).reshape(len(seen), 2, n_layers, n_kv)
    assert changes.get("reversible", True) is False or of_heads.max() > BUDGET  # some head has more than its own
    if policy.every == 1:
        shared = of_heads.sum((2, 3) if scope == "model" else 3)
        assert shared.max() <= BUDGET * n_kv * (n_layers if scope == "model" else 1)


def test_a_pool_takes_the_memory_of_its_budget_and_of_what_a_step_brings():
    """Nothing is left behind by the first step, which brings the most."""
    cache, _ = decode("pooled")
    ((store, _),) = cache.steps.host.stores
    total = BUDGET * len(IDS) * sum(layer.n_kv for layer in cache.paged)
    assert store.n_held == sum(int(x.sum()) for x in cache.resident()) == total
    assert store.n_blocks <= total * 9 // 8 + cache.books.n_wants // cache.books.n_steps
    open_pages = sum(layer.n_rows * layer.reservoir.page_bytes for layer in cache.paged)
    assert cache.tiers()["pages"] == store.n_blocks * cache.paged[0].reservoir.page_bytes + open_pages
