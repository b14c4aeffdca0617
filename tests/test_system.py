"""Time and bytes are counted for every cache alike, from one prefilled text."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import tiny
import torch

from wakekv import quality, system
from wakekv.errors import InputError

TOKENS = torch.randint(1, 64, (70,), generator=torch.Generator().manual_seed(2)).tolist()


def start_of(kind):
    model = tiny.model(kind)
    model.set_attn_implementation("sdpa")
    return model, quality.prefilled(model, TOKENS[:50], budget=3, wants=2, page=4, max_tokens=80)


@pytest.mark.parametrize("kind, names", [("llama", ["dynamic", "static"]), ("gemma3", ["dynamic"])])
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
    caches = [{"policy": "reactive"}, {"policy": "evict"}]
    rows = system.measure(model, start, TOKENS[50:62], caches, batch=2)
    assert [row["settings"] for row in rows] == ["dynamic", "static", "policy=reactive", "policy=evict"]
    page_bytes, heads = 2 * 4 * 8 * 4, 3 * 2 * 2
    assert rows[0]["bytes"] == 62 * page_bytes // 4 * heads
    for row in rows:
        assert row["context"] == 50 and row["batch"] == 2 and row["n_steps"] == 12
        assert row["step_s"] > 0 and row["tokens_per_s"] == pytest.approx(2 / row["step_s"])
    reversible, destructive = rows[2:]
    for row in rows[2:]:
        assert row["tiers"]["pages"] == 4 * page_bytes * heads  # the budget and the open page
        assert 0 < row["moving_share"] < 1 and row["slow_tier"] == "host memory"
    assert reversible["fetched_bytes"] > 0 and reversible["stall_s"] > 0 and reversible["stall_steps"] > 0
    assert destructive["fetched_bytes"] == destructive["stall_s"] == destructive["stall_steps"] == 0
    saved = json.loads(system.save(tmp_path / "new" / "run.json", model, start, rows).read_text())
    assert saved["rows"] == rows and saved["start"]["budget"] == 3 and "Recency" in saved["start"]["policy"]
    assert saved["environment"]["threads"] == torch.get_num_threads()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run.json"]


def test_a_sweep_measures_every_context_and_batch(monkeypatch):
    model, _ = start_of("llama")

    def build(regime, tokenizer, *, length):
        return SimpleNamespace(tokens=tuple(TOKENS[:length]), script=tuple(TOKENS[length:]))

    monkeypatch.setattr(system, "build", build)
    loaded = SimpleNamespace(model=model, tokenizer=None)
    rows = system.sweep(loaded, [{"budget": 2}], contexts=[20, 40], batches=[1, 2], steps=5, page=4, budget=3, wants=2)
    seen = [(row["context"], row["batch"], row["settings"], row["n_steps"]) for row in rows]
    assert seen == [(c - 1, b, s, 5) for c in (20, 40) for b in (1, 2) for s in ("dynamic", "static", "budget=2")]


def test_what_cannot_be_timed_is_refused():
    model, start = start_of("llama")
    with pytest.raises(InputError, match="too few to time"):
        system.measure(model, start, TOKENS[50:52], [])
    start.batch_repeat_interleave(2)
    with pytest.raises(InputError, match="holds 2 sequences"):
        system.measure(model, start, TOKENS[50:60], [])
