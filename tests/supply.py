"""What the locks bring in: the hashes of every file that may be installed, their licences, and a bill of materials.

    python tests/supply.py [--hashes]

requirements*.hashes  every pin of a lock with the sha256 of each of its files on the index (by uv), for
                      `pip install --require-hashes`; a build of torch for CPUs, which is not there, beside them
artifact/sbom.json    CycloneDX 1.6, a component a pin, for scanners of vulnerabilities
artifact/licences.csv   a row a package

Licences are as the installed packages declare them, in both environments; those of packages for other systems or
Pythons are asked of the index, as for Windows and Python 3.12. Versions of a package share a line's licence.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import wakekv
from wakekv.files import ROOT, write, write_json

# Each lock, the environment made of it, and for which Pythons and systems its hashes are.
LOCKS = {
    "requirements.lock": (".venv", "--universal", "--python-version=3.10"),
    "requirements-vllm.lock": (".venv-vllm", "--python-version=3.11", "--python-platform=x86_64-manylinux_2_28"),
}
# torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl: answers to torch==2.13.0 where it is offered, not on the index
BUILDS = {"torch==2.13.0": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"}
ELSEWHERE = (
    "--platform=win_amd64",
    "--platform=manylinux_2_28_x86_64",
    "--python-version=3.12",
    "--only-binary=:all:",
    "--ignore-requires-python",
    "--target=nowhere",
)


def pins(lock: str) -> list[Requirement]:
    """Every line of a lock."""
    lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def hashed(lock: str) -> Path:
    """requirements*.hashes, beside the lock."""
    return (ROOT / lock).with_suffix(".hashes")


def write_hashes(lock: str) -> Path:
    """The lock with the sha256 of every file on the index, and of BUILDS."""
    flags = ("--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet", *LOCKS[lock][1:])
    made = subprocess.run(["uv", "pip", "compile", *flags, lock], cwd=ROOT, check=True, capture_output=True, text=True)
    text = made.stdout
    for pin, sha256 in BUILDS.items():
        text = text.replace(f"\n{pin} \\\n", f"\n{pin} \\\n    --hash=sha256:{sha256} \\\n")
    return write(hashed(lock), text)


def installed(environment: str) -> dict[str, dict]:
    """Metadata of what an environment has, by name; empty where it has not been made."""
    folders = [str(path) for path in (ROOT / environment).glob("lib/python*/site-packages")]
    return {canonicalize_name(one.name): one.metadata.json for one in distributions(path=folders)}


def elsewhere(wanted: list[str]) -> dict[str, dict]:
    """Metadata of pins that are for other systems or Pythons, as the index has it, by name."""
    if not wanted:
        return {}
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    argv = [*pip, "--report=-", *ELSEWHERE, *wanted]
    told = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in told["install"]}


def licence(metadata: dict) -> str:
    """As a package declares it: an SPDX expression, classifiers, its own first words, or else where it says so."""
    named = [text.split(" :: ")[-1] for text in metadata.get("classifier", []) if text.startswith("License :: ")]
    named = [text for text in named if text != "OSI Approved"]
    own = (metadata.get("license") or "").strip()
    files = metadata.get("license_file") or ["sources"]
    told = f"in its {' and '.join([files] if isinstance(files, str) else files)}"
    return metadata.get("license_expression") or " AND ".join(named) or (own.splitlines() or [told])[0]


def components() -> list[dict]:
    """A CycloneDX component for every package and version in a lock, in order of their names."""
    found: dict[tuple[str, str], dict] = {}
    locked = {lock: pins(lock) for lock in LOCKS}
    known = {name: metadata for environment, *_ in LOCKS.values() for name, metadata in installed(environment).items()}
    every = {canonicalize_name(pin.name): f"{pin.name}{pin.specifier}" for some in locked.values() for pin in some}
    known |= elsewhere([text for name, text in every.items() if name not in known])
    for lock, some in locked.items():
        for pin in some:
            name, version = canonicalize_name(pin.name), next(iter(pin.specifier)).version
            one = found.setdefault((name, version), {
                "type": "library", "bom-ref": f"{name}@{version}", "name": name, "version": version,
                "purl": f"pkg:pypi/{name}@{version}", "licenses": [{"license": {"name": licence(known[name])}}],
                "properties": [],
            })  # fmt: skip
            one["properties"].append({"name": "wakekv:lock", "value": lock})
    return [found[key] for key in sorted(found)]


def main() -> None:
    if "--hashes" in sys.argv:
        for lock in LOCKS:
            write_hashes(lock)
    made = components()
    own = {"type": "application", "name": "wakekv", "version": wakekv.__version__}
    sbom = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": own}}
    write_json(ROOT / "artifact" / "sbom.json", {**sbom, "components": made})
    rows = io.StringIO()
    table = csv.writer(rows, lineterminator="\n")
    table.writerow(["package", "version", "licence", "locks"])
    for one in made:
        locks = " ".join(entry["value"] for entry in one["properties"])
        table.writerow([one["name"], one["version"], one["licenses"][0]["license"]["name"], locks])
    write(ROOT / "artifact" / "licences.csv", rows.getvalue())
    print(f"{len(made)} packages, {len({one['licenses'][0]['license']['name'] for one in made})} wordings of licences")


if __name__ == "__main__":
    main()
