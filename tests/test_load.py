"""Long and repeated use: nothing grows but what is kept, and no byte of that drifts."""

from __future__ import annotations

import gc
import hashlib
import os
import tempfile
import threading

import psutil
import pytest
import tiny
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from wakekv.cache import ReversibleCache
from wakekv.cache.pool import EMPTY
from wakekv.cache.reading import digest
from wakekv.recording.record import record

N_STEPS = int(os.environ.get("WAKEKV_STEPS", "500"))  # 50,000 to be thorough: make load
SLACK = 32 << 20  # bytes that allocators may keep beside what is stored
AFTER = 100  # steps until everything has its room


def sums(layer, first: int, last: int) -> list[str]:
    """A hash a page of what the slow tier holds, all heads of a layer."""
    held = (torch.cat([layer.reservoir.keys[:, i], layer.reservoir.values[:, i]], -1) for i in range(first, last))
    return [hashlib.sha256(page.numpy().tobytes()).hexdigest() for page in held]


def stored(cache: ReversibleCache) -> int:
    """Bytes that rightly grow with the text: pages and their notes and tables, and what was wanted at each step."""
    wants = cache.steps.host.wants
    return sum(cache.tiers().values()) + sum(w.page.nbytes + w.weight.nbytes + 300 * w.n_steps for w in wants)


def test_memory_and_digests_after_many_steps(capsys):
    model = tiny.model("llama", max_position_embeddings=N_STEPS + 100)
    cache, process = ReversibleCache(model.config, budget=8, wants=4), psutil.Process()
    tokens = torch.randint(0, 64, (1, 60 + N_STEPS), generator=torch.Generator().manual_seed(0))
    written = [[] for _ in cache.paged]
    with cache.attached(model), torch.inference_mode():
        cache.prefill(model, tokens[:, :60])
        for step in range(N_STEPS):
            model(tokens[:, 60 + step : 61 + step], past_key_values=cache)
            for layer, known in zip(cache.paged, written):
                known += sums(layer, len(known), layer.n_closed)
            if step == AFTER:
                gc.collect()
                before = process.memory_info().rss, stored(cache)
        gc.collect()
        grown, kept = process.memory_info().rss - before[0], stored(cache) - before[1]
    for layer, known in zip(cache.paged, written):
        n, pool = layer.n_closed, layer.pool
        assert len(known) == n == (60 + N_STEPS) // 16 and sums(layer, 0, n) == known
        assert torch.equal(digest(layer.reservoir.keys[:, :n]), layer.digests[:, :n])
        rows, pages = torch.nonzero(pool.slot_of[:, :n] != EMPTY, as_tuple=True)
        keys, values = pool.take(pool.slot_of[:, :n].clamp(min=0))
        assert torch.equal(keys[rows, pages], layer.reservoir.keys[rows, pages])
        assert torch.equal(values[rows, pages], layer.reservoir.values[rows, pages])
        assert len(rows) <= 8 * layer.n_rows
    assert cache.books.n_steps == N_STEPS and cache.books.fetched > 0
    with capsys.disabled():
        print(f"\n{N_STEPS:,} steps: {grown / 1e6:.1f} MB more resident, {kept / 1e6:.1f} MB more stored")
    assert grown <= kept + SLACK


def test_ten_recordings_in_a_row_are_equal_and_leave_nothing_behind(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    process, seen, hashes = psutil.Process(), [], set()
    for i in range(10):
        path = record(tiny.loaded(), tiny.prompt(200, n_script=30), tmp_path / f"log{i}", progress=False)
        hashes.add((path / "manifest.json").read_bytes())
        gc.collect()
        functions = sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping)
        seen.append((functions, threading.active_count(), process.num_threads(), process.num_fds()))
        if i == 2:
            before = process.memory_info().rss
    assert len(hashes) == 1
    assert seen[2:] == [seen[2]] * 8
    assert process.memory_info().rss - before < SLACK
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"log{i}" for i in range(10)] + ["temporary"])
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_records_the_same_bytes_twice(tmp_path, dtype):
    made = tiny.loaded()
    made.model.to(dtype)
    a, b = (record(made, tiny.prompt(n_script=12), tmp_path / name, progress=False) for name in "ab")
    assert (a / "manifest.json").read_bytes() == (b / "manifest.json").read_bytes()
