"""The tiers in pictures: what stays where, what that costs in answers, and what merges and codes leave of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator

from wakekv.drawing.picture import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    YELLOW,
    Picture,
    canvas,
    round_numbers,
    styled,
)
from wakekv.tables import tiered

LOOK = {  # of (family, method); the rest are grey points
    ("sentences", "exact"): {"color": ORANGE, "marker": "o"},
    ("sentences", "dot"): {"color": BLUE, "marker": "s"},
    ("sentences", "nearest"): {"color": SKY, "marker": "P"},
    ("sentences", "none"): {"color": GREEN, "marker": "X"},
    ("pages", "reactive"): {"color": YELLOW, "marker": "^", "linestyle": "--"},
}
POINTS = {
    ("sentences", "cosine"): {"color": GREEN, "marker": "+"},
    ("sentences", "centred"): {"color": BLUE, "marker": "D"},
    ("sentences", "key"): {"color": SKY, "marker": "v"},
    ("sentences", "bounds"): {"color": ORANGE, "marker": "D"},
    ("sentences", "exact, in fours"): {"color": ORANGE, "marker": "x"},
    ("sentences", "none, means stand in"): {"color": GREEN, "marker": "P"},
    ("pages", "evict"): {"color": PINK, "marker": "X"},
    ("pages", "gkv, every 16 steps"): {"color": PINK, "marker": "<"},
    ("pages", "gkv-blend, every 16 steps"): {"color": PINK, "marker": ">"},
    ("pages", "spindlekv"): {"color": GREEN, "marker": "<"},
    ("pages", "spindlekv-max"): {"color": GREEN, "marker": ">"},
    ("merging", "codebook"): {"color": GREY, "marker": "h"},
    ("merging", "merged, deep layers evict"): {"color": BLACK, "marker": "h"},
}

LEAST = 5e-4  # the smallest KL that a picture tells apart


@styled
def tier_memory(found: Sequence[Mapping], about: str) -> Picture:
    """Of the first passage, after each token: bytes on the fast tier (sentences and their vectors), by what returns;
    and bytes of each tier under the reactive return."""
    first, table = found[0], []
    figure = canvas(8, 3.2, about)
    every, ours = figure.subplots(1, 2, sharey=True)
    start = first["rows"][0]["n_prompt"] + 1
    for name, tiers in first["memory"].items():
        lines = pd.DataFrame(tiers)
        lines.insert(0, "position", range(start, start + len(lines)))
        table.append(lines.assign(method=name))
        look = {"color": BLACK, "linestyle": ":"} if name == "full" else {"color": LOOK["sentences", name]["color"]}
        label = "full cache" if name == "full" else tiered.says("sentences", name)
        every.plot(lines["position"], (lines["fast"] + lines["index"]) / 1e6, label=label, **look)
    lines = table[-1] if "exact" not in first["memory"] else next(x for x in table if x["method"][0] == "exact")
    parts = {"fast": ORANGE, "slow": GREY}
    for name, colour in parts.items():
        ours.plot(lines["position"], lines[name] / 1e6, color=colour, label=f"{name} tier")
    ours.fill_between(lines["position"], lines["fast"] / 1e6, color=ORANGE, alpha=0.2)
    every.set(title="on the fast tier", xlabel="position, tokens", ylabel="MB", ylim=(0, None))
    ours.set(title="by tier, reactive", xlabel="position, tokens")
    ours.legend(loc="lower left")
    figure.legend(*every.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return Picture(figure, pd.concat(table, ignore_index=True), "Memory by tier and position in the text")


@styled
def tier_answers(found: Sequence[Mapping], about: str) -> Picture:
    """KL to the full cache against what is held: mean over the tokens that count, and over the last 32 of them. Lines
    go through the thresholds of a*; means over passages. In grey what was asked for: below 0.05, at most 60 % held.
    What is nearer than 0.0005 stands there."""
    table = tiered.tiers(found).numbers
    table = (
        table.groupby(tiered.KEY, sort=False, dropna=False)[["residency", "kl_mean", "kl_last"]].mean().reset_index()
    )
    figure = canvas(8, 4.8, about)
    grid = figure.subplots(1, 2, sharey=True, sharex=True)
    for axes, (what, title) in zip(grid, (("kl_mean", "all tokens that count"), ("kl_last", "the last 32"))):
        axes.axhspan(1e-6, tiered.KL, xmax=tiered.RESIDENCY, color="0.93", zorder=0)
        for (family, method), line in table.groupby(["family", "method"], sort=False):
            if family == "codes":
                continue
            look = LOOK.get((family, method)) or {"linestyle": "", **POINTS.get((family, method), {"marker": "."})}
            axes.plot(line["residency"], line[what].clip(lower=LEAST), label=tiered.says(family, method), **look)
        axes.set(title=title, xlabel="held, of the full cache's bytes", xlim=(0, 1), yscale="log")
        round_numbers(axes.yaxis, between=False)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0%}"))
    most = table.loc[table["family"] != "codes", ["kl_mean", "kl_last"]].max(axis=None)
    if (table.loc[table["family"] != "codes", ["kl_mean", "kl_last"]] < LEAST).any(axis=None):
        grid[0].yaxis.set_major_formatter(FuncFormatter(_or_less))
    grid[0].set(ylabel="KL to full, nats a token", ylim=(LEAST / 1.3, 2 * max(most, tiered.KL)))
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=7)
    return Picture(figure, table, "KL to the full cache against the share of its bytes that is held, by method")


def _or_less(y: float, _) -> str:
    """A tick's number; at the floor with what else stands there."""
    return f"{y:g}\nor less" if np.isclose(y, LEAST) else f"{y:g}"


@styled
def tier_sweep(found: Sequence[Mapping], about: str) -> Picture:
    """Perplexity above the full cache's against the time a token waits for what returns; a point a threshold of a*."""
    table = tiered.retrieval(found).numbers
    figure = canvas(5.5, 3.2, about)
    axes = figure.subplots()
    for (family, method), line in table.groupby(["family", "method"], sort=False):
        axes.plot(line["retrieval_ms"], 100 * line["worse"], label=tiered.says(family, method), **LOOK[family, method])
        for row in line.to_dict("records"):
            place = row["retrieval_ms"], 100 * row["worse"]
            axes.annotate(f"{row['threshold']:g}", place, (4, 3), textcoords="offset points", fontsize=6)
    axes.set(xlabel="retrieval, ms a token", ylabel="perplexity, % above full")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_yticks([tick for tick in (-1, 0, 1, 2, 5, 10, 20, 50, 100) if tick >= 0 or (table["worse"] < 0).any()])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside upper center", ncols=2)
    return Picture(figure, table, "Perplexity against retrieval time at thresholds of a* from 0.01 to 0.05")


@styled
def tier_codes(found: Sequence[Mapping], about: str) -> Picture:
    """KL to the full cache by how many bits a number has, and what the codes weigh; mean over passages."""
    table = tiered.tiers(found).numbers
    table = (
        table[table["family"] == "codes"]
        .groupby("method", sort=False)[["residency", "kl_mean", "kl_p95"]]
        .mean()
        .reset_index()
    )
    bits = table["method"].str.split().str[0].astype(int)
    table = table.assign(bits=bits).sort_values(["bits", "method"], ascending=[False, True], ignore_index=True)
    figure = canvas(7.5, 0.9 + 0.28 * len(table), about)
    answers, memory = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    colours = [ORANGE if "promoted" in name else GREY if "," in name else BLUE for name in table["method"]]
    answers.scatter(table["kl_mean"], table.index, color=colours, zorder=3)
    answers.plot([], [], "o", color=BLACK, label="mean")
    answers.plot(table["kl_p95"], table.index, "|", color=BLACK, markersize=9, label="95th percentile")
    answers.axvline(tiered.KL, color="0.6", linewidth=0.8, linestyle=":", label=f"{tiered.KL:g}")
    answers.set(xscale="log", xlabel="KL to full, nats a token", ylabel="codes", yticks=table.index)
    answers.set_yticklabels(table["method"])
    answers.invert_yaxis()
    figure.legend(*answers.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    memory.barh(table.index, 100 * table["residency"], color=colours, height=0.7)
    memory.set(xlabel="held, % of the full cache's bytes", xlim=(0, 100))
    return Picture(figure, table, "KL to the full cache and bytes held by the number of bits")


@styled
def tier_sharing(found: Sequence[Mapping], about: str) -> Picture:
    """How many directions a token SpindleKV's codebook needs, by layer: 1 where nothing is shared."""
    table = tiered.sharing(found)
    figure = canvas(5.5, 2.8, about)
    axes = figure.subplots()
    axes.plot(table["layer"], table["keys"], color=ORANGE, marker="o", label="keys, cosine 0.98")
    axes.plot(table["layer"], table["values"], color=BLUE, marker="s", label="values, cosine 0.95")
    axes.set(xlabel="layer", ylabel="directions a token", ylim=(0, 1.02))
    figure.legend(loc="outside upper center", ncols=2)
    return Picture(figure, table, "Directions a token in the codebooks of each layer")


@styled
def first_token(found: Mapping) -> Picture:
    """Time to the first token in the engine by prompt length, median and 95th percentile, with the reservoir and
    without; and CPU seconds to the second token. found: what benchmarks/ttft.py left."""
    table, where = tiered.first_token(found).numbers, found["hardware"]
    about = f"measured: {found['model']}, {found['asked']['dtype']}, vLLM on one thread of {where['device']}, "
    about += f"{where['cores']} cores, load {table['load'].min():.0f} to {table['load'].max():.0f}"
    figure = canvas(8, 3.4, about)
    wall, cpu = figure.subplots(1, 2, sharex=True)
    for arm, line in table.groupby("arm", sort=False):
        colour, name = BLACK if arm == "stock" else ORANGE, tiered.ENGINES[arm]
        wall.plot(line["length"], 1e3 * line["p95_s"], color=colour, marker="v", label=f"{name}, 95th percentile")
        wall.plot(line["length"], 1e3 * line["p50_s"], color=colour, marker="o", linestyle=":", label=f"{name}, median")
        cpu.plot(line["length"], 1e3 * line["cpu_s"], color=colour, marker="o", label=f"{name}, median")
    wall.axhline(1e3 * tiered.WITHIN_S, color="0.6", linewidth=0.8)
    wall.annotate("150 ms", (table["length"].max(), 1e3 * tiered.WITHIN_S), (0, 3), textcoords="offset points",
                  ha="right", fontsize=7)  # fmt: skip
    for axes, title in ((wall, "to the first token, wall"), (cpu, "to the second token, CPU")):
        axes.set(title=title, xlabel="prompt, tokens", ylabel="ms", xscale="log", yscale="log")
        axes.set_xticks(sorted(table["length"].unique()))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        round_numbers(axes.yaxis, between=False)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    figure.legend(*wall.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return Picture(figure, table, "Time to the first token by prompt length, with the reservoir and without")
