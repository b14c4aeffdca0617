"""Whatever a command or a function is given: one line that names it and the way out, and nothing half-written."""

from __future__ import annotations

import malformed_commands
import malformed_logs
import malformed_models
import pytest
from malformed import told

CASES = [*malformed_logs.cases(), *malformed_models.cases(), *malformed_commands.cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.where}: {case.input}")
def test_it_is_refused_in_one_line_and_nothing_is_left(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if case.make:
        case.make(tmp_path)
    got = told(case, tmp_path)
    print(got)
    assert got.status == "2" if case.call is None else got.status.endswith("Error")
    assert got.out == "" and got.changed == ()
    assert got.message and "\n" not in got.message and "Traceback" not in got.message
    assert case.names in got.message and case.way in got.message
