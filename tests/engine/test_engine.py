"""The plugin in the real engine. `make test-vllm` runs this in .venv-vllm; each engine has a process of its own."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import transformers
from engines import ALL, ANY, RULES, arm, name_of
from safetensors.torch import load_file

from wakekv.costs.system import passages
from wakekv.errors import WakeKVError
from wakekv.recording.models import fetch
from wakekv.serving.sweep import divergence
from wakekv.simulation.replay import replay
from wakekv.vllm.arm import Arm, read_demands
from wakekv.vllm.settings import Settings

N_TOKENS = 20
SMALL = {"dtype": "float32", "max_tokens": 1024, "batch": 4, "reservoir_gib": 1, "max_num_batched_tokens": 256}
LONG = {"dtype": "float32", "max_tokens": 4096, "batch": 4, "reservoir_gib": 2}


@pytest.fixture(scope="module")
def model() -> str:
    return str(fetch("smollm2-135m"))


@pytest.fixture(scope="module")
def texts(model) -> list[list[int]]:
    """Three passages that differ in length, and none ends with a page."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    rows = passages(tokenizer, 3, 700).tolist()
    return [rows[0][:250], rows[1][:435], rows[2][:615]]


@pytest.fixture(scope="module")
def stock(model, tmp_path_factory):
    with arm(tmp_path_factory.mktemp("stock"), model=model, settings=None, **SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def ours(model, tmp_path_factory):
    settings = {"budget": 64, "record": True}
    with arm(tmp_path_factory.mktemp("ours"), model=model, settings=settings, **SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def plain(stock, texts):
    return stock.ask("generate", prompts=texts, n_tokens=N_TOKENS)["tokens"]


@pytest.mark.parametrize("rule", ALL, ids=name_of)
def test_with_room_for_all_pages_the_text_is_that_of_the_untouched_engine(rule, ours, plain, texts):
    ours.ask("set", **{**ANY, "budget": 64, **rule})
    ours.ask("books")
    assert ours.ask("generate", prompts=texts, n_tokens=N_TOKENS)["tokens"] == plain
    assert ours.ask("books")["misses"] == 0


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.get("scope") != "model"], ids=name_of)
def test_its_wants_replayed_by_the_simulator_give_its_misses(rule, ours, texts, tmp_path):
    ours.ask("set", **{**ANY, "budget": 8, **rule})
    ours.ask("demands", file=str(tmp_path / "before"))
    ours.ask("books")
    ours.ask("generate", prompts=texts, n_tokens=40)
    books = ours.ask("books")
    ours.ask("demands", file=str(tmp_path / "demands"))
    demands = read_demands(tmp_path / "demands").values()
    policy = Settings.of({"budget": 8, **rule}).policy
    found = [replay(demand, policy, 8) for demand in demands]
    assert len(found) == 3 and books["misses"] == sum(int(x.misses.sum()) for x in found) > 0
    assert books["fetched"] == sum(int(x.fetched.sum()) for x in found)
    assert books["tokens"] == 3 * 39 and books["wants"] == sum(demand.n_wants for demand in demands)


@pytest.mark.skipif("WAKEKV_LONG" not in os.environ, reason="ten minutes: make test-vllm-long")
def test_eight_long_prompts_have_the_text_of_the_untouched_engine(model, tmp_path):
    """2048 to 4032 tokens, 32 more of each, every rule; four at a time, so that all pages of all heads fit in 2 GB."""
    rows = passages(transformers.AutoTokenizer.from_pretrained(model), 8, 4032).tolist()
    load = {"prompts": [row[: 2048 + 283 * i] for i, row in enumerate(rows)], "n_tokens": 32}
    with arm(tmp_path, model=model, settings=None, **LONG) as stock:
        plain = stock.ask("generate", **load)["tokens"]
    with arm(tmp_path, model=model, settings={"budget": 256}, **LONG) as ours:
        for rule in ALL:
            ours.ask("set", **{**ANY, **rule})
            assert ours.ask("generate", **load)["tokens"] == plain, name_of(rule)
            assert ours.ask("books")["misses"] == 0


def test_what_is_thought_of_a_given_text_is_that_of_the_untouched_engine(stock, ours, texts, tmp_path):
    """A row a token, though prompts are read in parts; equal to rounding, and not so with few pages."""
    ours.ask("set", budget=64, mode="reactive", timing="exact", every=1, **ANY)
    given, kept = [text[:N_TOKENS] for text in texts], {}
    for name, engine, budget in (("stock", stock, None), ("all", ours, 64), ("few", ours, 4)):
        if budget:
            engine.ask("set", budget=budget)
        engine.ask("forget")
        engine.ask("forced", prompts=texts, texts=given, file=str(tmp_path / name))
        kept[name] = load_file(tmp_path / name)
    assert [len(rows) for rows in kept["stock"].values()] == [N_TOKENS] * 3
    assert divergence(kept["stock"], kept["all"])["kl_mean"] < 1e-6 < divergence(kept["stock"], kept["few"])["kl_mean"]


def test_requests_that_come_and_go_in_one_batch_have_the_text_of_those_alone(stock, ours, plain, texts):
    """Prefill in chunks beside decoding: the second and third request arrive while others decode."""
    ours.ask("set", budget=64, mode="reactive", timing="exact", every=1, **ANY)
    ours.ask("forget")
    requests = [
        {"prompt": text, "n_tokens": N_TOKENS, "arrives": 4 * i, "cancelled": None} for i, text in enumerate(texts)
    ]
    assert ours.ask("serve", requests=requests) == plain


def mappings(made: Arm) -> list[int]:
    """Sizes of the mapped files of pages that a process has."""
    lines = Path(f"/proc/{made._process.pid}/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if re.search(r"\.pages \(deleted\)$", line)]
    return [int(stop, 16) - int(start, 16) for start, stop in spans]


def test_the_fast_tier_has_the_budget_and_the_reservoir_is_a_file(ours, stock):
    ours.ask("set", budget=8, mode="reactive", timing="exact", every=1, **ANY)
    tiers = ours.ask("tiers")
    layers, heads, page = 30, 3, 2 * 16 * 64 * 4
    assert tiers["pages"] == layers * heads * SMALL["batch"] * (8 + 1) * page
    assert tiers["digests"] == tiers["slow"] / 16
    assert tiers["slow_tier"] == "memory-mapped file" and tiers["sequences"] == 0
    assert sum(mappings(ours)) >= tiers["slow"] and mappings(stock) == []


def test_settings_of_the_reservoir_and_untouched_engines_refuse_in_one_line(ours, stock):
    with pytest.raises(WakeKVError, match="page is fixed"):
        ours.ask("set", page=32)
    with pytest.raises(WakeKVError, match="without the plugin"):
        stock.ask("books")
    with pytest.raises(WakeKVError, match="holds no model"):
        stock.ask("start", model="/nowhere", settings=None)
