"""The serving engine in pictures: speed against how far the text strays, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

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
    figure = canvas(10, 3.6, served.about(found))
    left, *rest = figure.subplots(1, 3)
    theirs = pd.DataFrame(published)
    reactive = theirs[theirs["config"] == "reactive"]
    left.plot(reactive["longbench_pct"], reactive["speedup"], color=GREY, marker="o", markerfacecolor="white")
    left.plot([100], [1], color=BLUE, marker="D", ls="")
    for row in theirs.itertuples():
        said = "FlexiCache, R = 16" if row.config != "reactive" else f"R = {row.rerank}"
        _label(left, said, row.longbench_pct, row.speedup, row.config != "reactive")
    left.set(title="published: Mistral-7B, one A30", xlabel="LongBench, % of stock FlexiCache")
    left.set_ylabel("tokens a second over stock FlexiCache's")
    labels = {"kl": "KL from the dense engine, nats a token (left is better)"}
    labels["answers"] = "answers, % of the dense engine's"
    for axes, (x, label) in zip(rest, labels.items()):
        _measured(axes, ours.dropna(subset=x), x)
        axes.set(title="measured here", xlabel=label)
    rest[0].set_ylabel("decode speed over the dense engine's")
    rest[1].invert_xaxis()  # as in the panel before it, left is better
    handles = [Line2D([], [], color=ORANGE, marker="o", label="reactive, by R")]
    handles += [Line2D([], [], color=c, marker=m, ls="", label=name) for name, (c, m) in LOOK.items() if name in found]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    both = pd.concat([ours.assign(whose="measured"), theirs.assign(whose="published")], ignore_index=True)
    return Picture(figure, both, "Throughput against quality: as published on an A30, and as measured here")


def _measured(axes: Axes, rows: pd.DataFrame, x: str) -> None:
    line = rows[rows["configuration"].str.startswith("reactive")]
    axes.plot(line[x], line["decode_cpu_vs_stock"], color=ORANGE, linewidth=1)
    for i, row in enumerate(rows.to_dict("records")):
        colour, marker = LOOK.get(row["configuration"], (ORANGE, "o"))
        y, lo, hi = (row[f"decode_cpu_vs_stock{end}"] for end in ("", "_lo", "_hi"))
        axes.errorbar([row[x]], [y], yerr=[[y - lo], [hi - y]], color=colour, marker=marker, ls="", capsize=2)
        if row["configuration"].startswith("reactive"):
            _label(axes, row["configuration"].replace("reactive-r", "R = "), row[x], y, bool(i % 2))
    axes.axhline(1, color=GREY, linewidth=0.7)


def _label(axes: Axes, said: str, x: float, y: float, before: bool) -> None:
    side = {"xytext": (-5, 3), "ha": "right"} if before else {"xytext": (5, 3)}
    axes.annotate(said, (x, y), textcoords="offset points", fontsize=7, **side)


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
