"""What the locks bring in is hashed, named in the bill of materials, and licensed: three files that say the same."""

from __future__ import annotations

import csv
import json
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from supply import BUILDS, LOCKS, hashed, licence, pins

from wakekv.files import ROOT

LOCKED = {(canonicalize_name(pin.name), next(iter(pin.specifier)).version) for lock in LOCKS for pin in pins(lock)}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_pin_has_the_hashes_of_its_files_and_nothing_else_has(lock):
    blocks = re.split(r"\n(?=\S)", hashed(lock).read_text().strip())
    found = {}
    for block in blocks:
        pin, *hashes = block.split(" \\\n")
        assert hashes and all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", text) for text in hashes), pin
        found[Requirement(pin)] = hashes
    assert {str(pin) for pin in found} == {str(pin) for pin in pins(lock)}
    for pin, sha256 in BUILDS.items():
        assert f"    --hash=sha256:{sha256}" in found[Requirement(pin)]


def test_the_bill_of_materials_names_exactly_the_locked_packages():
    sbom = json.loads((ROOT / "artifact" / "sbom.json").read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    named = [(one["name"], one["version"]) for one in sbom["components"]]
    assert len(set(named)) == len(named) and set(named) == LOCKED
    assert all(one["purl"] == "pkg:pypi/{name}@{version}".format(**one) for one in sbom["components"])


def test_every_locked_package_has_a_licence():
    with open(ROOT / "artifact" / "licences.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["package"], row["version"]) for row in rows} == LOCKED
    assert all(row["licence"].strip() and set(row["locks"].split()) <= set(LOCKS) for row in rows)


@pytest.mark.parametrize(
    "metadata, words",
    [
        ({"license_expression": "MIT", "license": "other"}, "MIT"),
        ({"classifier": ["License :: OSI Approved", "License :: OSI Approved :: BSD License"]}, "BSD License"),
        ({"license": "Apache 2.0\nAll of it"}, "Apache 2.0"),
        ({"license_file": ["LICENSE", "NOTICE"]}, "in its LICENSE and NOTICE"),
        ({"license_file": "LICENSE"}, "in its LICENSE"),
        ({}, "in its sources"),
    ],
)
def test_a_licence_is_what_the_package_says(metadata, words):
    assert licence(metadata) == words
