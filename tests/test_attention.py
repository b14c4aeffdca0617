"""A model with the recorder attached computes what it computes without, and is itself again afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from wakekv.errors import ModelError
from wakekv.recording.attention import Reader


def run(model, ids, n_prompt, mode="step"):
    """Logits of every decoded position, with prefill in two passes as the recorder does it."""
    reader = Reader(model.config.num_hidden_layers, ids.shape[1], n_prompt, [[3, 9]], 8)
    logits, cut = [], max(1, n_prompt - 20)
    with torch.inference_mode(), reader.attached(model):
        model(ids[:, :cut], past_key_values=reader.cache)
        reader.mode = "rows"
        model(ids[:, cut : n_prompt - 1], past_key_values=reader.cache)
        reader.mode = mode
        for t in range(n_prompt - 1, ids.shape[1]):
            logits.append(model(ids[:, t : t + 1], past_key_values=reader.cache).logits[0, -1])
            if mode == "step":
                reader.take()
    return torch.stack(logits), reader


@pytest.mark.parametrize("family", tiny.CONFIGS)
@pytest.mark.parametrize("mode", ["step", "plain"])
def test_logged_model_computes_what_the_stock_model_does(family, mode):
    model, ids = tiny.model(family), torch.randint(0, 64, (1, 70), generator=torch.Generator().manual_seed(1))
    logits, reader = run(model, ids, 60, mode)
    stock = ["eager"] if family == "gemma2" else ["eager", "sdpa"]  # SDPA has no soft cap
    for name in stock:
        model.set_attn_implementation(name)
        with torch.inference_mode():
            torch.testing.assert_close(logits, model(ids).logits[0, 59:], atol=1e-4, rtol=1e-4)
    if mode == "step":
        assert [reader.windows[layer] for layer in range(3)] == tiny.WINDOWS[family]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masses_are_exact_in_float32_whatever_the_dtype_of_the_model(dtype):
    model, ids = tiny.model().to(dtype), torch.randint(0, 64, (1, 50), generator=torch.Generator().manual_seed(1))
    seen = []

    class Watching(Reader):
        def take(self):
            seen.append(super().take())
            return seen[-1]

    reader = Watching(3, 50, 49, [[0, 50]], 50)  # the whole context is needle, and logged
    with torch.inference_mode(), reader.attached(model):
        reader.mode = "rows"
        model(ids[:, 17:48], past_key_values=reader.cache)
        reader.mode = "step"
        model(ids[:, 48:49], past_key_values=reader.cache)
        reader.take()
    np.testing.assert_allclose(seen[0]["needle_mass"], 1, atol=1e-6)
    np.testing.assert_allclose(seen[0]["weights"].sum(1, dtype=np.float64), 1, atol=3e-3)  # stored as float16


def test_prefill_that_notes_page_weights_sums_to_one_a_row():
    model, ids = tiny.model("gemma3"), torch.randint(0, 64, (1, 60), generator=torch.Generator().manual_seed(1))
    _, reader = run(model, ids, 50)
    for layer in range(3):
        assert reader.prompt_pages[layer].shape == (4, 32, 4)
        np.testing.assert_allclose(reader.prompt_pages[layer].sum(-1)[:, 13:], 1, atol=2e-3)  # 19 rows went through
        assert (reader.prompt_pages[layer][:, :13] == 0).all()


def test_attention_with_sinks_of_its_own_is_refused():
    config = transformers.GptOssConfig(
        **{**tiny.SIZE, "max_position_embeddings": 131072}, head_dim=8, num_local_experts=2, layer_types=tiny.MIXED
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(ModelError, match="s_aux.*does not implement"):
        run(model, torch.zeros(1, 40, dtype=torch.long), 30)


def test_layers_that_do_not_attend_are_refused():
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    reader = Reader(2, 40, 30, [], 8)
    with torch.inference_mode(), reader.attached(model), pytest.raises(ModelError, match="layer 0 logged nothing"):
        model(torch.zeros(1, 1, dtype=torch.long))
        reader.take()


def test_two_sequences_at_once_are_refused():
    reader = Reader(3, 40, 30, [], 8)
    model = tiny.model()
    with reader.attached(model), pytest.raises(ModelError, match="one sequence"):
        model(torch.zeros(2, 10, dtype=torch.long), past_key_values=reader.cache)


def test_padding_is_refused():
    reader, model = Reader(3, 40, 12, [], 8), tiny.model()
    ids = torch.zeros(1, 11, dtype=torch.long)
    holes = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    with torch.inference_mode(), reader.attached(model):
        model(ids[:, :10], past_key_values=reader.cache)
        reader.mode = "step"
        with pytest.raises(ModelError, match="holes"):
            model(ids[:, 10:], attention_mask=holes, past_key_values=reader.cache)


@pytest.mark.parametrize("fails", [False, True])
def test_a_detached_model_is_as_it_was(fails):
    model, before = tiny.model(), dict(AttentionInterface._global_mapping)
    masks = dict(AttentionMaskInterface._global_mapping)
    reader = Reader(3, 40, 30, [], 8)
    try:
        with reader.attached(model):
            assert model.config._attn_implementation == "wakekv"
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert model.config._attn_implementation == "eager"
    assert AttentionInterface._global_mapping == before and AttentionMaskInterface._global_mapping == masks


def test_the_cache_never_moves_or_grows():
    model, ids = tiny.model(), torch.zeros(1, 40, dtype=torch.long)
    reader = Reader(3, 40, 30, [], 8)
    places = set()
    with torch.inference_mode(), reader.attached(model):
        model(ids[:, :29], past_key_values=reader.cache)
        reader.mode = "step"
        for t in range(29, 40):
            model(ids[:, t : t + 1], past_key_values=reader.cache)
            reader.take()
            places.add(tuple(layer.keys.data_ptr() for layer in reader.cache.layers))
    assert len(places) == 1 and reader.cache.layers[0].keys.shape == (1, 2, 40, 8)
