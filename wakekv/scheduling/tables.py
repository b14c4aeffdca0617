"""The scheduling study as tables: numbers with their intervals, and the same to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from wakekv import stats
from wakekv.scheduling.costs import Costs, hidden_ratio
from wakekv.scheduling.foresight import MissModel, brier
from wakekv.scheduling.profile import Profile
from wakekv.scheduling.study import attainment, bearable
from wakekv.tables import Table


def server_costs(costs: Costs, error: float, measured: Sequence[Mapping]) -> Table:
    """What an iteration costs, and from how many measured steps that was fitted."""
    says = {
        "step_s": "a decode step", "request_s": "more, a request in it", "page_s": "more, a page attended to",
        "rank_s": "more, a page ranked", "prefill_s": "a prompt token",
    }  # fmt: skip
    numbers = pd.DataFrame([{"cost": n, "what": what, "us": 1e6 * getattr(costs, n)} for n, what in says.items()])
    numbers = numbers.assign(typical_error=error, n_steps=len(measured))
    shown = pd.DataFrame({"cost": numbers["what"], "microseconds": numbers["us"].map("{:,.2f}".format)})
    return Table(numbers, shown)


def scheduled(cases: Mapping[str, pd.DataFrame]) -> Table:
    """`study.study` of several cases: attainment by load with intervals over streams of requests, effective throughput
    at the highest load, and the highest load at which nine in ten keep their objectives."""
    parts, shown = [], []
    for case, found in cases.items():
        at, most = attainment(found), bearable(found)
        parts.append(at.assign(case=case))
        for name, own in at.groupby("scheduler", sort=False):
            row = {"costs": case, "scheduler": name}
            row |= {f"load {r.load:g}": f"{r.estimate:.2f} [{r.lo:.2f}, {r.hi:.2f}]" for r in own.itertuples()}
            last = own.iloc[-1]
            row["worth having, requests a second"] = f"{last['effective']:.3g}, load {last['load']:g}"
            shown.append(row | {"nine in ten up to load": f"{most[name]:g}" if most[name] else "none tried"})
    return Table(pd.concat(parts, ignore_index=True), pd.DataFrame(shown))


def foreseen(model: MissModel, held_out: Sequence[Profile], resamples: int = stats.RESAMPLES) -> Table:
    """Brier scores of the miss model and of those that know less, on held-out prompts."""
    numbers = brier(model, held_out, resamples)
    shown = pd.DataFrame({
        "predictor": numbers["predictor"],
        "Brier score": [f"{r.estimate:.3f} [{r.lo:.3f}, {r.hi:.3f}]" for r in numbers.itertuples()],
        "held-out prompts": numbers["n"].astype(str),
    })  # fmt: skip
    return Table(numbers, shown)


def hidden(shapes: Mapping[str, tuple[int, int, int]]) -> Table:
    """Hidden states against keys and values: memory of a token by (d_model, KV heads, head size), and what follows."""
    numbers = pd.DataFrame(
        [{"model": name, "d_model": d, "kv_heads": heads, "head_dim": size, "ratio": hidden_ratio(d, heads, size)}
         for name, (d, heads, size) in shapes.items()]
    )  # fmt: skip
    ratio = numbers["ratio"]
    numbers["kept"] = ratio < 1
    shown = numbers[["model"]].assign(**{
        "hidden state over keys and values": ratio.map("{:.2f}".format),
        "hidden caching": ["an option" if r < 1 else "refused: more memory, more time" for r in ratio],
    })  # fmt: skip
    return Table(numbers, shown)


def tenants(found: pd.DataFrame) -> Table:
    """`study.tenants`, a row a rule: the worst agent's attainment, Jain's index, each agent's, and pages stored."""
    rows, shown = [], []
    for rule, own in found.groupby("rule", sort=False):
        by_seed = own.drop_duplicates("seed")
        worst, index = (stats.mean(by_seed[name], unit="streams of requests") for name in ("worst", "jain"))
        agents = own.groupby("agent")["attainment"].mean()
        saved = 1 - by_seed["stored"].sum() / by_seed["unshared"].sum()
        rows.append({"rule": rule, **worst.row(), "jain": index.value, "jain_lo": index.lo, "jain_hi": index.hi,
                     "stored": by_seed["stored"].mean(), "unshared": by_seed["unshared"].mean(), **agents})  # fmt: skip
        shown.append({
            "rule": rule, "worst agent keeps": f"{worst.value:.2f} [{worst.lo:.2f}, {worst.hi:.2f}]",
            "Jain": f"{index.value:.2f} [{index.lo:.2f}, {index.hi:.2f}]",
            **{f"{name} keeps": f"{value:.2f}" for name, value in agents.items()},
            "pages not stored twice": f"{saved:.0%}",
        })  # fmt: skip
    return Table(pd.DataFrame(rows), pd.DataFrame(shown))
