"""The tables: every number with its interval as CSV, and the same rounded, to be read, as Markdown."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.files import write
from wakekv.logs.trace import Trace
from wakekv.simulation.study import PAPER, Study, key, studies

RATES = tuple(policy for policy in PAPER if policy != "full")  # full never misses: what it has is a memory
MEMORY = ("reactive", "frozen", "full")  # evict and the optimum hold what reactive holds
LOG = ["model", "regime", "text"]
VARIANTS = {  # what the paper leaves open: options of `demand` and of `curves`; budgets are kept equal in tokens
    "default: cold start, batch steps, pages of 16, k = 64": {},
    "warm start: the prompt's pages are known": {"first_touch": "warm"},
    "each want in turn (sequential)": {"convention": "sequential"},
    "pages of 8 tokens": {"page_tokens": 8},
    "pages of 32 tokens": {"page_tokens": 32},
    "the 32 largest weights only": {"k": 32},
    "KV heads": {"unit": "kv_head"},
}


@dataclass(frozen=True)
class Table:
    """numbers: one a row, for programs. shown: the same for reading, text all of it; a notebook shows this.

    tints: a background a row of what a notebook shows, as CSS has it; empty: none.
    """

    numbers: pd.DataFrame
    shown: pd.DataFrame
    tints: Sequence[str] = ()

    def save(self, folder: Path | str, name: str) -> Table:
        """FOLDER/NAME.csv (the numbers) and NAME.md (as shown), each whole or not at all. Returns itself."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f"{name}.csv", as_csv(self.numbers))
        write(folder / f"{name}.md", self.markdown())
        return self

    def markdown(self) -> str:
        rows = [list(self.shown.columns), ["---"] * self.shown.shape[1], *self.shown.to_numpy().tolist()]
        return "".join("| " + " | ".join(map(str, row)) + " |\n" for row in rows)

    def _repr_html_(self) -> str:
        if self.tints:
            return self._tinted()
        with pd.option_context("display.max_colwidth", None):
            return self.shown.to_html(index=False, border=0)

    def _tinted(self) -> str:
        """As HTML, each row in its tint; the ink is dark on it in a dark page too."""

        def cells(values, tag: str) -> str:
            return "".join(f"<{tag}>{html.escape(str(value))}</{tag}>" for value in values)

        rows = zip(self.tints, self.shown.to_numpy().tolist(), strict=True)
        body = "".join(f'<tr style="background: {tint}; color: #111">{cells(row, "td")}</tr>\n' for tint, row in rows)
        return f"<table><thead><tr>{cells(self.shown.columns, 'th')}</tr></thead>\n<tbody>\n{body}</tbody></table>"


def logs(traces: Sequence[Trace]) -> Table:
    """What was logged, a row a log: prompt, text, agreement, repetition, and how much of its attention the log holds.

    agreement: share of steps at which the model's own choice is the token that was fed next. top-k mass: attention
    weight on the k logged positions, mean over heads and steps; pages: wanted per head and step, mean.
    """
    rows = []
    for trace in traces:
        manifest, mass = trace.manifest, np.asarray(trace.weights, np.float32).sum(-1)
        rows.append(
            dict(zip(LOG, key(trace)))
            | {"seed": manifest["prompt"]["seed"], "prompt": trace.n_prompt, "steps": trace.n_steps}
            | {"agreement": manifest["agreement"], "repetition": manifest["repetition"]["rate"]}
            | {"flagged": manifest["repetition"]["flagged"], f"top-{trace.k} mass": float(mass.mean())}
            | {"heads_steps_above_90": float((mass > 0.9).mean())}
        )
    numbers = pd.DataFrame(rows)
    shares = {name: numbers[name].map("{:.0%}".format) for name in ("agreement", "repetition")}
    shown = numbers.assign(**shares, flagged=numbers["flagged"].map({True: "yes", False: "no"}))
    held = [name for name in numbers if name.startswith("top-")]
    shown[held] = numbers[held].map("{:.3f}".format)
    return Table(numbers, shown.drop(columns="heads_steps_above_90").astype(str))


def sweep(chosen: Sequence[Study], budgets: Sequence[int], data: dict | None = None, *, resamples: int = 2000) -> Table:
    """Table 3's layout: miss rate at each budget, ours above the paper's, regime by regime.

    data: the content of artifact/published.json; None leaves the paper's rows out. Ours carry bootstrap intervals over
    prompts; pages are the mean over decode steps of resident pages, summed over heads.
    """
    ours = [rates(study, study.curves, budgets, resamples) for study in chosen]
    regimes = list(dict.fromkeys(study.regime for study in chosen))
    paper = [published(data, regime, (*RATES, "full")) for regime in regimes] if data else []
    numbers = pd.concat([*ours, *paper], ignore_index=True)
    numbers = numbers.sort_values("regime", key=lambda names: names.map(regimes.index), kind="stable")
    shown = []
    for (source, regime, model, text), log in numbers.groupby(["source", "regime", "model", "text"], sort=False):
        for budget in log["budget"].dropna().unique():
            at = log[(log["budget"] == budget) | log["budget"].isna()].set_index("policy")
            who = f"{model}, {text}, n = {at['n'].max():.0f}" if source == "simulated" else f"{model} (published)"
            row = {"regime": regime, "model": who, "B": f"{budget:.0f}"}
            row |= {policy: _cell(at.loc[policy]) for policy in RATES if policy in at.index}
            memory = {policy: at["mean_pages"].get(policy, np.nan) for policy in MEMORY}
            shown.append(row | {f"pages {p}": "" if np.isnan(m) else f"{m:,.0f}" for p, m in memory.items()})
    return Table(numbers, pd.DataFrame(shown).fillna(""))


def variants(traces: Sequence[Trace], budgets: Sequence[int], policies=("reactive", "evict")) -> Table:
    """How much the choices that the paper leaves open move the miss rate, over the logs of one model and regime.

    A budget is kept in tokens: B pages of 16 are 2 B pages of 8. Intervals are left to `sweep`.
    """
    numbers = []
    for name, options in VARIANTS.items():
        size = options.get("page_tokens", 16)
        at = [max(1, budget * 16 // size) for budget in budgets]
        (study,) = studies(traces, policies, sorted(set(at)), **options)
        for policy in policies:
            curve = study.curve(policy)
            rate = dict(zip(curve.budgets.tolist(), curve.rate))
            same = {"variant": name, "policy": policy, "n": study.n_prompts}
            numbers += [same | {"budget_tokens": b * 16, "miss_rate": rate[a]} for b, a in zip(budgets, at)]
    numbers = pd.DataFrame(numbers)
    wide = numbers.assign(column=numbers["policy"] + ", B = " + (numbers["budget_tokens"] // 16).astype(str))
    shown = wide.pivot(index="variant", columns="column", values="miss_rate").map("{:.3f}".format)
    shown = shown.loc[list(VARIANTS), list(dict.fromkeys(wide["column"]))]
    return Table(numbers, shown.reset_index().rename_axis(columns=None))


def rates(
    study: Study, policies, budgets: Sequence[int] | None = None, resamples: int = stats.RESAMPLES
) -> pd.DataFrame:
    """`Study.rates` of several policies as one table, with columns that say whose they are."""
    tables = [study.rates(policy, budgets, resamples=resamples).assign(policy=policy) for policy in policies]
    own = {"source": "simulated", "model": study.model, "regime": study.regime, "text": study.text}
    return pd.concat(tables, ignore_index=True).assign(**own, head_unit=study.unit)


def published(data: dict, regime: str, policies: Sequence[str]) -> pd.DataFrame:
    """The paper's points of a regime in the same columns; full has a memory only, unpublished memory is nan."""
    rows = []
    for name, sweeps in data["table3_sweep"]["rows"].items():
        model, of = name.split("/")
        held, own = data["realised_memory_pages"].get(name, {}), {"model": model, "regime": of, "text": ""}
        for i, point in enumerate(sweeps if of == regime else []):
            shared = {"reactive": point["reactive_mean_pages"], "evict": point["reactive_mean_pages"]}
            for policy in (p for p in policies if p in point):
                pages = shared.get(policy, held[policy][i] if policy in held else np.nan)
                at = {"budget": point["budget_pages"], "mean_pages": pages, "miss_rate": point[policy]}
                rows.append({**own, "policy": policy, **at})
        if of == regime and "full" in held and "full" in policies:
            rows.append({**own, "policy": "full", "budget": np.nan, "mean_pages": held["full"], "miss_rate": 0.0})
    return pd.DataFrame(rows).assign(source="published", head_unit="head")


def as_csv(table: pd.DataFrame) -> bytes:
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode()


def _cell(row: pd.Series) -> str:
    interval = f" [{row['lo']:.3f}, {row['hi']:.3f}]" if np.isfinite(row.get("lo", np.nan)) else ""
    return f"{row['miss_rate']:.3f}{interval}"
