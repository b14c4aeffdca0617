"""Claims: every sentence of the paper that a run can decide, and what this run made of it.

`artifact/claims.yaml` says beforehand what would count; a notebook calls `decide` on each of its claims, then
`write_claims` once; `table` joins the two. A surrogate model, or another machine where the claim names one, can show a
direction. It never reproduces the paper's number.
"""

from __future__ import annotations

import json
import math
import operator
import os
import platform
import re
import reprlib
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from wakekv.errors import InputError, lookup
from wakekv.files import ROOT, write_json

COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class Claim:
    """One sentence and what would decide it. Written in `artifact/claims.yaml`, never changed by a run."""

    id: str
    sentence: str  # the paper's, shortened
    place: str  # where in the paper
    notebook: str  # which of ours decides it
    quantity: str  # what our value is
    published: float | str | list  # a number, a fraction "17/17", or a range [lo, hi]
    source: str  # where in published.json that stands
    rule: str  # how our value must lie to the published one: a key of RULES
    tolerance: float
    why: str  # why this rule and tolerance
    direction: str  # what must be true on any model: "< 1", ">= 0.5"
    models: tuple[str, ...]  # on which models the number can be reproduced
    kind: str  # simulated | measured
    expected: str  # holds: a failure is an error | open: reported either way
    hardware: str = ""  # a part of the name of the machine that can reproduce it; empty: any

    @property
    def section(self) -> str:
        """The section of the paper, "§5.1"."""
        return re.match(r"§[\d.]+", self.place)[0]

    @property
    def command(self) -> str:
        """What runs it on the paper's own models, where there is the hardware."""
        if self.hardware:
            return f"python -m wakekv system --profile {self.hardware.lower()} --prompts FILE --longbench FILE ..."
        if not (ROOT / "notebooks" / f"{self.notebook}.ipynb").exists():
            return f"none yet: notebook {self.notebook} is to come"
        return f"python -m wakekv reproduce --profile full --out runs/full --only {self.notebook.split('_')[0]}"

    def __post_init__(self):
        if not isinstance(self.id, str):
            raise InputError(f"the id of a claim is a text, not {self.id!r}")
        if not re.match(r"§[\d.]+", self.place):
            raise InputError(f"claim {self.id}: place {self.place!r} does not begin with a section such as §5.1")
        lookup(self.rule, RULES, f"rule of claim {self.id}")
        for value, known in (self.kind, ("simulated", "measured")), (self.expected, ("holds", "open")):
            if value not in known:
                raise InputError(f"claim {self.id}: {value!r} is none of {', '.join(known)}")
        if not self.tolerance >= 0:
            raise InputError(f"claim {self.id}: tolerance {self.tolerance} is below 0")
        _holds(self.direction, 0.0)


@dataclass(frozen=True)
class Verdict:
    """What one run found on one claim. `value` as the notebook gave it, `number` the same as a float."""

    id: str
    verdict: str
    value: float | str | None = None
    number: float | None = None
    lo: float | None = None
    hi: float | None = None
    n: int | None = None
    unit: str = "prompts"
    model: str = ""
    hardware: str = ""
    note: str = ""


def load_claims(path: Path | str | None = None) -> dict[str, Claim]:
    """The declared claims by id. Raises InputError on a file that is missing or a claim that is malformed."""
    path = Path(path or ROOT / "artifact" / "claims.yaml")
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing: claims are read from a checkout of the repository") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    claims: dict[str, Claim] = {}
    for row in rows if isinstance(rows, list) else [rows]:
        try:
            claim = Claim(**{**row, "models": tuple(row["models"])})
            number(claim.published)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise InputError(f"{path}: malformed claim {reprlib.repr(row)}: {error}") from None
        if claim.id in claims:
            raise InputError(f"{path}: claim {claim.id} is declared twice")
        claims[claim.id] = claim
    return claims


def published(pointer: str = "", path: Path | str | None = None) -> Any:
    """What the paper printed, from `artifact/published.json`; `pointer` walks in: "table4_churn.0.regime".
    InputError for a file that cannot be read, and a pointer to nothing."""
    path = Path(path or ROOT / "artifact" / "published.json")
    try:
        here = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}): fetch the repository's again") from None
    for step in filter(None, pointer.split(".")):
        try:
            here = here[int(step)] if isinstance(here, list) else here[step]
        except (LookupError, ValueError, TypeError):
            raise InputError(f"published.json has no {pointer!r}: nothing at {step!r}") from None
    return here


def number(value: float | str | list) -> tuple[float, float]:
    """(lo, hi) of a number (both equal), a fraction such as "17/17" or a range [lo, hi]. Raises InputError."""
    try:
        if isinstance(value, list):
            lo, hi = map(float, value)
        elif isinstance(value, str):
            above, below = map(float, value.split("/"))
            lo = hi = above / below
        else:
            lo = hi = float(value)
    except (TypeError, ValueError, ZeroDivisionError):
        raise InputError(f"{value!r} is no number, fraction like '17/17', or range [lo, hi]") from None
    if not (math.isfinite(lo) and math.isfinite(hi) and lo <= hi):
        raise InputError(f"{value!r} is not finite, or a range that falls")
    return lo, hi


def decide(
    claim_id: str,
    value: float | str | None = None,
    *,
    lo: float | None = None,
    hi: float | None = None,
    n: int | None = None,
    unit: str = "prompts",
    model: str = "",
    note: str = "",
    claims: dict[str, Claim] | None = None,
    machine: str | None = None,
) -> Verdict:
    """The verdict on a claim from our value (a number, or a fraction of wins such as "41/44") and its interval.

    model: whose value it is; of several, all of them: "qwen2.5-3b, mistral-7b".
    reproduced: the paper's model (and machine, where the claim names one), the rule and the direction.
    direction holds: the direction alone, at the end of the interval that speaks against it.
    not run here: no value, and `note` says why.
    Raises InputError on an unknown claim, a value that is no number, or a missing value without a reason.
    """
    claim = lookup(claim_id, claims if claims is not None else load_claims(), "claim")
    machine = hardware() if machine is None else machine
    if value is None:
        if not note:
            raise InputError(f"claim {claim_id} has no value: say in `note` why it was not run")
        return Verdict(claim_id, "not run here", note=note, model=model, hardware=machine)
    ours = number(value)[0]
    ends = [ours, *(number(end)[0] for end in (lo, hi) if end is not None)]
    directed = all(_holds(claim.direction, end) for end in ends)
    same = set(model.split(", ")) <= set(claim.models) and claim.hardware.lower() in machine.lower()
    exact = RULES[claim.rule](ours, *number(claim.published), claim.tolerance)
    verdict = "reproduced" if same and exact and directed else "direction holds" if directed else "not reproduced"
    return Verdict(claim_id, verdict, value, ours, lo, hi, n, unit, model, machine, note)


def write_claims(
    out: Path | str, notebook: str, verdicts: Iterable[Verdict], claims: dict[str, Claim] | None = None
) -> Path:
    """OUT/claims/<notebook>.json, whole or not at all. InputError unless each claim of the notebook is decided once."""
    verdicts = list(verdicts)
    declared = [c.id for c in (claims if claims is not None else load_claims()).values() if c.notebook == notebook]
    given = [v.id for v in verdicts]
    if sorted(given) != sorted(declared):
        missing, extra = set(declared) - set(given), [i for i in given if i not in declared or given.count(i) > 1]
        raise InputError(f"claims of {notebook}: undecided {sorted(missing)}, foreign or repeated {sorted(set(extra))}")
    path = Path(out) / "claims" / f"{notebook}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"notebook": notebook, "verdicts": [asdict(v) for v in verdicts]})
    return path


def table(out: Path | str, claims: dict[str, Claim] | None = None) -> list[dict]:
    """One row a claim, declared and found: the fields of Claim, then those of Verdict, and section, needs (hardware),
    command, and failed (declared to hold, and not reproduced)."""
    claims = claims if claims is not None else load_claims()
    found: dict[str, Verdict] = {}
    for path in sorted((Path(out) / "claims").glob("*.json")):
        try:
            found |= {row["id"]: Verdict(**row) for row in json.loads(path.read_text(encoding="utf-8"))["verdicts"]}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(f"{path} is not a claims file ({error}): run its notebook again") from None
    rows = []
    for claim in claims.values():
        absent = Verdict(claim.id, "not run here", note=f"{claim.notebook} not run")
        verdict = found.get(claim.id, absent)
        failed = claim.expected == "holds" and verdict.verdict == "not reproduced"
        own = {"section": claim.section, "needs": claim.hardware, "command": claim.command, "failed": failed}
        rows.append({**asdict(claim), **asdict(verdict), **own})
    return rows


def hardware() -> str:
    """This machine in words, for provenance: CPU, cores that may be used, GPUs."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [f"{names[0] if names else platform.processor() or platform.machine()}, {cores} cores"]
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        gpus = subprocess.run(asked, capture_output=True, text=True, timeout=60)
        parts += gpus.stdout.strip().splitlines() if gpus.returncode == 0 else []
    return " + ".join(parts)


def _holds(direction: str, value: float) -> bool:
    match = re.fullmatch(r"(<=?|>=?) *(-?[\d.]+)", direction)
    if not match:
        raise InputError(f"direction {direction!r}: expected a comparison such as '< 1' or '>= 0.5'")
    return COMPARE[match[1]](value, float(match[2]))


def _within(ours: float, lo: float, hi: float, tolerance: float) -> bool:
    return lo - tolerance <= ours <= hi + tolerance


def _le(ours: float, lo: float, hi: float, tolerance: float) -> bool:
    return ours <= hi + tolerance


def _ge(ours: float, lo: float, hi: float, tolerance: float) -> bool:
    return ours >= lo - tolerance


RULES = {"within": _within, "le": _le, "ge": _ge}
