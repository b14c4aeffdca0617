"""Section 2 as tables to read, our rows above the paper's, and as sentences that its numbers decide."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from wakekv.heads.bursts import NULLS, SHARES
from wakekv.heads.pools import LEAD, MARKERS, TABLE_4, find
from wakekv.heads.wakeups import ENSEMBLE, SIGNALS
from wakekv.stats import ENOUGH
from wakekv.tables import Table

MODEL_OF = "{} (published)"
RELIABLE = 0.5  # precision and recall from which on alarms could be called reliable: right at least as often as not


def logs(numbers: pd.DataFrame) -> Table:
    """What was pooled and what stands beside, from `pools.logs`."""
    shares = {name: numbers[name].map("{:.0%}".format) for name in ("agreement", "repetition")}
    shown = numbers.drop(columns="share_of_heads_that_wake").assign(**shares)
    shown["heads that wake"] = numbers["share_of_heads_that_wake"].map("{:.0%}".format)
    return Table(numbers, shown.rename(columns={"wake_ups": "wake-ups"}).astype(str))


def churn(numbers: pd.DataFrame, data: Mapping) -> Table:
    """Table 4, ours with intervals and beside what random pairs of steps give; from `pools.churn`."""
    titles = {
        "Jaccard, continuous": "adjacent_jaccard_continuous", "(random pairs)": "random_pair_jaccard_continuous",
        "Jaccard, binary": "adjacent_jaccard_binary", "(random pairs) ": "random_pair_jaccard_binary",
        "unstable": "unstable_fraction", "unstable, FlexiCache's reading": "unstable_fraction_first",
        "drift fraction": "drift_fraction", "drifts per 100 steps": "drift_events_per_100_steps",
    }  # fmt: skip
    shown = []
    for _, own in numbers.groupby(["model", "regime", "text"], sort=False):
        of = own.set_index("quantity")
        cells = _who(own, "" if of["pooled"].iloc[0] else ", beside")
        shown.append(cells | {title: _cell(of.loc[quantity]) for title, quantity in titles.items()})
    for line in data["table4_churn"]:
        cells = dict.fromkeys(titles, "")
        for title, quantity in titles.items():
            column, score = TABLE_4.get(quantity, (None, None))
            if column and score in (None, line["score"]):
                cells[title] = _printed(line[column])
        shown.append({"regime": line["regime"], "model": MODEL_OF.format(line["model"]), "n": ""} | cells)
    return Table(numbers, _by_regime(shown, numbers))


def wakeups(numbers: pd.DataFrame, data: Mapping, lead: int = LEAD) -> Table:
    """Precision and recall of alarms at causal z > 2 and one lead, chance in brackets; from `pools.wakeups`."""
    at = numbers[(numbers["lead"] == lead) & numbers["grading"].isin(["z", "baseline"])]
    names, shown = list(at["signal"].unique()), []
    for _, own in at.groupby(["model", "regime"], sort=False):
        cells = _who(own) | {"wake-ups": f"{own['n_events'].iloc[0]}"}
        for metric in ("precision", "recall"):
            of = own[own["metric"] == metric].set_index("signal")
            values = {name: f"{_short(of.at[name, 'estimate'])} ({_short(of.at[name, 'random'])})" for name in names}
            shown.append(cells | {"": metric} | values)
        of = own[own["metric"] == "f1_above_same_heads"].set_index("signal")
        shown.append(cells | {"": "F1 above same heads"} | {name: _cell(of.loc[name]) for name in names})
    for line in data["prediction"]["rows"] if lead == LEAD else []:
        cells = {"regime": line["regime"], "model": MODEL_OF.format(line["model"]), "n": ""}
        cells["wake-ups"] = str(line["events"])
        for place, metric in enumerate(("precision", "recall")):
            values = {name: _printed(line[name][place]) if name in line else "" for name in names}
            shown.append(cells | {"": metric} | values)
    return Table(numbers, _by_regime(shown, numbers))


def markers(numbers: pd.DataFrame, data: Mapping) -> Table:
    """How many token ids survive, how many would by chance, and what they are worth held out; from `pools.markers`."""
    titles = {
        "ids tested": "tokens_tested", "survive": "markers", "by Fisher's test": "markers_exact",
        "by chance": "markers_by_chance", "p of the best": "chance_p", "held-out precision": "heldout_precision",
        "held-out recall": "heldout_recall", "held-out F1": "heldout_f1", "a head wakes next": "base_rate_discovery",
        "detectable from": "detectable_rate_median",
    }  # fmt: skip
    shown = []
    for _, own in numbers.groupby(["model", "regime"], sort=False):
        of = own.set_index("quantity")
        shown.append(_who(own) | {title: _cell(of.loc[quantity]) for title, quantity in titles.items()})
    for line in data["prediction"]["markers"]:
        cells = {"regime": line["regime"], "model": MODEL_OF.format(line["model"]), "n": ""}
        shown.append(cells | {title: _printed(line.get(MARKERS.get(q))) for title, q in titles.items()})
    return Table(numbers, _by_regime(shown, numbers))


def tokens(numbers: pd.DataFrame, best: int = 5) -> Table:
    """The `best` token ids of each pool; from `pools.tokens`."""
    top = numbers.groupby(["model", "regime"], sort=False).head(best)
    shown = pd.DataFrame({"regime": top["regime"], "model": top["model"], "token": top["said"].map(repr)})
    shown["emitted"], shown["then a head woke"] = top["n"], top["hits"]
    shown["rate"], shown["base rate"] = top["rate"].map(_short), top["base_rate"].map(_short)
    shown["p, Bonferroni"] = top["p_bonferroni"].map(_tiny)
    shown["p, Fisher, Bonferroni"] = (top["p_exact"] * top["family"]).clip(upper=1).map(_tiny)
    shown["survives"] = top["marker"].map({True: "yes", False: "no"})
    return Table(numbers, shown.astype(str))


def bursts(numbers: pd.DataFrame, data: Mapping) -> Table:
    """How much of all wake-ups the busiest steps hold, beside both nulls and other triggers; from `pools.bursts`."""
    paper, shown = data["prediction"]["burstiness"], []
    for _, own in numbers.groupby(["model", "regime"], sort=False):
        cells = _who(own) | {"wake-ups": f"{find(own, quantity='fano')['n_events']:.0f}"}
        for share in SHARES:
            row = find(own, quantity="coarse_recall", share=share)
            cells[f"in the busiest {share:.0%}"] = _cell(row)
            cells[f"shuffle, shift ({share:.0%})"] = ", ".join(_short(row[f"{name}_mean"]) for name in NULLS)
            cells[f"p, p ({share:.0%})"] = ", ".join(_tiny(row[f"{name}_p"]) for name in NULLS)
        cells["z, mean of logs"] = _cell(find(own, quantity="mean_z"))
        cells["Fano"] = _cell(find(own, quantity="fano"))
        for who in ("periodic", "signal"):
            cells[f"{who} trigger ({SHARES[0]:.0%})"] = _cell(find(own, quantity=f"{who}_trigger", share=SHARES[0]))
        shown.append(cells)
    cells = dict.fromkeys(shown[0], "") | {"regime": paper["regime"], "n": str(paper["runs"])}
    cells |= {"model": MODEL_OF.format(paper["model"]), "z, mean of logs": _printed(paper["mean_z"])}
    for share in SHARES:
        cells[f"in the busiest {share:.0%}"] = _printed(paper["coarse_trigger"][f"top_{100 * share:.0f}pct_recall"])
    return Table(numbers, _by_regime([*shown, cells], numbers))


def prefetching(numbers: pd.DataFrame) -> Table:
    """Misses saved, also in the steps in which a head wakes, and pages moved in vain; from `pools.prefetching`."""
    titles = {"misses_saved": "misses saved", "misses_saved_at_wakeups": "at wake-ups",
              "pages_in_vain_per_step": "pages in vain, a step", "pages_used": "of moved pages, used"}  # fmt: skip
    names, shown = list(numbers["predictor"].unique()), []
    for _, own in numbers.groupby(["model", "regime"], sort=False):
        for metric, title in titles.items():
            of = own[own["metric"] == metric].set_index("predictor")["estimate"]
            write = "{:,.0f}".format if metric == "pages_in_vain_per_step" else "{:.1%}".format
            values = {name: "" if np.isnan(of[name]) else write(of[name]) for name in names}
            shown.append(_who(own) | {"": title} | values)
    return Table(numbers, _by_regime(shown, numbers))


def foresight(numbers: pd.DataFrame, lead: int = LEAD) -> pd.DataFrame:
    """What the best signal of each model and regime is worth at one lead, a row each; from `pools.wakeups`.

    Best: the largest F1 at causal z > 2, chosen after the fact, which flatters it. verdict, the first that fits:
      nobody wakes             no wake-up to foresee
      reliable                 precision and recall at least one half, at the low ends of their intervals
      tells when               F1 above that of as many alarms on the same heads at random steps
      tells who, not when      F1 above that of as many alarms on any head
      no better than chance    (above: with the whole interval, where there is one)
    ensemble: the ensemble's F1 over the best signal's.
    """
    at = numbers[(numbers["lead"] == lead) & (numbers["grading"] == "z")]
    rows = []
    for (model, regime), own in at.groupby(["model", "regime"], sort=False):
        f1 = own[own["metric"] == "f1"].set_index("signal")["estimate"]
        single = f1[list(SIGNALS)].dropna()
        best = single.idxmax() if len(single) else next(iter(SIGNALS))
        of = own[own["signal"] == best].set_index("metric")
        low = {metric: row["lo"] if np.isfinite(row["lo"]) else row["estimate"] for metric, row in of.iterrows()}
        if not len(single):
            verdict = "nobody wakes"
        elif min(low["precision"], low["recall"]) >= RELIABLE:
            verdict = "reliable"
        elif low["f1_above_same_heads"] > 0 and low["f1_above_random"] > 0:
            verdict = "tells when"
        else:
            verdict = "tells who, not when" if low["f1_above_random"] > 0 else "no better than chance"
        cells = {"model": model, "regime": regime, "n": of["n_prompts"].iloc[0], "wake_ups": of["n_events"].iloc[0]}
        cells |= {"signal": best} | {name: of.at[name, "estimate"] for name in ("precision", "recall", "f1")}
        cells |= {"base_rate": of.at["base_rate", "estimate"], "random_f1": of.at["f1", "random"]}
        cells["ensemble"] = f1[ENSEMBLE] / f1[best] if f1[best] > 0 else np.nan
        rows.append(cells | {"verdict": verdict})
    return pd.DataFrame(rows)


def unreliable(seen: pd.DataFrame) -> dict:
    """Of `foresight`: pairs in which the best signal is not reliable, of those with wake-ups, for `claims.decide`."""
    awake = seen[seen["verdict"] != "nobody wakes"]
    if not len(awake):
        return {"note": "nobody wakes in these logs"}
    models = ", ".join(awake["model"].drop_duplicates())
    count = int((awake["verdict"] != "reliable").sum())
    return {"value": f"{count}/{len(awake)}", "n": int(awake["n"].sum()), "model": models}


def marker_ratio(found: Mapping, seen: pd.DataFrame, regime: str = "cot") -> dict:
    """The markers' held-out F1 (`pools.marker_evidence`) over the best single signal's on that model, for `decide`."""
    if found["value"] is None:
        return dict(found)
    best = seen[(seen["regime"] == regime) & (seen["model"] == found["model"])]["f1"]
    if not len(best) or not best.iloc[0] > 0:
        return {"note": f"{regime}: no signal is ever right, so there is no ratio"}
    ends = {end: None if found.get(end) is None else found[end] / best.iloc[0] for end in ("lo", "hi")}
    note = f"markers {found['value']:.3f}, best signal {best.iloc[0]:.3f}"
    return {**found, **ends, "value": float(found["value"] / best.iloc[0]), "note": note}


def foreseen(seen: pd.DataFrame) -> str:
    """The answer to "could one tell beforehand?", in words, from `foresight`."""
    awake = seen[seen["verdict"] != "nobody wakes"]
    if not len(awake):
        return "These logs cannot tell: nobody wakes in them."
    n = awake["verdict"].value_counts()
    word = "Better than by chance, but not reliably" if n.get("tells when", 0) == len(awake) else "No"
    if n.get("reliable", 0):
        word = "Yes" if n["reliable"] == len(awake) else "In part"
    found = ", ".join(f"{verdict} in {count}" for verdict, count in n.items())
    right, caught = _range(awake["precision"]), _range(awake["recall"])
    return (
        f"{word}. In {len(awake)} pairs of model and regime, the best signal is: {found}.\n"
        f"Of its alarms {right} are right (of blind ones {_range(awake['base_rate'])}), and they catch {caught} of the "
        f"wake-ups.{_caution(awake['n'])}"
    )


def drifting(numbers: pd.DataFrame) -> tuple[int, int, int]:
    """Of `pools.churn`: pairs of model and regime in which more than half of the heads drift, by the interval's low
    end; in which fewer do, by its high end; and all pairs."""
    drift = numbers[numbers["pooled"] & (numbers["quantity"] == "drift_fraction")]
    low, high = (drift[end].fillna(drift["estimate"]) for end in ("lo", "hi"))
    return int((low > 0.5).sum()), int((high < 0.5).sum()), len(drift)


def changed(numbers: pd.DataFrame) -> str:
    """The answer to "do heads change their minds?", in words, from `pools.churn`."""
    of = dict(iter(numbers[numbers["pooled"]].groupby("quantity")))
    drift, unstable = of["drift_fraction"], of["unstable_fraction"]["estimate"]
    most, few, n = drifting(numbers)
    word = "Yes" if most == n else "Most do not" if few == n else "It depends on model and regime"
    pace = "Few do so from one step to the next" if unstable.max() < 0.5 else "Many do so from one step to the next"
    close, far = (_range(of[f"{pair}_jaccard_continuous"]["estimate"]) for pair in ("adjacent", "random_pair"))
    against = f", below it in {few}" if few else ""
    return (
        f"{word}: {_range(drift['estimate'])} of the heads leave the pages they began with (interval above one half in "
        f"{most} of {n} pairs of model and regime{against}).\n{pace} ({_range(unstable)}). Of the heads that read the "
        f"needle, neighbouring steps share {close}, steps drawn at random {far}.{_caution(drift['n_prompts'])}"
    )


def _caution(n_prompts: pd.Series) -> str:
    few = int((n_prompts < ENOUGH).sum())
    return f" Descriptive in {few} of {len(n_prompts)} pairs, with fewer than {ENOUGH} prompts." if few else ""


def _range(values: pd.Series) -> str:
    """From the least to the most, in percent."""
    lo, hi = (f"{100 * end:.2g}" if end < 0.995 else f"{100 * end:.0f}" for end in (values.min(), values.max()))
    return "an unknown share" if "nan" in lo else f"{lo} %" if lo == hi else f"{lo} to {hi} %"


def _who(own: pd.DataFrame, more: str = "") -> dict:
    first = own.iloc[0]
    return {
        "regime": first["regime"],
        "model": f"{first['model']}, {first['text']}{more}",
        "n": f"{own['n_prompts'].max()}",
    }


def _by_regime(rows: list[dict], numbers: pd.DataFrame) -> pd.DataFrame:
    """Rows regime by regime, ours above the paper's, its other regimes last. All text."""
    regimes = list(dict.fromkeys([*numbers["regime"], *(row["regime"] for row in rows)]))
    return pd.DataFrame(sorted(rows, key=lambda row: regimes.index(row["regime"]))).fillna("").astype(str)


def _cell(row: Mapping) -> str:
    interval = f" [{_short(row['lo'])}, {_short(row['hi'])}]" if np.isfinite(row["lo"]) else ""
    return f"{_short(row['estimate'])}{interval}"


def _short(value: float) -> str:
    """Whole numbers whole, others with three decimals; nothing for what is undefined."""
    return "" if np.isnan(value) else f"{value:.0f}" if value == round(value) else f"{value:.3f}"


def _tiny(value: float) -> str:
    """A p-value: two digits."""
    return "" if np.isnan(value) else f"{value:.2g}"


def _printed(value: float | None) -> str:
    """As the paper has it; nothing where it has nothing."""
    return "" if value is None else f"{value:g}"
