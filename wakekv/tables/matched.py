"""The tables of matched comparisons, ours beside the paper's: Tables 1 and 3, the survey, and what moves the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.errors import InputError
from wakekv.logs.demand import demand
from wakekv.logs.trace import Trace
from wakekv.policies import POLICIES
from wakekv.simulation.match import Tally
from wakekv.simulation.simulate import curves
from wakekv.simulation.study import Study
from wakekv.tables import VARIANTS, Table, rates
from wakekv.tables import published as published_rates
from wakekv.tables.contests import (
    CITED,
    EVERY_8,
    MATCHED,
    NAMES,
    OURS,
    SEVEN,
    against,
    contest,
    method_of,
    published,
    short,
    survey,
    together,
)

COMPARED = {"frozen": ("frozen",), "evict": ("evict",), "snapkv, rkv, reasonalloc": CITED}  # Table 1's rows


def headline(chosen: Sequence[Study], budgets: Sequence[int], data: Mapping, resamples: int = stats.RESAMPLES) -> Table:
    """Table 1: how often reactive's miss rate is at most the other's, in the paper, in the paper's own tables under our
    matching, and in ours: all together, then each model and regime with its test over prompts.

    data: the content of artifact/published.json.
    """
    rows = []
    for (name, others), paper in zip(COMPARED.items(), data["table1_headline"], strict=True):
        first = {"against": name, "whose": "the paper, as printed"}
        rows.append(first | {"at_most": paper["wins"], "matched": paper["of"], "excluded": paper.get("dropped_points")})
        method = MATCHED[others[0]][-1]  # four budgets are too few for steps
        rows.append(_counted(published(data, others, method), name, "the paper's tables, matched by us", method))
        for method in MATCHED[others[0]]:
            each = {(s.name, o): against(s, o, method, budgets, resamples) for s in chosen for o in others}
            fair = [one for one in each.values() if not one.reason]
            rows.append(_counted(together(fair), name, "ours, all together", method))
            for (study, other), one in each.items():
                head = {"against": other, "whose": f"ours: {study}", "matching": method}
                row = one.row() if not one.reason else {"reason": one.reason, "n": one.margin.n}
                rows.append(head | row | ({} if one.reason else {"at_most": one.pooled.at_most}))
    numbers = pd.DataFrame(rows)
    return Table(numbers, pd.DataFrame([_headline_row(row) for row in numbers.to_dict("records")]))


def _counted(tally: Tally, name: str, whose: str, method: str) -> dict:
    return {"against": name, "whose": whose, "matching": method, "at_most": tally.at_most, **tally.row()}


def _headline_row(row: dict) -> dict:
    def whole(name):
        return "" if pd.isna(row.get(name)) else f"{row[name]:.0f}"

    against = ", ".join(map(short, row["against"].split(", ")))
    shown = {"against": against, "whose": row["whose"], "matched by": row.get("matching") or ""}
    shown = {name: "" if pd.isna(cell) else cell for name, cell in shown.items()}
    shown["at most"] = f"{whole('at_most')}/{whole('matched')}" if whole("matched") else f"withheld: {row['reason']}"
    shown |= {name: whole(name) for name in ("wins", "ties", "losses", "excluded")}
    least = row.get("smallest_margin", np.nan)
    shown["smallest margin"] = "" if pd.isna(least) else f"{least:+.4f} at B = {row['at_budget']:.0f}"
    tested = whole("prompts_won") and not pd.isna(row.get("margin"))
    shown["prompts won, tied, lost"] = ", ".join(whole(f"prompts_{what}") for what in ("won", "tied", "lost"))
    shown["p"] = "" if pd.isna(row.get("p")) else f"{row['p']:.2g}"
    shown["mean margin"] = f"{row['margin']:+.3f}{interval(row)}" if tested else ""
    if not tested:
        shown["prompts won, tied, lost"] = ""
    return shown


def interval(row: Mapping, sign: str = "+") -> str:
    return f" [{row['lo']:{sign}.3f}, {row['hi']:{sign}.3f}]" if np.isfinite(row.get("lo", np.nan)) else ""


def seven(
    chosen: Sequence[Study], budgets: Sequence[int], data: Mapping | None, resamples: int = stats.RESAMPLES
) -> Table:
    """Table 3: miss rate and (in brackets) resident pages of the seven policies at nominal budgets, ours above
    the paper's in each regime, with the optimum and, where they were run, the two that prune every 8 steps.

    Along a row only reactive, evict and the optimum hold the same memory. Intervals over prompts: in the numbers.
    """
    columns = [name for name in (*SEVEN, *EVERY_8, "optimum") if any(name in study.curves for study in chosen)]
    regimes = list(dict.fromkeys(study.regime for study in chosen))
    ours = [rates(study, [c for c in columns if c in study.curves], budgets, resamples) for study in chosen]
    paper = [published_rates(data, regime, (*SEVEN[1:], "full")) for regime in regimes if data]
    numbers = pd.concat([*ours, *paper], ignore_index=True)
    numbers = numbers.sort_values("regime", key=lambda names: names.map(regimes.index), kind="stable")
    shown = []
    for (source, regime, model), rows in numbers.groupby(["source", "regime", "model"], sort=False):
        whose = f"{model}, n = {rows['n'].max():.0f}" if source == "simulated" else f"{model} (published)"
        for budget in rows["budget"].dropna().unique():
            at = rows[(rows["budget"] == budget) | rows["budget"].isna()].set_index("policy")
            cells = {short(name): _rate_cell(at.loc[name]) if name in at.index else "" for name in columns}
            shown.append({"regime": regime, "model": whose, "B": f"{budget:.0f}", **cells})
    return Table(numbers, pd.DataFrame(shown))


def _rate_cell(row: pd.Series) -> str:
    pages = "?" if np.isnan(row["mean_pages"]) else f"{row['mean_pages']:,.0f}"
    return f"{row['miss_rate']:.3f} ({pages})"


def systems(chosen: Sequence[Study], budgets: Sequence[int], resamples: int = stats.RESAMPLES) -> Table:
    """Figure 1a as a table, a row a policy: its place on the axes, its number at the largest budget that each log has,
    and its margin over reactive at equal memory in each model and regime; or why a number is withheld."""
    numbers, shown = survey(chosen, budgets, resamples), []
    for name, rows in numbers.groupby("policy", sort=False):
        first = rows.iloc[0]
        line = {"system": NAMES.get(name, name), "decided": _when(first), "gives up": first["gives_up"]}
        line["calibrated on"] = first["calibrated"]
        for _, row in rows.iterrows():
            margin = "–" if row["reason"] else f"{row['margin']:+.3f}{interval(row)}"
            line[f"{row['regime']}: margin"] = margin
            parts = {"misses": row["miss_rate"]}
            parts |= {"fetches": row["fetched"]} if row["gives_up"] == "recoverable" else {}
            said = [f"{what} {value:.3f}" for what, value in parts.items() if np.isfinite(value)]
            said += [f"{row['pages']:,.0f} pages"] if np.isfinite(row["pages"]) else []
            line[f"{row['regime']}, B = {row['budget']}"] = ", ".join(said) or "–"
        shown.append(line | {"withheld": "; ".join(sorted(set(filter(None, rows["reason"]))))})
    return Table(numbers, pd.DataFrame(shown))


def _when(row: Mapping) -> str:
    return f"{row['when']} (head roles)" if row["roles"] else f"{row['when']} (pages, no head roles)"


def sensitivity(
    traces: Sequence[Trace],
    budgets: Sequence[int],
    others: Sequence[str] = ("frozen", "evict", "snapkv", "rkv"),
    resamples: int = stats.RESAMPLES,
) -> Table:
    """How much the choices that the paper leaves open move the comparisons, over logs of one model and regime.

    A budget is kept in tokens: B pages of 16 are 2 B pages of 8. A policy that has no meaning under a choice says so.
    """
    rows = []
    for variant, options in VARIANTS.items():
        convention, size = options.get("convention", "batch"), options.get("page_tokens", 16)
        at = sorted({max(1, budget * 16 // size) for budget in budgets})
        wants = [demand(t, **{n: value for n, value in options.items() if n != "convention"}) for t in traces]
        inside = None if convention == "batch" else [b for b in at if b <= min(w.n_pages for w in wants)]
        ours = [curves(one, POLICIES[OURS], inside, convention) for one in wants]
        for other in others:
            head = {"variant": variant, "against": other, "matching": method_of(other)}
            try:
                theirs = [curves(one, POLICIES[other], inside, convention) for one in wants]
            except InputError as error:  # no prompt rows at this page size, or no meaning under this convention
                rows.append(head | {"reason": str(error)})
                continue
            rows.append(head | contest(ours, theirs, method_of(other), at, resamples).row())
    numbers = pd.DataFrame(rows)
    numbers["reason"] = numbers["reason"].fillna("")
    cells = numbers.assign(cell=[_sensitivity_cell(row) for row in numbers.to_dict("records")])
    shown = cells.pivot(index="variant", columns="against", values="cell").loc[list(VARIANTS), list(others)]
    return Table(numbers, shown.rename(columns=short).reset_index().rename_axis(columns=None))


def _sensitivity_cell(row: Mapping) -> str:
    if row["reason"]:
        return f"– ({row['reason']})"
    return (
        f"{row['margin']:+.3f}{interval(row)}; {row['wins']:.0f} won, {row['ties']:.0f} tied, {row['losses']:.0f} lost"
    )
