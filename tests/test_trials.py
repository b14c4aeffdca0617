"""The real cache on trial: bytes that come back as they went, exactness, and twins that meet the same text."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from wakekv.cache import ReversibleCache
from wakekv.costs import quality, trials, witness
from wakekv.costs.quality import ARMS
from wakekv.costs.trials import POOLS
from wakekv.errors import InputError
from wakekv.simulation.replay import replay

MODEL = tiny.model("llama")
MODEL.set_attn_implementation("sdpa")
TOKENS = torch.randint(1, 64, (160,), generator=torch.Generator().manual_seed(4)).tolist()
ROOM = {"page": 4, "max_tokens": 200}


@pytest.fixture(scope="module")
def start():
    return quality.prefilled(MODEL, TOKENS[:60], budget=5, wants=3, **ROOM)


@pytest.fixture(scope="module")
def watched(start):
    first = witness.watch(MODEL, start, TOKENS[60:90])
    return {
        "reversible": first,
        "destructive": witness.watch(MODEL, start, TOKENS[60:90], head=first["head"], policy="evict"),
    }


def test_every_page_that_came_back_has_the_bytes_that_were_written(watched):
    seen = watched["reversible"]
    assert seen["fetched"] == seen["equal"] > 0
    assert seen["fetched_bytes"] == seen["fetched"] * seen["page_bytes"] and seen["page_bytes"] == 2 * 4 * 8 * 4
    assert seen["heads"] == 6 and seen["written_bytes"] > 0


def test_bytes_that_were_changed_on_the_way_are_noticed(start, monkeypatch):
    again = ReversibleCache.again

    def damaged(self, **settings):
        cache = again(self, **settings)
        cache.paged[1].reservoir.values += 1e-6
        return cache

    monkeypatch.setattr(ReversibleCache, "again", damaged)
    seen = witness.watch(MODEL, start, TOKENS[60:90])
    assert 0 < seen["equal"] < seen["fetched"]


@pytest.mark.parametrize("arm", ["reversible", "destructive"])
def test_what_is_told_of_a_head_is_what_its_cache_did(start, watched, arm):
    seen = watched[arm]
    policy = ARMS[arm]
    cache = start.again(policy=policy)
    quality.forced(MODEL, cache, TOKENS[60:90])
    kept, missed = [], []

    def note(step, resident, miss):
        kept.append(resident[seen["head"]].copy())
        missed.append(miss[seen["head"]].copy())

    replay(cache.demands()[0], cache.settings.policy, 5, on_step=note)
    for one, then in zip(seen["steps"], seen["steps"][1:] + [None]):
        step = one["step"]
        assert one["missed"] == np.flatnonzero(missed[step]).tolist()
        assert one["resident"] == np.flatnonzero(kept[step - 1]).tolist()
        after = set(np.flatnonzero(kept[step]))
        assert set(one["demoted"]) == set(one["resident"]) - after and set(one["fetched"]) <= after
        if then is not None:
            assert then["resident"] == sorted(after)
        if arm == "reversible":
            assert one["fetched"] == one["missed"] and one["bytes_in"] == len(one["fetched"]) * seen["page_bytes"]
        else:
            assert not one["fetched"] and not one["bytes_in"]
        assert (one["bytes_out"] > 0) == (one["closed"] is not None)
    assert [one["step"] for one in seen["steps"]] == list(range(20, 30))
    assert seen["n_pages"] == (60 + 20) // 4
    assert any(one["closed"] is not None for one in seen["steps"])


def test_the_head_that_is_shown_has_pages_that_left_and_returned(watched):
    left, returned = set(), 0
    for one in watched["reversible"]["steps"]:
        returned += len(left & set(one["fetched"]))
        left |= set(one["demoted"])
    assert returned > 0


def test_too_few_tokens_and_a_head_that_is_not_there_are_refused(start):
    with pytest.raises(InputError, match="too few to watch 10 steps"):
        witness.watch(MODEL, start, TOKENS[60:70])
    with pytest.raises(InputError, match="head 6 is not among the 6"):
        witness.watch(MODEL, start, TOKENS[60:75], head=6)


def test_a_budget_of_everything_is_exact_and_the_same_kernel_gives_the_same_bits():
    rows = trials.exactness(MODEL, TOKENS[:50], n_tokens=8, chunks=(50, 20), page=4)
    assert [(row["kernel"], row["chunk"]) for row in rows] == [(k, c) for c in (50, 20) for k in ("sdpa", "matmul")]
    assert rows[0]["equal_bits"] and rows[0]["largest_logit"] == 0.0
    for row in rows:
        assert row["equal_text"] and row["misses"] == 0 and row["largest_logit"] < 1e-4


def test_a_cache_that_strays_is_not_called_exact(monkeypatch):
    forced = trials.forced
    monkeypatch.setattr(trials, "forced", lambda *args: -forced(*args))
    assert not any(row["equal_text"] for row in trials.exactness(MODEL, TOKENS[:50], n_tokens=8, page=4))


def test_a_contest_has_every_arm_at_each_budget_and_the_replay_agrees():
    rows = trials.contest(MODEL, tiny.prompt(60, 40), (4, 8), n_tokens=30, budget=1, page=4, wants=3)
    assert [(row["budget"], row["arm"]) for row in rows] == [(b, arm) for b in (4, 8) for arm in trials.KINDS]
    for reversible, destructive, wider, snapkv in zip(rows[::4], rows[1::4], rows[2::4], rows[3::4]):
        assert snapkv["pages"] == wider["pages"] and snapkv["fetched"] == 0
        assert reversible["pages"] == destructive["pages"] == reversible["budget"] < wider["pages"]
        assert reversible["slots_bytes"] == destructive["slots_bytes"] < wider["slots_bytes"]
        assert destructive["bytes"] < wider["bytes"] <= reversible["bytes"]
        assert reversible["fetched"] > 0 == destructive["fetched"] == wider["fetched"]
        assert reversible["stall_s"] > 0 == destructive["stall_s"]
    for row in rows:
        assert row["replay_differs"] == 0 <= row["misses"] < row["n_wants"] and row["n_steps"] == 30
        assert row["misses"] > 0 or row["arm"] == "snapkv, wider"  # which keeps all that is decoded
        assert (row["kl_mean"] > 0) == (row["misses"] > 0) and row["kl_mean"] <= row["kl_p95"] <= row["kl_worst"]
        assert 0 <= row["agreement"] <= 1
        assert set(trials.TIMED) <= set(row)


def test_a_cache_that_miscounts_its_misses_differs_from_the_replay(monkeypatch):
    forced = trials.forced

    def miscounted(model, cache, tokens):
        out = forced(model, cache, tokens)
        cache.books.misses += 2
        return out

    monkeypatch.setattr(trials, "forced", miscounted)
    rows = trials.contest(MODEL, tiny.prompt(60, 40), (4,), n_tokens=30, budget=1, page=4, wants=3)
    assert {row["replay_differs"] for row in rows} == {2}


def test_a_contest_is_against_the_full_cache():
    row = trials.contest(MODEL, tiny.prompt(60, 40), (3,), n_tokens=30, budget=1, page=4, wants=3)[0]
    tokens = tiny.prompt(60, 40).tokens + tiny.prompt(60, 40).script
    with torch.inference_mode():
        truth = MODEL(torch.tensor([tokens])).logits[0, 59:89].float()
    start = quality.prefilled(MODEL, tokens[:59], budget=3, **ROOM | {"wants": 3})
    some = quality.forced(MODEL, start, tokens[59:89])
    assert row["kl_mean"] == pytest.approx(quality.divergence(truth, some).mean(), rel=1e-3)


def test_what_cannot_be_contested_is_refused():
    with pytest.raises(InputError, match="too short to feed 64"):
        trials.contest(MODEL, tiny.prompt(60, 40), (4,), budget=1, page=4)
    with pytest.raises(InputError, match="budget 22 keeps all 22 pages"):
        trials.contest(MODEL, tiny.prompt(60, 40), (4, 22), n_tokens=30, budget=1, page=4)


def test_pools_and_budgets_a_head_meet_the_same_text_at_the_same_total():
    rows = trials.pools(MODEL, tiny.prompt(60, 40), (3, 4), n_tokens=20, page=4, wants=3, least=1.0)
    assert [(row["budget"], row["arm"]) for row in rows] == [(b, arm) for b in (3, 4) for arm in (*POOLS, trials.WIDER)]
    for row in rows:
        assert row["n_steps"] == row["n_tokens"] == 20 and row["regime"] == "niah" and 0 < row["miss_rate"] < 1
        assert row["kl_mean"] > 0 and (row["fetched_bytes"] > 0) == ("destructive" not in row["arm"])
    assert rows[5]["asked"]["budget"] == 3 and rows[11]["asked"]["budget"] == 5


def test_a_plan_that_is_given_what_a_cache_wanted_foresees_its_fetches_exactly():
    rows = trials.foreseen(tiny.loaded(max_position_embeddings=256), tiny.prompt(120, 40), 4, 30)
    assert [row["policy"] for row in rows] == ["reactive", "pooled", "commons"]
    for row in rows:
        assert row["wants_fetches"] == row["fetches"] > 0 and row["n_steps"] == 30
        assert row["log_fetches"] > 0 and min(row[f"{of}stall_ms"] for of in ("", "log_", "wants_")) > 0
