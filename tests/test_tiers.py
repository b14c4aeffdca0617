"""Sentences in tiers: split by ids, demoted, recalled, and nothing lost that may come back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tiny
import torch
from transformers import DynamicCache

from wakekv.cache import ReversibleCache
from wakekv.costs import quality
from wakekv.errors import CacheError, InputError
from wakekv.tiers import Sentences, Splitter, TieredCache, ends_of
from wakekv.tiers.index import INDEXES, overlap, rounded
from wakekv.tiers.nearest import Nearest
from wakekv.tiers.panel import together
from wakekv.tiers.recall import RECALLS
from wakekv.tiers.text import Cuts

N_VOCAB, PROMPT, ENDS = 64, 60, frozenset(range(0, 64, 6))
SPLITTER = Splitter(N_VOCAB, ENDS, least=3, longest=12)
TOKENS = torch.randint(0, 64, (110,), generator=torch.Generator().manual_seed(4)).tolist()
ROOM = {"page": 4, "max_tokens": 128}
MODEL = tiny.model("llama")
MODEL.set_attn_implementation("sdpa")


def started(model=MODEL, **settings):
    cache = TieredCache(model.config, Sentences(SPLITTER, window=4, **settings), **ROOM)
    with cache.attached(model):
        cache.prefill(model, torch.tensor([TOKENS[:PROMPT]]), chunk=23)
    return cache


START = started()


def fed(threshold=0.05, steps=40, **settings):
    cache = START.again(Sentences(SPLITTER, window=4, threshold=threshold, **settings))
    return cache, quality.forced(MODEL, cache, TOKENS[PROMPT : PROMPT + steps])


FULL = quality.forced(MODEL, START.again(Sentences(SPLITTER, threshold=0.0)), TOKENS[PROMPT : PROMPT + 40])


def test_a_sentence_ends_at_a_mark_once_it_is_long_enough_and_at_its_longest():
    splitter = Splitter(10, frozenset({9}), least=3, longest=5)
    assert splitter.cut([1, 9, 2, 9, 1, 1, 9, 1, 1, 1, 1, 1, 9]) == [4, 7, 12]
    assert splitter.cut([1, 9, 2, 9, 1, 1, 9], first=4) == [7]
    assert Splitter(10, least=1, longest=1).cut([3, 4]) == [1, 2]


@pytest.mark.parametrize("ids", [[1, 10], [-1]])
def test_an_id_that_the_vocabulary_has_not_is_refused(ids):
    with pytest.raises(InputError, match=rf"token id {ids[-1]} is unknown: the vocabulary has ids from 0 to 9"):
        Splitter(10).cut(ids)
    with pytest.raises(InputError, match="is unknown"):
        Splitter(10, frozenset(ids))


def test_a_text_that_grows_is_cut_as_the_whole_text_is():
    ids, whole = [], SPLITTER.cut(TOKENS)
    cuts = Cuts(SPLITTER, ids)
    for n in range(0, len(TOKENS), 7):
        ids += TOKENS[n : n + 7]
        assert cuts.upto(len(ids)).tolist() == [end for end in whole if end <= len(ids)]
    assert cuts.upto(20).tolist() == [end for end in whole if end <= 20]


@pytest.mark.model
def test_the_default_models_sentences_are_those_a_reader_sees(smol):
    ends = ends_of(smol.tokenizer)
    splitter = Splitter(len(smol.tokenizer), ends)
    sentences = ["The tide comes in.", ' "Twice a day!"', " The second part\n", "Nobody (as yet)."]
    ids = smol.tokenizer("".join(sentences)).input_ids
    cuts = [0, *splitter.cut(ids)]
    assert [smol.tokenizer.decode(ids[a:b]) for a, b in zip(cuts, cuts[1:])] == sentences
    assert smol.tokenizer.eos_token_id in ends
    with pytest.raises(InputError, match="is unknown"):
        splitter.cut([len(smol.tokenizer)])


@pytest.mark.parametrize("recall", RECALLS)
def test_a_threshold_of_zero_is_the_full_cache(recall):
    plain = DynamicCache(config=MODEL.config)
    with torch.inference_mode():
        MODEL(torch.tensor([TOKENS[:PROMPT]]), past_key_values=plain)
        whole = MODEL(torch.tensor([TOKENS[PROMPT : PROMPT + 40]]), past_key_values=plain).logits[0]
    cache, logits = fed(0.0, recall=recall)
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-5)
    assert cache.books.fetched == 0 and cache.tiers()["gone"] == 0


@pytest.mark.parametrize("recall", RECALLS)
def test_bytes_are_conserved_and_those_on_the_fast_tier_are_those_that_were_written(recall):
    cache, logits = fed(recall=recall)
    assert torch.isfinite(logits).all()
    for shelf in cache.steps.shelves.values():
        there, reservoir = shelf.there, shelf.layer.reservoir
        for row in range(shelf.layer.n_rows):
            here = there.position[row] >= 0
            at = there.position[row][here]
            assert len(at) == len(set(at.tolist()))
            expected = [
                t
                for t in range(shelf.n_tokens)
                if shelf.unit_of[t] == shelf.n_units or shelf.resident[row, shelf.unit_of[t]]
            ]
            assert sorted(at.tolist()) == expected
            for name in ("keys", "values"):
                written = getattr(reservoir, name)[row].flatten(0, 1)[at]
                assert torch.equal(getattr(there, name)[row][here], written)
        everything = shelf.layer.n_rows * shelf.n_tokens * there.token_bytes
        away = int((~shelf.resident * shelf.sizes).sum()) * there.token_bytes
        assert there.n_bytes + away == everything and away > 0
        assert reservoir.held[:, : shelf.layer.n_closed].all()
    tiers = cache.tiers()
    assert (tiers["gone"] > 0) == (recall == "none") == (tiers["slow"] == 0)
    assert len(cache.history) == 40 and cache.history[-1] == tiers


def test_a_sentence_leaves_when_its_largest_weight_of_the_window_is_below_the_threshold():
    """Against a* computed from whole rows of attention, kept by hand."""
    cache, shelves, weights = START.again(Sentences(SPLITTER, window=4, threshold=0.05, recall="none")), {}, {}
    with torch.inference_mode(), cache.attached(MODEL):
        for step, token in enumerate(TOKENS[PROMPT : PROMPT + 20]):
            MODEL(torch.tensor([[token]]), past_key_values=cache)
            for i, shelf in cache.steps.shelves.items():
                weights.setdefault(i, []).append(shelf._read[:, :-1].clone())
                n = weights[i][0].shape[1]
                largest = torch.stack([w[:, :n] for w in weights[i][-4:]]).amax(0)
                was = shelves[i][:, :n] if step else torch.ones(2, n, dtype=torch.bool)
                assert torch.equal(shelf.resident[:, :n], was & ((largest >= 0.05) | (step < 3)))
            shelves = {i: shelf.resident.clone() for i, shelf in cache.steps.shelves.items()}


@pytest.mark.parametrize("recall", ["none", "exact", "key"])
def test_what_was_read_before_can_be_told_instead_of_fed(recall):
    """Nothing leaves while the window fills: a later start that knows what was read there is the same cache."""
    tier, whole, past = (
        Sentences(SPLITTER, 0.12, 7, recall),
        START.again(Sentences(SPLITTER, 0.0)),
        {0: [], 1: [], 2: []},
    )
    fed, later = START.again(tier), START.again()
    with later.attached(MODEL):
        later.prefill(MODEL, torch.tensor([TOKENS[PROMPT : PROMPT + 7]]))
    together(
        MODEL,
        [whole, fed],
        TOKENS[PROMPT : PROMPT + 7],
        lambda: [past[i].append(shelf.read) for i, shelf in whole.steps.shelves.items()],
    )
    told = later.again(dataclasses.replace(tier, past=past))
    a, b = together(MODEL, [fed, told], TOKENS[PROMPT + 7 : PROMPT + 40])
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(x.resident, told.steps.shelves[i].resident) for i, x in fed.steps.shelves.items())
    assert fed.history[-33:] == told.history and fed.books.fetched == told.books.fetched
    assert fed.history[6]["fast"] < fed.history[5]["fast"], "some leave as the window is full"


def test_the_reactive_return_misses_nothing_and_the_bounds_bring_no_less():
    kept = {}
    for recall in ("none", "exact", "bounds"):
        cache, logits = fed(recall=recall, audit=True)
        kept[recall] = cache.books, quality.divergence(FULL, logits).mean()
    assert kept["exact"][0].misses == kept["bounds"][0].misses == 0 < kept["none"][0].misses
    assert kept["bounds"][0].fetched >= kept["exact"][0].fetched > 0 == kept["none"][0].fetched
    assert kept["exact"][0].probed_bytes > 0 == kept["bounds"][0].probed_bytes
    assert kept["exact"][1] < kept["none"][1]


def test_sentences_can_be_demoted_several_at_a_time():
    cache, was = START.again(Sentences(SPLITTER, 0.05, 4, batch=3, recall="none")), {}
    left = []
    with torch.inference_mode(), cache.attached(MODEL):
        for token in TOKENS[PROMPT : PROMPT + 30]:
            MODEL(torch.tensor([[token]]), past_key_values=cache)
            for i, shelf in cache.steps.shelves.items():
                before = was.get(i, torch.ones(2, 0, dtype=torch.bool))
                left += (before & ~shelf.resident[:, : before.shape[1]]).sum(1).tolist()
                was[i] = shelf.resident.clone()
    assert set(left) - {0} and all(n == 0 or n >= 3 for n in left)


def test_the_nearest_sentences_are_those_most_like_the_question_that_there_is_room_for():
    wide = START.again(Nearest(SPLITTER, room=1000))
    torch.testing.assert_close(quality.forced(MODEL, wide, TOKENS[PROMPT : PROMPT + 40]), FULL, atol=1e-4, rtol=1e-4)
    assert wide.books.fetched == 0
    cache, left = START.again(Nearest(SPLITTER, 0.05, room=40, audit=True)), 0
    with torch.inference_mode(), cache.attached(MODEL):
        for token in TOKENS[PROMPT : PROMPT + 40]:
            MODEL(torch.tensor([[token]]), past_key_values=cache)
            for shelf in cache.steps.shelves.values():
                here = (shelf.there.position >= 0).sum(1)
                asked = torch.stack(shelf._queries or [shelf._query]).float().mean(0)
                score = torch.bmm(asked, shelf.means.transpose(1, 2)).amax(1)
                worst_here = score.masked_fill(~shelf.resident, torch.inf).amin(1)
                assert (here <= 40).all() and torch.equal(shelf.resident, shelf.near)
                if shelf._queries:  # else the sentence is over and its mean begun anew
                    assert (score.masked_fill(shelf.resident, -torch.inf).amax(1) <= worst_here).all()
                left += int((~shelf.resident).sum())
    tiers, books = cache.tiers(), cache.books
    assert left > 0 and books.fetched > 0 and books.misses > 0 and tiers["gone"] == 0 < tiers["slow"]
    assert tiers["index"] == sum(shelf.means.numel() * 4 for shelf in cache.steps.shelves.values())
    with pytest.raises(InputError, match="room counts tokens"):
        Nearest(SPLITTER, room=0)


def test_what_comes_back_has_its_bytes_and_is_counted():
    cache, _ = fed(recall="exact")
    books, token = cache.books, cache.steps.shelves[0].there.token_bytes
    assert books.fetched_bytes % token == 0 and books.fetched <= books.fetched_bytes // token <= 12 * books.fetched


@pytest.mark.parametrize("recall", ["cosine", "dot", "centred", "key"])
def test_both_indexes_recall_the_same_sentences(recall):
    pytest.importorskip("faiss", reason="pip install faiss-cpu")
    (torch_cache, a), (faiss_cache, b) = (fed(recall=recall, index=index) for index in INDEXES)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert torch_cache.books.fetched == faiss_cache.books.fetched
    assert torch_cache.tiers() == faiss_cache.tiers()


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_finds_what_is_most_like_the_question_and_nothing_that_was_removed(name):
    if name == "faiss":
        pytest.importorskip("faiss", reason="pip install faiss-cpu")
    generator = torch.Generator().manual_seed(0)
    vectors, asked = torch.randn(2, 30, 8, generator=generator), torch.randn(2, 3, 8, generator=generator)
    index = INDEXES[name](2, 8)
    index.grow(30)
    rows, units = torch.nonzero(torch.ones(2, 30), as_tuple=True)
    index.add(rows, units, vectors[rows, units])
    gone = torch.zeros(2, 30, dtype=torch.bool)
    gone[0, ::2] = gone[1, 5:29] = True
    index.remove(*torch.nonzero(gone, as_tuple=True))
    score = torch.bmm(asked, vectors.transpose(1, 2)).masked_fill(gone[:, None], -torch.inf)
    found, at = index.search(asked, 7)
    best = score.topk(7)
    torch.testing.assert_close(found, best.values, atol=1e-5, rtol=1e-5)
    assert torch.equal(at, torch.where(best.values > -torch.inf, best.indices, -1))
    assert index.n_bytes == int((~gone).sum()) * 8 * 4


def test_vectors_of_eight_bits_are_near_and_take_a_quarter():
    vectors = torch.randn(3, 200, 64, generator=torch.Generator().manual_seed(0))
    off = (rounded(vectors) - vectors).abs()
    assert (off <= vectors.abs().amax(-1, keepdim=True) / 254 + 1e-6).all() and off.max() > 0
    asked = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    assert 0.9 < overlap(asked, vectors, 8) <= 1.0
    for cache, own in ((fed(recall="dot", vector_bits=bits)[0], own) for bits, own in ((32, 4 * 8), (8, 8 + 4))):
        away = sum(int((~shelf.resident).sum()) for shelf in cache.steps.shelves.values())
        assert cache.tiers()["index"] == own * away > 0  # keys of 8 numbers


def test_the_means_stand_in_for_what_is_away():
    """A sentence of one token is its mean: so nothing is lost where each is one token."""
    single = Splitter(N_VOCAB, least=1, longest=1)
    cache = START.again(Sentences(single, threshold=0.9, window=1, recall="none", stand_in=True))
    logits = quality.forced(MODEL, cache, TOKENS[PROMPT : PROMPT + 40])
    torch.testing.assert_close(logits, FULL, atol=1e-4, rtol=1e-4)
    assert cache.tiers()["gone"] > 0 and cache.tiers()["index"] == cache.tiers()["gone"]


def test_generate_writes_the_same_text_and_goes_on_after_a_second_turn():
    ids = torch.tensor([TOKENS[:PROMPT]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cache = TieredCache(MODEL.config, Sentences(SPLITTER, threshold=0.0), **ROOM)
    with torch.inference_mode(), cache.attached(MODEL):
        text = MODEL.generate(ids, past_key_values=cache, **options)
        assert cache.ids == text[0, :-1].tolist()
        MODEL(torch.tensor([TOKENS[PROMPT : PROMPT + 10]]), past_key_values=cache)
        MODEL(torch.tensor([[3]]), past_key_values=cache)
    assert torch.equal(text, MODEL.generate(ids, past_key_values=DynamicCache(config=MODEL.config), **options))
    assert cache.get_seq_length() == PROMPT + 11 + 11 == len(cache.ids)
    assert not MODEL._forward_pre_hooks


def test_what_it_cannot_serve_is_refused_in_one_line():
    cache = TieredCache(MODEL.config, Sentences(SPLITTER, recall="none"), **ROOM)
    with torch.inference_mode(), cache.attached(MODEL):
        with pytest.raises(CacheError, match="serves one sequence"):
            MODEL(torch.tensor([TOKENS[:8], TOKENS[:8]]), past_key_values=cache)
        with pytest.raises(CacheError, match="needs to see the token ids"):
            MODEL(inputs_embeds=torch.zeros(1, 8, 32), past_key_values=cache)
        MODEL(torch.tensor([TOKENS[:8]]), past_key_values=cache)
        MODEL(torch.tensor([[1]]), past_key_values=cache)
        with pytest.raises(CacheError, match="has lost tokens"):
            MODEL(torch.tensor([TOKENS[:8]]), past_key_values=cache)
    with pytest.raises(CacheError, match="decoding has begun"):
        cache.again()
    for wrong in ({"recall": "cosines"}, {"index": "fais"}, {"threshold": 2.0}, {"window": 0}, {"batch": 0}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Sentences(SPLITTER, **wrong)


def test_a_step_that_failed_can_be_taken_again():
    cache, whole = START.again(Sentences(SPLITTER, window=4, threshold=0.05)), fed(recall="exact")[1]
    out, layer = [], MODEL.model.layers[1]
    with torch.inference_mode(), cache.attached(MODEL):
        for step, token in enumerate(TOKENS[PROMPT : PROMPT + 40]):
            if step % 9 == 5:
                hook = layer.mlp.register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    MODEL(torch.tensor([[token]]), past_key_values=cache)
                hook.remove()
            out.append(MODEL(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    torch.testing.assert_close(torch.stack(out), whole, atol=1e-5, rtol=1e-5)
    assert cache.ids == TOKENS[: PROMPT + 40]


def test_caches_side_by_side_give_what_they_give_alone():
    tiers = [Sentences(SPLITTER, window=4, threshold=0.05, recall=recall) for recall in ("exact", "none")]
    plain = ReversibleCache(MODEL.config, 3, wants=3, **ROOM)
    plain.hold(START)
    caches = [*(START.again(tier) for tier in tiers), plain]
    found = together(MODEL, caches, TOKENS[PROMPT : PROMPT + 40])
    alone = [START.again(tier) for tier in tiers] + [plain.__class__(MODEL.config, 3, wants=3, **ROOM)]
    alone[-1].hold(START)
    for cache, own, logits in zip(alone, caches, found):
        torch.testing.assert_close(
            logits, quality.forced(MODEL, cache, TOKENS[PROMPT : PROMPT + 40]), atol=1e-4, rtol=1e-4
        )
        assert own.books.fetched == cache.books.fetched and own.books.n_steps == 40
    assert MODEL.config._attn_implementation == "sdpa"
    gemma = tiny.model("gemma3")
    with pytest.raises(InputError, match="without sliding windows"):
        together(gemma, [started(gemma)], TOKENS[:2])


def test_the_centre_is_taken_off_and_cosines_stay_within_one():
    cache, _ = fed(recall="centred")
    assert -1.001 <= cache.books.best <= 1.001 and cache.books.n_fired == cache.books.n_asked > 0
    cosine, _ = fed(recall="cosine")
    assert cosine.books.n_asked > 0 and np.isfinite(cosine.books.best_sum)
