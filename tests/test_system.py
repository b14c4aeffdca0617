"""Time and bytes are counted for every cache alike, from one prefilled text."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import tiny
import torch

from wakekv.costs import quality, system
from wakekv.errors import InputError

TOKENS = torch.randint(1, 64, (70,), generator=torch.Generator().manual_seed(2)).tolist()


def start_of(kind):
    model = tiny.model(kind)
    model.set_attn_implementation("sdpa")
    return model, quality.prefilled(model, TOKENS[:50], budget=3, wants=2, page=4, max_tokens=80)


@pytest.mark.parametrize("kind, names", [("llama", ["dynamic", "static", "preallocated"]), ("gemma3", ["dynamic"])])
def test_the_rivals_hold_the_same_text(kind, names):
    model, start = start_of(kind)
    with torch.inference_mode():
        plain = model(torch.tensor([TOKENS[:51]])).logits[0, -1]
        for name, cache in system.rivals(start, 2, 5):
            assert name == names.pop(0) and cache.get_seq_length() == 50
            logits = model(torch.tensor([[TOKENS[50]]] * 2), past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(logits, plain.expand(2, -1), atol=1e-4, rtol=1e-4)
    assert not names


def test_a_measurement_counts_steps_stalls_and_bytes(tmp_path):
    model, start = start_of("llama")
    caches = [{"policy": "reactive"}, {"policy": "evict"}, {"budget": 15}]
    rows = system.measure(model, start, TOKENS[50:62], caches, batch=2)
    ours = ["policy=reactive", "policy=evict", "budget=15"]
    assert [row["settings"] for row in rows] == ["dynamic", "static", "preallocated", *ours]
    assert [row["asked"] for row in rows] == [{}, {}, {}, *caches]
    page_bytes, heads = 2 * 4 * 8 * 4, 3 * 2 * 2
    assert rows[0]["bytes"] == 62 * page_bytes // 4 * heads
    for row in rows:
        assert row["context"] == 50 and row["batch"] == 2 and row["n_steps"] == 12
        assert row["step_s"] > 0 and row["tokens_per_s"] == pytest.approx(2 / row["step_s"])
        assert row["step_cpu_s"] > 0 and row["mean_step_s"] > 0
    reversible, destructive, whole = rows[3:]
    for row in (reversible, destructive):
        assert row["tiers"]["pages"] == 4 * page_bytes * heads  # the budget and the open page
        fast = sum(row["tiers"][name] for name in ("pages", "digests", "tables", "windows"))
        assert row["bytes"] == fast and 1 <= row["over_budget"] and row["slow_tier"] == "host memory"
        assert 0 < row["moving_share"] < 1
    assert reversible["fetched_bytes"] > 0 and reversible["stall_s"] > 0 and reversible["stall_steps"] > 0
    assert destructive["fetched_bytes"] == destructive["stall_s"] == destructive["stall_steps"] == 0
    saved = json.loads(system.save(tmp_path / "new" / "run.json", model, start, rows, seed=3).read_text())
    assert saved["rows"] == rows and saved["start"]["budget"] == 3 and "Recency" in saved["start"]["policy"]
    assert saved["environment"]["threads"] == torch.get_num_threads() and saved["seed"] == 3
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]


def test_each_cache_is_told_apart_from_the_full_one():
    model, start = start_of("llama")
    start.batch_repeat_interleave(2)
    tokens = torch.tensor([TOKENS[50:62], TOKENS[8:20]])
    rows = system.measure(model, start, tokens, [{"budget": 15, "wants": 15}, {"budget": 2, "wants": 1}])
    _, static, lean, whole, some = rows
    assert rows[0].keys().isdisjoint({"kl_mean", "agreement"})
    for row in (static, lean, whole):
        assert row["kl_worst"] < 1e-8 and row["agreement"] == 1 and row["n_tokens"] == 24
    alone = [
        quality.compare(model, start_of("llama")[1], [*row, 0], [{"budget": 2, "wants": 1}], least=1)[0]
        for row in tokens.tolist()
    ]
    assert some["kl_mean"] == pytest.approx(sum(x.kl_mean for x in alone) / 2, rel=1e-3) and some["kl_mean"] > 0
    assert some["agreement"] == pytest.approx(sum(x.agreement for x in alone) / 2)
    assert some["miss_rate"] == pytest.approx(sum(x.miss_rate for x in alone) / 2)


def test_a_sweep_measures_every_context_and_batch(monkeypatch):
    model, _ = start_of("llama")
    monkeypatch.setattr(system, "passages", lambda tokenizer, batch, n: torch.tensor([TOKENS[:n]] * batch))
    loaded, settings = SimpleNamespace(model=model, tokenizer=None), {"page": 4, "budget": 3, "wants": 2}
    rows = system.sweep(loaded, [{"budget": 2}], contexts=[40, 20], batches=[1, 2], steps=5, **settings)
    seen = [(row["context"], row["batch"], row["settings"], row["n_steps"]) for row in rows]
    assert seen == [
        (c, b, s, 5) for b in (1, 2) for c in (20, 40) for s in ("dynamic", "static", "preallocated", "budget=2")
    ]
    assert all(row["kl_mean"] < 1e-8 for row in rows if row["settings"] in ("static", "preallocated"))


def test_passages_are_different_and_from_all_over_the_article(monkeypatch):
    article = SimpleNamespace(sentences=["zero one ", "two three ", "four five"])
    monkeypatch.setattr(system, "read_filler", lambda path, n_tokens: article)

    def tokenizer(text, **_):
        words = "zero one two three four five".split()
        return SimpleNamespace(input_ids=[words.index(word) for word in text.split()])

    assert system.passages(tokenizer, 3, 2).tolist() == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(InputError, match="has 6 tokens, not 7"):
        system.passages(tokenizer, 1, 7)


def test_what_cannot_be_timed_is_refused():
    model, start = start_of("llama")
    with pytest.raises(InputError, match="too few to time"):
        system.measure(model, start, TOKENS[50:52], [])
    with pytest.raises(InputError, match="tokens for 2 sequences, and the cache holds 3"):
        system.measure(model, start, [TOKENS[50:60]] * 2, [], batch=3)
