"""Commands: --help worth reading, JSON as promised, and for bad input one line and a status that is not 0."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from test_reproduce import book

from wakekv import __version__, commands, reviewing
from wakekv.__main__ import main
from wakekv.errors import WakeKVError
from wakekv.files import ROOT
from wakekv.logs.demand import demand
from wakekv.logs.trace import save_trace
from wakekv.policies import POLICIES
from wakekv.reproduction import artifact
from wakekv.reproduction import reproduce as runner
from wakekv.simulation.replay import replay

COMMANDS = [commands.record, commands.simulate, commands.quality, reviewing.verify, commands.reproduce, commands.models,
            commands.claims, commands.document, reviewing.tables, reviewing.study, reviewing.pack, reviewing.compare,
            reviewing.spotcheck, reviewing.site]  # fmt: skip


@pytest.fixture(scope="module")
def log(make_trace, tmp_path_factory):
    return str(save_trace(make_trace(), tmp_path_factory.mktemp("logs") / "log"))


def refused(capsys, *argv: str) -> str:
    """The one line that a command which fails leaves on stderr."""
    try:
        status = main(list(argv))
    except SystemExit as stopped:  # argparse
        status = stopped.code
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert err.startswith("wakekv: error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("run", COMMANDS, ids=lambda run: run.__name__)
def test_help_says_what_a_command_does_and_how_it_is_called(run, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([run.__name__, "--help"])
    told = capsys.readouterr().out
    assert stopped.value.code == 0 and inspect.getdoc(run) in told
    assert f"  python -m wakekv {run.__name__}" in told


def test_help_and_version(capsys):
    for flag, said in ("--help", "reproduce"), ("--version", __version__):
        with pytest.raises(SystemExit):
            main([flag])
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("unit", ["head", "kv_head"])
@pytest.mark.parametrize("policy", ["full", "frozen", "reactive", "evict"])
def test_simulate_prints_one_json_object_equal_to_a_replay(log, make_trace, capsys, policy, unit):
    assert main(["simulate", log, "--policy", policy, "--unit", unit, "--budgets", "4,2,8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["policy"] == policy and told["head_unit"] == unit and told["budgets"] == [2, 4, 8]
    wants = demand(make_trace(), unit=unit)
    for i, budget in enumerate(told["budgets"]):
        expected = replay(wants, POLICIES[policy], budget)
        for name in ("miss_rate", "mean_pages", "peak_pages"):
            assert np.isclose(told[name][i], getattr(expected, name)[0]), name


def test_simulate_takes_first_touch_and_convention(log, capsys):
    told = []
    for options in [], ["--first-touch", "warm"], ["--convention", "sequential"]:
        main(["simulate", log, "--policy", "reactive", "--budgets", "3", "--json", *options])
        told.append(json.loads(capsys.readouterr().out)["miss_rate"][0])
    assert len(set(told)) == 3


def test_simulate_prints_a_table_without_json(log, capsys):
    assert main(["simulate", log, "--policy", "evict", "--budgets", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "4"


@pytest.mark.parametrize(
    "changes, said",
    [
        (["--budgets", "0"], "budget 0 is not a whole number between 1 and 15"),
        (["--budgets", "8,999"], "budget 999 is not a whole number between 1 and 15"),
        (["--budgets", "8,x"], "--budgets takes whole numbers"),
        (["--budgets", ""], "--budgets takes whole numbers"),
        (["--policy", "reactiv"], "did you mean reactive"),
        (["--unit", "heads"], "invalid choice"),
        (["--convention", "sequential", "--policy", "frozen"], "sequential"),
    ],
)
def test_simulate_refuses_in_one_line(log, capsys, changes, said):
    assert said in refused(capsys, "simulate", log, "--policy", "reactive", "--budgets", "8", *changes)


def test_verify_tells_whole_from_damaged(log, make_trace, tmp_path, capsys):
    assert main(["verify", log]) == 0
    assert "whole" in capsys.readouterr().out
    damaged = save_trace(make_trace(), tmp_path / "log")
    data = (damaged / "entropy.npy").read_bytes()
    (damaged / "entropy.npy").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "entropy.npy" in refused(capsys, "verify", str(damaged))
    assert "nowhere" in refused(capsys, "verify", "nowhere")


def test_verify_without_a_log_checks_what_the_repository_shows(monkeypatch, tmp_path, capsys):
    for name in ("artifact/claims.yaml", "figures/1.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("shown")
    artifact.write_manifest(tmp_path)
    check = artifact.check
    monkeypatch.setattr(artifact, "check", lambda: check(tmp_path))
    for argv in (["verify"], ["verify", str(ROOT / "artifact")]):
        assert main(argv) == 0 and "2 files" in capsys.readouterr().out
    (tmp_path / "figures" / "1.png").write_text("shawn")
    assert "figures/1.png does not match its sha256" in refused(capsys, "verify")


@pytest.mark.parametrize(
    "cell, given, said",
    [
        ("assert 1 == 2, 'one is not two'", [], "00_bad failed in code cell 2 of 2: AssertionError: one is not two"),
        ("import os\nos.kill(os.getpid(), 9)", [], "00_bad lost its kernel"),
        ("1", ["-p", "profil=smoke"], "no notebook declares the parameter profil"),
    ],
    ids=["assertion", "killed kernel", "mistyped parameter"],
)
def test_a_notebook_that_fails_ends_the_command_with_status_2_and_is_named(
    cell, given, said, tmp_path, monkeypatch, capsys
):
    book(tmp_path / "notebooks", "00_bad", cell)
    monkeypatch.setattr(runner, "reproduce", partial(runner.reproduce, folder=tmp_path / "notebooks"))
    assert main(["reproduce", "--profile", "smoke", "--out", str(tmp_path / "out"), *given]) == 2
    err = capsys.readouterr().err
    assert err.startswith("wakekv: error: ") and err.count("\n") == 1 and said in err


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "COMMAND"),
        (["frobnicate"], "invalid choice"),
        (["simulate", "nowhere", "--policy", "full"], "nowhere"),
        (["reproduce", "--profile", "smok"], "did you mean smoke"),
        (["reproduce", "--out", "figures"], "belongs to the repository"),
        (["reproduce", "-p", "unit"], "-p takes NAME=VALUE"),
        (["claims", "--out", "nowhere"], "nowhere is no run"),
        (["record", "--out", "x", "--text", "loud"], "invalid choice"),
        (["record"], "--out"),
        (["quality", "--depths", "0.5,x"], "--depths takes numbers"),
        (["quality", "--longbench", "no.jsonl", "--lengths", "1,2"], "give --lengths one number"),
        (["quality", "--longbench", "no.jsonl"], "no.jsonl cannot be read"),
        (["compare", "nowhere", "reference"], "nowhere holds no results"),
        (["spotcheck", "nowhere.npz"], "manifest.json is missing"),
        (["tables", "nowhere.npz", "--out", "x"], "no shipped log at nowhere.npz"),
        (["site", "--run", "nowhere", "--out", "x"], "no executed notebooks"),
    ],
)
def test_bad_requests_are_one_line(capsys, argv, said):
    assert said in refused(capsys, *argv)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--regime", "nia"], "did you mean niah"),
        (["--model", "smollm3"], "did you mean smollm2-135m"),
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--dtype", "float12"], "unknown dtype"),
    ],
)
def test_record_refuses_in_one_line_and_leaves_nothing(capsys, tmp_path, argv, said):
    pytest.importorskip("torch", reason="recording needs torch")
    out = tmp_path / "log"
    assert said in refused(capsys, "record", "--out", str(out), *argv)
    assert not list(tmp_path.iterdir())


def test_record_refuses_a_log_that_is_there(log, capsys):
    pytest.importorskip("torch", reason="recording needs torch")
    assert "holds a log already" in refused(capsys, "record", "--out", log)


def test_models_lists_every_model_without_the_network(capsys):
    models = pytest.importorskip("wakekv.recording.models", reason="models needs torch")
    assert main(["models", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(models.MODELS)
    assert "did you mean" in refused(capsys, "models", "--fetch", "smollm")


def test_claims_fail_with_status_1_only_where_one_was_to_hold(tmp_path, capsys):
    (tmp_path / "claims").mkdir()
    path = tmp_path / "claims" / "04_policies.json"
    for verdict, status in ("direction holds", 0), ("not reproduced", 1):
        path.write_text(json.dumps({"verdicts": [{"id": "evict-19-of-20", "verdict": verdict}]}))
        assert main(["claims", "--out", str(tmp_path)]) == status
        assert main(["claims", "--out", str(tmp_path), "--json"]) == status
    told = capsys.readouterr().out
    assert "declared to hold, and failed: evict-19-of-20" in told
    (row,) = (row for row in json.loads(told.splitlines()[-1]) if row["failed"])
    assert row["id"] == "evict-19-of-20"


def test_debug_shows_the_whole_error():
    with pytest.raises(WakeKVError):
        main(["--debug", "verify", "nowhere"])


@pytest.mark.parametrize(
    "error, status, said",
    [
        (OSError(28, "No space left on device"), 2, "the disk is full"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "pip install 'wakekv[models]'"),
        (ModuleNotFoundError("No module named 'filelock'", name="filelock"), 2, "pip install 'wakekv[cluster]'"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("Could not determine home directory."), 2, "set WAKEKV_CACHE"),
    ],
    ids=["full disk", "no torch", "no filelock", "Ctrl-C", "no home"],
)
def test_other_endings_are_one_line_too(monkeypatch, capsys, error, status, said):
    def fail(options):
        """Fail."""
        raise error

    monkeypatch.setattr(commands, "claims", fail)
    fail.__name__ = "claims"
    assert main(["claims"]) == status
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_a_terminal_without_unicode_is_shown_the_same_in_ascii(tmp_path, more):
    (tmp_path / "run").mkdir()
    where = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "wakekv", "claims", "--out", "run", *more]
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and "not run here" in done.stdout.decode("ascii")
    if more:
        assert json.loads(done.stdout)[0]["place"].startswith("§")


def test_verify_finds_what_the_repository_shows_from_any_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wakekv.reproduction.artifact.check", lambda: 7)
    assert main(["verify"]) == 0 and "whole, 7 files" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["tables", "study"])
def test_what_the_repository_shows_is_no_place_for_results(log, capsys, command):
    argv = [command, log, "--out", str(ROOT / "artifact")]
    assert main(argv) == 2 and "belongs to the repository: give another --out" in capsys.readouterr().err


def test_the_module_runs_from_another_folder(log, tmp_path):
    command = [sys.executable, "-m", "wakekv", "simulate", log, "--policy", "reactive", "--budgets", "4", "--json"]
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["budgets"] == [4] and done.stderr == ""
