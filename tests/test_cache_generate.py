"""What `generate` asks of a cache: done as transformers' own cache does it, bit for bit, or refused in one line.

transformers tests this too, but ships those tests neither in its wheel nor in its source distribution: what they look
at is looked at here, on random models.
"""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from transformers import DynamicCache

from wakekv.cache import ReversibleCache
from wakekv.errors import CacheError

IDS = torch.randint(1, 64, (2, 30), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(IDS)
PADDED[1, :7] = 0
MODELS = {}


@pytest.fixture(params=["llama", "gemma3"])
def model(request):
    if request.param not in MODELS:
        MODELS[request.param] = tiny.model(request.param)
        MODELS[request.param].set_attn_implementation("sdpa")
    return MODELS[request.param]


def new(model, budget=100, **settings):
    return ReversibleCache(model.config, budget, page=4, max_tokens=100, **{"kernel": "sdpa", **settings})


def generate(model, cache, ids=IDS, **how):
    torch.manual_seed(0)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, past_key_values=cache, **{**options, **how})


def both(model, **how):
    """What our cache gives, and transformers' own."""
    cache = new(model)
    with cache.attached(model):
        ours = generate(model, cache, **how)
    return ours, generate(model, DynamicCache(config=model.config), **how)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"ids": IDS[:1]},
        {"ids": IDS[:, :1]},
        {"attention_mask": PADDED},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        {"num_beams": 3, "attention_mask": PADDED},
        {"do_sample": True, "num_beams": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
        {"eos_token_id": list(range(20))},
        {"prefill_chunk_size": 8},
        {"max_new_tokens": 1},
    ],
    ids=lambda how: ", ".join(how) or "greedy",
)
def test_the_text_is_that_of_transformers_own_cache(model, how):
    ours, theirs = both(model, **how)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("beams", [1, 3])
def test_all_that_can_be_returned_is_the_same(model, beams):
    asked = ("scores", "logits", "hidden_states")
    ours, theirs = both(
        model, num_beams=beams, return_dict_in_generate=True, **{f"output_{name}": True for name in asked}
    )
    assert type(ours) is type(theirs) and isinstance(ours.past_key_values, ReversibleCache)
    assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length()
    for name in ("scores", "logits"):
        assert all(torch.equal(a, b) for a, b in zip(ours[name], theirs[name], strict=True))
    for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_text_can_be_gone_on_with_from_the_cache(model):
    """As in a conversation: the cache of one call serves the next, which brings new tokens too."""
    turn = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(2))
    texts = []
    for cache in (new(model), DynamicCache(config=model.config)):
        with cache.attached(model) if isinstance(cache, ReversibleCache) else torch.no_grad():
            first = generate(model, cache, max_new_tokens=6)
            texts.append(generate(model, cache, ids=torch.cat([first, turn], 1), max_new_tokens=6))
    assert torch.equal(*texts)


def test_a_prompt_can_come_as_embeddings(model):
    with torch.no_grad():
        embeds, texts = model.get_input_embeddings()(IDS), []
        cache = new(model)
        for held in (cache, DynamicCache(config=model.config)):
            with cache.attached(model) if held is cache else torch.no_grad():
                options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
                texts.append(model.generate(inputs_embeds=embeds, past_key_values=held, **options))
    assert torch.equal(*texts)


@pytest.mark.parametrize("begun", [False, True], ids=["a prompt", "a prompt and steps"])
@pytest.mark.parametrize("policy", ["reactive", "evict", "lfu", "pooled"])
def test_a_copy_goes_its_own_way(model, policy, begun):
    """As where one prompt's cache is copied for every continuation."""
    cache = new(model, 3, wants=2, policy=policy, kernel="matmul")

    def feed(some, first, last):
        with some.attached(model), torch.no_grad():
            return torch.stack([model(IDS[:, i : i + 1], past_key_values=some).logits for i in range(first, last)])

    with cache.attached(model), torch.no_grad():
        model(IDS[:, :20], past_key_values=cache)
    if begun:
        feed(cache, 20, 24)
    held = copy.deepcopy(cache)
    other = copy.deepcopy(held)
    expected = feed(cache, 24, 30)
    assert torch.equal(feed(other, 24, 30), expected)
    assert held.get_seq_length() == (24 if begun else 20)
    assert torch.equal(feed(held, 24, 30), expected)
    assert [x.misses for x in (cache.books, other.books)] == [held.books.misses] * 2


def test_a_cache_serves_again_after_a_reset_and_another_batch(model):
    cache, texts = new(model), {}
    for ids in (IDS, IDS[:1], IDS[:, :9]):
        texts[ids.shape] = generate(model, DynamicCache(config=model.config), ids)
    with cache.attached(model):
        for ids in (IDS, IDS[:1], IDS[:, :9]):
            assert torch.equal(generate(model, cache, ids), texts[ids.shape])
            cache.reset()
            assert cache.get_seq_length() == 0 and not cache.is_initialized


def test_it_tells_transformers_what_it_is(model):
    ours, theirs = new(model), DynamicCache(config=model.config)
    assert not ours.is_compileable and len(ours) == model.config.num_hidden_layers
    assert ours.is_sliding == theirs.is_sliding and ours.get_seq_length() == 0
    with ours.attached(model), torch.no_grad():
        model(IDS, past_key_values=ours)
    model(IDS, past_key_values=theirs)
    for i in range(len(ours)):
        assert ours.get_seq_length(i) == theirs.get_seq_length(i) == IDS.shape[1]
        assert ours.get_mask_sizes(1, i) == theirs.get_mask_sizes(1, i)


def test_sequences_can_be_chosen_and_repeated(model):
    ours, theirs = new(model), DynamicCache(config=model.config)
    following = torch.tensor([[5], [6], [7]])
    out = []
    for cache in (ours, theirs):
        with ours.attached(model) if cache is ours else torch.no_grad(), torch.no_grad():
            model(IDS, past_key_values=cache)
            cache.batch_select_indices(torch.tensor([1]))
            cache.batch_repeat_interleave(3)
            out.append(model(following, past_key_values=cache).logits)
    assert torch.equal(*out)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"ids": IDS[:1].repeat(1, 2), "prompt_lookup_num_tokens": 3}, "assisted decoding and prompt lookup"),
        ({"ids": IDS[:1], "assistant_model": True}, "assisted decoding and prompt lookup"),
        ({"guidance_scale": 1.5}, "another cache than the one attached"),
    ],
    ids=["prompt lookup", "assisted", "guidance"],
)
def test_what_needs_another_cache_or_a_crop_is_refused(model, how, message):
    if "assistant_model" in how:
        how = {**how, "assistant_model": tiny.model("llama", seed=1, num_hidden_layers=1)}
    cache = new(model)
    with cache.attached(model), pytest.raises(CacheError, match=message):
        generate(model, cache, **how)


def test_gradients_are_refused(model):
    cache = new(model)
    with cache.attached(model), torch.enable_grad(), pytest.raises(CacheError, match="torch.no_grad"):
        model(IDS, past_key_values=cache)
    assert cache.get_seq_length() == 0
