"""The paper's run, and the sweep of either engine, without an engine."""

from __future__ import annotations

import pytest
import torch

from wakekv.errors import InputError
from wakekv.serving import table2


def test_the_papers_run_is_exact_and_says_in_one_line_that_it_needs_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = table2.with_changes("a30")
    assert (run.model, run.requests, run.length, run.n_tokens) == ("mistral-7b", 24, 8192, 1000)
    assert (run.max_tokens, run.reservoir_gib, run.samples, len(run.longbench)) == (10240, 16, 30, 4)
    with pytest.raises(InputError, match="needs one NVIDIA A30, and this machine has no GPU"):
        table2.fitting(run, "a30")
    with pytest.raises(InputError, match="leave --n-tokens out"):
        table2.with_changes("a30", n_tokens=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    with pytest.raises(InputError, match="this machine has NVIDIA H200"):
        table2.fitting(run, "a30")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A30")
    assert table2.fitting(run, "a30") == "NVIDIA A30"


def test_a_sweep_without_stock_is_refused_before_an_engine_is_looked_for(tmp_path):
    with pytest.raises(InputError, match="name it among the configurations"):
        table2.sweep(table2.with_changes("smoke"), "vllm", tmp_path / "out", only=["reactive-r1"])
    assert not (tmp_path / "out").exists()
