"""Codes and products on them; pages kept as codes; keys and values that are alike kept once."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from test_tiers import FULL, MODEL, N_VOCAB, PROMPT, ROOM, SPLITTER, START, TOKENS

from wakekv.costs import quality
from wakekv.errors import InputError
from wakekv.tiers import Sentences, Splitter, TieredCache
from wakekv.tiers.codes import BITS, coded, mixture, pack, product, unpack
from wakekv.tiers.merging import Codebook, Directions, Layered, Merged
from wakekv.tiers.quantised import LAYOUTS, Quantised
from wakekv.tiers.recall import RECALLS
from wakekv.tiers.rope import Rope

ROPE = Rope(MODEL)
STEPS = TOKENS[PROMPT : PROMPT + 40]


def fed(tier):
    cache = START.again(tier)
    return cache, quality.forced(MODEL, cache, STEPS)


def doubles(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_product_on_codes_is_that_of_the_numbers_they_stand_for(bits, axis):
    a, b = doubles(2, 5, 32), coded(doubles(2, 48, 32, seed=1), bits, 16, axis, torch.float64)
    assert b.code.max() == 2**bits - 1 and b.code.min() == 0 and b.code.dtype == torch.float64
    assert (product(a, b, None) - a @ b.value().transpose(-1, -2)).abs().max() < 1e-12
    p = torch.softmax(doubles(2, 5, 48, seed=2), -1)
    assert (mixture(p, b, None) - p @ b.value()).abs().max() < 1e-12


@pytest.mark.parametrize("bits", BITS)
def test_so_is_one_whose_other_side_is_codes_too(bits):
    """The identity of HACK, section 4.2, with both sides in groups along what is summed over."""
    a, b = doubles(2, 5, 32), coded(doubles(2, 48, 32, seed=1), bits, 16, -1, torch.float64)
    near = coded(a, 8, 16, -1, torch.float64).value()
    assert (product(a, b, 8) - near @ b.value().transpose(-1, -2)).abs().max() < 1e-12
    p, v = torch.softmax(doubles(2, 5, 48, seed=2), -1), coded(doubles(2, 48, 32, seed=3), bits, 16, -2, torch.float64)
    near = coded(p, 8, 16, -1, torch.float64).value()
    assert (mixture(p, v, 8) - near @ v.value()).abs().max() < 1e-12


@pytest.mark.parametrize("axis", [-1, -2])
def test_and_in_the_other_layout_to_half_a_step_of_the_operand(axis):
    a, b = doubles(2, 5, 32), coded(doubles(2, 48, 32, seed=1), 4, 16, axis, torch.float64)
    exact = a @ b.value().transpose(-1, -2)
    off = (product(a, b, 8) - exact).abs().max()
    assert 0 < off < 0.05 * exact.abs().max()


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_within_half_a_step_and_are_packed_without_loss(bits):
    x = doubles(3, 32, 16)
    one = coded(x, bits, 16, -1, torch.float64)
    assert ((one.value() - x).abs() <= one.spread(one.scale) / 2 + 1e-12).all()
    packed = pack(one.code, bits)
    assert packed.shape == (3, 32, 16 * bits // 8) and torch.equal(unpack(packed, bits, torch.float64), one.code)
    same = coded(torch.full((1, 16, 16), 2.5, dtype=torch.float64), bits, 16, -1, torch.float64)
    assert (same.value() == 2.5).all()


def test_codes_that_cannot_be_made_are_refused():
    with pytest.raises(InputError, match="codes have 2, 4, 8 bits, not 3"):
        coded(doubles(1, 16, 16), 3, 16, -1)
    with pytest.raises(InputError, match="20 numbers are no whole groups of 16"):
        coded(doubles(1, 20, 16), 4, 16, -2)
    with pytest.raises(InputError, match="one of 2, 4, 8"):
        Quantised(3)
    with pytest.raises(InputError, match="unknown layout"):
        Quantised(layout="rows")
    with pytest.raises(InputError, match="a group of 6 must be whole pages of 4"):
        fed(Quantised(group=6))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_bits_stray_further_and_take_less(layout):
    found = {}
    for bits in BITS:
        cache, logits = fed(Quantised(bits, layout, group=8))
        found[bits] = quality.divergence(FULL, logits).mean(), cache.tiers()
        shelf = cache.steps.shelves[0]
        assert shelf.n_coded == shelf.n_tokens // 8 * 8 and shelf.exact.n_tokens == shelf.layer.n_rows * (
            shelf.n_tokens % 8
        )
        assert cache.tiers()["codes"] == sum(x.numel() * x.element_size() for s in cache.steps.shelves.values()
                                             for parts in s.codes for x in parts)  # fmt: skip
    kl, size = ([found[bits][i] for bits in BITS] for i in range(2))
    assert kl[0] > kl[1] > kl[2] < 1e-2
    assert size[0]["fast"] < size[1]["fast"] < size[2]["fast"] < cache.tiers()["slow"]


def test_pages_that_are_promoted_are_the_full_cache_if_all_are():
    cache, logits = fed(Quantised(2, group=8, promote=0.0))
    torch.testing.assert_close(logits, FULL, atol=1e-4, rtol=1e-4)
    shelf = cache.steps.shelves[1]
    assert shelf.promoted.all() and shelf.exact.n_tokens == shelf.layer.n_rows * shelf.n_tokens


def test_promotion_brings_what_is_read_has_its_bytes_and_lets_it_go_again():
    plain, promoted = (fed(Quantised(2, group=8, promote=promote, window=3)) for promote in (None, 0.1))
    kl = [quality.divergence(FULL, logits).mean() for _, logits in (plain, promoted)]
    assert kl[1] < kl[0]
    cache, page = promoted[0], 4
    books = cache.books
    assert books.fetched_bytes == books.fetched * page * cache.steps.shelves[0].exact.token_bytes > 0
    for shelf in cache.steps.shelves.values():
        assert not shelf.promoted.all()
        for row in range(shelf.layer.n_rows):
            here = shelf.exact.position[row] >= 0
            at = shelf.exact.position[row][here]
            pages = [p for p, there in enumerate(shelf.promoted[row].tolist()) if there]
            expected = [t for t in range(shelf.n_tokens) if t >= shelf.n_coded or t // page in pages]
            assert sorted(at.tolist()) == expected
            written = shelf.layer.reservoir.keys[row].flatten(0, 1)[at]
            assert torch.equal(shelf.exact.keys[row][here], written)
    resident = sum(int(shelf.promoted.sum()) for shelf in cache.steps.shelves.values())
    assert 0 < resident < books.fetched, "some page was let go again"


# --- merging


def test_keys_are_turned_back_exactly():
    x, at = doubles(2, 3, 50, 8), torch.arange(50) * 19
    turned = ROPE.turned(x, at)
    assert (turned - x).abs().max() > 0.5 and (ROPE.back(turned, at) - x).abs().max() < 1e-12


def test_what_is_turned_back_is_what_the_model_projected():
    seen = {}
    layer = MODEL.model.layers[1].self_attn
    hook = layer.k_proj.register_forward_hook(lambda module, args, out: seen.update(keys=out))
    with torch.inference_mode():
        cache = START.again()
        MODEL(torch.tensor([TOKENS[:PROMPT]]))
    hook.remove()
    projected = seen["keys"].view(PROMPT, 2, 8).transpose(0, 1)
    rotated = cache.paged[1].reservoir.keys[:, : PROMPT // 4].flatten(1, 2)
    torch.testing.assert_close(ROPE.back(rotated, torch.arange(PROMPT)), projected, atol=1e-5, rtol=1e-5)


def test_a_model_whose_keys_cannot_be_turned_back_is_refused():
    with pytest.raises(InputError, match="cannot be turned back"):
        Rope(tiny.model("gemma3"))


def test_a_direction_is_shared_from_its_cosine_on_and_new_below():
    book, least = Directions(2, 2), math.cos(math.radians(11))
    angles = [0, 10, 30, 12, 60] + [100 + 12 * i for i in range(20)]  # degrees; more than the room it begins with
    units = torch.tensor([[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in angles])
    entries = [book.place(unit.expand(2, 2), least).tolist() for unit in units]
    assert entries == [[n, n] for n in (0, 0, 1, 2, 3, *range(4, 24))] and book.n.tolist() == [24, 24]


@pytest.mark.parametrize("tier", [Codebook(ROPE, 1.1, 1.1), Merged(ROPE, 1.1)], ids=["codebook", "merged"])
def test_where_nothing_is_alike_nothing_is_lost(tier):
    cache, logits = fed(tier)
    torch.testing.assert_close(logits, FULL, atol=1e-3, rtol=1e-3)
    assert all(share == 1.0 for shelf in cache.steps.shelves.values() for share in shelf.shares())


@pytest.mark.parametrize("kind", ["codebook", "merged"])
def test_the_more_counts_as_alike_the_less_is_kept(kind):
    fast, shares = [], []
    for least in (0.98, 0.7):
        cache, logits = fed(Codebook(ROPE, least, least) if kind == "codebook" else Merged(ROPE, least))
        assert torch.isfinite(logits).all()
        fast.append(cache.tiers()["fast"])
        shares.append(sum(share for shelf in cache.steps.shelves.values() for share in shelf.shares()))
    assert fast[1] < fast[0] and shares[1] < shares[0]


def test_a_codebook_keeps_every_length_and_each_direction_to_the_cosine_it_promises():
    cache, _ = fed(Codebook(ROPE, 0.9, 0.8))
    shelf = cache.steps.shelves[2]
    keys, values, bias = shelf.stand()
    held = shelf.layer.reservoir
    for ours, written, least in ((keys, held.keys, 0.9), (values, held.values, 0.8)):
        written = written.flatten(1, 2)[:, : shelf.n_tokens]
        torch.testing.assert_close(ours.norm(dim=-1), written.norm(dim=-1), atol=1e-4, rtol=1e-4)
        assert torch.cosine_similarity(ours, written, dim=-1).min() >= least - 1e-5
    assert not bias.any()


def test_a_merged_entry_is_the_mean_of_its_tokens_and_counts_as_many():
    cache, _ = fed(Merged(ROPE, 0.7))
    shelf = cache.steps.shelves[0]
    assert (shelf.count.sum(1) == shelf.n_tokens).all() and shelf.count.max() > 1
    values = shelf.layer.reservoir.values.flatten(1, 2)[:, : shelf.n_tokens].sum(1)
    torch.testing.assert_close(shelf.values.sum(1), values, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "tier",
    [
        *(Sentences(SPLITTER, 0.5, 2, recall) for recall in RECALLS),
        Quantised(4, group=8, promote=0.5),
        Codebook(ROPE),
        Merged(ROPE),
    ],
    ids=[*RECALLS, "quantised", "codebook", "merged"],
)
def test_a_text_can_begin_with_one_token_and_grow(tier):
    cache = TieredCache(MODEL.config, tier, **ROOM)
    with torch.inference_mode(), cache.attached(MODEL):
        logits = [MODEL(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in TOKENS[:50]]
    assert torch.isfinite(torch.stack(logits)).all() and cache.get_seq_length() == len(cache.ids) == 50


def test_layers_can_have_tiers_of_their_own():
    deep = Sentences(Splitter(N_VOCAB, least=1, longest=1), 0.05, 4, "none")
    cache, logits = fed(Layered(Merged(ROPE), deep, 1))
    kinds = [type(shelf).__name__ for _, shelf in sorted(cache.steps.shelves.items())]
    assert kinds == ["MergedShelf", "SentenceShelf", "SentenceShelf"] and torch.isfinite(logits).all()
    assert not cache.tier.returns and cache.tiers()["gone"] > 0
