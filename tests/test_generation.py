"""transformers' generation as the engine of a sweep."""

from __future__ import annotations

import pytest
import tiny

from wakekv.errors import InputError
from wakekv.serving import sweep as serving
from wakekv.serving.generation import Transformers
from wakekv.serving.loads import Load
from wakekv.simulation.replay import replay
from wakekv.vllm.settings import Settings

LOAD = Load("random", (tiny.prompt(90).tokens, tiny.prompt(90, seed=1).tokens), 6)
ROOM = {"budget": 8, "every": 1, "timing": "exact", "wants": 8}
FEW = {"budget": 3, "every": 1, "timing": "exact"}


@pytest.fixture(scope="module")
def engine() -> Transformers:
    return Transformers(tiny.loaded(), batch=2)


def test_with_room_for_all_pages_each_rule_writes_and_thinks_what_the_dense_cache_does(engine):
    texts = [tiny.prompt(6, seed=2).tokens] * 2
    plain, full = engine.answers(None, LOAD.prompts, 6), engine.forced(None, LOAD, texts)
    assert [len(text) for text in plain] == [6, 6] and [len(rows) for rows in full.values()] == [6, 6]
    for mode in ("reactive", "destructive"):
        assert engine.answers({**ROOM, "mode": mode}, LOAD.prompts, 6) == plain
        assert serving.divergence(full, engine.forced({**ROOM, "mode": mode}, LOAD, texts))["kl_mean"] < 1e-6
    assert serving.divergence(full, engine.forced({**FEW, "budget": 1}, LOAD, texts))["kl_mean"] > 1e-4


def test_a_row_has_what_a_row_of_vllm_has(engine):
    row, dense = engine.run(FEW, LOAD), engine.run(None, LOAD)
    assert row["reached"] == 2 and row["n_steps"] == 5 - serving.WARM and row["prefill_s"] < row["elapsed_s"]
    assert 0 < row["miss_rate"] <= 1 and row["fetched_bytes"] > 0 and row["resident_bytes"] > 0
    assert set(dense) == set(row) - {"stall_s", "score_s", "attend_s", "place_s", "fetched_bytes", "misses", "wants",
                                     "miss_rate", "resident_bytes", "tiers"}  # fmt: skip


def test_what_it_wanted_replayed_gives_its_misses_and_a_profile(engine):
    misses = engine.run(FEW, LOAD)["misses"] * 5
    demands = engine.demands(FEW, LOAD)
    found = [replay(demand, Settings.of(FEW).policy, 3).misses.sum() for demand in demands]
    assert sum(found) == pytest.approx(misses)
    heads = serving.profiled(engine, LOAD, 3)
    flexi = {"mode": "flexicache", "budget": 3, "every": 4, "timing": "lagged", "profile": heads}
    assert engine.run(flexi, LOAD)["resident_bytes"] > engine.run(FEW, LOAD)["resident_bytes"]


def test_shorter_prompts_are_padded_and_answered_as_alone(engine):
    prompts = [LOAD.prompts[0][:50], LOAD.prompts[1]]
    both = engine.answers(FEW, prompts, 6)
    assert both == [engine.answers(FEW, [prompt], 6)[0] for prompt in prompts]


def test_ranking_before_attention_every_few_steps_is_refused(engine):
    with pytest.raises(InputError, match="ask for every=1 or timing lagged"):
        engine.run({**FEW, "every": 4}, LOAD)
