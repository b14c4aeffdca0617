"""What wakekv reads may hold any bytes: a few hundred of the inputs of `make fuzz`, and what it has found."""

from __future__ import annotations

import json

import fuzz
import numpy as np
import pytest

from wakekv.files import ROOT


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    fuzz.build(folder)
    return folder


def place(name: str, content: bytes) -> bytes:
    return bytes([fuzz.FILES.index(name)]) + content


def test_every_file_is_valid_before_it_is_changed(root):
    assert all(fuzz.run(root, data) for data in fuzz.seeds(root))


def test_changed_files_end_in_an_error_of_ours_or_are_read(root):
    before = fuzz.seeds(root)
    assert fuzz.blindly(root, 300, seed=1) < 300
    assert fuzz.seeds(root) == before


def test_another_error_is_not_taken_for_one_of_ours(root, monkeypatch):
    monkeypatch.setitem(fuzz.READERS, "run/run.json", lambda root: json.loads((root / "run/run.json").read_text()))
    with pytest.raises(json.JSONDecodeError):
        fuzz.run(root, place("run/run.json", b"{"))


BOMB = "- &a [x, x]\n" + "".join(f"- &{b} [*{a}, *{a}, *{a}, *{a}]\n" for a, b in zip("abcdefghijkl", "bcdefghijklm"))


HEAD = b"{'descr': '<i4', 'fortran_order': False, 'shape': ((((".ljust(117) + b"\n"
UNCLOSED = b"\x93NUMPY\x01\x00" + len(HEAD).to_bytes(2, "little") + HEAD


@pytest.mark.parametrize(
    "name, content",
    [
        ("log/tokens.npy", UNCLOSED),  # numpy fails with a TokenError
        ("artifact/claims.yaml", BOMB.encode()),  # printing the row takes forever
        ("artifact/claims.yaml", b"- \xed"),
        ("artifact/claims.yaml", b"[" * 5000),
        ("artifact/claims.yaml", (ROOT / "artifact/claims.yaml").read_bytes().replace(b"id: none-both", b"id: [[]]")),
        ("tolerances.yaml", b"\xff"),
        ("run/run.json", b'{"profile": "smoke", "stages": [1], "volatile": {}}'),
        ("run/tables/x.csv", b"name,value\na,1,2\na,b,3\n"),  # more cells than names
        ("run/claims/00.json", b"[" * 100_000),
        ("logs/manifest.json", b"[" * 100_000),
    ],
)
def test_what_was_found_stays_mended(root, name, content):
    assert not fuzz.run(root, place(name, content))


@pytest.mark.parametrize("change", [lambda x: x + 1000, lambda x: x[..., ::-1]], ids=["beyond the context", "falling"])
def test_positions_that_no_recorder_writes_are_refused(root, change, tmp_path):
    positions = np.load(root / "log" / "positions.npy")
    np.save(tmp_path / "x.npy", change(positions))
    assert not fuzz.run(root, place("log/positions.npy", (tmp_path / "x.npy").read_bytes()))
