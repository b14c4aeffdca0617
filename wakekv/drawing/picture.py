"""What every picture shares: one palette, one order of policies, and files that are the same bytes on every run."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from wakekv.files import write
from wakekv.tables import as_csv

FORMATS = {  # and what to leave out of each so that two runs are equal bytes
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
# Okabe and Ito's colours, which colour-blind readers tell apart; markers and dashes say the same without colour.
BLACK, BLUE, ORANGE, GREEN, GREY = "#000000", "#0072B2", "#D55E00", "#009E73", "#8A8A8A"
YELLOW, SKY, PINK = "#E69F00", "#56B4E9", "#CC79A7"
POLICY_STYLE = {  # in the order in which legends, panels and tables name them
    "full": {"color": BLACK, "marker": "D", "linestyle": ":"},
    "frozen": {"color": BLUE, "marker": "s", "linestyle": "-"},
    "reactive": {"color": ORANGE, "marker": "o", "linestyle": "-"},
    "evict": {"color": GREEN, "marker": "X", "linestyle": "-"},
    "snapkv": {"color": PINK, "marker": "v", "linestyle": "-"},
    "rkv": {"color": YELLOW, "marker": "^", "linestyle": "-"},
    "reasonalloc": {"color": SKY, "marker": "P", "linestyle": "-"},
    "optimum": {"color": GREY, "marker": "", "linestyle": "--"},
}
OTHER = {"color": GREY, "marker": ".", "linestyle": "-"}  # a policy without a style of its own
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so the same everywhere
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "image.interpolation": "nearest",
    "savefig.dpi": 200,
    "svg.hashsalt": "wakekv",
    "pdf.fonttype": 42,
}

styled = style.context(["default", STYLE])  # a decorator: the function draws in our style and leaves none behind


@dataclass(frozen=True)
class Picture:
    """A figure, the numbers in it, and a sentence that says what it shows (its alternative text)."""

    figure: Figure
    table: pd.DataFrame
    says: str

    def __post_init__(self):
        """Lay out once, for all formats, and to 1e-5 only: the solver's last digits vary from process to process."""
        with style.context(["default", STYLE]):
            self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")
        for axes in self.figure.axes:
            axes.set_position([round(float(edge), 5) for edge in axes.get_position(original=True).bounds])

    def save(self, folder: Path | str, name: str) -> Picture:
        """FOLDER/NAME.png, .svg, .pdf and the numbers as .csv, each whole or not at all. Returns itself."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in FORMATS:
            write(folder / f"{name}.{kind}", self.render(kind))
        write(folder / f"{name}.csv", as_csv(self.table))
        return self

    def render(self, kind: str) -> bytes:
        """The picture's bytes as one of FORMATS."""
        buffer = io.BytesIO()
        title = {"Title": self.says}
        with style.context(["default", STYLE]):
            FigureCanvasAgg(self.figure)
            self.figure.savefig(buffer, format=kind, metadata={**FORMATS[kind], **title}, facecolor="white")
        return buffer.getvalue()

    def _repr_png_(self) -> tuple[bytes, dict]:
        width, height = self.figure.get_size_inches() * 100
        return self.render("png"), {"width": round(width), "height": round(height)}


def canvas(width: float, height: float, stamp: str) -> Figure:
    """An empty figure (inches) that lays itself out, with a small line of provenance at its foot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    foot = 0.14 / height
    figure.get_layout_engine().set(rect=(0, foot, 1, 1 - foot))
    figure.text(0.995, 0.02 / height, stamp, ha="right", va="bottom", fontsize=6, color="0.45")
    return figure


def policy_style(name: str) -> dict:
    return POLICY_STYLE.get(name, OTHER)


def thousands(axis) -> None:
    """Label an axis in short: 500, 2k, 50k."""
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}"))


def round_numbers(axis, between: bool = True) -> None:
    """Label a logarithmic axis in short at 1, 2 and 5 times the powers of ten; ticks `between` them have no label."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if between:
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_minor_locator(NullLocator())
    thousands(axis)
