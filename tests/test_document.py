"""REPRODUCE.md says what was measured, and what it tells people to type works: its blocks are run, to the letter.

By default the plain blocks; with WAKEKV_REPRODUCE=1 (`make reproduce-doc`) the smoke blocks too, in that profile.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from wakekv.errors import InputError
from wakekv.files import ROOT
from wakekv.reproduction import document
from wakekv.reproduction.claims import load_claims
from wakekv.reproduction.document import ITEMS, PARTS, render

TEXT = (ROOT / "REPRODUCE.md").read_text(encoding="utf-8")
KINDS = {"": "run always", "smoke": "run with WAKEKV_REPRODUCE", "gpu": "never run here"}
BLOCKS = re.findall(r"^```bash ?(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
RUN = {"", "smoke"} if os.environ.get("WAKEKV_REPRODUCE") else {""}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout, without what git ignores, whose .venv is this environment."""
    copy = tmp_path_factory.mktemp("clone") / "wakekv"
    if (ROOT / ".git").exists():
        asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    else:  # an archive: all of it but what runs and environments leave
        listed = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.parts[-2] != "__pycache__"]
    for name in filter(None, listed):
        if (ROOT / name).is_file() and name.split("/")[0] not in ("runs", "build") and not name.startswith(".venv"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    here = ROOT / ".venv"
    (copy / ".venv").mkdir()
    for part in here.iterdir():
        (copy / ".venv" / part.name).symlink_to(part)
    (copy / ".venv" / "installed").unlink(missing_ok=True)
    (copy / ".venv" / "installed").touch()  # newer than the lock: make leaves the environment alone
    return copy


# What ipykernel's heartbeat may print where its kernel is stopped while it beats; the notebook has run by then.
HEARTBEAT = re.compile(r"Exception in thread Heartbeat:\nTraceback .*\n(?:\s.*\n)*\S.*\n")


@pytest.mark.parametrize("number", [i for i, (kind, _) in enumerate(BLOCKS) if kind in RUN])
def test_a_block_does_what_it_says(number, checkout):
    """In the order of the document, so that a later block finds what an earlier one made."""
    script = BLOCKS[number][1]
    environment = os.environ | {"PROFILE": "smoke", "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith(("MAKE", "PYTEST"))}
    ran = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=checkout, env=environment,
                         capture_output=True, text=True)  # fmt: skip
    assert ran.returncode == 0, f"block {number}:\n{script}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    assert "Traceback" not in HEARTBEAT.sub("", ran.stdout + ran.stderr)


def test_only_a_kernels_last_heartbeat_may_end_in_a_traceback():
    last = "Exception in thread Heartbeat:\nTraceback (most recent call last):\n  File x\n    run()\nZMQError: gone\n"
    assert HEARTBEAT.sub("", f"a\n{last}b\n") == "a\nb\n"
    assert "Traceback" in HEARTBEAT.sub("", f"{last}Traceback (most recent call last):\n  File y\nValueError: 5\n")


def test_every_block_is_of_a_known_kind():
    assert len(BLOCKS) == TEXT.count("```bash") == TEXT.count("```") / 2
    assert {kind for kind, _ in BLOCKS} == set(KINDS)


def test_the_document_is_up_to_date_with_the_reference_results():
    assert render(TEXT, ROOT / "artifact") == TEXT, "python -m wakekv document brings REPRODUCE.md up to date"


def test_every_measured_part_is_in_the_document_once():
    assert sorted(re.findall(r"<!-- begin (\w+) -->", TEXT)) == sorted(PARTS)


@pytest.fixture
def shown(tmp_path):
    """Reference results of one notebook."""
    record = {
        "profile": "default",
        "stages": {
            "02_churn": {"inputs": {}, "outputs": {}},
            "12_more": {"inputs": {}, "outputs": {"tables/12.csv": ""}},
        },
        "volatile": {
            "02_churn": {
                "seconds_s": 54.0,
                "kept_s": 700.0,
                "peak_bytes": 2_345_000_000,
                "hardware": "another, 4 cores",
            },
            "12_more": {"seconds_s": 60.0, "peak_bytes": 1_000_000_000},
            "recordings": {"seconds_s": 1800.0, "logs": 37},
        },
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "churn.md").write_text("| a |")
    for name, title in ("02_churn", "Do heads change?"), ("12_more", "What else?"):
        cells = [
            {"cell_type": "markdown", "source": [f"# {title}\n", "word " * 400]},
            {"cell_type": "code", "source": []},
        ]
        (tmp_path / "notebooks").mkdir(exist_ok=True)
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text(json.dumps({"cells": cells}))
    verdict = {"id": "drift-niah-3b", "verdict": "direction holds", "value": 0.757, "number": 0.757, "lo": 0.748,
               "hi": 0.767, "n": 9, "model": "smollm2-135m", "hardware": "a machine, 2 cores"}  # fmt: skip
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "02_churn.json").write_text(json.dumps({"verdicts": [verdict]}))
    return tmp_path


def test_minutes_memory_and_verdicts_come_from_the_records(shown):
    row = next(line for line in PARTS["items"](shown).splitlines() if "Table 4" in line)
    assert "| 13, measurements kept | 2.3 GB |" in row and "1, and 2 to read" in row and "1 direction holds" in row
    assert "another, 4 cores" in row and "`02_table4.png`, [churn.csv](artifact/tables/churn.md)" in row
    assert "37 recordings took 30 minutes, and its 2 notebooks took 14 minutes" in PARTS["run"](shown)
    claim = next(line for line in PARTS["claims"](shown).splitlines() if "0.757" in line)
    assert "| 0.63 | 0.757 [0.748, 0.767] | direction holds | simulated | smollm2-135m, n = 9 prompts |" in claim


def test_a_notebook_that_was_not_run_is_named(shown, tmp_path, monkeypatch):
    for name in ("02_churn", "08_tiers", "12_more"):
        (tmp_path / "sources").mkdir(exist_ok=True)
        (tmp_path / "sources" / f"{name}.ipynb").touch()
    monkeypatch.setattr(document, "NOTEBOOKS", tmp_path / "sources")
    assert PARTS["run"](shown).endswith("Not part of it, and so without numbers here: 08.\n")
    (tmp_path / "sources" / "08_tiers.ipynb").unlink()
    assert PARTS["run"](shown).endswith("GB of memory.\n")


def test_a_notebook_beyond_the_paper_has_its_row(shown):
    assert "| What else? | `make reproduce ONLY=12` |" in PARTS["items"](shown)


def test_another_record_is_another_text_and_writing_twice_changes_nothing(shown, tmp_path):
    path = tmp_path / "REPRODUCE.md"
    path.write_text("before\n<!-- begin run -->\nold\n<!-- end -->\nafter\n")
    assert document.document(path, shown) and not document.document(path, shown)
    text = path.read_text()
    assert text.startswith("before\n<!-- begin run -->\nThe reference run") and text.endswith("<!-- end -->\nafter\n")
    (shown / "run.json").write_text((shown / "run.json").read_text().replace("700.0", "1700.0"))
    assert document.document(path, shown)


def test_without_a_record_the_document_says_so(tmp_path):
    assert "no record" in PARTS["run"](tmp_path) and "–" in PARTS["items"](tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"stages": [], "volatile": {}}', "[" * 100_000])
def test_a_record_that_is_damaged_is_named(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InputError, match="run.json is damaged"):
        document.run_at_a_glance(tmp_path)


def test_a_part_that_nobody_makes_is_named(tmp_path):
    with pytest.raises(InputError, match="part 'hours'"):
        render("<!-- begin hours -->\n<!-- end -->", tmp_path)


def test_every_claim_belongs_to_an_item_of_its_own():
    for claim in load_claims().values():
        row = {"place": claim.place}
        assert [item for item in ITEMS if "all" not in item.names and document._belongs(row, item)], claim.id
    one = {"place": "§5.2, Table 2"}
    assert [item.names[0] for item in ITEMS if document._belongs(one, item)] == ["Table 2", "all"]


def test_items_name_notebooks_that_exist_or_are_to_come():
    there = {path.stem for path in Path(ROOT / "notebooks").glob("*.ipynb")}
    assert {item.notebook for item in ITEMS} - there <= {claim.notebook for claim in load_claims().values()}
