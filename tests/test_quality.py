"""What a cache costs in answers is measured against the full one, and is nothing where nothing is left out."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tiny
import torch

from wakekv.costs import quality
from wakekv.errors import InputError

MODEL = tiny.model("llama")
MODEL.set_attn_implementation("sdpa")
TOKENS = torch.randint(1, 64, (120,), generator=torch.Generator().manual_seed(2)).tolist()
ROOM = {"page": 4, "max_tokens": 128}


def test_divergence_is_that_of_the_textbook():
    full, some = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log(), torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    expected = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    np.testing.assert_allclose(quality.divergence(full + 3.0, some), [expected, 0.0], atol=1e-7)


def test_what_keeps_everything_loses_nothing_and_what_keeps_less_loses_something():
    start = quality.prefilled(MODEL, TOKENS[:50], chunk=20, **ROOM)
    all_of_it, some, twin = quality.compare(
        MODEL, start, TOKENS[50:], [{"budget": 40}, {"budget": 3, "wants": 2}, {"budget": 3, "policy": "evict"}]
    )
    assert all_of_it.n_tokens == some.n_steps == 69 and all_of_it.misses == 0
    assert all_of_it.kl_worst < 1e-8 and all_of_it.agreement == 1.0
    assert all_of_it.perplexity == pytest.approx(all_of_it.full_perplexity)
    for less in (some, twin):
        assert 0 < less.kl_mean <= less.kl_p95 <= less.kl_worst and less.agreement < 1 and less.miss_rate > 0
        assert less.full_perplexity == all_of_it.full_perplexity != less.perplexity
    assert some.fetched_bytes > 0 and some.stall_steps > 0 and twin.fetched_bytes == twin.stall_steps == 0
    row = quality.as_rows([some])[0]
    assert row["settings"] == "budget=3, wants=2" and row["miss_rate"] == some.miss_rate


def test_perplexity_is_that_of_the_model_alone():
    start = quality.prefilled(MODEL, TOKENS[:50], **ROOM)
    (found,) = quality.compare(MODEL, start, TOKENS[50:], [{"budget": 40}])
    with torch.inference_mode():
        logits = MODEL(torch.tensor([TOKENS])).logits[0, 50:-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(TOKENS[51:])).exp().item()
    assert found.full_perplexity == pytest.approx(expected, rel=1e-4)


def test_a_short_text_tells_nothing():
    start = quality.prefilled(MODEL, TOKENS[:50], **ROOM)
    with pytest.raises(InputError, match="19 tokens of text are too few"):
        quality.compare(MODEL, start, TOKENS[50:70], [{"budget": 3}])


def test_needles_are_looked_for_in_every_arms_answer_and_in_the_full_caches(monkeypatch):
    asked = []

    def build(regime, tokenizer, **how):
        asked.append((regime, how["length"], how["depth"], how["seed"], how["scripted"]))
        return SimpleNamespace(tokens=tuple(TOKENS[: how["length"]]), answer="17")

    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids: " ".join(map(str, ids)))
    monkeypatch.setattr(quality, "build", build)
    loaded = SimpleNamespace(model=MODEL, tokenizer=tokenizer)
    rows = quality.needles(loaded, budgets=[40, 2], lengths=[40, 60], depths=[0.5], n_tokens=6, page=4)
    assert asked == [("niah", 40, 0.5, 0, False), ("niah", 60, 0.5, 0, False)]
    arms = ["full", *quality.ARMS, *quality.ARMS]
    assert rows["arm"].tolist() == arms * 2
    assert (rows["found"] == rows["text"].str.contains("17")).all()
    for length, some in rows.groupby("length"):
        full = some["text"].iloc[0]
        ids = torch.tensor([TOKENS[:length]])
        alone = MODEL.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert full == tokenizer.decode(alone[0, ids.shape[1] :].tolist())
        assert (some["as_full"] == (some["text"] == full)).all()
        assert some.loc[some["budget"] == 40, "as_full"].all() and not some["as_full"].all()
    # A head's page: 4 tokens, keys and values of 8 float32; a digest: two bounds and the longest value.
    page, digest, heads = 2 * 4 * 8 * 4, 2 * 8 * 4 + 4, 3 * 2
    for length, some in rows[rows["budget"] == 2].groupby("length"):
        some = some.set_index("arm")
        n = -(-(length + 6) // 4)
        assert some.loc["reversible", "bytes"] == heads * (2 * page + n * digest)
        assert some.loc["destructive", ["pages", "bytes"]].tolist() == [2, heads * 2 * page]
        wider = some.loc["destructive, wider"]
        assert wider["bytes"] == wider["pages"] * heads * page
        assert 0 <= some.loc["reversible", "bytes"] - wider["bytes"] < heads * page


def test_accuracy_counts_prompts_and_gives_wilsons_interval():
    row = {"as_full": False, "misses": 3, "n_wants": 12, "stall_s": 0.5, "n_steps": 4}
    rows = pd.DataFrame(
        [{"arm": "full", "budget": np.nan, "found": True, **row}] * 2
        + [{"arm": "reversible", "budget": 8, "found": i < 3, **row} for i in range(4)]
    )
    full, some = quality.accuracy(rows).to_dict("records")
    assert (full["arm"], full["n"], full["accuracy"]) == ("full", 2, 1.0)
    assert (some["budget"], some["n"], some["n_found"], some["accuracy"], some["n_as_full"]) == (8, 4, 3, 0.75, 0)
    assert (some["miss_rate"], some["stall_s"]) == (0.25, 0.125)
    z, p, n = 1.959964, 0.75, 4
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    assert [some["lo"], some["hi"]] == pytest.approx([middle - half, middle + half], abs=1e-6)


def test_an_answer_ends_where_the_model_ends_it():
    start = quality.prefilled(MODEL, TOKENS[:50], **ROOM)
    whole = quality.answer(MODEL, start.again(budget=9), TOKENS[50], 6)
    cut = quality.answer(MODEL, start.again(budget=9), TOKENS[50], 6, frozenset({whole[2]}))
    assert len(whole) == 6 and cut == whole[: whole.index(whole[2]) + 1]
