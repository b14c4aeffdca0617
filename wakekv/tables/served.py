"""A sweep of the serving engine in numbers: the paper's Table 2 beside what was measured here and what was predicted.

Reads the JSON files that `python -m wakekv system` leaves; needs no engine and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from wakekv.errors import InputError
from wakekv.files import ROOT
from wakekv.logs.demand import Demand

GROWTH = ROOT / "benchmarks" / "results" / "growth.json"  # benchmarks/growth.py
POOLED = ROOT / "benchmarks" / "results" / "vllm-pooled.json"  # benchmarks/pooled.py
RECORDED = ROOT / "benchmarks" / "results" / "system-cpu"  # a sweep that was run once, with its hardware in each file
EVERY = (1, 2, 4, 8, 16)
RANKS = {f"reactive-r{every}": every for every in EVERY} | {"destructive": 1}  # every how many steps each ranks
MEASURED = ("wants", "misses", "miss_rate", "fetched_bytes", "resident_bytes", "stall_s", "score_s", "step_s",
            "step_cpu_s", "decode_tokens_per_s")  # fmt: skip
PARTS = {  # of a decode step: what the plugin times, by its books
    "score_s": "ranking",
    "stall_s": "waiting for pages",
    "attend_s": "attention",
    "place_s": "open and new pages",
}


def find(out: str | Path) -> tuple[Path, str]:
    """The sweep of a run, OUT/system, or else the recorded one; and whose it is, in words."""
    own = Path(out) / "system"
    return (own, "this run's own sweep") if (own / "stock.json").exists() else (RECORDED, "a recorded sweep")


def load(folder: str | Path) -> dict[str, dict[str, Any]]:
    """The sweep's configurations by name, in its order. InputError naming the command if stock is not among them."""
    names = ["stock", "flexicache", *(f"reactive-r{every}" for every in EVERY), "destructive"]
    found = {name: json.loads(path.read_text()) for name in names if (path := Path(folder) / f"{name}.json").exists()}
    found = {name: row for name, row in found.items() if row["repeats"]}
    if "stock" not in found:
        raise InputError(f"{folder} holds no sweep: python -m wakekv system --out {folder} makes one")
    return found


def about(found: Mapping[str, Mapping]) -> str:
    """What was run and on what, in one line for the foot of a picture."""
    row = found["stock"]
    return (
        f"{row['model']}, {row['dtype']}, {row['requests']} requests of {row['length']} + {row['n_tokens']} tokens; "
        f"measured on {row['hardware']['device']}, {row['hardware']['threads']} thread"
    )


def rates(found: Mapping[str, Mapping]) -> pd.DataFrame:
    """A row a configuration: ratios of each repeat to the same repeat of another (median, lo and hi the extremes).

    whole: tokens over elapsed seconds, prefill included; decode: over a step's; decode_cpu: of its CPU seconds, which
    other processes disturb less. vs_flexi, vs_stock: against which. tokens_per_s, decode_tokens_per_s; kl, agreement
    with stock; points (of 100, of the questions that were asked) and full_points, stock's; stall_ms, miss_rate,
    fetched_mb (a step), resident_mb, reached.
    """
    rows = []
    for name, row in found.items():
        line: dict[str, Any] = {"configuration": name, "repeats": len(row["repeats"])}
        for base, short in (("flexicache", "flexi"), ("stock", "stock")):
            if base not in found:
                continue
            pairs = list(zip(row["repeats"], found[base]["repeats"]))
            for what, key, faster in (
                ("whole", "tokens_per_s", 1), ("decode", "step_s", -1), ("decode_cpu", "step_cpu_s", -1)
            ):  # fmt: skip
                ratios = [(mine[key] / theirs[key]) ** faster for mine, theirs in pairs]
                line[f"{what}_vs_{short}"] = float(np.median(ratios))
                line[f"{what}_vs_{short}_lo"], line[f"{what}_vs_{short}_hi"] = min(ratios), max(ratios)
        line |= {"kl": row.get("quality", {}).get("kl_mean"), "agreement": row.get("quality", {}).get("agreement")}
        line |= {"points": row.get("answers", {}).get("mean"), "full_points": row.get("answers", {}).get("full")}
        line["as_full"] = row.get("answers", {}).get("as_full")
        middle = {key: value["median"] for key, value in row["summary"].items()}
        line |= {name: middle[name] for name in ("tokens_per_s", "decode_tokens_per_s", "reached")}
        line |= {"stall_ms": 1e3 * middle.get("stall_s", np.nan), "miss_rate": middle.get("miss_rate")}
        line |= {"fetched_mb": middle.get("fetched_bytes", np.nan) / 1e6}
        line |= {"resident_mb": middle.get("resident_bytes", np.nan) / 1e6}
        rows.append(line)
    return pd.DataFrame(rows)


def as_text(found: Mapping[str, Mapping]) -> str:
    """What the command prints of a sweep."""
    names = ["configuration", "tokens_per_s", "whole_vs_stock", "decode_tokens_per_s", "decode_vs_stock",
             "decode_vs_flexi", "stall_ms", "resident_mb", "kl", "points", "full_points"]  # fmt: skip
    table = rates(found).reindex(columns=names).dropna(axis=1, how="all")
    return table.to_string(index=False, na_rep="", float_format="{:.3f}".format)


def table_2(found: Mapping[str, Mapping], published: Sequence[Mapping], predicted: Mapping | None) -> pd.DataFrame:
    """Table 2 three ways, a row a configuration: as published (on an A30, against FlexiCache), as measured here
    (against flexicache, and decoding alone), and as predicted for decoding here from what one run wanted."""
    ours = rates(found).set_index("configuration")
    said = {f"reactive-r{row['rerank']}": row for row in published[1:]} | {"flexicache": published[0]}
    strict = {key: x["median"] for key, x in found.get("reactive-r1", {}).get("summary", {}).items()}
    misses = (predicted or {}).get("misses", {}) if strict else {}
    steps = foreseen(misses, strict) if misses else {}
    rows = []
    for name in ours.index:
        row = ours.loc[name]
        line = {"configuration": name, "published": said.get(name, {}).get("speedup")}
        line["published LongBench %"] = said.get(name, {}).get("longbench_pct")
        line |= {"whole, measured": row.get("whole_vs_flexi"), "decode, measured": row.get("decode_vs_flexi")}
        line |= {"decode CPU, measured": row.get("decode_cpu_vs_flexi")}
        line["misses a step, measured"] = _median(found[name], "misses")
        line["misses a step, predicted"], step = misses.get(name), steps.get(name)
        base = _median(found["flexicache"], "step_s") if "flexicache" in found else None
        line["decode, predicted"] = base / step if base and step else None
        line |= {"KL from dense": row["kl"], "same next token": row["agreement"]}
        line |= {"points of 100": row["points"], "stock's points": row["full_points"]}
        rows.append(line)
    return pd.DataFrame(rows)


def parts(found: Mapping[str, Mapping]) -> pd.DataFrame:
    """Where a step's time goes: configuration, part, ms (median over repeats); the rest is the model's own."""
    rows = []
    for name, row in found.items():
        spent = {said: 1e3 * (_median(row, key) or 0.0) for key, said in PARTS.items()} if row["settings"] else {}
        spent["the rest of the model"] = max(0.0, 1e3 * _median(row, "step_s") - sum(spent.values()))
        rows += [{"configuration": name, "part": part, "ms": ms} for part, ms in spent.items()]
    return pd.DataFrame(rows)


def grown(found: Mapping[str, Any]) -> pd.DataFrame:
    """What benchmarks/growth.py left: context, requests, configuration, decode_vs_stock (a step of stock over its own,
    within a repeat: median, lo and hi the extremes), the same of CPU seconds (decode_cpu_vs_stock), and the medians of
    its step_s and step_cpu_s."""
    table = pd.DataFrame(found["rows"]).drop(columns="tiers", errors="ignore")
    at = ["context", "requests", "repeat"]
    stock = table[table["configuration"] == "stock"][[*at, "step_s", "step_cpu_s"]]
    both = table[table["configuration"] != "stock"].merge(stock, on=at, suffixes=("", "_stock"))
    both["ratio"] = both["step_s_stock"] / both["step_s"]
    both["decode_cpu_vs_stock"] = both["step_cpu_s_stock"] / both["step_cpu_s"]
    cells = both.groupby(["context", "requests", "configuration"], sort=False)
    middle = cells[["decode_cpu_vs_stock", "step_s", "step_cpu_s"]].median()
    ratios = cells["ratio"].agg(decode_vs_stock="median", lo="min", hi="max")
    return ratios.join(middle).reset_index()


def pooled(found: Mapping[str, Any]) -> pd.DataFrame:
    """What benchmarks/pooled.py left, a row an arm: wants, misses and fetched_mb (a step), miss_rate, stall_ms,
    score_ms, step_ms and step_cpu_ms (medians over repeats), tokens_per_s of decoding, vs_reactive (reactive's CPU time
    of a step at the same R and wants over its own, within a repeat: the median), resident_mb on the fast tier, kl (to
    stock, nats a token), agreement, points of 100."""
    rows = []
    for name, row in found["rows"].items():
        line: dict[str, Any] = {"arm": name, "kl": row["quality"]["kl_mean"], "agreement": row["quality"]["agreement"]}
        line["points"] = row.get("answers", {}).get("mean")
        repeats = row["repeats"]
        if repeats:
            middle = {key: float(np.median([r.get(key, np.nan) for r in repeats])) for key in MEASURED}
            line |= {key: middle[key] for key in ("wants", "misses", "miss_rate")}
            line |= {"fetched_mb": middle["fetched_bytes"] / 1e6, "resident_mb": middle["resident_bytes"] / 1e6}
            for key in ("stall_s", "score_s", "step_s", "step_cpu_s"):
                line[key.removesuffix("_s") + "_ms"] = 1e3 * middle[key]
            line["tokens_per_s"] = middle["decode_tokens_per_s"]
            base = found["rows"].get("reactive" + name[name.find(", R") :], {"repeats": []})["repeats"]
            ratios = [theirs["step_cpu_s"] / mine["step_cpu_s"] for mine, theirs in zip(repeats, base)]
            line["vs_reactive"] = float(np.median(ratios)) if ratios else None
        rows.append(line)
    return pd.DataFrame(rows)


def thinned(demand: Demand, every: int) -> Demand:
    """The demand of a ranking every so many steps, from one that ranked at each: other steps want nothing."""
    counts = np.diff(demand.ptr, axis=1)
    counts[:, np.arange(demand.n_steps) % every != 0] = 0
    ends = np.cumsum(counts).reshape(counts.shape)
    starts = np.concatenate([[0], ends[:-1, -1]])[:, None]
    keep = demand.step_of % every == 0
    fields = {name: getattr(demand, name) for name in demand.__dataclass_fields__}
    ptr = np.concatenate([starts, ends], axis=1)
    return Demand(**fields | {"ptr": ptr, "page": demand.page[keep], "weight": demand.weight[keep]})


def predict(demands: Sequence[Demand], budget: int) -> dict[str, float]:
    """The misses of a step, over layers, KV heads and requests, that the simulator expects of RANKS, from the wants of
    one run at R = 1."""
    from wakekv.policies import POLICIES
    from wakekv.simulation.simulate import curves

    misses = {}
    for name, every in RANKS.items():
        policy = POLICIES["evict" if name == "destructive" else "reactive"]
        found = [curves(thinned(demand, every), policy, [budget]) for demand in demands]
        misses[name] = float(sum(x.misses[0] for x in found)) / demands[0].n_steps
    return misses


def foreseen(misses: Mapping[str, float], strict: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step of each configuration in `misses`, from the medians of the one at R = 1 (step_s, score_s,
    stall_s, misses): ranking in one step of R, waiting in proportion to the misses, all else as it was."""
    rest = strict["step_s"] - strict["score_s"] - strict["stall_s"]
    each = strict["stall_s"] / max(strict["misses"], 1e-9)
    waits = {name: 0.0 if name == "destructive" else each * n for name, n in misses.items()}
    return {name: rest + strict["score_s"] / RANKS[name] + waits[name] for name in misses}


def _median(row: Mapping, name: str) -> float | None:
    return row["summary"].get(name, {}).get("median")
