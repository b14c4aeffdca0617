"""The runner believes execution counts and claims files. Every notebook here is thrown away with its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import nbformat
import pytest
from filelock import FileLock
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from wakekv.errors import InputError
from wakekv.files import ROOT
from wakekv.reproduction import notebooks, recordings
from wakekv.reproduction import reproduce as reproduction
from wakekv.reproduction.notebooks import NotebookError, parameters, read, run
from wakekv.reproduction.profiles import PROFILES
from wakekv.reproduction.reproduce import reproduce, summary
from wakekv.reproduction.sources import code_sha256, files_of

DECLARES = 'profile: str = "smoke"\nout: str = "runs/smoke"'
TABLE = 'path = Path(out) / "tables" / "t.csv"\npath.parent.mkdir(exist_ok=True)\n_ = path.write_text(profile)'
DECIDES = """from wakekv.reproduction.claims import decide, load_claims, write_claims
mine = [c.id for c in load_claims().values() if c.notebook == "07_real_system"]
_ = write_claims(out, "07_real_system", [decide(i, note="no A30") for i in mine])"""


def book(folder: Path, name: str, *code: str, declares: str | None = DECLARES, text: str = "# Title") -> Path:
    cells = [new_markdown_cell(text)]
    if declares is not None:
        cells.append(new_code_cell(declares, metadata={"tags": ["parameters"]}))
    path = folder / f"{name}.ipynb"
    folder.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=[*cells, *map(new_code_cell, code)]), path)
    return path


def edit(path: Path, change) -> None:
    content = nbformat.read(path, 4)
    change(content.cells)
    nbformat.write(content, path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two notebooks, while the user's folder holds a `python3` kernel whose interpreter does not exist."""
    folder, out = tmp_path_factory.mktemp("books") / "notebooks", tmp_path_factory.mktemp("out") / "run"
    book(folder, "00_table", "from pathlib import Path", TABLE)
    book(folder, "07_real_system", DECIDES)
    data = tmp_path_factory.mktemp("jupyter")
    (data / "kernels" / "python3").mkdir(parents=True)
    wrong = {"argv": [str(data / "no-such-python"), "{connection_file}"], "display_name": "x", "language": "python"}
    (data / "kernels" / "python3" / "kernel.json").write_text(json.dumps(wrong))
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(data))
        reproduce("smoke", out, folder=folder, say=said.append)
    return folder, out, said


def test_a_run_leaves_results_and_says_where(finished):
    _, out, said = finished
    assert (out / "tables" / "t.csv").read_text() == "smoke"
    assert {path.name for path in (out / "notebooks").iterdir()} == {"00_table.ipynb", "07_real_system.ipynb"}
    assert "4 not run here" not in said[-1] and "not run here" in said[-1] and str(out / "tables") in said[-1]


def test_the_record_says_with_what_and_on_what_and_keeps_what_varies_apart(finished):
    _, out, _ = finished
    record = json.loads((out / "run.json").read_text())
    stage, volatile = record["stages"]["00_table"], record["volatile"]["00_table"]
    assert {"inputs", "outputs", "parameters", "seeds", "versions"} == set(stage)
    assert stage["parameters"] == {"profile": "smoke"} and stage["versions"]["numpy"].count(".") == 2
    assert stage["seeds"]["smollm2-135m_niah_d50_s1"] == 1
    assert volatile["seconds_s"] > 0 and volatile["peak_bytes"] > 1e7 and volatile["hardware"]


def test_an_executed_copy_has_every_count_and_nothing_volatile(finished):
    _, out, _ = finished
    content = json.loads((out / "notebooks" / "00_table.ipynb").read_text())
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [1, 2, 3, 4]
    assert "papermill" not in content["metadata"] and not any("execution" in cell["metadata"] for cell in code)


def test_a_second_run_does_nothing(finished):
    folder, out, _ = finished
    said: list[str] = []
    reproduce("smoke", out, folder=folder, say=said.append)
    assert said[1:3] == ["[1/2] 00_table: up to date", "[2/2] 07_real_system: up to date"]


@pytest.mark.parametrize(
    "damage, why", [(lambda p: p.unlink(), "is gone"), (lambda p: p.write_text("x"), "not what it left")]
)
def test_a_lost_or_changed_output_is_a_reason_to_run(finished, damage, why, monkeypatch):
    folder, out, _ = finished
    damage(out / "tables" / "t.csv")
    said = stopped_at_the_first_run(folder, out, monkeypatch)
    assert (
        said[1] == f"[1/1] 00_table: runs, its tables/t.csv {'is gone' if why == 'is gone' else 'is not what it left'}"
    )
    (out / "tables" / "t.csv").write_text("smoke")


def test_force_and_a_changed_cell_are_reasons_to_run(finished, monkeypatch):
    folder, out, _ = finished
    assert "asked to" in stopped_at_the_first_run(folder, out, monkeypatch, force=True)[1]
    source = folder / "00_table.ipynb"
    kept = source.read_bytes()
    edit(source, lambda cells: cells[0].update(source="# Another title"))
    assert stopped_at_the_first_run(folder, out, monkeypatch)[1].endswith("runs, cells changed")
    source.write_bytes(kept)


def stopped_at_the_first_run(folder, out, monkeypatch, **options) -> list[str]:
    """What `reproduce` says of 00 until it would start papermill."""
    said: list[str] = []

    def stop(*_):
        raise NotebookError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(notebooks, "run", stop)
        with pytest.raises(NotebookError, match="stopped"):
            reproduce("smoke", out, folder=folder, only=["00"], say=said.append, **options)
    return [line.partition("; took")[0] for line in said]


@pytest.mark.parametrize(
    "cell, said",
    [
        ("assert 1 == 2, 'one is not two'", "failed in code cell 2 of 3: AssertionError: one is not two"),
        ("import sys\nsys.exit(0)", "code cell"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "bad lost its kernel"),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "killed by signal 9"),
        ("if False:\n    write_claims(out)", "ended without writing bad.json"),
    ],
    ids=["assertion", "sys.exit(0)", "kernel killed", "papermill killed", "no claims file"],
)
def test_a_notebook_that_did_not_run_to_its_end_is_named(tmp_path, cell, said):
    source = read(book(tmp_path, "bad", cell, "print(1)"))
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "bad.json").write_text("{}")  # from an earlier run: must not pass for this one's
    with pytest.raises(NotebookError) as caught:
        run(source, tmp_path, {})
    assert said in str(caught.value) and "bad" in str(caught.value) and "\n" not in str(caught.value)
    left = {path.name for path in (tmp_path / "notebooks").iterdir()}
    assert left <= {"bad.failed.ipynb"} and not (tmp_path / "claims" / "bad.json").exists()


def test_the_first_failure_ends_the_run(tmp_path):
    folder = tmp_path / "notebooks"
    book(folder, "00_bad", "raise ValueError('no')")
    book(folder, "01_good", "print(1)")
    said: list[str] = []
    with pytest.raises(NotebookError, match=r"00_bad failed in code cell 2 of 2: ValueError: no"):
        reproduce("smoke", tmp_path / "out", folder=folder, say=said.append)
    assert not any("01_good" in line for line in said)


def test_a_source_with_outputs_or_injected_cells_is_refused(tmp_path):
    path = book(tmp_path, "00_x", "1")
    edit(path, lambda cells: cells[2].update(execution_count=1))
    with pytest.raises(InputError, match="with outputs"):
        read(path)
    path = book(tmp_path, "00_x", "1")
    edit(path, lambda cells: cells[2].metadata.update(tags=["injected-parameters"]))
    with pytest.raises(InputError, match="an earlier run injected"):
        read(path)


@pytest.mark.parametrize("declares", [None, "n = len('x')", "n: int", "n = [1]", "import os", "a.b = 1", "a, b = 1, 2"])
def test_the_parameters_cell_holds_literals_only(tmp_path, declares):
    with pytest.raises(InputError, match="parameters"):
        read(book(tmp_path, "00_x", declares=declares))


@pytest.mark.parametrize("cell", ["!false", "%matplotlib inline", "def f(:"])
def test_a_cell_that_is_not_plain_python_is_refused(tmp_path, cell):
    with pytest.raises(InputError, match="code cell 2 is not plain Python"):
        read(book(tmp_path, "00_x", cell))


def test_a_file_that_is_no_notebook_is_named(tmp_path):
    (tmp_path / "00_x.ipynb").write_text("{")
    with pytest.raises(InputError, match=r"00_x\.ipynb is not a notebook"):
        read(tmp_path / "00_x.ipynb")


def test_parameters_are_checked_and_read_as_their_declared_type(tmp_path):
    source = read(book(tmp_path, "00_x", declares="n: int = 1\nx: float = 0.5\nflag: bool = True\nname: str = 'a'"))
    assert parameters(source, {"n": "3", "x": "1e-3", "flag": "False", "name": "7"}) == {
        "n": 3, "x": 1e-3, "flag": False, "name": "7"}  # fmt: skip
    assert parameters(source, {"x": 2}) == {"x": 2.0}
    for given in [
        {"n": "{[]: 1}"},
        {"n": "-" * 100_000 + "1"},
        {"x": "1e999"},
        {"n": "many"},
        {"n": 1.5},
        {"n": True},
        {"flag": "false"},
        {"flag": 1},
        {"name": 3},
    ]:
        with pytest.raises(InputError, match="00_x"):
            parameters(source, given)
    with pytest.raises(InputError, match="unknown parameter of 00_x 'nam': did you mean name"):
        parameters(source, {"nam": "x"})


def test_a_run_may_lie_in_a_folder_of_any_name(tmp_path):
    book(tmp_path / "books", "00_x", "from pathlib import Path", TABLE)
    for name in "{profile}", "a {b", 'It\'s "so" ü':
        out = reproduce("smoke", tmp_path / name, folder=tmp_path / "books", say=lambda text: None)
        assert (out / "tables" / "t.csv").read_text() == "smoke" and out == tmp_path / name


def test_profile_and_folder_are_no_parameters_to_be_set(tmp_path):
    book(tmp_path / "books", "00_x", "1")
    for name in "profile", "out":
        with pytest.raises(InputError, match=f"give --{name} instead"):
            reproduce("smoke", tmp_path / "out", folder=tmp_path / "books", settings={name: str(tmp_path / "other")})
    assert [path.name for path in tmp_path.iterdir()] == ["books"]


@pytest.mark.parametrize("out", [".", "..", "figures", "artifact/tables", "notebooks", "wakekv/x", ".git"])
def test_a_run_never_writes_over_the_repository(out):
    with pytest.raises(InputError, match="belongs to the repository"):
        reproduce("smoke", ROOT / out)


def test_bad_requests_stop_before_anything_runs(tmp_path):
    folder, out = tmp_path / "notebooks", tmp_path / "out"
    book(folder, "00_x", "1")
    cases = [
        ({"profile": "smok"}, "did you mean smoke"),
        ({"only": ["04"]}, "unknown notebook '04'"),
        ({"settings": {"unit": "kv_head"}}, "no notebook declares the parameter unit"),
        ({"folder": tmp_path / "none"}, "holds no notebooks"),
    ]
    for changes, said in cases:
        with pytest.raises(InputError, match=said):
            reproduce(**{"profile": "smoke", "out": out, "folder": folder, **changes})
    book(folder, "00_x", "1", declares="profile: str = 'smoke'")
    with pytest.raises(InputError, match="must declare the parameter out"):
        reproduce("smoke", out, folder=folder)


def test_one_folder_holds_one_profile_and_one_run(tmp_path):
    folder, out = tmp_path / "notebooks", tmp_path / "out"
    book(folder, "00_x", "1")
    out.mkdir()
    (out / "run.json").write_text(json.dumps({"profile": "default", "stages": {}, "volatile": {}}))
    with pytest.raises(InputError, match="holds a run of profile default"):
        reproduce("smoke", out, folder=folder)
    (out / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"run\.json is damaged"):
        reproduce("smoke", out, folder=folder)
    (out / "run.json").unlink()
    with FileLock(out / ".lock"), pytest.raises(InputError, match="another run is writing"):
        reproduce("smoke", out, folder=folder)


def test_a_summary_names_failed_claims_that_were_to_hold(tmp_path):
    (tmp_path / "claims").mkdir()
    row = {"id": "evict-19-of-20", "verdict": "not reproduced", "value": "1/4", "number": 0.25}
    (tmp_path / "claims" / "04_policies.json").write_text(json.dumps({"verdicts": [row]}))
    assert "declared to hold, and failed: evict-19-of-20" in summary(tmp_path)


def test_code_counts_and_comments_do_not():
    """Nor does what an error says; which one it is does."""
    import ast

    errors = [ast.parse(f"raise {error}") for error in ("ValueError('a')", "ValueError('b')", "OSError('a')")]
    same, again, other = map(code_sha256, errors)
    assert same == again != other
    one = "def f(x):\n    '''Doc.'''\n    return x + 1  # why"
    assert code_sha256(ast.parse(one)) == code_sha256(ast.parse("def f(x):\n    return x + 1"))
    assert code_sha256(ast.parse(one)) != code_sha256(ast.parse("def f(x):\n    return x + 2"))


def test_dependencies_follow_imports_through_the_package():
    import ast

    found = files_of(ast.parse("from wakekv.simulation.simulate import curves\nimport numpy"))
    assert {
        "wakekv/__init__.py",
        "wakekv/simulation/simulate.py",
        "wakekv/logs/demand.py",
        "wakekv/policies/__init__.py",
    } <= set(found)
    assert "wakekv/reproduction/claims.py" not in found
    assert set(files_of(ast.parse("1"))) == {"wakekv/__init__.py"}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_a_profile_names_each_log_once(profile):
    names = [log.name for log in profile.logs]
    assert len(set(names)) == len(names) and all(os.sep not in name and " " not in name for name in names)
    assert profile.model in {log.model for log in profile.logs}


def test_a_file_of_artifact_that_a_notebook_names_is_one_of_its_inputs(tmp_path, monkeypatch):
    own = "artifact/examples/own_policy.py"
    source = read(book(tmp_path, "00_x", f"print(open('{own}').read())"))
    given = {"profile": "smoke", "out": str(tmp_path)}
    before = reproduction._inputs(source, given, tmp_path, PROFILES["smoke"])
    assert own in before and own in reproduction._inputs(
        read(ROOT / "notebooks" / "05_matched.ipynb"), given, tmp_path, PROFILES["smoke"]
    )
    monkeypatch.setattr(reproduction, "_sha256", lambda path: "changed" if path.name == "own_policy.py" else "")
    after = reproduction._inputs(source, given, tmp_path, PROFILES["smoke"])
    assert "own_policy.py changed" in reproduction._stale(
        {"inputs": before | {own: "was"}, "outputs": {}}, before, tmp_path
    )
    assert after[own] != before[own]


@pytest.mark.parametrize(
    "spent, done, total, expected, said",
    [
        (10, 0, 8, None, ""),
        (20, 2, 8, None, "about 60 s left"),
        (20, 2, 8, 65.0, "about 45 s left"),
        (70, 7, 8, 65.0, "longer than the 65 s it took before"),
        (70, 8, 8, None, "not long now"),
    ],
)
def test_progress_says_how_long_it_will_still_take(spent, done, total, expected, said):
    assert said in notebooks._left(spent, done, total, expected)
    assert said or not notebooks._left(spent, done, total, expected)


def test_what_a_notebook_took_before_is_what_it_is_expected_to_take(finished):
    _, out, _ = finished
    record = json.loads((out / "run.json").read_text())
    assert reproduction._expected("00_table", record) == record["volatile"]["00_table"]["seconds_s"]
    assert reproduction._expected("99_new", record) is None


def test_a_first_run_is_expected_to_make_the_measurements_that_the_reference_run_found_made(tmp_path, monkeypatch):
    (tmp_path / "artifact").mkdir()
    costs = {"06_x": {"seconds_s": 100.0, "kept_s": 500.0}, "02_x": {"seconds_s": 30.0}}
    (tmp_path / "artifact" / "run.json").write_text(json.dumps({"profile": "default", "volatile": costs}))
    monkeypatch.setattr(reproduction, "ROOT", tmp_path)
    first = {"profile": "default", "volatile": {}}
    assert [reproduction._expected(name, first) for name in costs] == [600.0, 30.0]
    assert reproduction._expected("06_x", {"profile": "smoke", "volatile": {}}) is None


def test_what_recording_took_is_added_up(tmp_path, monkeypatch):
    def two_logs(profile, out, say):
        say("[1/2] a recorded in 3 s")
        say("[2/2] b recorded in 3 s")

    monkeypatch.setattr(recordings, "record_all", two_logs)
    record = {"volatile": {}}
    for logs in (2, 4):
        reproduction._record(PROFILES["smoke"], tmp_path, record, lambda text: None)
        assert record["volatile"]["recordings"]["logs"] == logs
    assert json.loads((tmp_path / "run.json").read_text()) == record


def test_what_kept_measurements_took_is_counted_where_they_are_used(tmp_path):
    """Two are there before; the notebook uses one, measures another, and leaves the third alone."""
    folder, out = tmp_path / "notebooks", tmp_path / "out"
    (out / "measured").mkdir(parents=True)
    for name, seconds in ("used", 7.0), ("unused", 100.0), ("again", 1000.0):
        (out / "measured" / f"{name}.json").write_text(json.dumps({"seconds_s": seconds}))
    uses = """measured = Path(out) / "measured"
(measured / "used.json").touch()
_ = (measured / "again.json").write_text('{"seconds_s": 2.0}')
_ = (measured / "new.json").write_text('{"seconds_s": 3.0}')"""
    book(folder, "00_table", "from pathlib import Path", uses, TABLE)
    reproduce("smoke", out, folder=folder, say=lambda text: None)
    assert json.loads((out / "run.json").read_text())["volatile"]["00_table"]["kept_s"] == 7.0
