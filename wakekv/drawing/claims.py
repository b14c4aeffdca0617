"""The paper's claims in one picture: what it printed, what a run found, and whether the one bears out the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from wakekv.drawing.picture import BLACK, BLUE, GREEN, GREY, ORANGE, Picture, canvas, styled
from wakekv.errors import InputError
from wakekv.tables import Table
from wakekv.verdicts import cells

LOOKS = {  # colour and mark of each verdict; the mark says the same without colour
    "reproduced": {"color": GREEN, "marker": "o"},
    "direction holds": {"color": BLUE, "marker": "o"},
    "not reproduced": {"color": ORANGE, "marker": "X"},
    "not run here": {"color": GREY, "marker": ""},
}
SIGNS = {"reproduced": "✓", "direction holds": "→", "not reproduced": "✗", "not run here": "–"}
TINTS = {"reproduced": "#cdebe0", "direction holds": "#d3e5f2", "not reproduced": "#f7d3bf", "not run here": "#eeeeee"}
_PAPER = {"color": BLACK, "marker": "D", "markerfacecolor": "white", "ls": "", "markersize": 4.5}


@styled
def claims_beside(rows: Sequence[Mapping], stamp: str) -> Picture:
    """Every claim's published value (diamond; a line for a range) beside ours (dot, coloured by verdict) with its
    interval, section by section.

    Left, shares and rates, from 0 to 1, percentages among them; right, everything else, logarithmic. rows: what
    `claims.table` returns. stamp: what the values stand on.
    """
    if not rows:
        raise InputError("no claim to draw")
    table = pd.DataFrame([_numbers(row) for row in rows])
    parts = [part.reset_index(drop=True) for _, part in table.groupby(~table["share"], sort=True)]
    tall = max(len(part) + part["section"].nunique() for part in parts)
    figure = canvas(10.5, 0.9 + 0.17 * tall, stamp)
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts):
        _panel(axes, part)
        share = bool(part["share"].iloc[0])
        axes.set_xlabel("share or rate" if share else "ratio, count or z (logarithmic)")
        if share:
            axes.set_xlim(-0.03, 1.05)
        else:
            axes.set_xscale("symlog", linthresh=0.1, linscale=0.4)
            axes.xaxis.set_major_locator(FixedLocator([0, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axes.set_xlim(-0.02, 1.3 * max(1.0, np.nanmax(part[["published_hi", "ours", "hi"]].to_numpy(float))))
    handles = [Line2D([], [], label="published", **_PAPER)]
    handles += [Line2D([], [], ls="", label=name, **look) for name, look in LOOKS.items() if look["marker"]]
    handles.append(Line2D([], [], ls="", label="no dot: not run here"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    counts = ", ".join(f"{n} {verdict}" for verdict, n in table["verdict"].value_counts().items())
    return Picture(figure, table, f"{len(table)} claims, published and ours: {counts}")


def verdict_table(rows: Sequence[Mapping]) -> Table:
    """Claims as a table, a row each in the colour of its verdict, with its sign. rows: as `claims.table` has them."""
    shown = pd.DataFrame([cells(row) for row in rows])
    shown["verdict"] = [f"{SIGNS[row['verdict']]} {row['verdict']}" for row in rows]
    plain = [{name: str(v) if isinstance(v, list | tuple) else v for name, v in row.items()} for row in rows]
    return Table(pd.DataFrame(plain), shown.astype(str), tuple(TINTS[row["verdict"]] for row in rows))


def _numbers(row: Mapping) -> dict:
    """A claim's numbers as they are drawn; percentages as shares."""
    ends = row["published"] if isinstance(row["published"], list) else [row["published"]]
    printed = [_number(end) for end in ends]
    found = [row["number"], row["lo"], row["hi"]]
    percent = "as % of" in row["quantity"]
    scale = 100.0 if percent else 1.0
    share = percent or (max(printed) <= 1 and not _unbounded(row))
    number, lo, hi = (np.nan if value is None else value / scale for value in found)
    return {"id": row["id"], "section": row["section"], "verdict": row["verdict"], "share": share,
            "published_lo": min(printed) / scale, "published_hi": max(printed) / scale,
            "ours": number, "lo": lo, "hi": hi, "n": row["n"], "model": row["model"]}  # fmt: skip


def _number(value: float | str) -> float:
    """A number, or a fraction such as "17/17"."""
    above, _, below = str(value).partition("/")
    return float(above) / float(below or 1)


def _unbounded(row: Mapping) -> bool:
    """Can its value pass 1? A count, or a ratio of two numbers of which neither is part of the other."""
    fraction_of_counts = isinstance(row["published"], str) and "." not in row["published"]
    return isinstance(row["published"], int) or (" / " in row["quantity"] and not fraction_of_counts)


def _panel(axes, part: pd.DataFrame) -> None:
    names, at, y = [], [], 0
    for section, own in part.groupby("section", sort=False):
        axes.axhline(y, color="0.85", linewidth=0.7)
        axes.text(0.004, y, section, transform=axes.get_yaxis_transform(), fontsize=7.5, va="top")
        for row in own.to_dict("records"):
            y += 1
            look = LOOKS[row["verdict"]]
            axes.plot([row["published_lo"], row["published_hi"]], [y, y], color=BLACK, linewidth=1)
            for end in sorted({row["published_lo"], row["published_hi"]}):
                axes.plot(end, y, **_PAPER)
            if np.isfinite([row["lo"], row["hi"]]).all():
                axes.plot([row["lo"], row["hi"]], [y, y], color=look["color"], linewidth=1.5, alpha=0.7)
            if np.isfinite(row["ours"]):
                axes.plot(row["ours"], y, ls="", markersize=5, zorder=4, **look)
            names.append(row["id"])
            at.append(y)
        y += 1
    axes.set_yticks(at, names)
    axes.set_ylabel("claim")
    axes.set_ylim(y - 0.5, -0.8)
    axes.tick_params(axis="y", length=0, labelsize=6.5)
    axes.grid(axis="x", color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
