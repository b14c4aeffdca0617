"""A log is made once, made again only when something it depends on changed, and a failure is named."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from wakekv.errors import InputError, ModelError, WakeKVError
from wakekv.logs.trace import verify
from wakekv.reproduction import recordings
from wakekv.reproduction.profiles import PROFILES, Log
from wakekv.reproduction.recordings import ensure, logs, record_all

LOG = Log("tiny", "niah", 0, 12, 0.5, 60)
PROFILE = replace(PROFILES["smoke"], name="tiny", logs=(LOG, replace(LOG, seed=1)))


@pytest.fixture
def tiny(monkeypatch):
    """A tiny random model in place of a real one; `loads` counts how often it was asked for."""
    pytest.importorskip("torch", reason="recording needs torch")
    import tiny

    from wakekv.recording import prompts

    made, seen = tiny.loaded(), SimpleNamespace(loads=0)
    made.context = 1024

    def loaded(*_):
        seen.loads += 1
        return made

    monkeypatch.setattr(recordings, "_loaded", loaded)
    monkeypatch.setattr(prompts, "build", lambda *_, seed, **__: tiny.prompt(n_script=20, seed=seed))
    return seen


def contents(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_a_log_is_recorded_once(tiny, tmp_path):
    path = ensure(LOG, tmp_path, progress=False)
    verify(path)
    assert path == tmp_path / "traces" / "tiny_niah_d50_s0"
    before = contents(path)
    assert ensure(LOG, tmp_path, progress=False) == path
    assert tiny.loads == 1 and contents(path) == before


@pytest.mark.parametrize("change", ["entry", "code"])
def test_a_log_is_recorded_again_when_its_entry_or_the_recorder_changed(tiny, tmp_path, monkeypatch, change):
    path, log = ensure(LOG, tmp_path, progress=False), LOG
    first = contents(path)
    if change == "entry":
        log = replace(LOG, steps=8)
    else:
        monkeypatch.setattr(recordings, "_recorder", lambda: {"wakekv/recording/record.py": "other"})
    assert ensure(log, tmp_path, progress=False) == path and tiny.loads == 2
    assert (contents(path) == first) == (change == "code")  # the recorder's own key was the same: the log is kept
    assert json.loads((path / "manifest.json").read_text())["n_steps"] == log.steps


def test_an_interrupted_recording_goes_on_to_the_same_bytes(tiny, tmp_path, monkeypatch):
    from wakekv.recording import record

    long = replace(LOG, steps=40)  # the third pass has its first steps, the fourth the rest
    whole = contents(ensure(long, tmp_path / "whole", progress=False))
    real, calls = record._forward, []

    def stops(*arguments):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(record, "_forward", stops)
        with pytest.raises(KeyboardInterrupt):
            ensure(long, tmp_path / "cut", progress=False)
    part = tmp_path / "cut" / "traces" / f"{long.name}.part"
    assert part.exists() and not recordings._fresh(long, part.with_suffix(""))
    assert contents(ensure(long, tmp_path / "cut", progress=False)) == whole and not part.exists()


def test_what_an_older_recorder_left_half_done_is_begun_anew(tiny, tmp_path):
    part = tmp_path / "traces" / f"{LOG.name}.part"
    part.mkdir(parents=True)
    (part / "start.json").write_text("{}")
    verify(ensure(LOG, tmp_path, progress=False))


def test_logs_refuse_one_that_is_missing_or_out_of_date(tiny, tmp_path, monkeypatch):
    for log in PROFILE.logs:
        ensure(log, tmp_path, progress=False)
    found = logs(tmp_path, PROFILE, regime="niah", model="tiny")
    assert [path.name for _, path in found] == ["tiny_niah_d50_s0", "tiny_niah_d50_s1"]
    with pytest.raises(InputError, match=r"unknown regime of profile tiny 'cot': known: niah"):
        logs(tmp_path, PROFILE, regime="cot")
    with pytest.raises(InputError, match="is missing"):
        logs(tmp_path / "elsewhere", PROFILE)
    monkeypatch.setattr(recordings, "_recorder", dict)
    with pytest.raises(InputError, match="is out of date"):
        logs(tmp_path, PROFILE)


@pytest.mark.parametrize("note", ["{", "[]", "5", "[" * 100_000])
def test_a_note_cut_short_is_not_believed(tiny, tmp_path, note):
    path = ensure(LOG, tmp_path, progress=False)
    recordings._beside(path).write_text(note)
    assert not recordings._fresh(LOG, path)
    before = contents(path)
    ensure(LOG, tmp_path, progress=False)
    assert contents(path) == before


def job(log, out, device, dtype):
    """In a worker: the seed says what happens."""
    assert os.environ["OMP_NUM_THREADS"] == "1"
    if log.seed == 1:
        raise ModelError("no such weights")
    if log.seed == 2:
        raise RuntimeError("odd")
    if log.seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def recorded(log, out, device, dtype):
    """In a worker: a tiny model's log."""
    import tiny

    from wakekv.recording.record import record

    record(tiny.loaded(), tiny.prompt(n_script=20, seed=log.seed), f"{out}/{log.name}", progress=False)
    return 1.0


def test_one_worker_and_two_record_the_same_bytes(tmp_path):
    pytest.importorskip("torch", reason="recording needs torch")
    several = [replace(LOG, seed=seed) for seed in range(3)]
    for workers in (1, 2):
        recordings._record(several, tmp_path / str(workers), PROFILE, workers, [].append, recorded)
    for log in several:
        assert contents(tmp_path / "1" / log.name) == contents(tmp_path / "2" / log.name)


def test_a_failure_is_named_and_the_others_go_on(tmp_path):
    said: list[str] = []
    missing = [replace(LOG, seed=seed) for seed in (0, 1, 2, 4)]
    with pytest.raises(WakeKVError, match="2 of 4 logs failed") as caught:
        recordings._record(missing, tmp_path, PROFILE, 2, said.append, job)
    assert "tiny_niah_d50_s1: no such weights" in str(caught.value)
    assert "tiny_niah_d50_s2: RuntimeError: odd" in str(caught.value)
    assert sum("recorded in 1 s" in line for line in said) == 2 and sum("left" in line for line in said) == 3


def test_a_killed_worker_is_named(tmp_path):
    with pytest.raises(WakeKVError, match="tiny_niah_d50_s3: its process was killed"):
        recordings._record([replace(LOG, seed=3)], tmp_path, PROFILE, 1, [].append, job)


def test_record_all_records_only_what_is_missing(tiny, tmp_path, monkeypatch):
    ensure(LOG, tmp_path, progress=False)
    asked: list[str] = []
    monkeypatch.setattr(recordings, "_prefetch", lambda models, say: None)
    monkeypatch.setattr(
        recordings, "_record", lambda missing, *_: [ensure(log, tmp_path, progress=False) for log in missing]
    )
    found = record_all(PROFILE, tmp_path, say=asked.append)
    assert asked == ["2 logs: 1 are there, 1 to record, 1 at a time"] and len(found) == 2
    record_all(PROFILE, tmp_path, say=asked.append)
    assert len(asked) == 1


def test_an_unknown_model_stops_before_any_worker_starts(tmp_path):
    pytest.importorskip("torch", reason="recording needs torch")
    with pytest.raises(InputError, match="unknown model 'tiny'"):
        record_all(PROFILE, tmp_path, say=[].append)
