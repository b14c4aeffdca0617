"""The log of a served model is that of the recorder."""

from __future__ import annotations

import numpy as np
import pytest

from wakekv.errors import InputError
from wakekv.logs.shipped import open_shipped, pack
from wakekv.logs.trace import open_trace
from wakekv.recording import models
from wakekv.recording.prompts import build
from wakekv.recording.record import record
from wakekv.recording.spotcheck import compare, pieces
from wakekv.serving import logged

STEPS = 20


@pytest.fixture(scope="module")
def loaded():
    return models.load("smollm2-135m", dtype="float32")


def test_the_engine_logs_what_the_recorder_logs(loaded, tmp_path):
    prompt = build("niah", loaded.tokenizer, length=600)
    theirs = open_trace(record(loaded, prompt, tmp_path / "recorder", steps=STEPS, progress=False))
    ours = open_trace(logged.record(loaded, prompt, tmp_path / "engine", steps=STEPS))
    assert np.array_equal(ours.tokens, theirs.tokens) and np.array_equal(ours.choice, theirs.choice)
    assert np.allclose(ours.prompt_pages, theirs.prompt_pages, atol=2e-3)
    assert np.allclose(ours.key_means, theirs.key_means, atol=2e-2)
    for name in ("needle_mass", "sink_mass", "local_mass"):
        assert np.allclose(getattr(ours, name), getattr(theirs, name), atol=1e-3)
    assert np.allclose(ours.entropy, theirs.entropy, atol=1e-2)
    row = compare(open_shipped(pack(ours, pieces(ours), tmp_path / "log.npz")), theirs)
    assert row["tokens_equal"] == 1 and row["equal"] > 0.995 and row["order_equal"] > 0.95, row


def test_text_of_the_engine_s_own_is_refused_in_one_line(loaded, tmp_path):
    prompt = build("niah", loaded.tokenizer, length=600, scripted=False)
    with pytest.raises(InputError, match="scripted prompts only"):
        logged.record(loaded, prompt, tmp_path / "log")
    assert not (tmp_path / "log").exists()
