"""The tiers on trial, on a tiny model: what is compared, what is counted, and at how many bytes."""

from __future__ import annotations

import pytest
import tiny
import torch

from wakekv.errors import InputError
from wakekv.tables import tiered
from wakekv.tiers import trial

TOKENS = torch.randint(0, 64, (400,), generator=torch.Generator().manual_seed(5)).tolist()


class Words:
    """A tokenizer that knows numbers from 0 to 63 and nothing else."""

    all_special_ids = [0]

    def __len__(self):
        return 64

    def __call__(self, text, add_special_tokens=False):
        return type("Coded", (), {"input_ids": [len(word) for word in text.split()]})

    def decode(self, ids):
        return " ".join(map(str, ids))

    def batch_decode(self, rows):
        return [f"{row[0]}." if row[0] % 6 == 0 else str(row[0]) for row in rows]


@pytest.fixture(scope="module")
def found():
    loaded = tiny.loaded()
    loaded.model.set_attn_implementation("sdpa")
    loaded.tokenizer = Words()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "passage", lambda tokenizer, seed, n, path: ("numbers", TOKENS[seed : seed + n]))
        return trial.contest(loaded, seed=1, length=200, n_tokens=20, thresholds=(0.02, 0.1), at=0.1, window=6, page=4)


def row(found, method, threshold=0.1, family="sentences"):
    (one,) = (r for r in found["rows"] if (r["family"], r["method"], r["threshold"]) == (family, method, threshold))
    return one


def test_every_method_is_there_and_told_of_in_words(found):
    keys = [(one["family"], one["method"]) for one in found["rows"]]
    assert set(tiered.SAYS) <= set(keys) and {family for family, _ in keys} == {
        "sentences",
        "codes",
        "merging",
        "pages",
    }
    for name in ("none", "dot", "exact"):
        assert row(found, name, 0.02)["residency"] > row(found, name)["residency"]
    assert len(tiered.tiers([found]).shown) == len(found["rows"])
    assert found["text"]["n_sentences"] > 5 and len(found["text"]["first"]) == 5


def test_what_can_return_stays_nearer_and_loses_nothing(found):
    never, ours, bounded = (row(found, name) for name in ("none", "exact", "bounds"))
    assert ours["kl_mean"] < never["kl_mean"] and ours["misses"] == bounded["misses"] == 0 < never["misses"]
    assert never["gone_bytes"] > 0 == never["slow_bytes"] == never["fetched"]
    assert ours["gone_bytes"] == 0 < ours["slow_bytes"] and bounded["fetched"] >= ours["fetched"] > 0
    assert bounded["index_bytes"] > 0 == ours["index_bytes"]
    full, held = (found["memory"][name]["fast"] for name in ("full", "exact"))
    assert full == sorted(full) and len(full) == 26 and 0 < held[-1] < full[-1]
    assert ours["residency"] == pytest.approx(sum(held[6:]) / sum(full[6:]))
    assert sum(found["memory"]["none"]["gone"]) > 0 == sum(found["memory"]["exact"]["gone"])


def test_the_more_heads_a_weight_is_the_largest_of_the_fewer_sentences_are_below(found):
    for threshold in (0.02, 0.1):
        share = [one["share"] for one in found["flagged"] if one["threshold"] == threshold]
        assert 1 >= share[0] >= share[1] >= share[2] >= 0
    assert found["flagged"][1]["share"] > found["flagged"][5]["share"]
    assert tiered.flagged([found]).shown.shape == (3, 3)


def test_pages_get_as_many_bytes_as_the_reactive_sentences_held(found):
    for threshold in (0.02, 0.1):
        ours, pages = row(found, "exact", threshold), row(found, "reactive", threshold, "pages")
        assert pages["fast_bytes"] + pages["index_bytes"] <= ours["fast_bytes"] + ours["index_bytes"]
        page = 3 * 2 * 4 * 2 * 8 * 4  # layers, KV heads, tokens, keys and values, width, bytes
        assert ours["fast_bytes"] - pages["fast_bytes"] - pages["index_bytes"] < 2.5 * page
        near = row(found, "nearest", threshold)
        assert abs(near["residency"] / ours["residency"] - 1) < 0.15 and near["gone_bytes"] == 0
    assert row(found, "evict", 0.1, "pages")["gone_bytes"] > 0 == row(found, "reactive", 0.1, "pages")["gone_bytes"]


def test_eight_bits_are_near_and_two_are_promoted_for_the_better(found):
    kl = {r["method"]: r["kl_mean"] for r in found["rows"] if r["family"] == "codes"}
    assert kl["8 bits"] < kl["4 bits"] < kl["2 bits"] and kl["2 bits, promoted"] < kl["2 bits"]
    assert len(found["shares"]) == 3 and 0.5 < found["overlap"] <= 1


def test_families_can_be_tried_apart_but_for_pages():
    with pytest.raises(InputError, match="as many bytes as sentences held"):
        trial.contest(None, seed=0, length=9, n_tokens=9, thresholds=(), at=0.1, families=("pages", "codes"))


def test_a_text_that_is_too_short_is_refused(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("One two three four. Five six seven. Eight nine ten eleven twelve. Thirteen.")
    assert trial.passage(Words(), 0, 3, str(path))[1] in ([3, 3, 5], [4, 3, 5], [5, 4, 3])
    with pytest.raises(InputError, match="give a longer text"):
        trial.passage(Words(), 0, 50, str(path))
