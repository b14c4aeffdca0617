"""Reversible against its destructive twin on a real cache, as tables: what was counted and what was timed, apart.

The rows come from `results`: each prompt met every arm at the same budgets. Intervals are over prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.errors import InputError
from wakekv.tables import Table

ARMS = ("reversible", "destructive", "destructive, wider", "snapkv, wider")  # as in trials.KINDS
OURS, OTHERS, FAIR = ARMS[0], ARMS[1:], ARMS[2]
SAYS = {"destructive": "destructive, as many pages", FAIR: "destructive, as many bytes",
        ARMS[3]: "SnapKV, as many bytes"}  # fmt: skip
ALL = "all prompts"
COUNTED = {  # what -> (its number in each row, its name, how it is shown)
    "miss_rate": (lambda r: r["misses"] / r["n_wants"], "miss rate", ".3f"),
    "misses_per_step": (lambda r: r["misses"] / r["n_steps"], "misses a step", ",.0f"),
    "fetched_mb_per_step": (lambda r: r["fetched_bytes"] / r["n_steps"] / 1e6, "MB fetched a step", ".2f"),
    "kl_mean": (lambda r: r["kl_mean"], "KL to full", ".4f"),
    "kl_p95": (lambda r: r["kl_p95"], "KL, p95", ".3f"),
    "agreement": (lambda r: r["agreement"], "top-1 agreement", ".3f"),
}
TIMED = {
    "stall_ms_per_step": (lambda r: 1e3 * r["stall_s"] / r["n_steps"], "waiting, ms a step", ".2f"),
    "stall_steps": (lambda r: r["stall_steps"] / r["n_steps"], "steps that wait", ".2f"),
    "gb_per_stalled_s": (
        lambda r: r["fetched_bytes"] / 1e9 / r["stall_s"].where(r["stall_s"] > 0),
        "GB a second",
        ".2f",
    ),
}
PARTS = {  # of a step, in the order in which they happen: the column of `system.measure` and what it is called
    "score_s": "score the pages, choose",
    "stall_s": "move pages (stall)",
    "attend_s": "attend",
    "settle_s": "trim",
    "rest_s": "the rest of the model",
    "whole_s": "a whole step, not split",
}


def at_equal_memory(rows: Sequence[Mapping], resamples: int = stats.RESAMPLES) -> Table:
    """What reversible and destructive miss, move and cost in answers, at each budget.

    numbers: long, a row a regime (and all together), budget, arm and quantity (those of COUNTED), with intervals over
    prompts; `less` is the arm's number less reversible's, prompt by prompt, with its own.  shown: all prompts together.
    """
    numbers = estimated(rows, COUNTED, resamples=resamples)
    won = {(v["budget"], v["against"]): f"{v['won']} of {v['n']}" for v in verdicts(rows, 2).to_dict("records")
           if v["regime"] == ALL}  # fmt: skip
    shown = []
    for (budget, arm), group in numbers[numbers["regime"] == ALL].groupby(["budget", "arm"], sort=False):
        size = _of(rows, ALL, budget).set_index("arm").loc[[arm]].mean(numeric_only=True)
        line = {
            "B": str(budget),
            "cache": SAYS.get(arm, arm),
            "pages": f"{size['pages']:.0f}",
            "MB": f"{size['bytes'] / 1e6:.1f}",
        }
        line |= cells(group, COUNTED)
        shown.append(line | {"KL above reversible's": won.get((budget, arm), "")})
    return Table(numbers, pd.DataFrame(shown))


def stalls(rows: Sequence[Mapping], resamples: int = stats.RESAMPLES) -> Table:
    """What return costs: milliseconds a step in which the model waits for pages, the share of steps that wait, and how
    fast the bytes came. Measured in time: no two runs agree to the digit."""
    numbers = estimated([row for row in rows if row["arm"] == OURS], TIMED, resamples=resamples)
    shown = [
        {"prompts": regime, "B": str(budget)} | cells(group, TIMED)
        for (regime, budget), group in numbers.groupby(["regime", "budget"], sort=False)
    ]
    return Table(numbers, pd.DataFrame(shown))


def verdicts(rows: Sequence[Mapping], resamples: int = stats.RESAMPLES) -> pd.DataFrame:
    """Is reversible's KL below destructive's? A row a regime (and all together), budget and destructive arm.

    reversible, destructive: mean KL;  lower: the first is below the second;  won: in how many of the n prompts it is;
    difference, lo, hi: destructive less reversible, mean over prompts with its interval.
    """
    found = []
    for regime, budget in _groups(rows):
        wide = _of(rows, regime, budget).pivot(index="prompt", columns="arm", values="kl_mean")
        for other in (arm for arm in OTHERS if arm in wide):
            apart = stats.mean((wide[other] - wide[OURS]).to_numpy(), resamples=resamples)
            row = {"regime": regime, "budget": budget, "against": other, "n": len(wide)}
            row |= {"reversible": wide[OURS].mean(), "destructive": wide[other].mean()}
            row |= {"lower": bool(row["reversible"] < row["destructive"]), "won": int((wide[OURS] < wide[other]).sum())}
            found.append(row | {"difference": apart.value, "lo": apart.lo, "hi": apart.hi})
    return pd.DataFrame(found)


def steps(watched: Mapping[str, Mapping]) -> Table:
    """The ten steps of one head: how many pages it had, wanted, missed, fetched and gave up, and the bytes moved."""
    numbers = pd.DataFrame(
        {"cache": arm, "step": one["step"]}
        | {name: len(one[name]) for name in ("resident", "wanted", "missed", "fetched", "demoted")}
        | {name: one[name] for name in ("bytes_in", "bytes_out")}
        for arm, head in watched.items()
        for one in head["steps"]
    )
    shown = numbers.rename(columns={"bytes_in": "bytes, slow to fast", "bytes_out": "bytes, fast to slow"})
    return Table(numbers, shown.map(lambda x: f"{x:,}" if isinstance(x, int | np.integer) else str(x)))


def split(rows: Sequence[Mapping]) -> pd.DataFrame:
    """settings, part (of PARTS), ms: where the time of a mean step goes, from the rows of `system.measure`."""
    found = []
    for row in rows:
        parts = {part: row[part] for part in PARTS if part in row}
        rest = "rest_s" if parts else "whole_s"  # transformers' own: nothing is known of its parts
        parts[rest] = max(0.0, row["mean_step_s"] - sum(parts.values()))
        found += [{"settings": named(row), "part": part, "ms": 1e3 * seconds} for part, seconds in parts.items()]
    return pd.DataFrame(found)


def costs(rows: Sequence[Mapping]) -> Table:
    """What a step takes by context and cache, and what is held on the fast tier; from the rows of `system.measure`."""
    numbers = pd.DataFrame(
        {"context": row["context"], "settings": named(row), "batch": row["batch"]}
        | {"step_ms": 1e3 * row["step_s"], "step_cpu_ms": 1e3 * row["step_cpu_s"], "fast_mb": row["bytes"] / 1e6}
        | {"stall_ms": 1e3 * row.get("stall_s", np.nan), "miss_rate": row.get("miss_rate", np.nan)}
        | {"kl_mean": row.get("kl_mean", np.nan)}
        for row in rows
    )
    cells = numbers.assign(cell=[f"{a:.0f} ms, {b:,.0f} MB" for a, b in numbers[["step_ms", "fast_mb"]].to_numpy()])
    shown = cells.pivot(index="context", columns="settings", values="cell")[list(dict.fromkeys(numbers["settings"]))]
    return Table(numbers, shown.reset_index().rename_axis(columns=None).astype(str))


def needles(rows: Sequence[Mapping]) -> pd.DataFrame:
    """arm, budget (nan: full), length, depth, found (share), n: the answers of `quality.needles`."""
    grouped = pd.DataFrame(rows).groupby(["arm", "budget", "length", "depth"], sort=False, dropna=False)["found"]
    return grouped.agg(found="mean", n="size").reset_index().astype({"budget": float})


def found(rows: Sequence[Mapping]) -> Table:
    """Needles found by each arm and budget, of those asked for, with Wilson's interval over prompts; and how many
    answers are the full cache's to the letter."""
    table, numbers = pd.DataFrame(rows), []
    for (arm, budget), some in table.groupby(["arm", "budget"], sort=False, dropna=False):
        share = stats.proportion(int(some["found"].sum()), len(some), unit="prompts")
        counts = {"n_found": int(some["found"].sum()), "n_as_full": int(some["as_full"].sum())}
        numbers.append({"arm": arm, "budget": budget, **counts, **share.row()})
    numbers = pd.DataFrame(numbers)
    shown = pd.DataFrame(
        {
            "cache": SAYS.get(row["arm"], row["arm"]),
            "B": "–" if pd.isna(row["budget"]) else f"{row['budget']:.0f}",
            "found": f"{row['n_found']} of {row['n']}",
            "share": f"{row['estimate']:.2f} [{row['lo']:.2f}, {row['hi']:.2f}]",
            "same text as full": f"{row['n_as_full']} of {row['n']}",
        }
        for row in numbers.to_dict("records")
    )
    return Table(numbers, shown)


def named(row: Mapping) -> str:
    """A row of `system.measure` in words: "dynamic", "reversible, exact", "reversible, lagged, R = 4"."""
    asked = row.get("asked")
    if not asked:
        return row["settings"]
    policy = asked.get("policy", "reactive")
    words = [{"reactive": OURS, "evict": OTHERS[0]}.get(policy, policy)]
    words += [asked.get("mode", "exact")] if policy != "evict" else []
    return ", ".join(words + ([f"R = {asked['every']}"] if "every" in asked else []))


def estimated(
    rows: Sequence[Mapping], quantities: Mapping, arms: Sequence[str] = ARMS, resamples: int = stats.RESAMPLES
) -> pd.DataFrame:
    """A row a regime (and all together), budget, arm and quantity: its mean over prompts with its interval; less,
    less_lo, less_hi: the same less the first arm's, prompt by prompt. quantities: as COUNTED."""
    found = []
    for regime, budget in _groups(rows):
        each = _of(rows, regime, budget)
        for what, (number, _, _) in quantities.items():
            wide = each.assign(it=number(each)).pivot(index="prompt", columns="arm", values="it")
            for arm in (arm for arm in arms if arm in wide):
                row = {"regime": regime, "budget": budget, "arm": arm, "what": what}
                row |= stats.mean(wide[arm].to_numpy(), resamples=resamples).row()
                apart = stats.mean((wide[arm] - wide[arms[0]]).to_numpy(), resamples=resamples)
                found.append(row | {"less": apart.value, "less_lo": apart.lo, "less_hi": apart.hi})
    return pd.DataFrame(found)


def _groups(rows: Sequence[Mapping]) -> list[tuple[str, int]]:
    if not rows:
        raise InputError("no measurement to show: measure at least one prompt first")
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    budgets = sorted({row["budget"] for row in rows})
    return [(regime, budget) for regime in (*regimes, ALL) for budget in budgets]


def _of(rows: Sequence[Mapping], regime: str, budget: int) -> pd.DataFrame:
    table = pd.DataFrame([row for row in rows if row["budget"] == budget and regime in (ALL, row["regime"])])
    return table.assign(prompt=table["regime"] + " " + table["seed"].astype(str))


def cells(numbers: pd.DataFrame, quantities: Mapping) -> dict[str, str]:
    """Each quantity's name and its estimate with its interval, of the rows of one arm."""
    of = numbers.set_index("what")
    return {label: _cell(of.loc[what], form) for what, (_, label, form) in quantities.items()}


def _cell(row: pd.Series, form: str) -> str:
    if not np.isfinite(row["estimate"]):
        return "–"
    interval = f" [{row['lo']:{form}}, {row['hi']:{form}}]" if row["lo"] < row["hi"] else ""
    return f"{row['estimate']:{form}}{interval}"
