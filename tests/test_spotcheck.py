"""spotcheck: a shipped log made again from the model is the same, and one that was tampered with is not."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="recording needs torch")

from wakekv.__main__ import main
from wakekv.files import ROOT
from wakekv.logs.shipped import open_shipped, pack
from wakekv.recording.spotcheck import about, compare

SMOKE = ROOT / "artifact" / "logs" / "smoke_smollm2-135m_niah_d50_s1.npz"


def test_a_log_compares_with_itself_and_with_its_first_steps(make_trace, tmp_path):
    trace = make_trace(n_steps=30)
    log = open_shipped(pack(trace, ["x"] * len(trace.tokens), tmp_path / "a.npz"))
    same = {"tokens_equal": 1.0, "equal": 1.0, "order_equal": 1.0, "weight_codes": 0, "weight": 0.0}
    assert compare(log, trace).items() >= same.items()
    cut = {n: getattr(trace, n)[:, :10] for n in ("positions", "weights", "top", "needle_mass", "sink_mass")}
    first = replace(trace, tokens=trace.tokens[: trace.n_prompt + 10], **cut)
    assert compare(log, first).items() >= same.items() and compare(log, first)["wants"] < compare(log, trace)["wants"]


def test_another_log_is_seen_to_be_another(make_trace, tmp_path):
    trace, other = make_trace(n_steps=30), make_trace(n_steps=30, seed=1)
    log = open_shipped(pack(trace, ["x"] * len(trace.tokens), tmp_path / "a.npz"))
    row = compare(log, other)
    assert row["tokens_equal"] < 0.1 and row["equal"] < 0.9 and row["order_equal"] < 0.5
    louder = replace(trace, weights=np.where(trace.weights > 0.05, trace.weights * 2, trace.weights))
    assert compare(log, louder)["weight_codes"] >= 6


def test_the_command_that_records_a_log_anew_is_told():
    manifest = json.loads(json.dumps(open_shipped(SMOKE).manifest))
    told = about(manifest)
    assert "--model smollm2-135m --regime niah --seed 1 --length 800 --depth 0.5 --steps 40" in told["command"]
    assert "Apache-2.0" in told["licence"]


@pytest.mark.model
def test_the_first_steps_of_the_smoke_log_come_out_of_the_model_again(capsys):
    assert main(["spotcheck", str(SMOKE), "--steps", "5", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["tokens_equal"] == 1 and row["equal"] > 0.99 and row["weight_codes"] <= 1 and row["steps"] == 5
