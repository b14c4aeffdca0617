"""Many requests at once in the real engine: they come, are cancelled, lose their place and get it back, and each has
the text that it has alone. The engine's own cache is too small for the requests that it takes at a time.

A run asks for REQUESTS with room for all pages, and for a quarter as many of every rule with three pages a KV head.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import transformers
from engines import ANY, RULES, arm, name_of

from wakekv.vllm.arm import Arm

REQUESTS = int(os.environ.get("WAKEKV_REQUESTS", 200))
BOUND = 8 << 20  # bytes by which a process may grow over a storm of a quarter of REQUESTS


@pytest.fixture(scope="module")
def storm(tmp_path_factory):
    """An engine with a random model, so that many requests take seconds."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    start = {"dtype": "float32", "max_tokens": 512, "batch": 6, "skip_tokenizer_init": True}
    start |= {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 48}
    with arm(folder, model=str(folder), settings={"budget": 40}, **start) as made:
        yield made


def drawn(rng: random.Random, n: int) -> list[dict]:
    """Requests of 1 to 200 tokens and 4 to 120 more, one every three steps, a quarter cancelled on the way."""
    requests, at = [], 0
    for _ in range(n):
        at += rng.randint(0, 6)
        n_tokens = rng.randint(4, 120)
        cancelled = at + rng.randint(1, 2 * n_tokens) if rng.random() < 0.25 else None
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 200))]
        requests.append({"prompt": prompt, "n_tokens": n_tokens, "arrives": at, "cancelled": cancelled})
    return requests


def alone(engine: Arm, request: dict) -> list[int]:
    engine.ask("forget")
    return engine.ask("generate", prompts=[request["prompt"]], n_tokens=request["n_tokens"])["tokens"][0]


def resident_bytes(engine: Arm) -> int:
    """Of the engine's process, without files that are mapped into it."""
    status = Path(f"/proc/{engine._process.pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def weathered(engine: Arm, requests: list[dict]) -> dict:
    """The books of a storm in which every request ended as it does alone, and nothing was left behind."""
    free = engine.ask("free_blocks")
    engine.ask("books")
    together = engine.ask("serve", requests=requests)
    books, tiers = engine.ask("books"), engine.ask("tiers")
    assert (tiers["sequences"], tiers["resident"], engine.ask("free_blocks")) == (0, 0, free)
    cut = 0
    for request, tokens in zip(requests, together, strict=True):
        whole = alone(engine, request)
        cut += len(tokens) < len(whole)
        assert tokens == whole[: len(tokens)] and (request["cancelled"] is not None or len(tokens) == len(whole))
    assert cut > len(requests) // 20 and books["preempted"] > len(requests) // 20  # it was a storm
    return books


def test_with_room_for_all_pages_no_request_differs_from_itself_alone(storm):
    storm.ask("set", budget=40, mode="reactive", timing="exact", every=1, **ANY)
    assert weathered(storm, drawn(random.Random(0), REQUESTS))["misses"] == 0


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_with_few_pages_neither_though_some_lost_theirs(storm, rule):
    """Which pages a request holds depends on all that it decoded: one that comes back decodes it again."""
    storm.ask("set", **{**ANY, **rule, "budget": 3, "profile": [0] if rule["mode"] == "flexicache" else []})
    assert weathered(storm, drawn(random.Random(1), REQUESTS // 4))["misses"] > 0


def test_what_a_request_wrote_is_no_prefix_of_another(storm):
    """It was written with few pages at hand; a prompt is read with all."""
    storm.ask("set", budget=3, mode="reactive", timing="exact", every=1, **ANY)
    rng = random.Random(2)
    for _ in range(8):
        first = {"prompt": [rng.randrange(256) for _ in range(100)], "n_tokens": 60}
        second = {"prompt": first["prompt"] + alone(storm, first) + [7], "n_tokens": 40}
        warm = storm.ask("generate", prompts=[second["prompt"]], n_tokens=40)["tokens"][0]
        assert warm == alone(storm, second)


def test_memory_is_what_it_was_before_a_storm(storm):
    requests = drawn(random.Random(3), REQUESTS // 4)
    storm.ask("serve", requests=requests)
    before = resident_bytes(storm)
    storm.ask("serve", requests=requests)
    assert resident_bytes(storm) - before < BOUND
