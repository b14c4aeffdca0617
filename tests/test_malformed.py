"""Whatever a command or a function is given: one line that names it and the way out, and nothing half-written.

`artifact/tables/malformed.csv` is what these tests found: with WAKEKV_MALFORMED=1 (`make malformed`) they write it,
otherwise they hold it to what they find.
"""

from __future__ import annotations

import os
import subprocess
import sys

import malformed_calls
import malformed_commands
import malformed_logs
import malformed_models
import pandas as pd
import pytest
from malformed import Told, settled, told

from wakekv.files import ROOT, write
from wakekv.tables import as_csv

TABLE = ROOT / "artifact" / "tables" / "malformed.csv"
SOURCES = (malformed_commands, malformed_models, malformed_logs, malformed_calls)
CASES = {f"{case.where}: {case.input}": case for source in SOURCES for case in source.cases()}
FOUND: dict[str, Told] = {}
A_PROCESS = [  # also in a process of their own, as a reader would type them
    "simulate: a policy that is misspelt",
    "verify: a log with a flipped bit",
]


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_one_line_and_nothing_is_left(name, tmp_path, monkeypatch):
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    if case.make:
        case.make(tmp_path)
    got = FOUND[name] = told(case, tmp_path)
    print(got)
    assert got.status == "2" if case.call is None else got.status.endswith("Error")
    assert got.out == "" and got.changed == ()
    assert case.call or got.err.startswith("wakekv: error: ")
    assert got.message and got.err.count("\n") == 1 and "Traceback" not in got.err
    assert case.names in got.message and case.way in got.message


def test_every_case_is_of_its_own():
    assert len(CASES) == sum(len([*source.cases()]) for source in SOURCES)


def test_the_table_says_what_was_found():
    """Of the cases that ran: with `-k` that may be some of them."""
    rows = [
        {"input": CASES[name].input, "where": CASES[name].where, "message": got.message, "exit status": got.status}
        for name, got in FOUND.items()
    ]
    if os.environ.get("WAKEKV_MALFORMED"):
        assert len(rows) == len(CASES), "some cases did not run: leave -k out"
        write(TABLE, as_csv(pd.DataFrame(rows)))
    shown = pd.read_csv(TABLE, dtype=str, keep_default_na=False)
    assert len(shown) >= 100
    assert (shown["where"] + ": " + shown["input"]).tolist() == [*CASES]
    written = {f"{row['where']}: {row['input']}": row for row in shown.to_dict("records")}
    for row in rows:
        other = written[f"{row['where']}: {row['input']}"]
        assert (other["exit status"], settled(other["message"])) == (row["exit status"], settled(row["message"]))


@pytest.mark.parametrize("name", A_PROCESS)
def test_a_process_says_the_same_as_a_command_in_this_one(name, tmp_path, monkeypatch):
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    if case.make:
        case.make(tmp_path)
    command = [sys.executable, "-m", "wakekv", *case.argv]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    got = told(case, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (int(got.status), "", got.err)
