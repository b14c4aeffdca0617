"""Positions become pages, once, in one order."""

from __future__ import annotations

import numpy as np
import pytest

from wakekv.errors import InputError
from wakekv.logs import demand as demand_module
from wakekv.logs.demand import Demand, demand


def plain_wants(trace, heads, step, page_tokens, k):
    """{page: weight} by definition, in dictionaries."""
    wants = {}
    for h in heads:
        read = [
            (float(w), int(p))
            for p, w in zip(trace.positions[h, step], trace.weights[h, step], strict=True)
            if p != np.iinfo(trace.positions.dtype).max
        ]
        for w, p in sorted(read, key=lambda pair: (-pair[0], pair[1]))[:k]:
            wants[p // page_tokens] = wants.get(p // page_tokens, 0.0) + w
    return wants


@pytest.mark.parametrize("unit", ["head", "kv_head"])
@pytest.mark.parametrize("page_tokens,k", [(16, 16), (8, 16), (32, 5)])
def test_wants_are_the_pages_of_the_heaviest_positions(make_trace, unit, page_tokens, k):
    trace = make_trace()
    wanted = demand(trace, unit=unit, page_tokens=page_tokens, k=k)
    group = trace.group if unit == "kv_head" else 1
    assert wanted.n_heads == trace.n_heads // group
    for u in range(wanted.n_heads):
        for t in (0, 7, trace.n_steps - 1):
            entries = slice(wanted.ptr[u, t], wanted.ptr[u, t + 1])
            plain = plain_wants(trace, range(u * group, (u + 1) * group), t, page_tokens, k)
            got = dict(zip(wanted.page[entries].tolist(), wanted.weight[entries].tolist(), strict=True))
            assert got == pytest.approx(plain)
            pairs = list(zip(wanted.weight[entries], wanted.page[entries], strict=True))
            assert pairs == sorted(pairs), "ascending weight, ties by page"


def test_padding_is_nobodys_want(make_trace):
    trace = make_trace(n_prompt=10, n_steps=4, k=64, needle=())
    wanted = demand(trace)
    assert wanted.page.max() == 0 and (np.diff(wanted.ptr, axis=1) == 1).all()


def test_a_page_is_created_when_its_first_token_is_fed(make_trace):
    trace = make_trace(n_prompt=33, n_steps=40, needle=())
    wanted = demand(trace, first_touch="warm")
    # prefill covers positions 0..31; position 32, the last of the prompt, is fed by step 0 and opens page 2
    assert wanted.created.tolist() == [-1, -1, 0, 16, 32]


def test_prompt_rows_and_key_means_follow_the_unit(make_trace):
    trace = make_trace()
    heads, kv_heads = demand(trace), demand(trace, unit="kv_head")
    assert heads.prompt_rows.shape == (trace.n_heads, 32, heads.n_pages)
    assert np.allclose(kv_heads.prompt_rows[0], heads.prompt_rows[: trace.group].sum(0), atol=1e-5)
    assert (heads.key_means[1] == heads.key_means[0]).all() and len(kv_heads.key_means) == trace.n_kv_heads
    assert demand(trace, page_tokens=8).prompt_rows is None, "logged by 16 tokens, not to be split"


def test_the_order_within_a_step_is_by_weight_over_all_heads():
    wanted = Demand.from_lists([[{0: 0.3, 1: 0.1}], [{0: 0.2, 1: 0.1}]])
    assert [(h, p) for _, h, p in sorted(zip(wanted.order, wanted.head_of, wanted.page, strict=True))] == [
        (0, 1),
        (1, 1),
        (1, 0),
        (0, 0),
    ]


def test_next_use_is_the_step_of_the_following_want():
    wanted = Demand.from_lists([[[0], [1], [0], [0]]])
    following, first = wanted.next_use
    assert following.tolist() == [2, 4, 3, 4] and first.tolist() == [[0, 1]]


def test_until_is_the_past_alone():
    wanted = Demand.from_lists([[[0], [1], [0]], [[1], [1], [0]]])
    past = wanted.until(2)
    assert past.n_steps == 2 and past.page.tolist() == [0, 1, 1, 1] and past.ptr.tolist() == [[0, 1, 2], [2, 3, 4]]


def test_bad_demands_are_refused_in_one_line(make_trace):
    trace = make_trace()
    for options, said in [({"unit": "layer"}, "unit"), ({"k": 99}, "k must"), ({"page_tokens": 0}, "page_tokens")]:
        with pytest.raises(InputError, match=said):
            demand(trace, **options)
    with pytest.raises(InputError, match="first_touch"):
        Demand.from_lists([[[0]]], first_touch="tepid")
    with pytest.raises(InputError, match="page"):
        Demand.from_lists([[[3]]], created=[-1])
    with pytest.raises(InputError, match="weight"):
        Demand.from_lists([[{0: float("nan")}]])
    with pytest.raises(InputError, match="before it is created"):
        Demand.from_lists([[[0]]], created=[5], first_touch="warm")


@pytest.mark.parametrize("unit, k", [("head", None), ("head", 3), ("kv_head", None)])
def test_wants_do_not_depend_on_how_many_reads_are_turned_at_a_time(unit, k, make_trace, monkeypatch):
    trace = make_trace(k=8, n_steps=13)
    whole = demand(trace, unit, k=k)
    for reads in (1, 8 * trace.group * 5):
        monkeypatch.setattr(demand_module, "READS", reads)
        some = demand(trace, unit, k=k)
        assert all(np.array_equal(getattr(some, name), getattr(whole, name)) for name in ("ptr", "page", "weight"))
