"""The plugin in the real engine. `make test-vllm` runs this in .venv-vllm; each engine has a process of its own."""

from __future__ import annotations

import os
import pickle
import random
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

from wakekv.errors import WakeKVError
from wakekv.models import fetch
from wakekv.replay import replay
from wakekv.system import passages
from wakekv.vllm.arm import Arm
from wakekv.vllm.settings import Settings

N_TOKENS = 20
SMALL = {"dtype": "float32", "max_tokens": 1024, "batch": 4, "reservoir_gib": 1, "max_num_batched_tokens": 256}
REQUESTS = int(os.environ.get("WAKEKV_REQUESTS", 60))  # of the storm; the acceptance run asked for 200


def arm(folder: Path, **start) -> Arm:
    made = Arm(sys.executable, folder / "engine.log")
    made.ask("start", **start)
    return made


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


ALL = [
    {"mode": "reactive", "timing": "exact", "every": 1},
    {"mode": "reactive", "timing": "lagged", "every": 16},
    {"mode": "destructive", "timing": "exact", "every": 1},
    {"mode": "flexicache", "timing": "lagged", "every": 16, "profile": [0, 4, 8, 33, 60]},
]
RULES = [*ALL, {"mode": "destructive", "timing": "lagged", "every": 4}]


def name_of(rule) -> str:
    return f"{rule['mode']}-{rule['timing']}-{rule['every']}"


@pytest.mark.parametrize("rule", ALL, ids=name_of)
def test_with_room_for_all_pages_the_text_is_that_of_the_untouched_engine(rule, ours, plain, texts):
    ours.ask("set", **{"profile": [], "budget": 64, **rule})
    ours.ask("books")
    assert ours.ask("generate", prompts=texts, n_tokens=N_TOKENS)["tokens"] == plain
    assert ours.ask("books")["misses"] == 0


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_its_wants_replayed_by_the_simulator_give_its_misses(rule, ours, texts, tmp_path):
    ours.ask("set", **{"profile": [], "budget": 8, **rule})
    ours.ask("demands", file=str(tmp_path / "before"))
    ours.ask("books")
    ours.ask("generate", prompts=texts, n_tokens=40)
    books = ours.ask("books")
    ours.ask("demands", file=str(tmp_path / "demands"))
    demands = pickle.loads((tmp_path / "demands").read_bytes()).values()
    policy = Settings.of({"budget": 8, **rule}).policy
    found = [replay(demand, policy, 8) for demand in demands]
    assert len(found) == 3 and books["misses"] == sum(int(x.misses.sum()) for x in found) > 0
    assert books["fetched"] == sum(int(x.fetched.sum()) for x in found)
    assert books["tokens"] == 3 * 39 and books["wants"] == sum(demand.n_wants for demand in demands)


def test_requests_that_come_and_go_in_one_batch_have_the_text_of_those_alone(stock, ours, plain, texts):
    """Prefill in chunks beside decoding: the second and third request arrive while others decode."""
    ours.ask("set", budget=64, mode="reactive", timing="exact", every=1, profile=[])
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
    ours.ask("set", budget=8, mode="reactive", timing="exact", every=1, profile=[])
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """A random model, so that many requests take seconds."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def storm(tiny, tmp_path_factory):
    """An engine whose reservoir is too small for the requests it takes at a time."""
    start = {"dtype": "float32", "max_tokens": 512, "batch": 6, "skip_tokenizer_init": True}
    start |= {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 60}
    with arm(tmp_path_factory.mktemp("storm"), model=tiny, settings={"budget": 40}, **start) as made:
        yield made


def test_many_requests_with_cancellation_and_preemption_differ_in_nothing_from_themselves_alone(storm):
    rng = random.Random(0)
    requests, at = [], 0
    for _ in range(REQUESTS):
        at += rng.randint(0, 6)
        n_tokens = rng.randint(4, 120)
        cancelled = at + rng.randint(1, 2 * n_tokens) if rng.random() < 0.25 else None
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 200))]
        requests.append({"prompt": prompt, "n_tokens": n_tokens, "arrives": at, "cancelled": cancelled})
    storm.ask("books")
    together = storm.ask("serve", requests=requests)
    books, tiers = storm.ask("books"), storm.ask("tiers")
    assert books["preempted"] > REQUESTS // 10 and tiers["sequences"] == 0
    cut = 0
    for request, tokens in zip(requests, together, strict=True):
        storm.ask("forget")
        alone = storm.ask("generate", prompts=[request["prompt"]], n_tokens=request["n_tokens"])["tokens"][0]
        cut += len(tokens) < len(alone)
        assert tokens == alone[: len(tokens)] and (request["cancelled"] is not None or len(tokens) == len(alone))
    assert cut > REQUESTS // 20  # some were indeed cancelled on the way
    assert storm.ask("tiers")["sequences"] == 0


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_with_few_pages_a_batch_changes_nothing_either(storm, rule):
    """No preemption here: it has the engine read again, with whole attention, what a request had written with less."""
    profile = [0] if rule["mode"] == "flexicache" else []
    storm.ask("set", **{**rule, "budget": 3, "profile": profile})
    rng = random.Random(1)
    requests = [
        {"prompt": [rng.randrange(256) for _ in range(rng.randint(60, 140))], "n_tokens": 40, "arrives": 3 * i,
         "cancelled": 3 * i + 25 if i % 4 == 3 else None} for i in range(8)
    ]  # fmt: skip
    storm.ask("books")
    together = storm.ask("serve", requests=requests)
    books = storm.ask("books")
    assert books["preempted"] == 0 and books["misses"] > 0
    for request, tokens in zip(requests, together, strict=True):
        storm.ask("forget")
        alone = storm.ask("generate", prompts=[request["prompt"]], n_tokens=40)["tokens"][0]
        assert tokens == alone[: len(tokens)]
