"""A log simulated a few heads at a time costs what it costs whole, in the memory of a few heads."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest

from wakekv.errors import InputError
from wakekv.files import ROOT
from wakekv.logs.blocks import blocks, simulate
from wakekv.logs.demand import demand
from wakekv.logs.trace import open_trace, save_trace
from wakekv.policies import POLICIES
from wakekv.policies.classic import Recency
from wakekv.simulation.simulate import curves, streamed, streams

EXACT = (
    "misses",
    "mean_pages",
    "peak_pages",
    "fetched",
    "stall_steps",
    "head_misses",
    "head_wants",
    "n_wants",
    "n_cold",
)


@dataclass(frozen=True)
class Crowd(Recency):
    """A user's: a head keeps what the others read."""

    def rank(self, seen):
        return seen.reads.sum(0) - seen.reads


ALONE = [name for name, policy in POLICIES.items() if streams(policy)]


@pytest.fixture(scope="module")
def log(make_trace, tmp_path_factory):
    return save_trace(make_trace(n_layers=3, k=16), tmp_path_factory.mktemp("blocks") / "log")


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/scale.py, to be called."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import scale

    return scale


def assert_equal(one, other):
    for name in EXACT:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert np.allclose(one.missed_weight, other.missed_weight) and np.isclose(one.weight, other.weight)
    assert one.n_heads == other.n_heads


@pytest.mark.parametrize("unit", ["head", "kv_head"])
def test_blocks_are_the_demand_cut_by_heads(log, unit):
    whole, parts = demand(open_trace(log), unit=unit), list(blocks(log, reads=1, unit=unit))
    assert len(parts) == open_trace(log).n_kv_heads
    assert all(part.prompt_rows is None and part.key_means is None for part in parts)
    for name in ("page", "weight", "layer"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name)), name
    assert np.array_equal(np.concatenate([np.diff(part.ptr) for part in parts]), np.diff(whole.ptr))


@pytest.mark.parametrize("first_touch", ["cold", "warm"])
@pytest.mark.parametrize("unit", ["head", "kv_head"])
@pytest.mark.parametrize("name", ALONE)
def test_a_log_in_blocks_costs_what_it_costs_whole(log, name, unit, first_touch):
    options = {"unit": unit, "first_touch": first_touch}
    for changes in {}, {"every": 3}, {"start": "prompt"}, {"sticky": True}:
        policy = POLICIES[name].but(**changes)
        whole = curves(demand(open_trace(log), **options), policy)
        assert_equal(streamed(blocks(log, reads=1, **options), policy), whole)
        assert_equal(streamed(blocks(log, reads=1, **options), policy, [3, 9]), whole.at([3, 9]))


def test_policies_whose_heads_look_at_each_other_get_all_of_them(log, make_trace):
    policy = POLICIES["commons"]
    assert not any(map(streams, (policy, POLICIES["reactive"].but(scope="layer"), Crowd())))
    with pytest.raises(InputError, match="all heads at once"):
        streamed(blocks(log), policy)
    assert_equal(simulate(log, policy, [4]), curves(demand(open_trace(log)), policy, [4]))


def test_nothing_is_not_simulated_and_a_budget_is_refused_before_the_second_block(log):
    with pytest.raises(InputError, match="no block"):
        streamed([], POLICIES["reactive"])
    read = iter(blocks(log, reads=1))
    with pytest.raises(InputError, match="budget 999"):
        streamed(read, POLICIES["reactive"], [999])
    assert next(read).n_heads == 2


def test_the_large_logs_heads_are_the_same_in_one_piece_and_step_by_step(benchmark, tmp_path):
    size = benchmark.Size(tokens=1000, steps=12, heads=8, k=16, wants=8)
    benchmark.write(tmp_path / "whole", size)
    benchmark.journal(tmp_path / "steps", size)
    whole, steps = open_trace(tmp_path / "whole"), open_trace(tmp_path / "steps")
    for name in ("positions", "weights", "top"):
        assert np.array_equal(getattr(whole, name), getattr(steps, name))
    assert (np.diff(demand(whole).ptr) == 8).all() and len(np.unique(whole.positions)) > 16


def test_the_large_log_in_small_stays_within_its_ceiling(benchmark, monkeypatch, tmp_path, capsys):
    sizes = ["--tokens", "3000", "--steps", "24", "--heads", "8", "--k", "64", "--wants", "32", "--factors", "1", "2"]
    monkeypatch.setattr(
        sys, "argv", ["scale.py", "--json", *sizes, "--folder", str(tmp_path), "--out", str(tmp_path / "scale.json")]
    )
    assert benchmark.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "scale.json").read_text())["result"] == found
    assert found["within_ceiling"] and found["big"]["simulate"]["reactive"]["wants"] == 24 * 8 * 32
    assert {row["grows"] for row in found["growth"]} == {"tokens", "steps", "heads", "budgets"}
    assert [path.name for path in tmp_path.iterdir()] == ["scale.json"]


def test_simulating_takes_the_memory_of_a_block_and_not_of_the_log(benchmark, tmp_path):
    benchmark.compile_all(tmp_path, ["reactive"])
    peaks, size = [], benchmark.Size(tokens=20_000, steps=1024, heads=64, k=512, wants=64)  # 200 MB
    for heads in 8, size.heads:
        path = tmp_path / str(heads)
        benchmark.write(path, replace(size, heads=heads))
        peaks.append(benchmark.alone(benchmark.run, path=path, policy="reactive", budgets=None)["peak_bytes"])
    assert peaks[1] - peaks[0] < size.n_bytes // 4
