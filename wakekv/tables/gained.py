"""What one budget for all heads gains, as tables: against the paper's rule, the optimum, fixed splits, and chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.logs.demand import Demand
from wakekv.policies import POLICIES, Policy
from wakekv.simulation.beyond import GOAL, OURS, PAPER, RANGE, Counted, Flow, floor_of, gap, groups, measures, splits
from wakekv.simulation.simulate import curves
from wakekv.tables import Table
from wakekv.tables.twins import ALL, cells, estimated

SPLITS = {  # names of the fixed splits of a budget among heads, each under per-head recency
    "own": "fixed split, best for this very log",
    "other_prompt": "fixed split, best for another prompt",
    "other_regime": "fixed split, best for another regime",
}
IN_CACHE = {  # of `trials.pools`: what -> (its number in each row, its name, how it is shown); counted
    "miss_rate": (lambda r: r["miss_rate"], "miss rate", ".3f"),
    "misses": (lambda r: r["misses"], "misses a step", ",.0f"),
    "fetched_mb": (lambda r: r["fetched_bytes"] / 1e6, "MB fetched a step", ".2f"),
    "kl_mean": (lambda r: r["kl_mean"], "KL to full", ".4f"),
    "agreement": (lambda r: r["agreement"], "top-1 agreement", ".3f"),
    "over_budget": (lambda r: r["over_budget"], "fast tier over budget", ".2f"),
}
IN_TIME = {  # and timed
    "stall_ms": (lambda r: 1e3 * r["stall_s"], "waiting, ms a step", ".2f"),
    "settle_ms": (lambda r: 1e3 * r["settle_s"], "trimming, ms a step", ".2f"),
    "step_cpu_ms": (lambda r: 1e3 * r["step_cpu_s"], "CPU ms a step", ".1f"),
    "step_ms": (lambda r: 1e3 * r["step_s"], "ms a step", ".1f"),
    "tokens_per_s": (lambda r: r["tokens_per_s"], "tokens a second", ".1f"),
}
SCOPES = {"commons, layer": "layer", "optimum, layer": "layer"}  # the others move memory over the whole model


def beyond(cases: Sequence[Counted], budgets: Sequence[int], resamples: int = stats.RESAMPLES) -> Table:
    """Every rule and fixed split on every group of prompts: miss rate, misses saved against reactive, and how much of
    the way to the optimum of the same scope that is (gap_closed), with their intervals over prompts.

    numbers: policy, scope, model, regime, split, unit, budget, miss_rate, fewer_misses, gap_closed, lo, hi (of
    gap_closed), n, method; miss_lo to fewer_hi; pages, reactive_pages (mean resident pages, summed over heads);
    fewer_same_memory: misses saved against reactive with the same mean memory, on the line between its budgets.
    """
    fixed, rows = splits(cases, budgets), []
    for (model, regime, part, unit), group in groups(cases).items():
        inside = [b for b in budgets if b <= min(case.n_pages for case in group)]
        own = fixed[(fixed["model"] == model) & (fixed["regime"] == regime) & (fixed["unit"] == unit)]
        own = own[own["part"] == part]
        for budget in inside:
            head = {"model": model, "regime": regime, "split": part, "unit": unit, "budget": budget}
            for rule in (name for name in group[0].misses if name != PAPER):
                found = gap(group, rule, budget, floor_of(rule), resamples)
                row = _row(rule, SCOPES.get(rule, "model"), head, found)
                rows.append(row | _memory(group, rule, budget))
            for kind, name in SPLITS.items():
                found = _of_split(group, own[own["budget"] == budget], kind, budget, resamples)
                rows += [_row(name, "model", head, found)] if found else []
    numbers = pd.DataFrame(rows)
    return Table(numbers, _beyond_shown(numbers))


def _row(policy: str, scope: str, head: Mapping, found: Sequence[stats.Estimate]) -> dict:
    rate, saved, closed = found
    return {
        "policy": policy, "scope": scope, **head, "miss_rate": rate.value, "fewer_misses": saved.value,
        "gap_closed": closed.value, "lo": closed.lo, "hi": closed.hi, "n": closed.n, "method": closed.method,
        "miss_lo": rate.lo, "miss_hi": rate.hi, "fewer_lo": saved.lo, "fewer_hi": saved.hi,
    }  # fmt: skip


def _memory(group: Sequence[Counted], rule: str, budget: int) -> dict:
    pages, paper = [case.pages[rule][budget - 1] for case in group], 0.0
    for case, held in zip(group, pages):
        rising = np.append(np.diff(case.pages[PAPER]) > 1e-9, True)  # of budgets with one memory, the last
        known = case.pages[PAPER][rising]
        at = np.clip(held, known[0], known[-1])  # at its largest reactive holds all that it will ever hold
        paper += float(stats.interpolate(at, known, case.misses[PAPER][rising]))
    ours = sum(case.misses[rule][budget - 1] for case in group)
    return {
        "pages": float(np.mean(pages)),
        "reactive_pages": float(np.mean([case.pages[PAPER][budget - 1] for case in group])),
        "fewer_same_memory": (paper - ours) / paper if paper else np.nan,
    }


def _of_split(group, fixed: pd.DataFrame, kind: str, budget: int, resamples: int) -> list[stats.Estimate] | None:
    """As beyond.gap, for a fixed split; None where there is no other prompt or regime to take it from."""
    if fixed[kind].isna().any():
        return None
    paper, best = ([case.misses[name][budget - 1] for case in group] for name in (PAPER, "optimum"))
    sums = np.column_stack([paper, fixed[kind], best, fixed["wants"]]).astype(float)
    return measures(sums, resamples)


def _beyond_shown(numbers: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for (model, regime, part, unit), at in numbers.groupby(["model", "regime", "split", "unit"], sort=False):
        for policy in (OURS, "pooled", *SPLITS.values(), "commons, layer"):
            of = at[at["policy"] == policy]
            if len(of):
                row = {"model": model, "regime": regime, "prompts": f"{part}, n = {of['n'].max()}", "heads": unit}
                row["policy"] = policy
                rows.append(row | {f"B = {b}": _cell(r) for b, r in of.set_index("budget").iterrows()})
    return pd.DataFrame(rows).fillna("")


def _cell(row: pd.Series) -> str:
    if not np.isfinite(row["gap_closed"]):
        return f"{row['miss_rate']:.3f}, no gap"
    span = f" [{row['lo']:.0%}, {row['hi']:.0%}]" if np.isfinite(row["lo"]) else ""
    return f"{row['miss_rate']:.3f}, {row['gap_closed']:.0%}{span}"


def goal(cases: Sequence[Counted], rule: str = OURS, within: tuple[int, int] = RANGE) -> Table:
    """Over every budget from within[0] to within[1]: the least and the most of the way that a rule goes, at how many
    budgets the goal of 70 % is met; and over all budgets and single prompts, where it misses more than reactive.

    gap_closed pooled over the group's prompts; budgets at which the paper's rule misses no more than the optimum by one
    in a thousand wants of a head's (a gap of less than 0.001) are counted apart: there is nothing to close.
    """
    rows = []
    for (model, regime, part, unit), group in groups(cases).items():
        n = min(case.n_pages for case in group)
        budgets = np.arange(within[0], min(within[1], n) + 1)
        names = PAPER, rule, floor_of(rule)
        paper, ours, best = (sum(case.misses[name][budgets - 1] for case in group) for name in names)
        wants = sum(case.wants.sum() for case in group)
        open_ = (paper - best) / wants >= 0.001
        closed = (paper - ours)[open_] / (paper - best)[open_]
        worse = [(case, np.flatnonzero(case.misses[rule] > case.misses[PAPER])) for case in group]
        excess = [
            (case.misses[rule] - case.misses[PAPER])[at].max() / case.wants.sum() for case, at in worse if len(at)
        ]
        row = {"model": model, "regime": regime, "split": part, "unit": unit, "n": len(group), "policy": rule}
        row |= {"budgets": len(budgets), "without_gap": int((~open_).sum()), "met": int((closed >= GOAL).sum())}
        row |= {"least": closed.min(initial=np.inf), "most": closed.max(initial=-np.inf), "mean": closed.mean()}
        row |= {"worse": sum(len(at) for _, at in worse), "compared": sum(case.n_pages for case in group)}
        row["worse_budgets"] = " ".join(map(str, sorted({int(b) + 1 for _, at in worse for b in at})))
        rows.append(row | {"largest_excess": max(excess, default=0.0)})
    numbers = pd.DataFrame(rows)
    shown = numbers[["model", "regime", "unit"]].assign(prompts=numbers["split"] + ", n = " + numbers["n"].astype(str))
    shown["of the way, least to most"] = [f"{a:.0%} to {b:.0%}" for a, b in zip(numbers["least"], numbers["most"])]
    met = zip(numbers["met"], numbers["budgets"] - numbers["without_gap"])
    shown["budgets at 70 % or more"] = [f"{m} of {of}" for m, of in met]
    shown["worse than reactive"] = [
        "nowhere" if not w else f"{w} of {c} (B = {b}; by at most {e:.5f})"
        for w, c, b, e in numbers[["worse", "compared", "worse_budgets", "largest_excess"]].to_numpy()
    ]
    return Table(numbers, shown)


def tried(cases: Sequence[Counted], budgets: Sequence[int]) -> Table:
    """All orders that were tried, on training prompts: of the way to the optimum (over the model), mean over regimes
    and units; and at how many budgets one misses more than reactive."""
    rows = []
    for rule in (name for name in cases[0].misses if name not in (PAPER, "optimum")):
        for case in cases:
            paper, ours, best = (np.asarray(case.misses[name], float) for name in (PAPER, rule, "optimum"))
            for b in (b for b in budgets if b <= case.n_pages):
                at = paper[b - 1], ours[b - 1], best[b - 1]
                closed = (at[0] - at[1]) / (at[0] - at[2]) if at[0] > at[2] else np.nan
                row = {"policy": rule, "model": case.model, "regime": case.regime, "unit": case.unit, "budget": b}
                rows.append(row | {"gap_closed": closed, "worse": int(np.nansum(ours > paper))})
    numbers = pd.DataFrame(rows)
    shown = numbers.pivot_table(index="policy", columns="budget", values="gap_closed", sort=False)
    shown = (
        shown.loc[shown.mean(axis=1).sort_values(ascending=False, kind="stable").index]
        .map("{:.0%}".format)
        .replace("nan%", "–")
    )
    worse = numbers.drop_duplicates(["policy", "regime", "unit"]).groupby("policy")["worse"].sum()
    shown.columns = [f"B = {b}" for b in shown.columns]
    shown["budgets worse than reactive"] = worse.loc[shown.index].astype(str)
    return Table(numbers, shown.reset_index())


def chance(logs: Mapping[str, tuple[Demand, Policy]], budgets: Sequence[int]) -> Table:
    """On logs drawn from known odds (luck.drawn): how far towards the optimum the order of the true odds goes, and
    `commons`, which estimates them."""
    rows = []
    for name, (wants, true) in logs.items():
        rules = {PAPER: POLICIES[PAPER], "true odds": true, OURS: POLICIES[OURS]}
        found = {n: curves(wants, rule) for n, rule in rules.items()}
        best = curves(wants, POLICIES["optimum"].but(scope="model"))
        for rule in ("true odds", OURS):
            for b in (b for b in budgets if b <= wants.n_pages):
                paper, ours, least = (int(c.at(b).misses[0]) for c in (found[PAPER], found[rule], best))
                closed = (paper - ours) / (paper - least) if paper > least else np.nan
                rows.append({"log": name, "policy": rule, "budget": b, "gap_closed": closed})
    numbers = pd.DataFrame(rows)
    shown = numbers.pivot_table(index=["log", "policy"], columns="budget", values="gap_closed", sort=False)
    shown = shown.map("{:.0%}".format).replace("nan%", "–")
    shown.columns = [f"B = {b}" for b in shown.columns]
    return Table(numbers, shown.reset_index())


def in_cache(rows: Sequence[Mapping], resamples: int = stats.RESAMPLES) -> Table:
    """What the rules miss, fetch and stray in a real cache, budget by budget; from the rows of `trials.pools`.

    numbers: those of `twins.estimated`, less: than the first arm's.  shown: all prompts together.
    """
    return _real(rows, IN_CACHE, resamples)


def in_time(rows: Sequence[Mapping], resamples: int = stats.RESAMPLES) -> Table:
    """The same, timed: a step, and what of it is waiting and trimming."""
    return _real(rows, IN_TIME, resamples)


def _real(rows: Sequence[Mapping], quantities: Mapping, resamples: int) -> Table:
    numbers = estimated(rows, quantities, list(dict.fromkeys(row["arm"] for row in rows)), resamples)
    whole = numbers[numbers["regime"] == ALL].groupby(["budget", "arm"], sort=False)
    shown = [{"B": str(budget), "cache": arm} | cells(group, quantities) for (budget, arm), group in whole]
    return Table(numbers, pd.DataFrame(shown))


def saved(rows: Sequence[Mapping], resamples: int = stats.RESAMPLES) -> Table:
    """What the pools miss, wait and take more than reactive with as many pages, so what is saved is negative: all
    prompts, with intervals of the differences (less, less_lo, less_hi) and the mean's share of reactive's (share)."""
    whats = {"misses": IN_CACHE["misses"]} | {what: IN_TIME[what] for what in ("stall_ms", "settle_ms", "step_cpu_ms")}
    numbers = estimated(rows, whats, (PAPER, "pooled", OURS), resamples)
    numbers = numbers[(numbers["regime"] == ALL) & (numbers["arm"] != PAPER)].reset_index(drop=True)
    numbers["share"] = numbers["less"] / (numbers["estimate"] - numbers["less"])
    shown = [{"B": str(budget), "cache": arm} | {
        whats[row["what"]][1]: f"{row['less']:+.1f} [{row['less_lo']:+.1f}, {row['less_hi']:+.1f}], {row['share']:+.0%}"
        for row in of.to_dict("records")
    } for (budget, arm), of in numbers.groupby(["budget", "arm"], sort=False)]  # fmt: skip
    return Table(numbers, pd.DataFrame(shown))


def predicted(rows: Sequence[Mapping]) -> Table:
    """What a plan foresees of fetches and waiting, from a log and from the cache's own wants, and what a cache then
    does; from the rows of `trials.foreseen`. off: the plan's number over the cache's, less 1."""
    numbers = pd.DataFrame(rows)
    for source in ("log", "wants"):
        for what in ("fetches", "stall_ms"):
            numbers[f"{source}_{what}_off"] = numbers[f"{source}_{what}"] / numbers[what] - 1
    shown = numbers[["policy"]].assign(B=numbers["budget"].astype(str))
    for what, label, form in ("fetches", "fetches a step", ",.1f"), ("stall_ms", "waiting, ms a step", ".2f"):
        shown[label] = numbers[what].map(f"{{:{form}}}".format)
        for source, says in ("log", "planned from the log"), ("wants", "from the cache's wants"):
            pairs = zip(numbers[f"{source}_{what}"], numbers[f"{source}_{what}_off"])
            shown[f"{label}, {says}"] = [f"{value:{form}} ({off:+.0%})" for value, off in pairs]
    return Table(numbers, shown)


def where(flows: Sequence[Flow]) -> Table:
    """What a pool does with its memory: the most and the least that a layer or head holds (mean over steps, pages a
    head), what share lies elsewhere than its own mean over time, and elsewhere than another regime's mean."""
    rows = []
    for flow in flows:
        held, layers = flow.pages.mean(1), flow.by_layer().mean(1)
        row = {"model": flow.model, "regime": flow.regime, "unit": flow.unit, "budget": flow.budget}
        row |= {"head_least": held.min(), "head_most": held.max(), "layer_least": layers.min()}
        row |= {"layer_most": layers.max(), "most_in_layer": int(np.unique(flow.layer)[layers.argmax()])}
        row |= {"in_top_quarter": np.sort(held)[-max(1, len(held) // 4) :].sum() / held.sum(), "moved": flow.moved()}
        others = [o for o in flows if o.model == flow.model and o.regime != flow.regime]
        apart = [np.abs(held / held.sum() - o.pages.mean(1) / o.pages.mean(1).sum()).sum() / 2 for o in others]
        rows.append(row | {"apart": float(np.mean(apart)) if apart else np.nan})
    numbers = pd.DataFrame(rows)
    shown = numbers[["model", "regime", "unit", "budget"]].astype(str)
    for what in ("head", "layer"):
        pairs = zip(numbers[f"{what}_least"], numbers[f"{what}_most"])
        shown[f"pages a head, by {what}"] = [f"{least:.1f} to {most:.1f}" for least, most in pairs]
    shown["fullest layer"] = numbers["most_in_layer"].astype(str)
    shown["held by the fullest quarter of heads"] = numbers["in_top_quarter"].map("{:.0%}".format)
    shown["elsewhere than its mean over time"] = numbers["moved"].map("{:.0%}".format)
    apart = numbers["apart"].map("{:.0%}".format)
    return Table(numbers, shown.assign(**{"elsewhere than another regime's mean": apart.replace("nan%", "")}))
