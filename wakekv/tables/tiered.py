"""What the tiers hold, move and cost in answers, as tables: a row a method, threshold and passage of `tiers.trial`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from wakekv import stats
from wakekv.errors import InputError
from wakekv.tables import Table

WITHIN_S = 0.15  # the text's claim of the 95th percentile of the time to a first token
AT, KL, RESIDENCY = 0.02, 0.05, 0.6  # the recipe's threshold and tolerance, and the most that may stay
OURS = "exact"
ENGINES = {"stock": "untouched", "reservoir": "with the reservoir"}
KEY = ["family", "method", "threshold"]
SAYS = {  # of (family, method)
    ("sentences", "none"): "nothing returns",
    ("sentences", "none, means stand in"): "nothing returns, means stand in",
    ("sentences", "cosine"): "cosine above 0.85 (the recipe)",
    ("sentences", "dot"): "best product (SentenceKV)",
    ("sentences", "dot, 8-bit vectors"): "best product, 8-bit vectors",
    ("sentences", "nearest"): "similarity alone (no a*)",
    ("sentences", "centred"): "best centred cosine",
    ("sentences", "key"): "key to key above 0.85",
    ("sentences", "exact"): "reactive",
    ("sentences", "exact, in fours"): "reactive, demoted in fours",
    ("sentences", "bounds"): "reactive, by bounds",
    ("pages", "reactive"): "whole pages, reactive",
    ("pages", "evict"): "whole pages, evict",
    ("pages", "gkv, every 16 steps"): "whole pages, G-KV every 16 steps",
    ("pages", "gkv-blend, every 16 steps"): "whole pages, G-KV as retold",
    ("pages", "spindlekv"): "whole pages, SpindleKV's pyramid",
    ("pages", "spindlekv-max"): "whole pages, SpindleKV as retold",
    ("merging", "codebook"): "codebook of directions (SpindleKV)",
    ("merging", "merged, deep layers evict"): "merge shallow, evict deep (as retold)",
}
BYTES = ("fast", "codes", "index", "tables", "slow", "gone")
ANSWERS = ("kl_mean", "kl_p95", "kl_last", "agreement", "perplexity", "full_perplexity")


def says(family: str, method: str) -> str:
    """A method in words."""
    return SAYS.get((family, method), f"{family}, {method}")


def tiers(found: Sequence[Mapping]) -> Table:
    """numbers: a row a method, threshold and passage (`seed`): residency, bytes by tier, fetches, misses and bytes a
    step, KL to the full cache (mean, 95th percentile, mean of the last 32 tokens; nats), agreement, perplexity.

    misses: (KV head, sentence)s that a step would have weighed by the threshold or more and did not have; for whole
    pages, wanted pages; empty where nothing can be missed.  shown: means over passages.
    """
    rows = _rows(found)
    per_step = rows[["fetched", "fetched_bytes", "probed_bytes", "misses"]].div(rows["n_tokens"], axis=0)
    numbers = rows[[*KEY, "seed", "n_prompt", "n_tokens", "residency", *(f"{name}_bytes" for name in BYTES)]].copy()
    for name, column in zip(("fetches", "fetched_bytes", "probed_bytes", "misses"), per_step):
        numbers[f"{name}_per_step"] = per_step[column]
    numbers.loc[numbers["family"].isin(("codes", "merging")), "misses_per_step"] = np.nan
    numbers[list(ANSWERS)] = rows[list(ANSWERS)]
    shown = []
    for (family, method, threshold), some in numbers.groupby(KEY, sort=False, dropna=False):
        mean = some.mean(numeric_only=True)
        shown.append({
            "method": says(family, method), "a*": "–" if np.isnan(threshold) else f"{threshold:g}",
            "held": f"{mean['residency']:.0%}", "fetches a step": f"{mean['fetches_per_step']:,.1f}",
            "KB a step": f"{mean['fetched_bytes_per_step'] / 1e3:,.0f}",
            "misses a step": "–" if np.isnan(mean["misses_per_step"]) else f"{mean['misses_per_step']:,.1f}",
            "KL": f"{mean['kl_mean']:.4f}", "p95": f"{mean['kl_p95']:.3f}", "last 32": f"{mean['kl_last']:.4f}",
            "top-1": f"{mean['agreement']:.3f}",
            "perplexity": f"{mean['perplexity']:.2f} ({mean['full_perplexity']:.2f})",
        })  # fmt: skip
    return Table(numbers, pd.DataFrame(shown))


def told(found: Sequence[Mapping]) -> Table:
    """What similarity said of the sentences that were away: how large it was at most, and in the mean, whenever a KV
    head asked for the best, and how often that was enough to bring it back."""
    rows = _rows(found)
    rows = rows[(rows["n_asked"] > 0) & (rows["threshold"] == AT)]
    numbers = rows.groupby(KEY, sort=False)[["n_asked", "n_fired", "best_sum", "fetched"]].sum().reset_index()
    numbers["best"] = rows.groupby(KEY, sort=False)["best"].max().to_numpy()
    numbers["mean_best"] = numbers["best_sum"] / numbers["n_asked"]
    numbers["share_fired"] = numbers["n_fired"] / numbers["n_asked"]
    shown = pd.DataFrame({
        "recall": [says(*key) for key in numbers[["family", "method"]].to_numpy()],
        "asked": numbers["n_asked"].map("{:,.0f}".format), "largest": numbers["best"].map("{:.2f}".format),
        "mean of the largest": numbers["mean_best"].map("{:.2f}".format),
        "brought one back": numbers["share_fired"].map("{:.1%}".format),
    })  # fmt: skip
    return Table(numbers.drop(columns="best_sum"), shown)


def verdict(found: Sequence[Mapping]) -> Table:
    """Is the mean KL below 0.05 on every passage, with at most 60 % held? A row a method and threshold;
    kl_mean: over passages, with its interval."""
    rows, numbers = _rows(found), []
    for key, some in rows.groupby(KEY, sort=False, dropna=False):
        row = dict(zip(KEY, key)) | {"passages": len(some), "held": some["residency"].max()}
        row |= {"below": int((some["kl_mean"] < KL).sum()), "worst": some["kl_mean"].max()}
        mean = stats.mean(some["kl_mean"].to_numpy())
        row |= {"last": some["kl_last"].max(), "kl_mean": mean.value, "lo": mean.lo, "hi": mean.hi}
        numbers.append(row | {"holds": row["below"] == len(some) and row["held"] <= RESIDENCY})
    numbers = pd.DataFrame(numbers)
    shown = pd.DataFrame({
        "method": [says(*key) for key in numbers[["family", "method"]].to_numpy()],
        "a*": numbers["threshold"].map(lambda x: "–" if np.isnan(x) else f"{x:g}"),
        "most held": numbers["held"].map("{:.0%}".format), "worst KL": numbers["worst"].map("{:.4f}".format),
        "worst last 32": numbers["last"].map("{:.4f}".format),
        "KL < 0.05": [f"{a} of {b}" for a, b in numbers[["below", "passages"]].to_numpy()],
        "and at most 60 % held": numbers["holds"].map({True: "yes", False: "no"}),
    })  # fmt: skip
    return Table(numbers, shown)


def result(judged: Table, method: str) -> str:
    """In words, what a `verdict` says of a method of sentences at the recipe's threshold. KeyError for another."""
    rows = judged.numbers
    row = rows[(rows["threshold"] == AT) & (rows["family"] == "sentences")].set_index("method").loc[method]
    holds = "within" if row["holds"] else "not within"
    return f"{row['worst']:.4f} ({row['held']:.0%} held, {holds} {KL:g} at {RESIDENCY:.0%})"


def retrieval(found: Sequence[Mapping]) -> Table:
    """The sweep of a*: milliseconds a token spent bringing sentences or pages, perplexity above the full cache's, and
    what was held. Timed: no two runs agree to the digit."""
    rows = _rows(found)
    rows = rows[rows["threshold"].notna() & rows["method"].isin(("none", "dot", "nearest", OURS, "reactive"))]
    numbers = rows.assign(
        retrieval_ms=1e3 * rows["stall_s"] / rows["n_tokens"], worse=rows["perplexity"] / rows["full_perplexity"] - 1
    )
    numbers = numbers.groupby(KEY, sort=False)[["retrieval_ms", "worse", "residency", "kl_mean"]].mean().reset_index()
    shown = pd.DataFrame({
        "method": [says(*key) for key in numbers[["family", "method"]].to_numpy()],
        "a*": numbers["threshold"].map("{:g}".format), "held": numbers["residency"].map("{:.0%}".format),
        "retrieval, ms a token": numbers["retrieval_ms"].map("{:.2f}".format),
        "perplexity, above full": numbers["worse"].map("{:+.1%}".format),
    })  # fmt: skip
    return Table(numbers, shown)


def flagged(found: Sequence[Mapping]) -> Table:
    """Share of the sentences that a* would demote, by what it is pooled over; mean over passages, in the full cache."""
    exact = [one for one in found if one["rows"][0]["family"] == "sentences"]
    rows = pd.DataFrame([row for one in exact for row in one["flagged"]])
    numbers = rows.groupby(["pooled", "threshold"], sort=False)["share"].mean().reset_index()
    shown = numbers.pivot(index="pooled", columns="threshold", values="share").loc[["KV head", "layer", "model"]]
    shown = shown.map("{:.1%}".format).rename(columns=lambda x: f"a* < {x:g}").rename_axis(columns=None).reset_index()
    return Table(numbers, shown.rename(columns={"pooled": "largest weight of any query of a"}))


def first_token(found: Mapping) -> Table:
    """What benchmarks/ttft.py left: by engine and prompt length, seconds to the first token (median, 95th percentile),
    to the second, and CPU seconds (medians)."""
    if not found.get("rows"):
        raise InputError("no time to a first token was measured: run benchmarks/ttft.py first")
    numbers = pd.DataFrame([
        {"arm": row["arm"], "length": row["length"], "requests": len(row["first"]),
         "p50_s": np.median(row["first"]), "p95_s": np.quantile(row["first"], 0.95),
         "second_s": np.median(row["second"]), "cpu_s": np.median(row["cpu"]), "load": np.mean(row["load"])}
        for row in found["rows"]
    ])  # fmt: skip
    numbers["within"] = numbers["p95_s"] <= WITHIN_S
    shown = numbers.assign(
        engine=numbers["arm"].map(ENGINES),
        **{name: (1e3 * numbers[name]).map("{:,.0f}".format) for name in ("p50_s", "p95_s", "second_s", "cpu_s")},
        within=numbers["within"].map({True: "yes", False: "no"}), load=numbers["load"].map("{:.0f}".format),
        **{name: numbers[name].map("{:,}".format) for name in ("length", "requests")},
    )  # fmt: skip
    names = {"length": "prompt, tokens", "engine": "engine", "requests": "requests", "p50_s": "first token p50, ms",
             "p95_s": "p95, ms", "within": "p95 within 150 ms", "second_s": "second token p50, ms",
             "cpu_s": "CPU p50, ms", "load": "load"}  # fmt: skip
    return Table(numbers, shown[list(names)].rename(columns=names))


def soon(first: Table) -> str:
    """In words, up to which prompt length the 95th percentile of a `first_token` is within 150 ms."""
    found = []
    for arm, rows in first.numbers.sort_values("length").groupby("arm", sort=False):
        lengths = rows["length"][rows["within"].cummin()]
        reach = f"up to {lengths.iloc[-1]} prompt tokens" if len(lengths) else "at no length that was asked"
        found.append(f"{ENGINES[arm]}: {reach}")
    return f"In vLLM 95 % of first tokens came within 150 ms: {'; '.join(found)}."


def sharing(found: Sequence[Mapping]) -> pd.DataFrame:
    """layer, keys, values: directions a token in SpindleKV's codebook, mean over passages."""
    shares = np.mean([one["shares"] for one in found if "shares" in one], axis=0)
    return pd.DataFrame({"layer": range(len(shares)), "keys": shares[:, 0], "values": shares[:, 1]})


def _rows(found: Sequence[Mapping]) -> pd.DataFrame:
    if not found:
        raise InputError("no measurement to show: measure at least one passage first")
    return pd.DataFrame([row for one in found for row in one["rows"]]).astype({"threshold": float})
