"""Shipped logs: what a policy costs on one is what it costs on the whole log, and a flipped byte is named."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from test_layers import BLOCK

from wakekv.__main__ import main
from wakekv.errors import InputError, TraceError
from wakekv.files import ROOT
from wakekv.logs.demand import demand
from wakekv.logs.shipped import code, describe, open_log, open_shipped, pack, verify_shipped
from wakekv.logs.sound import of_pages
from wakekv.logs.trace import save_trace
from wakekv.policies import POLICIES
from wakekv.simulation.simulate import curves

LOGS = ROOT / "artifact" / "logs"
EXACT = ("full", "frozen", "reactive", "evict", "shadow", "optimum", "fifo", "lfu", "random", "quest", "streamingllm")
COUNTS = ("misses", "mean_pages", "peak_pages", "fetched", "stall_steps")


def words(trace):
    return [f" w{token}" for token in trace.tokens]


@pytest.fixture(scope="module")
def trace(make_trace):
    return make_trace(n_prompt=400, n_steps=50, k=24)


@pytest.fixture(scope="module")
def packed(trace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shipped")
    pack(trace, words(trace), folder / "a.npz")
    describe(folder, {"a.npz": {"licence": "MIT"}})
    return folder / "a.npz"


@pytest.mark.parametrize("name", EXACT)
def test_a_policy_of_reads_costs_the_same_to_the_last_miss(trace, packed, name):
    whole, small = (curves(demand(log), POLICIES[name]) for log in (trace, open_shipped(packed)))
    for count in COUNTS:
        assert np.array_equal(getattr(whole, count), getattr(small, count)), count


def test_wants_and_their_order_are_exact_and_weights_within_nine_percent(trace, packed):
    whole, small = demand(trace), demand(open_shipped(packed))
    assert np.array_equal(whole.ptr, small.ptr) and np.array_equal(whole.page, small.page)
    assert np.array_equal(whole.created, small.created) and np.array_equal(whole.layer, small.layer)
    ratio = small.weight[whole.weight > 1e-6] / whole.weight[whole.weight > 1e-6]
    assert 1 / 1.095 < ratio.min() and ratio.max() < 1.095
    rising = np.diff(small.weight) > 0
    assert rising[(np.diff(small.head_of) == 0) & (np.diff(small.step_of) == 0)].all()
    rows = whole.prompt_rows > 1e-6
    assert np.abs(small.prompt_rows[rows] / whole.prompt_rows[rows] - 1).max() < 0.046


def test_kv_heads_are_the_union_of_their_group(trace, packed):
    whole, small = (demand(log, unit="kv_head") for log in (trace, open_shipped(packed)))
    assert np.array_equal(whole.ptr, small.ptr)
    for h, t in np.ndindex(whole.n_heads, whole.n_steps):
        of = [set(w.page[w.ptr[h, t] : w.ptr[h, t + 1]]) for w in (whole, small)]
        assert of[0] == of[1]
    for name in ("reactive", "evict", "optimum"):
        rates = [curves(wants, POLICIES[name]).miss_rate for wants in (whole, small)]
        assert np.abs(rates[0] - rates[1]).max() < 0.01, name


def test_text_and_marks_travel(trace, packed):
    log = open_log(packed)
    assert "".join(log.pieces) == "".join(words(trace)) and np.array_equal(log.emitted, trace.emitted)
    assert log.needle == trace.needle and log.manifest["model"] == trace.manifest["model"]


def test_equal_logs_give_equal_bytes(trace, packed, tmp_path):
    again = pack(trace, words(trace), tmp_path / "b.npz")
    assert again.read_bytes() == packed.read_bytes()


def test_codes_keep_the_order_of_weights():
    weights = np.sort(np.random.default_rng(0).random(10_000).astype(np.float32) ** 8)
    assert (np.diff(code(weights).astype(int)) >= 0).all()
    assert code(np.float32([0, 2.0**-31, 2.0**-40, 1]))[[0, 2, 3]].tolist() == [0, 1, 248]


@pytest.mark.parametrize("options", [{"page_tokens": 8}, {"k": 8}, {"unit": "heads"}], ids=str)
def test_what_needs_the_whole_log_is_refused(packed, options):
    with pytest.raises(InputError, match="shipped log|unit must be"):
        demand(open_shipped(packed), **options)


def test_a_policy_that_compares_keys_is_refused(packed):
    with pytest.raises(InputError, match="no page key means"):
        curves(demand(open_shipped(packed)), POLICIES["rkv"].but(every=8))


def test_any_flipped_byte_is_named(packed, tmp_path):
    content = packed.read_bytes()
    (tmp_path / "manifest.json").write_bytes((packed.parent / "manifest.json").read_bytes())
    for at in np.random.default_rng(1).integers(0, len(content), 30):
        flipped = bytearray(content)
        flipped[at] ^= 1
        (tmp_path / "a.npz").write_bytes(flipped)
        with pytest.raises(TraceError, match=r"a\.npz does not match its sha256"):
            verify_shipped(tmp_path / "a.npz")


@pytest.mark.parametrize("cut", [0, 10, 0.5, 0.99])
def test_a_file_cut_short_or_foreign_is_refused(packed, tmp_path, cut):
    content = packed.read_bytes()
    (tmp_path / "x.npz").write_bytes(content[: int(cut * len(content)) if cut < 1 else cut])
    with pytest.raises(TraceError, match="x.npz is damaged"):
        open_shipped(tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", a=np.zeros(3))
    with pytest.raises(TraceError, match="y.npz is damaged or no shipped log"):
        open_shipped(tmp_path / "y.npz")


def test_a_file_that_is_missing_or_not_listed_is_named(packed, tmp_path, trace):
    (tmp_path / "manifest.json").write_bytes((packed.parent / "manifest.json").read_bytes())
    with pytest.raises(TraceError, match="a.npz is missing"):
        verify_shipped(tmp_path)
    (tmp_path / "a.npz").write_bytes(packed.read_bytes())
    pack(trace, words(trace), tmp_path / "z.npz")
    with pytest.raises(TraceError, match="z.npz is not in the manifest"):
        verify_shipped(tmp_path)


def test_simulate_says_the_same_of_both(trace, packed, tmp_path, capsys):
    whole = save_trace(trace, tmp_path / "log")
    told = []
    for log in (whole, packed):
        assert main(["simulate", str(log), "--policy", "reactive", "--budgets", "2,4,8", "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]


def test_a_page_wanted_too_early_is_refused(packed):
    log = open_shipped(packed)
    counts, page = log.counts.copy(), log.page.copy()
    page[0] = log.n_pages - 1
    said = of_pages(counts, page, log.created, log.n_prompt)
    assert said == "head 0 wants a page before it is there"
    assert of_pages(counts, log.page, log.created, log.n_prompt) == ""


def test_what_the_repository_ships_is_whole_small_and_says_where_it_came_from():
    names = verify_shipped(LOGS)
    files = json.loads((LOGS / "manifest.json").read_text())["files"]
    kinds = {(files[name]["model"], files[name]["regime"]) for name in names if not name.startswith("smoke_")}
    assert kinds == {(m, r) for m in ("smollm2-135m", "gemma3-270m") for r in ("niah", "cot", "multiturn")}
    assert sum(entry["bytes"] for entry in files.values()) <= 25e6
    for name in names:
        assert "MIT" in files[name]["licence"] and files[name]["command"].startswith("python -m wakekv record")


def test_tables_need_neither_torch_nor_the_network(tmp_path):
    blocked = BLOCK.format(blocked=["torch", "transformers", "huggingface_hub", "matplotlib", "papermill"])
    run = "from wakekv.__main__ import main; sys.exit(main(sys.argv[1:]))"
    log = str(LOGS / "smoke_smollm2-135m_niah_d50_s1.npz")
    command = [sys.executable, "-c", blocked + run, "tables", log, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "tables").glob("*.csv")} == {
        "04_sweep.csv", "04_sweep_kv_heads.csv", "05_table3.csv", "05_systems.csv",
    }  # fmt: skip
