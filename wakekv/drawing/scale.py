"""How simulating grows: time and memory against the sizes of a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import NullLocator

from wakekv.drawing.picture import Picture, canvas, policy_style, round_numbers, styled, thousands
from wakekv.errors import InputError

MEASURED = {"seconds": "CPU seconds", "megabytes": "peak memory, MB"}


@styled
def scale_growth(rows: Sequence[Mapping], about: str) -> Picture:
    """Time and peak memory of simulating, a column a size that grows, with the slope of a line fitted to the logs.

    rows: grows, at, policy, cpu_seconds, peak_bytes, as benchmarks/scale.py measures them; all else stays meanwhile.
    A slope of 1 is in proportion, 0 not at all. The table holds the slopes too.
    """
    table = pd.DataFrame(rows)
    if not len(table) or table.groupby(["grows", "policy"])["at"].nunique().min() < 2:
        raise InputError("growth needs every size at two values or more")
    table = table.assign(seconds=table["cpu_seconds"], megabytes=table["peak_bytes"] / 1e6)
    table = table[["grows", "policy", "at", *MEASURED]]
    grows = list(dict.fromkeys(table["grows"]))
    figure = canvas(2.4 * len(grows), 4.4, about)
    panels = figure.subplots(len(MEASURED), len(grows), sharex="col", sharey="row", squeeze=False)
    for what, row in zip(MEASURED, panels):
        table[f"slope_{what}"] = np.nan
        for axes, size in zip(row, grows):
            for policy, line in table[table["grows"] == size].groupby("policy", sort=False):
                slope = np.polyfit(np.log(line["at"]), np.log(line[what]), 1)[0]
                table.loc[line.index, f"slope_{what}"] = slope
                style = policy_style(policy) | {"label": f"{policy}, slope {round(slope, 2) + 0.0:.2f}"}
                axes.plot(line["at"], line[what], **style)
            axes.set(xscale="log", yscale="log", ylim=(table[what].min() / 1.5, table[what].max() * 2))
            axes.xaxis.set_minor_locator(NullLocator())
            round_numbers(axes.yaxis)
            axes.set_xticks(sorted(set(table.loc[table["grows"] == size, "at"])))
            thousands(axes.xaxis)
            axes.legend(fontsize=6)
        row[0].set_ylabel(MEASURED[what])
    for axes, size in zip(panels[-1], grows):
        axes.set_xlabel(size)
    says = "Time and peak memory of simulating a log as its tokens, steps and heads and the number of budgets grow"
    return Picture(figure, table, says)
