"""What the repository shows is what was shipped: every flipped, lost or foreign byte is named."""

from __future__ import annotations

import json
import shutil

import pytest

from wakekv.errors import InputError
from wakekv.files import ROOT
from wakekv.reproduction import artifact
from wakekv.reproduction.artifact import MANIFEST, ArtifactError, check, write_manifest


@pytest.fixture
def root(tmp_path):
    """A small checkout."""
    files = {"artifact/claims.yaml": "- a", "artifact/logs/x.npz": "log", "figures/1.png": "picture"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write_manifest(tmp_path)
    return tmp_path


def test_the_checkout_is_as_its_manifest_says():
    assert check() == len(artifact.shipped()) > 100


@pytest.mark.parametrize("name", ["artifact/claims.yaml", "artifact/logs/x.npz", "figures/1.png"])
def test_a_flipped_byte_is_named(root, name):
    content = bytearray((root / name).read_bytes())
    content[1] ^= 1
    (root / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=f"{name} does not match its sha256"):
        check(root)


@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_flipped_byte_in_any_real_file_is_named(tmp_path, place):
    real = artifact.shipped()
    name = list(real)[int(place * (len(real) - 1))]
    (tmp_path / name).parent.mkdir(parents=True)
    shutil.copy(ROOT / name, tmp_path / name)
    listed = json.loads((ROOT / MANIFEST).read_text())["files"]
    (tmp_path / "artifact").mkdir(exist_ok=True)
    (tmp_path / MANIFEST).write_text(json.dumps({"files": {name: listed[name]}}))
    assert check(tmp_path) == 1
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 0x80
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=name):
        check(tmp_path)


def test_missing_cut_and_foreign_files_are_named(root):
    (root / "figures" / "2.png").write_text("foreign")
    with pytest.raises(ArtifactError, match=r"figures/2\.png is not in"):
        check(root)
    (root / "figures" / "2.png").unlink()
    (root / "figures" / "1.png").write_text("pict")
    with pytest.raises(ArtifactError, match=r"figures/1\.png has 4 bytes instead of 7"):
        check(root)
    (root / "figures" / "1.png").unlink()
    with pytest.raises(ArtifactError, match=r"figures/1\.png is missing"):
        check(root)


def test_a_manifest_that_is_missing_or_damaged_is_named(root):
    (root / MANIFEST).write_text("{")
    with pytest.raises(ArtifactError, match="damaged"):
        check(root)
    (root / MANIFEST).unlink()
    with pytest.raises(InputError, match="is missing"):
        check(root)


def test_the_manifest_is_the_same_bytes_twice(root):
    first = (root / MANIFEST).read_bytes()
    assert write_manifest(root).read_bytes() == first
