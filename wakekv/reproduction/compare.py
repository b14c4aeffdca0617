"""What differs between two runs, in numbers: tables and figures cell by cell, verdicts, and what they ran on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from wakekv.errors import InputError
from wakekv.files import ROOT

TOLERANCES = ROOT / "artifact" / "tolerances.yaml"
PARTS = ("tables", "figures", "claims")


@dataclass(frozen=True)
class Rule:
    """How far cells of some columns may be apart: |a - b| <= abs + rel * min(|a|, |b|).

    judged: False for cells whose difference is shown and never counted.
    """

    file: str
    columns: tuple[str, ...]
    why: str
    abs: float = 0.0
    rel: float = 0.0
    judged: bool = True

    def __post_init__(self):
        if not all(isinstance(text, str) for text in (self.file, *self.columns)):
            raise TypeError(f"file and columns are names, or patterns of them, not {self.file!r} and {self.columns!r}")
        if not isinstance(self.judged, bool):
            raise TypeError(f"judged is true or false, not {self.judged!r}")
        if not (self.abs >= 0 and self.rel >= 0):
            raise TypeError(f"abs and rel are numbers from 0 up, not {self.abs!r} and {self.rel!r}")

    def fits(self, file: str, column: str) -> bool:
        return fnmatchcase(file, self.file) and any(fnmatchcase(column, pattern) for pattern in self.columns)


@dataclass(frozen=True)
class Run:
    """A run's results: files by name (tables/x.csv, figures/x.csv, claims/x.json), and its record."""

    path: str
    files: dict[str, Path]
    record: dict[str, Any]


def open_run(path: Path | str) -> Run:
    """The run in folder `path`; `reference`, or the folder artifact, is what the repository shows.

    Raises InputError where there are no results.
    """
    path = ROOT / "artifact" if str(path) == "reference" else Path(path)
    folders = {part: path / part for part in PARTS}
    if path.resolve() == (ROOT / "artifact").resolve():
        folders["figures"] = ROOT / "figures"
    files = {
        f"{part}/{file.name}": file
        for part, folder in folders.items()
        for file in sorted(folder.glob("*.json" if part == "claims" else "*.csv"))
    }
    if not files:
        raise InputError(f"{path} holds no results: give a run such as runs/default, or reference")
    record = path / "run.json"
    return Run(str(path), files, _read(record) if record.exists() else {})


def compare(
    a: Run, b: Run, tolerances: Sequence[Rule] | None = None, only: Sequence[str] = PARTS, both: bool = False
) -> dict[str, Any]:
    """What differs. `beyond` counts what is beyond tolerance: cells, rows, files, verdicts; 0 means the runs agree.

    both: leave out files that only one of the runs has.
    """
    rules = load_rules() if tolerances is None else tolerances
    mine, theirs = ({name for name in run.files if name.split("/")[0] in only} for run in (a, b))
    alone = [] if both else [{"file": name, "in": (a if name in mine else b).path} for name in sorted(mine ^ theirs)]
    tables, verdicts = [], []
    for name in sorted(mine & theirs):
        if name.startswith("claims/"):
            verdicts += _verdicts(a.files[name], b.files[name])
        else:
            tables.append({"file": name, **_table(name, a.files[name], b.files[name], rules)})
    try:
        record = _records(a.record, b.record)
    except (AttributeError, TypeError) as error:
        raise InputError(f"run.json of {a.path} or {b.path} is damaged ({error}): run it again, or remove it") from None
    beyond = len(alone) + sum(table["beyond"] for table in tables) + sum(v["verdict_changed"] for v in verdicts)
    return {
        "a": a.path,
        "b": b.path,
        "beyond": beyond,
        "only_in_one": alone,
        "tables": tables,
        "verdicts": verdicts,
        "record": record,
    }


def load_rules(path: Path | str = TOLERANCES) -> list[Rule]:
    """The rules of a YAML file, in order. InputError, naming the entry, where one is not as it should be."""
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if not isinstance(entries, list) or any(not isinstance(entry["columns"], list) for entry in entries):
            raise TypeError("it is a list of rules, and columns a list of each")
        rules = [Rule(**{**entry, "columns": tuple(entry["columns"])}) for entry in entries]
        if not (rules and rules[-1].fits("", "")):
            raise ValueError("its last rule must fit every column of every file: file '*', columns ['*']")
        return rules
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, RecursionError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"tolerances {path} cannot be read ({said}): write them as in {TOLERANCES.name}") from None


def exact(rules: Sequence[Rule]) -> list[Rule]:
    """The same rules without any tolerance: what is judged must be equal."""
    return [Rule(rule.file, rule.columns, rule.why, judged=rule.judged) for rule in rules]


def _read(path: Path) -> dict[str, Any]:
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}): run it again, or remove it") from None


def _table(name: str, a: Path, b: Path, rules: Sequence[Rule]) -> dict[str, Any]:
    """cells; differing numbers, not_judged of them, and max_abs, max_rel of the others; texts that differ; beyond;
    columns: the same for each."""
    same = dict.fromkeys(("cells", "differing", "not_judged", "texts", "max_abs", "max_rel", "beyond"), 0)
    same |= {"columns": {}}
    if a.read_bytes() == b.read_bytes():
        return same
    try:
        left, right = map(_cells, (a, b))
    except ValueError as error:
        raise InputError(f"{name} of {a} or {b} is no CSV ({' '.join(str(error).split())}): run it again") from None
    left, right, unmatched = _aligned(left, right)
    found = same | {"rows_in_one": unmatched, "beyond": unmatched}
    for column in [c for c in left if c not in right] + [c for c in right if c not in left]:
        found["beyond"] += 1
        found["columns"] = found["columns"] | {column: {"only_in": "a" if column in left else "b"}}
    for column in [c for c in left if c in right]:
        rule = next(rule for rule in rules if rule.fits(name, column))
        cells = _column(left[column], right[column], rule)
        found["cells"] += len(left)
        if not cells["differing"] and not cells["texts"]:
            continue
        for count in "differing", "texts":
            found[count] += cells[count]
        found["beyond"] += cells["beyond"]
        found["not_judged"] += 0 if rule.judged else cells["differing"]
        for most in ("max_abs", "max_rel") if rule.judged else ():
            found[most] = max(found[most], cells[most])
        found["columns"] = found["columns"] | {column: cells | ({} if rule.judged else {"not judged": rule.why})}
    return found


def _cells(path: Path) -> pd.DataFrame:
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    if not isinstance(table.index, pd.RangeIndex):  # pandas takes what is too much for names of the rows
        raise ValueError("rows have more cells than the first line has names")
    return table


def _column(left: pd.Series, right: pd.Series, rule: Rule) -> dict[str, Any]:
    x, y = (pd.to_numeric(cells, errors="coerce").to_numpy(float) for cells in (left, right))
    number = ~np.isnan(x) & ~np.isnan(y)
    text = ~number & (left.to_numpy(str) != right.to_numpy(str))
    with np.errstate(invalid="ignore", divide="ignore"):
        gap = np.where(number & (x != y), np.abs(x - y), 0.0)  # inf where one is infinite
        share = np.where(gap > 0, gap / np.maximum(np.abs(x), np.abs(y)), 0.0)
        far = np.isinf(gap) | (gap > rule.abs + rule.rel * np.minimum(np.abs(x), np.abs(y)))
    return {
        "differing": int((gap > 0).sum()),
        "texts": int(text.sum()),
        "max_abs": float(gap.max(initial=0)),
        "max_rel": float(np.nan_to_num(share, nan=1.0).max(initial=0)),
        "beyond": int(far.sum() + text.sum()) if rule.judged else 0,
    }


def _aligned(left: pd.DataFrame, right: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    """Rows that belong together, in order, and how many have no partner. Rows are told apart by their texts; where
    there are as many rows on both sides and the texts do not pair them, by their place."""
    texts = [
        c for c in left if c in right and all(pd.to_numeric(t[c], errors="coerce").isna().all() for t in (left, right))
    ]
    keyed = []
    for table in left, right:
        key = table[texts].agg("\x1f".join, axis=1) if texts and len(table) else pd.Series("", index=table.index)
        keyed.append(key + "\x1f" + key.groupby(key).cumcount().astype(str) if len(table) else key)
    common = keyed[0][keyed[0].isin(set(keyed[1]))]
    if len(common) < len(left) == len(right):
        return left, right, 0
    place = {key: i for i, key in enumerate(keyed[1])}
    paired = right.iloc[[place[key] for key in common]]
    unmatched = len(left) + len(right) - 2 * len(common)
    return left.loc[common.index].reset_index(drop=True), paired.reset_index(drop=True), unmatched


def _verdicts(a: Path, b: Path) -> list[dict[str, Any]]:
    """Claims whose verdict, value or interval differs."""
    try:
        left, right = ({verdict["id"]: {**verdict} for verdict in _read(path)["verdicts"]} for path in (a, b))
        if any(not isinstance(name, str) for name in left.keys() | right.keys()):
            raise TypeError("the id of a verdict is a text")
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{a} or {b} is no claims file ({error!r}): run its notebook again") from None
    rows = []
    for name in sorted(left.keys() | right.keys()):
        mine, theirs = left.get(name, {}), right.get(name, {})
        fields = [f for f in ("verdict", "value", "lo", "hi", "n", "hardware") if mine.get(f) != theirs.get(f)]
        if fields:
            row = {"id": name, "verdict_changed": "verdict" in fields}
            rows.append(row | {field: [mine.get(field), theirs.get(field)] for field in fields})
    return rows


def _records(a: Mapping, b: Mapping) -> dict[str, Any]:
    """Of the two run records: profile, and of each notebook what it depended on that differs, time and memory."""
    found: dict[str, Any] = {"profile": [a.get("profile"), b.get("profile")], "notebooks": {}}
    left, right = a.get("stages", {}), b.get("stages", {})
    for name in sorted(left.keys() | right.keys()):
        mine, theirs = left.get(name), right.get(name)
        if mine is None or theirs is None:
            found["notebooks"][name] = {"only_in": "a" if theirs is None else "b"}
            continue
        row: dict[str, Any] = {}
        for part in "inputs", "parameters", "versions", "seeds":
            one, other = mine.get(part, {}), theirs.get(part, {})
            changed = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
            if changed and part == "inputs":
                row[part] = changed
            elif changed:
                row[part] = {key: [one.get(key), other.get(key)] for key in changed}
        spent = [record.get("volatile", {}).get(name, {}) for record in (a, b)]
        row["volatile"] = {
            field: [side.get(field) for side in spent] for field in ("seconds_s", "peak_bytes", "hardware")
        }
        found["notebooks"][name] = row
    return found


def as_text(found: Mapping[str, Any]) -> str:
    """The comparison for a terminal: what differs, a line each; then the sum."""
    lines = [
        f"{side}: {found[side]}" + (f", profile {p}" if p else "") for side, p in zip("ab", found["record"]["profile"])
    ]
    lines += [f"{entry['file']}: only in {entry['in']}" for entry in found["only_in_one"]]
    for table in found["tables"]:
        changed = table["differing"] + table["texts"] + table.get("rows_in_one", 0)
        if not changed and not table["beyond"]:
            continue
        judged = table["differing"] - table["not_judged"]
        said = f"{table['differing']} of {table['cells']} numbers differ"
        said += f", {table['not_judged']} of them not judged" if table["not_judged"] else ""
        said += f", by {table['max_abs']:.3g} at most ({table['max_rel']:.2g} of the value)" if judged else ""
        said += f", {table['texts']} texts" if table["texts"] else ""
        said += f", {table['rows_in_one']} rows only in one" if table.get("rows_in_one") else ""
        lines.append(f"{table['file']}: {said}; beyond tolerance: {table['beyond']}")
        for column, cells in table["columns"].items():
            if cells.get("beyond") or "only_in" in cells:
                lines.append(f"  {column}: " + ", ".join(f"{key} {value}" for key, value in cells.items()))
    for verdict in found["verdicts"]:
        fields = {key: value for key, value in verdict.items() if isinstance(value, list)}
        lines.append(f"claim {verdict['id']}: " + "; ".join(f"{k} {was} -> {now}" for k, (was, now) in fields.items()))
    for name, row in found["record"]["notebooks"].items():
        parts = [f"{part} {row[part]}" for part in ("only_in", "parameters", "versions", "seeds") if part in row]
        if inputs := row.get("inputs"):
            parts += [
                f"inputs differ: {', '.join(inputs[:3])}" + (f" and {len(inputs) - 3} more" if inputs[3:] else "")
            ]
        lines += [f"{name}: {'; '.join(parts)}"] if parts else []
    equal = sum(not (t["differing"] or t["texts"] or t["beyond"]) for t in found["tables"])
    tables = f"{equal} of {len(found['tables'])} tables are equal; " if found["tables"] else ""
    changed = sum(verdict["verdict_changed"] for verdict in found["verdicts"])
    return "\n".join([*lines, f"{tables}{changed} verdicts differ; beyond tolerance: {found['beyond']}"])
