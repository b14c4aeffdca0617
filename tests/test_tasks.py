"""A study comes out the same on one process, several, or a cluster that loses a worker; and it never repeats itself."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest

from wakekv.__main__ import main
from wakekv.errors import InputError
from wakekv.logs.demand import demand
from wakekv.logs.trace import open_trace, save_trace
from wakekv.policies import POLICIES
from wakekv.policies.classic import Recency
from wakekv.reproduction import places, tasks
from wakekv.simulation.simulate import curves
from wakekv.simulation.study import studies
from wakekv.tables import rates

POLICY, BUDGETS = ("reactive", "evict", "adakv"), (3, 8)  # adakv: a floor, so a task a budget


@pytest.fixture(scope="module")
def logs(make_trace, tmp_path_factory):
    """Three logs, of two regimes."""
    folder = tmp_path_factory.mktemp("logs")
    for seed, regime in enumerate(("niah", "niah", "cot")):
        trace = make_trace(k=8, seed=seed)
        manifest = trace.manifest | {"prompt": trace.manifest["prompt"] | {"regime": regime}}
        save_trace(replace(trace, manifest=manifest), folder / f"{regime}_{seed}")
    return folder


@pytest.fixture(scope="module")
def alone(logs, tmp_path_factory):
    """The study in one process."""
    out = tmp_path_factory.mktemp("alone")
    assert study(logs, out) == {}
    return out


def study(logs, out, **how):
    how = {"policies": POLICY, "budgets": BUDGETS, "say": lambda text: None} | how
    return tasks.study([str(logs)], out, **how)


def contents(out):
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_it_finds_what_studies_finds(logs, alone):
    traces = [open_trace(path) for path in sorted(logs.iterdir())]
    expected = [rates(one, POLICY, BUDGETS) for one in studies(traces, POLICY, slow_budgets=BUDGETS)]
    found = pd.read_csv(alone / "study.csv")
    pd.testing.assert_frame_equal(found, pd.concat(expected, ignore_index=True), check_dtype=False, rtol=1e-5)
    each = pd.read_csv(alone / "prompts.csv").set_index(["log", "policy", "budget"])
    assert len(each) == 3 * len(POLICY) * len(BUDGETS)
    one = curves(demand(traces[1]), POLICIES["evict"], [8])
    assert each.loc[(traces[1].manifest["prompt"]["regime"] + "_0", "evict", 8), "misses"] == one.misses[0]


def test_several_processes_write_the_same_bytes(logs, alone, tmp_path):
    assert study(logs, tmp_path, jobs=2) == {}
    assert contents(tmp_path) == contents(alone)


def test_a_cluster_that_loses_a_worker_writes_the_same_bytes(logs, alone, tmp_path):
    distributed = pytest.importorskip("distributed", reason="takes pip install 'wakekv[cluster]'")
    settings = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": None, "local_directory": str(tmp_path)}
    killed = []

    def kill(text):
        """As the first result arrives, a worker that has others in hand is killed."""
        busy = [name for name, at in client.processing().items() if at]
        if text.startswith("1/") and busy:
            workers = {worker.worker_address: worker for worker in cluster.workers.values()}
            killed.append(workers[busy[-1]].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    with distributed.LocalCluster(**settings) as cluster, distributed.Client(cluster) as client:
        assert study(logs, tmp_path / "out", client=client, say=kill) == {}
    assert killed and contents(tmp_path / "out") == contents(alone)


def test_a_second_run_does_nothing_and_says_so(logs, alone):
    before, said = {path: path.stat().st_mtime_ns for path in alone.rglob("*")}, []
    assert study(logs, alone, say=said.append) == {}
    assert said[-1] == "nothing to do: every result is there" and "0 to run" in said[0]
    assert {path: path.stat().st_mtime_ns for path in alone.rglob("*")} == before


def test_what_is_missing_or_damaged_is_made_again_and_nothing_else(logs, alone, tmp_path):
    study(logs, tmp_path)
    missing, damaged, *others = sorted((tmp_path / "tasks").iterdir())
    stamps = [path.stat().st_mtime_ns for path in others]
    missing.unlink()
    damaged.write_bytes(damaged.read_bytes()[:100])
    said = []
    study(logs, tmp_path, say=said.append)
    assert "2 to run" in said[0] and contents(tmp_path) == contents(alone)
    assert [path.stat().st_mtime_ns for path in others] == stamps


def test_a_study_that_grows_pays_for_what_is_new(logs, tmp_path):
    study(logs, tmp_path, policies=("reactive",), regimes=("niah",))
    said = []
    study(logs, tmp_path, policies=("reactive", "evict"), budgets=(2, 5, 9), say=said.append)
    assert said[0].endswith("6 tasks: 2 kept, 4 to run"), "every budget came from one pass"


def test_the_key_holds_all_that_a_result_depends_on(logs):
    (task, *_) = tasks.tasks(places.find([str(logs)]), ["reactive"], BUDGETS, "head", "cold")
    other = {
        "sha256": "0",
        "rule": Recency(sticky=True),
        "budget": 3,
        "unit": "kv_head",
        "first_touch": "warm",
        "code": "1",
    }
    assert len({task.key, *(replace(task, **{name: value}).key for name, value in other.items())}) == 1 + len(other)
    assert replace(task, url="elsewhere", policy="by another name").key == task.key
    learned = POLICIES["commons"]
    assert replace(task, rule=learned).key != replace(task, rule=learned.but(read=learned.rest)).key


def test_what_fails_is_told_and_the_rest_is_kept(logs, make_trace, tmp_path, capsys):
    for log in logs.iterdir():
        (tmp_path / "logs" / log.name).mkdir(parents=True)
        for file in log.iterdir():
            (tmp_path / "logs" / log.name / file.name).write_bytes(file.read_bytes())
    (tmp_path / "logs" / "niah_1" / "top.npy").write_bytes(b"short")
    command = [
        "study",
        str(tmp_path / "logs"),
        "--policies",
        "reactive,evict",
        "--budgets",
        "3",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(command) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and all("niah_1" in line and "top.npy" in line for line in told)
    found = pd.read_csv(tmp_path / "out" / "study.csv").set_index(["regime", "policy"])
    assert found.loc[("niah", "reactive"), "n"] == found.loc[("cot", "evict"), "n"] == 1
    (tmp_path / "logs" / "niah_1" / "top.npy").write_bytes((logs / "niah_1" / "top.npy").read_bytes())
    places.local.cache_clear()
    assert main(command) == 0
    assert pd.read_csv(tmp_path / "out" / "study.csv").set_index(["regime", "policy"]).loc[("niah", "evict"), "n"] == 2


@dataclass(frozen=True)
class Fatal(Recency):
    """Ends the process it runs in."""

    def fit(self, *demands):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_task_that_kills_its_worker_takes_no_other_with_it(logs, monkeypatch, tmp_path):
    monkeypatch.setitem(POLICIES, "fatal", Fatal())
    failed = study(logs, tmp_path, policies=("reactive", "fatal"), regimes=("cot",), jobs=2)
    assert failed == {"cot_2, fatal": "the process that ran it was killed (out of memory?)"}
    assert set(pd.read_csv(tmp_path / "study.csv")["policy"]) == {"reactive"}


def test_a_worker_with_other_code_is_refused(logs):
    (task, *_) = tasks.tasks(places.find([str(logs)]), ["reactive"], BUDGETS, "head", "cold")
    assert "another version" in tasks.run(replace(task, code="older"))[1]


def test_logs_in_a_store_are_read_from_there(logs, alone, tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("WAKEKV_CACHE", str(tmp_path / "cache"))
    fsspec.filesystem("memory").put(f"{logs}/", "/store/logs", recursive=True)
    assert study("memory://store/logs", tmp_path / "out", jobs=2) == {}
    assert contents(tmp_path / "out") == contents(alone)


@pytest.mark.parametrize(
    "how, said",
    [
        ({"policies": ["reactiv"]}, "did you mean reactive"),
        ({"budgets": [0]}, "from 1 on"),
        ({"models": ["gpt"]}, "unknown model of these logs"),
        ({"regimes": ["coat"]}, "did you mean cot"),
    ],
)
def test_names_and_numbers_that_do_not_fit_are_refused_before_anything_runs(logs, tmp_path, how, said):
    with pytest.raises(InputError, match=said):
        study(logs, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()


def test_a_log_shorter_than_every_budget_is_named_before_anything_runs(logs, tmp_path):
    with pytest.raises(InputError, match="has 15 pages, fewer than the 16 of --budgets: ask for fewer"):
        study(logs, tmp_path / "out", budgets=(16, 99))
    assert not (tmp_path / "out").exists()


def test_budgets_beyond_the_pages_are_left_out(logs, tmp_path):
    study(logs, tmp_path, budgets=(3, 10_000))
    assert set(pd.read_csv(tmp_path / "prompts.csv")["budget"]) == {3}
    assert np.isfinite(pd.read_csv(tmp_path / "study.csv")["miss_rate"]).all()
