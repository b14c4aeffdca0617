"""Section 2 over all logs of a run: pools of logs, and what was measured of each, in numbers, beside what was printed.

Every function of a table takes the pools and the content of artifact/published.json and returns a DataFrame whose rows
say on how many prompts they stand, how the interval was made, and what was published for that regime on which model
(our own model's number where the paper has it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.errors import InputError
from wakekv.heads.bursts import DRAWS, SHARES, burst_table, per_log
from wakekv.heads.churn import churn_table
from wakekv.heads.grading import LEADS, METRICS, wakeup_table
from wakekv.heads.markers import find_markers, marker_table
from wakekv.heads.prefetch import ASK, BUDGET, prefetch_table
from wakekv.heads.reads import Reads, read
from wakekv.heads.wakeups import events
from wakekv.logs.trace import Trace
from wakekv.simulation.study import key, machine

LEAD = 32  # the lead that the paper quotes
CHANCE = ("random", "same_heads", "periodic")  # blind alarms beside a signal's own, as in `wakeup_table`
TABLE_4 = {  # quantity of `churn_table` -> the paper's column, and the score it was taken with
    "adjacent_jaccard_binary": ("adjacent_jaccard", "binary"),
    "adjacent_jaccard_continuous": ("adjacent_jaccard", "continuous"),
    "unstable_fraction": ("unstable_fraction", None),
    "drift_fraction": ("drift_fraction", None),
}
MARKERS = {  # quantity of `marker_table` -> the paper's name for it
    "tokens_tested": "tokens_tested",
    "markers": "markers",
    "heldout_precision": "heldout_precision",
    "heldout_recall": "heldout_recall",
    "heldout_f1": "f1",
}


@dataclass(frozen=True, eq=False)
class Pool:
    """The logs of one model, regime and kind of text.

    beside: not for statistics. It stands beside another kind of text of which more logs count, or none of it counts
    because every log repeats itself.
    """

    model: str
    regime: str
    text: str
    reads: list[Reads]
    beside: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} / {self.regime}"

    @property
    def sound(self) -> list[Reads]:
        """The logs that count: those whose text does not repeat itself. All of them where the pool stands beside."""
        return [reads for reads in self.reads if self.beside or not reads.flagged]


def pools(traces: Iterable[Trace]) -> list[Pool]:
    """The logs of a run, pooled by model, regime and kind of text, in order of appearance. Reads each log once.

    Of the kinds of text of one model and regime, the one with most logs that count is pooled; the others stand beside.
    """
    found: dict[tuple, list[Reads]] = {}
    for trace in traces:
        found.setdefault(key(trace), []).append(read(trace))
    if not found:
        raise InputError("no logs to measure: record at least one")
    chosen: dict[tuple, tuple[int, str]] = {}
    for (*of, text), many in found.items():
        n = sum(not reads.flagged for reads in many)
        if n > chosen.get(tuple(of), (0, ""))[0]:
            chosen[tuple(of)] = n, text
    return [Pool(*of, many, beside=chosen.get(of[:2], (0, ""))[1] != of[2]) for of, many in found.items()]


def counted(many: Sequence[Pool]) -> list[Pool]:
    """The pools that statistics are made of. Raises InputError if there is none."""
    kept = [pool for pool in many if not pool.beside]
    if not kept:
        raise InputError("every log of this run repeats itself, so nothing can be measured: record scripted text")
    return kept


def stamp(many: Sequence[Pool]) -> str:
    """What pools stand on, in words: prompts, models, kinds of text, machines."""
    n = sorted({len(pool.sound) for pool in many})
    prompts = f"{n[0]}" if len(n) == 1 else f"{n[0]} to {n[-1]}"
    models, kinds = (", ".join(dict.fromkeys(getattr(pool, what) for pool in many)) for what in ("model", "text"))
    machines = ", ".join(dict.fromkeys(machine(reads.trace) for pool in many for reads in pool.reads))
    plural, each = "prompt" if n == [1] else "prompts", " each" if len(many) > 1 else ""
    return f"measured on logs of {prompts} {plural}{each}: {models}, {kinds} text, recorded in {machines}"


def logs(many: Sequence[Pool]) -> pd.DataFrame:
    """The logs behind section 2, a row a pool: how many, how many repeat themselves, and how often their heads wake."""
    rows = []
    for pool in many:
        traces, woke = [reads.trace for reads in pool.reads], [events(reads.score) for reads in pool.reads]
        cells = {"model": pool.model, "regime": pool.regime, "text": pool.text, "logs": len(traces)}
        cells["flagged"] = sum(reads.flagged for reads in pool.reads)
        cells |= {"pooled": 0 if pool.beside else len(pool.sound), "steps": sum(trace.n_steps for trace in traces)}
        cells["agreement"] = np.mean([trace.manifest["agreement"] for trace in traces])
        cells["repetition"] = np.mean([trace.manifest["repetition"]["rate"] for trace in traces])
        cells["wake_ups"] = sum(int(event.sum()) for event in woke)
        rows.append(cells | {"share_of_heads_that_wake": np.mean([event.any(1).mean() for event in woke])})
    return pd.DataFrame(rows)


def churn(many: Sequence[Pool], data: Mapping) -> pd.DataFrame:
    """Table 4, a row a quantity of `churn_table`. Pools that stand beside come too, and `pooled` says so."""
    rows = []
    for pool in many:
        for row in churn_table(pool.reads, flagged=pool.beside):
            column, score = TABLE_4.get(row["quantity"], (None, None))
            lines = [line for line in data["table4_churn"] if column and score in (None, line["score"])]
            rows.append(_own(pool, row) | _printed(lines, pool, column))
    return pd.DataFrame(rows)


def wakeups(many: Sequence[Pool], data: Mapping, leads: Sequence[int] = LEADS) -> pd.DataFrame:
    """Section 2.2, a row a signal, grading, lead and metric of `wakeup_table`.

    Beside the estimate of precision, recall and F1 stand, in columns of their own, those of as many blind alarms.
    """
    rows = []
    for pool in counted(many):
        table = wakeup_table(pool.reads, leads)
        own = ("signal", "grading", "lead", "metric")
        value = {tuple(row[name] for name in own): row["estimate"] for row in table}
        lines = [dict(line) for line in data["prediction"]["rows"]]
        for row in table:
            at, metric = tuple(row[name] for name in own[:3]), row["metric"]
            if metric not in METRICS and not metric.startswith("f1_above"):
                continue  # a blind alarm's own number: a column here
            place = {"precision": 0, "recall": 1}.get(metric) if at[1:] == ("z", LEAD) else None
            said = [line | {"value": line[at[0]][place]} for line in lines if place is not None]
            blind = {who: value.get((*at, f"{who}_{metric}"), np.nan) for who in CHANCE}
            rows.append(_own(pool, row) | blind | _printed(said, pool, "value"))
    return pd.DataFrame(rows)


def markers(many: Sequence[Pool], data: Mapping, draws: int = DRAWS) -> pd.DataFrame:
    """Do emitted tokens announce wake-ups? A row a quantity of `marker_table`."""
    rows = []
    for pool in counted(many):
        for row in marker_table(pool.reads, draws=draws):
            lines = [line for line in data["prediction"]["markers"] if MARKERS.get(row["quantity"]) in line]
            rows.append(_own(pool, row) | _printed(lines, pool, MARKERS.get(row["quantity"])))
    return pd.DataFrame(rows)


def tokens(many: Sequence[Pool], decode: Callable[[str, int], str]) -> pd.DataFrame:
    """Every token id tested, a row each, the likeliest to announce a wake-up first. decode: (model, id) -> its text."""
    columns = ["model", "regime", "text", "token", "said", "n", "hits", "rate", "p", "p_bonferroni", "p_exact"]
    rows = []
    for pool in counted(many):
        found = find_markers(pool.reads, draws=0)
        for row in found.tested:
            rows.append({**_of(pool), "said": decode(pool.model, row["token"]), **row, "base_rate": found.base_rate,
                         "family": found.family, "n_discovery": found.n_discovery})  # fmt: skip
    return pd.DataFrame(rows, columns=[*columns, "marker", "base_rate", "family", "n_discovery"])


def bursts(many: Sequence[Pool], data: Mapping, draws: int = DRAWS) -> pd.DataFrame:
    """Do heads wake together? A row a quantity of `burst_table`, and `mean_z`: the mean over logs of the z under the
    shuffle (`n_used`: the logs with wake-ups, where there is one)."""
    paper = data["prediction"]["burstiness"]
    said = {("mean_z", SHARES[0]): paper["mean_z"], ("fano", None): float(np.mean(paper["fano"]))}
    said |= {("coarse_recall", share): paper["coarse_trigger"][f"top_{100 * share:.0f}pct_recall"] for share in SHARES}
    rows = []
    for pool in counted(many):
        z = [log["shuffle_z"] for log in per_log(pool.sound, draws=draws)]
        mean_z = {"model": pool.model, "regime": pool.regime, "quantity": "mean_z", "share": SHARES[0]}
        for row in [*burst_table(pool.reads, draws=draws), mean_z | stats.mean(z).row()]:
            value = said.get((row["quantity"], row["share"]))
            lines = [] if value is None else [{**paper, "value": value}]
            rows.append(_own(pool, row) | _printed(lines, pool, "value"))
    return pd.DataFrame(rows)


def prefetching(many: Sequence[Pool], budget: int = BUDGET, ask: int = ASK, first_touch: str = "cold") -> pd.DataFrame:
    """What prefetching on alarms would save, a row a predictor and metric of `prefetch_table`. Not in the paper."""
    options = {"budget": budget, "ask": ask, "first_touch": first_touch}
    tables = [(pool, prefetch_table(pool.reads, **options)) for pool in counted(many)]
    return pd.DataFrame([_own(pool, row) | {"first_touch": first_touch} for pool, table in tables for row in table])


def evidence(table: pd.DataFrame, models: Sequence[str], note: str = "", **cells) -> dict:
    """The row with these cells (`find`) as what `claims.decide` is told: value, lo, hi, n, unit, model, note.

    Without a value, and with a note that says why, where this run has no such row or the quantity is undefined.
    """
    try:
        row = find(table, models, **cells)
    except InputError as error:
        return {"value": None, "note": str(error)}
    if not np.isfinite(row["estimate"]):
        return {"value": None, "model": row["model"], "note": f"{row['regime']}: {row['method']}"}
    lo, hi = (float(row[end]) if np.isfinite(row[end]) else None for end in ("lo", "hi"))
    few = "descriptive: fewer than five prompts" if row["descriptive"] else ""
    said = {"n": int(row["n_prompts"]), "unit": row["unit"], "note": "; ".join(filter(None, [note, few]))}
    return {"value": float(row["estimate"]), "lo": lo, "hi": hi, "model": row["model"], **said}


def marker_evidence(table: pd.DataFrame, models: Sequence[str], regime: str, quantity: str) -> dict:
    """`evidence` on markers; without a value where no id was emitted often enough to be tested.

    Where some were tested and none survived, nothing ever alarms, and F1 is 0.
    """
    tested = evidence(table, models, regime=regime, quantity="tokens_tested")
    if tested["value"] == 0:
        return tested | {"value": None, "note": f"{regime}: no token was emitted often enough to be tested"}
    found = evidence(table, models, regime=regime, quantity=quantity)
    if quantity == "heldout_f1" and tested["value"] and found["value"] is None:
        return tested | {"value": 0.0, "lo": None, "hi": None, "note": "no token survives, so nothing alarms"}
    return found


def find(table: pd.DataFrame, models: Sequence[str] = (), **cells) -> pd.Series:
    """The row of a table with these cells, on the first of `models` that the table has, or else on its first model.

    Pools that stand beside are passed over. Raises InputError if there is no such row.
    """
    kept = table[table["pooled"]]
    for name, value in cells.items():
        kept = kept[kept[name] == value]
    if not len(kept):
        raise InputError(f"this run measured nothing with {', '.join(f'{k} = {v}' for k, v in cells.items())}")
    chosen = next(model for model in [*models, *kept["model"]] if (kept["model"] == model).any())
    return kept[kept["model"] == chosen].iloc[0]


def _of(pool: Pool) -> dict:
    return {"model": pool.model, "regime": pool.regime, "text": pool.text}


def _own(pool: Pool, row: Mapping) -> dict:
    """A row of a measure under a name that says which pool it is of, and that its n counts prompts."""
    rest = {name: value for name, value in row.items() if name not in ("model", "regime", "n")}
    return _of(pool) | {"pooled": not pool.beside} | rest | {"n_prompts": row["n"]}


def _printed(lines: Iterable[Mapping], pool: Pool, column: str | None) -> dict:
    """What the paper printed for this regime: our model's number where it has one, else one a model, in one cell."""
    values = {line["model"]: line[column] for line in lines if line["regime"] == pool.regime}
    values = {pool.model: values[pool.model]} if pool.model in values else values
    return {"published": "; ".join(f"{value:g}" for value in values.values()), "published_on": "; ".join(values)}
