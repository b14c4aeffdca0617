"""The lock, pyproject.toml, environment.yml and the imports say the same."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
import yaml
from layers import CORE, METAL, PICTURES, RUN, files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import wakekv
from wakekv.files import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()
CHECKS = (ROOT / "requirements-checks.lock").read_text()
FIRST, SECOND = LOCK.split("\n# Brought along by the above\n")
ENGINE = {"setuptools", "lark"}  # pinned for the serving engine only


def pins(text: str) -> list[Requirement]:
    return [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]


def asked(*extras: str) -> dict[str, Requirement]:
    """What pyproject.toml asks for: the core, and some extras."""
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in PROJECT["optional-dependencies"][extra])]
    return {canonicalize_name(r.name): r for r in map(Requirement, texts) if r.name != "wakekv"}


EXTRAS = sorted(
    set(PROJECT["optional-dependencies"]) - {"all", "vllm"}
)  # vllm has an environment, and a lock, of its own


def imported(paths) -> dict[str, str]:
    """Third-party distributions that files import, each with a file that does."""
    known, found = packages_distributions(), {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for top in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"wakekv"}:
                found.update({canonicalize_name(name): path.name for name in known.get(top, [top])[:1]})
    return found


def test_every_line_of_every_lock_is_one_exact_version():
    for pin in [*pins(LOCK), *pins(CHECKS), *pins((ROOT / "requirements-vllm.lock").read_text())]:
        assert [s.operator for s in pin.specifier] == ["=="], pin


def test_the_engines_own_lock_has_what_its_extra_asks_for_and_the_same_versions_of_what_both_have():
    theirs = {canonicalize_name(pin.name): pin for pin in pins((ROOT / "requirements-vllm.lock").read_text())}
    for name, wanted in asked("vllm").items():
        assert next(iter(theirs[name].specifier)).version in wanted.specifier, name
    ours: dict[str, set[str]] = {}
    for pin in pins(LOCK):
        ours.setdefault(canonicalize_name(pin.name), set()).add(str(pin.specifier))
    other = {
        name: str(pin.specifier)
        for name, pin in theirs.items()
        if str(pin.specifier) not in ours.get(name, {str(pin.specifier)})
    }
    assert not other


def test_the_lock_names_no_gpu_libraries():
    assert not [pin for pin in pins(LOCK) if re.match("nvidia|cuda|triton", pin.name)]


def test_every_pin_of_the_first_part_says_what_breaks():
    lines = FIRST.split("\n\n", 1)[1].splitlines()
    for above, line in zip(lines, lines[1:]):
        if not line.startswith("#"):
            assert above.startswith("# ") or above.split("==")[0] == line.split("==")[0], line


def test_the_first_part_of_the_lock_is_what_the_project_asks_for():
    assert {canonicalize_name(pin.name) for pin in pins(FIRST)} == set(asked(*EXTRAS)) | ENGINE


def test_every_pin_is_one_that_the_project_accepts():
    wanted = asked(*EXTRAS)
    for pin in pins(FIRST):
        (version,) = (s.version for s in pin.specifier)
        if canonicalize_name(pin.name) not in ENGINE:
            assert wanted[canonicalize_name(pin.name)].specifier.contains(version), pin


def test_no_pin_stands_in_both_parts():
    assert not {pin.name for pin in pins(FIRST)} & {pin.name for pin in pins(SECOND)}


@pytest.mark.parametrize("version", ["3.10.0", "3.11.0", "3.12.0", "3.13.0"])
def test_each_python_gets_each_package_once(version):
    where = {"python_version": version[:4], "python_full_version": version, "sys_platform": "linux"}
    taken = [pin.name for pin in pins(LOCK) if pin.marker is None or pin.marker.evaluate(where)]
    assert len(set(taken)) == len(taken) and set(asked(*EXTRAS)) <= set(taken)


def test_the_peers_environment_is_exact_and_has_our_torch():
    peer = {pin.name: pin for pin in pins((ROOT / "benchmarks" / "peer" / "requirements.lock").read_text())}
    assert all([s.operator for s in pin.specifier] == ["=="] for pin in peer.values())
    assert str(peer["kvpress"]) == "kvpress==0.5.5" and str(peer["torch"]) in FIRST.splitlines()


def test_conda_users_get_the_same_pins():
    wanted = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    *interpreter, pip = wanted
    assert pip == {"pip": ["-r requirements.lock", "-e ."]}  # nothing pinned a second time
    (python,) = (item for item in interpreter if item.startswith("python="))
    assert interpreter == [python, "pip"]
    assert Requirement("python" + PROJECT["requires-python"]).specifier.contains(python.split("=")[1])


@pytest.mark.parametrize(
    "ring, extras",
    [
        (CORE, ["fast"]),
        (PICTURES, ["fast", "figures"]),
        (METAL, ["models", "faiss"]),
        (RUN, ["notebooks", "models", "cluster"]),
    ],
    ids=["core", "pictures", "metal", "run"],
)
def test_every_import_of_a_ring_is_a_dependency_it_declares(ring, extras):
    undeclared = {name: at for name, at in imported(files(ring)).items() if name not in asked(*extras)}
    assert not undeclared


def test_every_import_of_tests_and_benchmarks_is_declared():
    outside = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).glob("*.py")]
    local = {canonicalize_name(path.stem) for path in outside}
    undeclared = {name: at for name, at in imported(outside).items() if name not in asked(*EXTRAS)}
    brought = {canonicalize_name(pin.name) for pin in [*pins(SECOND), *pins(CHECKS)]}
    assert not {name for name in undeclared if name not in brought and name not in local}


def test_the_version_stands_in_one_place_and_its_copies_agree():
    assert PROJECT["dynamic"] == ["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == wakekv.__version__
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    assert newest == wakekv.__version__


def test_ci_runs_the_tests_by_make_and_stops_at_the_first_failure():
    text = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK) and "set -euo pipefail" in text and "\nmake test\n" in text


@pytest.mark.parametrize(
    "target, runs",
    [
        ("reproduce", "-m wakekv reproduce --profile default --out runs/default"),
        ("smoke", "-m wakekv reproduce --profile smoke --out runs/smoke"),
        ("test", "-m pytest"),
        ("lint", "-m ruff check"),
    ],
)
def test_make_targets_do_what_the_readme_says(target, runs):
    told = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert runs in told
