"""The serving engine in pictures: speed against how far the text strays, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from wakekv.drawing.labels import Label, place
from wakekv.drawing.picture import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, YELLOW, Picture, canvas, styled
from wakekv.tables import served

COLOUR = dict(zip((*served.PARTS.values(), "the rest of the model"), (YELLOW, ORANGE, BLUE, PINK, "#d9d9d9")))
LOOK = {"stock": (BLACK, "s"), "flexicache": (BLUE, "D"), "destructive": (GREEN, "X")}


@styled
def engine_front(found: Mapping[str, Mapping], published: Sequence[Mapping]) -> Picture:
    """Throughput against quality. Left, as published: tokens a second over stock FlexiCache's, LongBench in % of it.
    Measured here, decoding over the dense engine's by CPU seconds: against the divergence from it, and against answers
    in % of its own, where questions were asked; bars reach over the repeats."""
    ours = served.rates(found)
    ours["answers"] = 100 * ours["points"].astype(float) / ours["full_points"].astype(float)
    figure = canvas(11.5, 3.8, served.about(found))
    left, *rest = figure.subplots(1, 3, width_ratios=(4, 6, 4))
    theirs, labels = pd.DataFrame(published), {}
    reactive = theirs[theirs["config"] == "reactive"]
    left.plot(reactive["longbench_pct"], reactive["speedup"], color=GREY, marker="o", markerfacecolor="white")
    left.plot([100], [1], color=BLUE, marker="D", ls="")
    said = ["FlexiCache, R = 16" if row.config != "reactive" else f"R = {row.rerank}" for row in theirs.itertuples()]
    labels[left] = list(zip(said, theirs["longbench_pct"], theirs["speedup"]))
    left.set(title="published: Mistral-7B, one A30", xlabel="LongBench, % of stock FlexiCache")
    left.set_ylabel("tokens a second over stock FlexiCache's")
    whats = {"kl": "KL from the dense engine, nats a token (left is better)"}
    whats["answers"] = "answers, % of the dense engine's"
    for axes, (x, label) in zip(rest, whats.items()):
        shown = ours.dropna(subset=x)
        at = _beside(shown[x].astype(float))
        labels[axes] = _measured(axes, shown.assign(at=at))
        label += "\n(equal ones side by side)" if (at != shown[x]).any() else ""
        axes.set(title="measured here", xlabel=label)
    rest[0].set_ylabel("decode speed over the dense engine's")
    rest[1].invert_xaxis()  # as in the panel before it, left is better
    inset, named = _stretched(rest[0], ours.dropna(subset="kl").assign(at=lambda rows: rows["kl"]))
    if inset is not None:
        labels[rest[0]], labels[inset] = [], named
    handles = [Line2D([], [], color=ORANGE, marker="o", label="reactive, by R")]
    handles += [Line2D([], [], color=c, marker=m, ls="", label=name) for name, (c, m) in LOOK.items() if name in found]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    place(figure, labels, size=7)
    both = pd.concat([ours.assign(whose="measured"), theirs.assign(whose="published")], ignore_index=True)
    return Picture(figure, both, "Throughput against quality: as published on an A30, and as measured here")


def _measured(axes: Axes, rows: pd.DataFrame) -> list[Label]:
    """The configurations at `at`, with bars; returns what to write beside them."""
    line, labels = _by_rerank(rows), []
    axes.plot(line["at"], line["decode_cpu_vs_stock"], color=ORANGE, linewidth=0.8, alpha=0.5)
    for row in rows.to_dict("records"):
        colour, marker = LOOK.get(row["configuration"], (ORANGE, "o"))
        y, lo, hi = (row[f"decode_cpu_vs_stock{end}"] for end in ("", "_lo", "_hi"))
        bars = {"capsize": 2, "elinewidth": 1}
        axes.errorbar([row["at"]], [y], yerr=[[y - lo], [hi - y]], color=colour, marker=marker, ls="", **bars)
        if row["configuration"].startswith("reactive"):
            labels.append((row["configuration"].replace("reactive-r", "R = "), row["at"], y))
    axes.axhline(1, color=GREY, linewidth=0.7)
    return labels


def _by_rerank(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["configuration"].str.startswith("reactive")]


def _beside(x: pd.Series) -> pd.Series:
    """Equal values a little apart, around where they are."""
    equal = x.round(9)
    place, many = equal.groupby(equal).cumcount(), equal.map(equal.value_counts())
    return x + 0.035 * (x.max() - x.min()) * (place - (many - 1) / 2)


def _stretched(axes: Axes, rows: pd.DataFrame) -> tuple[Axes | None, list[Label]]:
    """Where the reactive ones crowd and there is room: they alone, drawn wider, at the same heights as in `axes`."""
    line, every = _by_rerank(rows)["at"], rows["at"].sort_values().to_numpy()
    span, gap = every[-1] - every[0], np.diff(every)
    if len(line) < 2 or line.max() - line.min() > 0.15 * span or gap.max() < 0.5 * span:
        return None, []
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.15 * (high - low), high + 0.1 * (high - low))
    (low, high), (first, last) = axes.get_ylim(), axes.get_xlim()
    start, end = ((every[gap.argmax() + i] - first) / (last - first) for i in (0, 1))
    inset = axes.inset_axes([start + 0.1, 0.12, end - start - 0.17, 0.8], facecolor="#f7f7f7")
    named = _measured(inset, rows[rows["configuration"].isin(_by_rerank(rows)["configuration"])])
    edge = 0.12 * (line.max() - line.min())
    inset.set(xlim=(line.min() - edge, line.max() + edge), yticks=[])
    inset.set_ylim(low + 0.12 * (high - low), low + 0.92 * (high - low))
    inset.set_title("the same, stretched", fontsize=7)
    inset.spines[:].set(visible=True, color="0.6")
    inset.xaxis.set_major_locator(MaxNLocator(4))
    axes.indicate_inset_zoom(inset, edgecolor="0.6")
    return inset, named


@styled
def engine_parts(found: Mapping[str, Mapping]) -> Picture:
    """Where the time of a decode step goes, a bar a configuration: stacked milliseconds, medians over steps."""
    table = served.parts(found)
    names = list(dict.fromkeys(table["configuration"]))
    figure = canvas(8, 1.0 + 0.32 * len(names), served.about(found))
    axes = figure.subplots()
    for y, name in enumerate(names):
        left = 0.0
        for part, ms in table[table["configuration"] == name][["part", "ms"]].to_numpy():
            axes.barh(y, ms, left=left, color=COLOUR[part], edgecolor="0.6", linewidth=0.4, height=0.7)
            left += ms
        axes.annotate(f"{left:.0f} ms", (left, y), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set(xlabel="milliseconds a decode step", ylabel="configuration")
    handles = [Patch(facecolor=c, edgecolor="0.6", linewidth=0.4, label=part) for part, c in COLOUR.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=7)
    return Picture(figure, table, "Time of a decode step in the serving engine, by what it goes to")


@styled
def engine_growth(found: Mapping[str, Any]) -> Picture:
    """How the gain over the dense engine grows with the context, a panel a number of requests, a line a configuration.
    Solid: the seconds of a step, bars over the repeats; dotted: CPU seconds. found: what benchmarks/growth.py left."""
    rows = served.grown(found)
    together = sorted(rows["requests"].unique())
    about = f"{found['model']}, {found['dtype']}, {found['budget']} pages a KV head; measured on "
    figure = canvas(9, 3.2, f"{about}{found['hardware']['device']}, {found['hardware']['threads']} thread")
    panels = figure.subplots(1, len(together), sharey=True, squeeze=False)[0]
    looks = {"reactive-r1": ORANGE, "reactive-r16": GREEN, "flexicache": BLUE}
    for axes, n in zip(panels, together):
        for name, colour in looks.items():
            part = rows[(rows["requests"] == n) & (rows["configuration"] == name)].sort_values("context")
            spread = [part["decode_vs_stock"] - part["lo"], part["hi"] - part["decode_vs_stock"]]
            x = part["context"] / 1024
            axes.errorbar(x, part["decode_vs_stock"], yerr=spread, color=colour, marker="o", capsize=2)
            axes.plot(x, part["decode_cpu_vs_stock"], color=colour, ls=":")
        axes.axhline(1, color=GREY, linewidth=0.7)
        axes.set_xscale("log", base=2)
        ticks = sorted(rows["context"].unique() / 1024)
        axes.set_xticks(ticks, [f"{tick:.0f}k" for tick in ticks])
        axes.set(title="1 request" if n == 1 else f"{n} requests", xlabel="tokens of context")
    panels[0].set_ylabel("decode speed over the dense engine's")
    handles = [Line2D([], [], color=colour, marker="o", label=name) for name, colour in looks.items()]
    handles.append(Line2D([], [], color="0.3", ls=":", label="by CPU seconds"))
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return Picture(figure, rows, "Gain over the dense engine by context and requests")
