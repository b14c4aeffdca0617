"""A decision for a workload: what each budget would save, and what it would cost, from logs of its own prompts.

What moves is counted, not estimated: the wants of the log are replayed, KV head by KV head, from a prompt that is all
resident, as in a real cache. What a page's way costs is the link's model: each layer that has to fetch waits for its
pages one after the other, a latency for the batch and then bytes over bandwidth, with nothing hidden behind compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.costs.links import Link
from wakekv.errors import InputError, lookup
from wakekv.logs.demand import Demand, demand
from wakekv.logs.trace import Trace
from wakekv.policies import POLICIES, Policy
from wakekv.simulation.replay import Curves
from wakekv.simulation.simulate import curves

DEFAULT = ("reactive", "commons", "evict")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
ESTIMATES = ("saved", "fetches", "fetched_bytes", "stall_ms", "slowdown", "at_risk")  # a column, its _lo and its _hi


@dataclass(frozen=True)
class Plan:
    """What each policy costs at each budget, and what to choose.

    rows   a row a policy and budget: policy, budget (pages a KV head), memory_bytes, peak_bytes, full_bytes, and with
           their intervals over prompts (name, name_lo, name_hi): saved (share of full_bytes), fetches and fetched_bytes
           a token, stall_ms a step, slowdown (stall over step), at_risk (share of the logged attention weight that is
           never read, as its page is gone or not there); fits: within both limits at the interval's unfavourable end,
           and at least `least` pages
    least  pages that a KV head reads in a step, mean: a cache that holds fewer than it reads is not recommended
    best   the row to choose, None if none fits;  why: in words
    """

    rows: pd.DataFrame
    best: dict | None
    why: str
    link: Link
    step_s: float
    n_prompts: int
    page_bytes: int
    batch: int
    least: int
    left_out: int  # layers with a sliding window


def plan(
    traces: Sequence[Trace],
    link: Link,
    step_s: float,
    max_slowdown: float = 0.05,
    max_at_risk: float = 0.001,
    policies: Sequence[str] | Mapping[str, Policy] = DEFAULT,
    dtype: str | None = None,
    page_tokens: int = 16,
    batch: int = 1,
    resamples: int = stats.RESAMPLES,
) -> Plan:
    """Every budget of some policies over logs of one model, and the smallest memory that stays within the limits.

    step_s        seconds of a decode step with everything resident
    max_slowdown  the most that waiting may add to a step, as a share of it;  max_at_risk: of attention weight unread
    dtype         of keys and values when served (default: that of the recording)
    batch         sequences decoded together: their pages share the link and, layer by layer, its latency
    Raises InputError for no log, logs of several models, or limits, names and numbers that do not fit.
    """
    if not traces:
        raise InputError("no log to plan from: record prompts of the workload with python -m wakekv record")
    models = {trace.manifest["model"]["name"] for trace in traces}
    if len(models) > 1:
        raise InputError(f"these logs are of several models ({', '.join(sorted(models))}): plan for one at a time")
    if not step_s > 0:
        raise InputError(f"a step must take some time, not {step_s:g} s")
    for name, limit in ("max_slowdown", max_slowdown), ("max_at_risk", max_at_risk):
        if not limit >= 0:
            raise InputError(f"{name} must be at least 0, not {limit!r}")
    if batch < 1:
        raise InputError(f"batch counts sequences from 1, not {batch!r}")
    if not policies:
        raise InputError("no policies to compare: name one or more, such as reactive,evict")
    rules = policies if isinstance(policies, Mapping) else {name: lookup(name, POLICIES, "policy") for name in policies}
    for name, rule in rules.items():
        if rule.offline:
            raise InputError(f"{name} looks at its own log beforehand, which no cache can: plan with another policy")
    page_bytes, paged = page_bytes_of(traces[0], dtype, page_tokens), _paged(traces[0])
    wants = [paged_only(demand(t, "kv_head", "warm", page_tokens), paged) for t in traces]
    common = np.arange(1, min(one.n_pages for one in wants) + 1)
    full = [curves(one, POLICIES["full"], [1]).mean_pages[0] for one in wants]
    rows = []
    for name, rule in rules.items():
        found = [curves(one, rule, common) for one in wants]
        rows += _rows(name, rule, found, wants, full, common, page_bytes, link, step_s, batch, resamples)
    table = pd.DataFrame(rows)
    worst = {n: table[f"{n}_hi"].fillna(table[n]) for n in ("slowdown", "at_risk")}
    table["fits"] = (worst["slowdown"] <= max_slowdown) & (worst["at_risk"] <= max_at_risk)
    least = int(np.ceil(np.mean([one.n_wants / one.n_heads / one.n_steps for one in wants])))
    table["fits"] &= table["budget"] >= min(least, common[-1])
    best, why = _choose(table, max_slowdown, max_at_risk, len(traces))
    left_out = len(set(range(traces[0].n_layers)) - set(paged))
    return Plan(table, best, why, link, step_s, len(traces), page_bytes, batch, least, left_out)


def paged_only(wants: Demand, layers: Sequence[int]) -> Demand:
    """The part of a demand that comes from some layers, in their order."""
    heads = np.flatnonzero(np.isin(wants.layer, layers))
    return wants if len(heads) == wants.n_heads else wants.select(heads)


def _paged(trace: Trace) -> list[int]:
    """Layers whose cache has pages: those without a sliding window, which keep a cache of their own."""
    paged = [layer for layer, window in enumerate(trace.manifest["model"]["windows"]) if window is None]
    if not paged:
        raise InputError(f"every layer of {trace.manifest['model']['name']} has a sliding window: no page to plan for")
    return paged


def page_bytes_of(trace: Trace, dtype: str | None = None, page_tokens: int = 16) -> int:
    """Bytes of one page of one KV head, keys and values."""
    model = trace.manifest["model"]
    return 2 * page_tokens * model["head_dim"] * lookup(dtype or model["dtype"], BYTES, "dtype")


def _rows(
    name, rule, found: list[Curves], wants, full, budgets, page_bytes, link, step_s, batch, resamples
) -> list[dict]:
    steps = np.array([one.n_steps for one in found], float)
    pages = np.array([one.mean_pages for one in found])  # [prompt, budget]
    fetched = np.array([one.fetched for one in found])
    stall = np.array([stall_s(rule, c, w, page_bytes, link, batch) for c, w in zip(found, wants)])
    lost = np.array([c.missed_weight if not rule.reversible or rule.fetch == "trim" else 0 * c.misses for c in found])
    weight = np.array([one.weight for one in found])
    peak = np.max([one.peak_pages for one in found], axis=0)
    rows = []
    for i, budget in enumerate(budgets):
        row = {"policy": name, "budget": int(budget), "memory_bytes": pages[:, i].mean() * page_bytes}
        row |= {"peak_bytes": int(peak[i]) * page_bytes, "full_bytes": np.mean(full) * page_bytes}
        of = {
            "saved": (np.asarray(full) - pages[:, i], full),
            "fetches": (fetched[:, i], steps),
            "fetched_bytes": (fetched[:, i] * page_bytes, steps),
            "stall_ms": (1e3 * stall[:, i], steps),
            "slowdown": (stall[:, i], steps * step_s),
            "at_risk": (lost[:, i], weight),
        }
        for what in ESTIMATES:
            one = stats.ratio(*of[what], resamples=resamples)
            row |= {what: one.value, f"{what}_lo": one.lo, f"{what}_hi": one.hi}
        rows.append(row)
    return rows


def stall_s(rule: Policy, found: Curves, wants: Demand, page_bytes: int, link: Link, batch: int = 1) -> np.ndarray:
    """float [budget]: seconds that the steps of one log wait for pages, all together, as its link has it."""
    most = len(np.unique(wants.layer)) * found.n_steps  # a wait a layer and step
    waited = np.minimum(batch * waits(rule, found, wants), most)
    return link.seconds(batch * found.fetched * page_bytes, waited)


def waits(rule: Policy, found: Curves, wants: Demand) -> np.ndarray:
    """int [budget]: batches of fetches, one for each layer and step that has any; where layers cannot be told apart
    step by step, at most: no layer waits more often than it misses, nor than there are steps with a miss."""
    if rule.fetch == "trim":
        trims = found.n_steps // rule.every if rule.every else 0
        return np.minimum(found.fetched, trims * len(np.unique(wants.layer)))
    if not rule.reversible:
        return np.zeros(len(found.budgets), np.int64)
    _, layer = np.unique(wants.layer, return_inverse=True)
    misses = np.zeros((layer.max() + 1, len(found.budgets)), np.int64)
    np.add.at(misses, layer, found.head_misses)
    return np.minimum(misses, found.stall_steps).sum(0)


def _choose(table: pd.DataFrame, max_slowdown: float, max_at_risk: float, n: int) -> tuple[dict | None, str]:
    limits = f"a slowdown of at most {max_slowdown:.3g}, at most {max_at_risk:.3g} of attention weight unread and "
    limits += "no fewer pages than a head reads in a step"
    sure = "at the unfavourable end of its interval" if n > 1 else "on the one prompt there is, so without an interval"
    fits = table[table["fits"]]
    if not len(fits):
        near = table.sort_values(["at_risk", "slowdown"], kind="stable").iloc[0]
        return None, (
            f"no budget of these policies keeps to {limits}, {sure}; nearest is {near['policy']} at {near['budget']} "
            f"pages: {near['slowdown']:.3g} slower, {near['at_risk']:.3g} unread. Allow more, or take a faster link"
        )
    row = fits.sort_values(["memory_bytes", "slowdown"], kind="stable").iloc[0].to_dict()
    others = []
    for name in table["policy"].unique():
        own = fits[fits["policy"] == name].sort_values("memory_bytes", kind="stable")
        if name != row["policy"]:
            others.append(
                f"{name} needs {own.iloc[0]['budget']} pages" if len(own) else f"{name} keeps to them nowhere"
            )
    what = f"{row['policy']} at {row['budget']} pages a KV head is the smallest memory that keeps to {limits}, {sure}"
    return row, "; ".join([what, *others])


def as_json(made: Plan) -> dict:
    """All of a plan as plain values; what is undefined is None."""
    rows = made.rows.astype(object).where(made.rows.notna(), None).to_dict("records")
    best = None if made.best is None else next(
        row for row in rows if (row["policy"], row["budget"]) == (made.best["policy"], made.best["budget"])
    )  # fmt: skip
    own = {n: getattr(made, n) for n in ("step_s", "n_prompts", "page_bytes", "batch", "least", "left_out")}
    return {"link": vars(made.link), **own, "best": best, "why": made.why, "rows": rows}


def as_text(made: Plan, budgets: Sequence[int]) -> str:
    """A plan for a terminal: the policies at some budgets and at the one recommended."""
    of = made.link
    lines = [
        f"link {of.name}: {of.bytes_per_s / 1e9:.3g} GB/s, {of.latency_s * 1e6:.3g} us a batch ({of.about})",
        f"{made.n_prompts} prompts, {made.batch} at a time, KV heads, pages of {made.page_bytes:,} bytes, steps of "
        f"{1e3 * made.step_s:g} ms; a head reads {made.least} pages in a step"
        + (f"; {made.left_out} layers with a sliding window keep a cache of their own" if made.left_out else ""),
        "",
        f"{'policy':<16}{'B':>5}{'memory':>11}{'saved':>7}{'fetches/token':>15}{'MB/token':>10}"
        f"{'stall ms/step':>25}{'slower':>8}{'unread':>25}",
    ]
    chosen = (made.best["policy"], made.best["budget"]) if made.best else None
    for row in made.rows.to_dict("records"):
        own = (row["policy"], row["budget"])
        if row["budget"] in budgets or own == chosen:
            memory, stall = f"{row['memory_bytes'] / 2**20:.1f} MiB", _within(row, "stall_ms")
            lines.append(
                f"{row['policy']:<16}{row['budget']:>5}{memory:>11}{row['saved']:>7.0%}{row['fetches']:>15.1f}"
                f"{row['fetched_bytes'] / 1e6:>10.2f}{stall:>25}{row['slowdown']:>8.1%}{_within(row, 'at_risk'):>25}"
                + ("  <" if own == chosen else "")
            )
    return "\n".join([*lines, "", made.why])


def _within(row: Mapping, name: str) -> str:
    span = f" [{row[f'{name}_lo']:.3g}, {row[f'{name}_hi']:.3g}]" if np.isfinite(row[f"{name}_lo"]) else ""
    return f"{row[name]:.3g}{span}" if row[name] else "0"
