"""The shape of the code: three rings, one direction, short files, notebooks that only tell and show."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import nbformat
import pytest
from layers import CORE, METAL, ORDER, PICTURES, RINGS, RUN, files, module_of, place
from nbformat.v4 import new_code_cell, new_markdown_cell

from wakekv.files import ROOT
from wakekv.reproduction.claims import load_claims
from wakekv.reproduction.notebooks import read
from wakekv.reproduction.sources import imported_by

FILES = sorted((ROOT / "wakekv").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HEAVY = ["torch", "transformers", "matplotlib", "seaborn", "numba", "llvmlite", "papermill", "filelock", "tqdm"]

BLOCK = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("not here: " + name, name=name)
sys.meta_path.insert(0, Absent())
"""


def import_alone(modules: list[str], blocked: list[str], folder) -> str:
    """Import `modules` in a process where `blocked` packages are not installed; what it printed."""
    code = BLOCK.format(blocked=blocked) + "".join(f"import {name}\n" for name in modules)
    (folder / "here").mkdir()
    where = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "", "HOME": str(folder / "home")}
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, cwd=folder / "here", env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list((folder / "here").iterdir())
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "ring, needs, blocked",
    [
        (CORE, "numpy", HEAVY),
        (PICTURES, "seaborn", ["torch", "transformers", "papermill"]),
        (METAL, "torch", ["matplotlib", "seaborn", "papermill"]),
        (RUN, "filelock", [name for name in HEAVY if name != "filelock"]),
    ],
    ids=["core", "pictures", "metal", "run"],
)
def test_a_ring_needs_no_package_of_a_wider_one_and_does_nothing_on_import(ring, needs, blocked, tmp_path):
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    modules = [module_of(path) for path in files(ring) if path.name != "__main__.py"]
    assert import_alone(modules, blocked, tmp_path) == ""


def test_a_blocked_package_is_indeed_not_to_be_had(tmp_path):
    with pytest.raises(AssertionError, match="torch"):
        import_alone(["wakekv.recording.record"], ["torch"], tmp_path)


def test_the_command_line_shows_its_help_without_torch(tmp_path):
    import_alone(["wakekv.__main__"], HEAVY, tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_a_file_imports_only_from_files_above_it(path):
    above = ORDER[: ORDER.index(place(path)) + 1] if place(path) else []
    assert {place(other) for other in imported_by(path)} - {None} <= set(above)


def test_every_file_has_its_place_in_the_order():
    placed = {place(path) for path in FILES} - {None}
    assert placed <= set(ORDER), "add it to a ring in tests/layers.py, below what it imports"
    assert len(ORDER) == sum(map(len, RINGS))


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_no_file_is_long_or_named_after_nothing(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 300
    assert path.stem not in ("utils", "util", "base", "common", "manager", "helpers", "misc")


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_every_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def faults(cells) -> list[str]:
    """What keeps a notebook from being one that tells and shows."""
    found = [] if cells[0].cell_type == "markdown" and cells[0].source.startswith("# ") else ["no title"]
    row = 0
    for number, cell in enumerate(cells):
        row = row + 1 if cell.cell_type == "code" else 0
        if cell.cell_type == "code":
            tree = ast.parse(cell.source)
            defines = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            found += [f"cell {number} defines something" for node in ast.walk(tree) if isinstance(node, defines)]
            found += [f"cell {number} is long"] if len(cell.source.strip().splitlines()) > 12 else []
            found += [f"cell {number} is the third code cell in a row"] if row > 2 else []
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_tells_and_shows(path):
    source = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(source)
    book = read(path)  # plain Python, no outputs, literal parameters
    assert {"profile", "out"} <= set(book.parameters)
    assert faults(source.cells) == []
    assert book.claims == (path.stem in {claim.notebook for claim in load_claims().values()})


@pytest.mark.parametrize(
    "cells, fault",
    [
        ([new_code_cell("1")], "no title"),
        ([new_markdown_cell("# T"), new_code_cell("def f():\n    pass")], "cell 1 defines something"),
        ([new_markdown_cell("# T"), new_code_cell("\n".join("x" * 13))], "cell 1 is long"),
        ([new_markdown_cell("# T"), *[new_code_cell("1")] * 3], "cell 3 is the third code cell in a row"),
        ([new_markdown_cell("# T"), new_code_cell("1"), new_markdown_cell("and"), new_code_cell("2")], None),
    ],
)
def test_a_notebook_out_of_shape_is_noticed(cells, fault):
    assert faults(cells) == ([fault] if fault else [])


def test_notebooks_are_numbered_once():
    numbers = [path.stem.split("_")[0] for path in NOTEBOOKS]
    assert len(set(numbers)) == len(numbers) and all(number.isdigit() for number in numbers)


def test_json_files_are_plain_json():
    for path in [*(ROOT / "wakekv").rglob("*.json"), ROOT / "artifact" / "published.json"]:
        json.loads(path.read_text(encoding="utf-8"))


def test_the_readme_names_every_file_of_the_package():
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1]
    files = {path.name + "/" * path.is_dir() for path in (ROOT / "wakekv").iterdir() if path.name[:2] != "__"}
    assert files <= set(tree.split())
