"""What heads read: one head close up, and all heads as they sleep and wake."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap, LogNorm
from matplotlib.patches import Rectangle

from wakekv.drawing.picture import BLUE, ORANGE, YELLOW, Picture, canvas, styled
from wakekv.errors import InputError
from wakekv.heads.reads import Reads
from wakekv.heads.wakeups import REST, WAKE, events
from wakekv.logs.trace import PAGE, Trace
from wakekv.simulation.study import machine

READ = LinearSegmentedColormap.from_list("read", ["#c6dbef", "#6baed6", "#2171b5", "#08306b", "#000000"])
SCORE_EDGES = [0, REST, WAKE, 0.4, 0.6, 0.8, 1.0]
SCORE_COLOURS = ["#ffffff", "#d9e6ef", "#9ecae1", "#4a98c9", "#1764ab", "#08306b"]


@styled
def one_head(trace: Trace, head: int, first: int = 0, steps: int = 20, words: Sequence[str] | None = None) -> Picture:
    """One head over `steps` steps: the pages it wants, and the positions of one step (its most needle-bound) that make
    it want them.

    words: what each of the log's steps was fed, to stand under it; without them the step numbers do.
    Raises InputError for a head or steps that the log does not have.
    """
    if not (0 <= head < trace.n_heads and first >= 0 and steps >= 1 and first + steps <= trace.n_steps):
        asked = f"head {head}, steps {first}..{first + steps - 1}"
        raise InputError(f"{asked} is not in this log of {trace.n_heads} heads and {trace.n_steps} steps")
    table = _reads(trace, head, first, steps)
    wants = table.groupby(["step", "page"], as_index=False)["weight"].sum()
    step = first + int(np.argmax(trace.needle_mass[head, first : first + steps]))
    figure = canvas(9, 4.2, f"head {head} of {log_stamp(trace)}")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.3])
    _close_up(left, table[table["step"] == step], wants[wants["step"] == step], step)
    image = _wants(right, wants, trace, first, steps, words)
    right.add_patch(
        Rectangle((step - 0.5, 0), 1, 1, fill=False, edgecolor="black", transform=right.get_xaxis_transform())
    )
    figure.colorbar(image, ax=right, pad=0.03, label="weight read from the page", extend="min")
    says = f"Head {head}: positions read at step {step}, and pages wanted over {steps} steps"
    return Picture(figure, table, says)


@styled
def needle_scores(reads: Reads) -> Picture:
    """Every head over every step by its needle score, asleep to awake, with how many are awake at once below.

    A triangle is a wake-up (section 2.2): above 0.2 after eight steps below 0.05.
    """
    score, trace = reads.score, reads.trace
    woke = events(score)
    figure = canvas(9, 4.6, log_stamp(trace))
    upper, lower = figure.subplots(2, 1, height_ratios=[5, 1], sharex=True)
    norm = BoundaryNorm(SCORE_EDGES, len(SCORE_COLOURS))
    extent = (-0.5, trace.n_steps - 0.5, trace.n_heads - 0.5, -0.5)
    image = upper.imshow(score, cmap=ListedColormap(SCORE_COLOURS), norm=norm, aspect="auto", extent=extent)
    head, step = np.nonzero(woke)
    upper.scatter(step, head, marker=">", s=9, color=ORANGE, linewidths=0, label=f"wake-ups: {len(head)}")
    per_layer = trace.n_heads // trace.n_layers
    upper.set_yticks(np.arange(0, trace.n_heads, per_layer * 5) - 0.5, range(0, trace.n_layers, 5))
    upper.set_ylabel(f"layer ({per_layer} heads each)")
    upper.set_title(f"Needle score of {trace.n_heads} heads over {trace.n_steps} steps")
    upper.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, handletextpad=0.1)
    bar = figure.colorbar(image, ax=upper, pad=0.01, spacing="uniform", ticks=SCORE_EDGES)
    bar.set_label("needle score: asleep below 0.05, awake above 0.2", fontsize=7)
    awake = (score > WAKE).sum(0)
    lower.fill_between(np.arange(trace.n_steps), awake, step="mid", color=BLUE, linewidth=0)
    lower.set(ylabel="heads awake", xlabel="decode step", xlim=(-0.5, trace.n_steps - 0.5), ylim=(0, None))
    heads, steps = np.nonzero(score >= REST)
    table = pd.DataFrame({"head": heads, "step": steps, "score": score[heads, steps], "woke": woke[heads, steps]})
    return Picture(figure, table.round(4), f"Needle score of every head at every step: {len(head)} wake-ups")


def log_stamp(trace: Trace) -> str:
    """Which log it is, and what it was recorded on."""
    manifest = trace.manifest
    prompt, text = manifest["prompt"], manifest["text"]["mode"]
    name = f"{manifest['model']['name']} / {prompt['regime']}, seed {prompt['seed']}"
    return f"one log: {name}, {trace.n_prompt} prompt tokens, {text} text, recorded in {machine(trace)}"


def _reads(trace: Trace, head: int, step: int, steps: int) -> pd.DataFrame:
    """step, position, page, weight of every logged position of one head."""
    positions = np.asarray(trace.positions[head, step : step + steps]).astype(np.int64)
    weights = np.asarray(trace.weights[head, step : step + steps], np.float32)
    row, column = np.nonzero(positions != np.iinfo(trace.positions.dtype).max)
    position = positions[row, column]
    rows = {"step": step + row, "position": position, "page": position // PAGE, "weight": weights[row, column]}
    return pd.DataFrame(rows)


def _close_up(axes, read: pd.DataFrame, wants: pd.DataFrame, step: int) -> None:
    """The neighbourhood of the page most read, apart from the sinks and the local window: positions, pages, wants."""
    inner = wants[(wants["page"] > 2) & (wants["page"] < wants["page"].max() - 2)]
    centre = int((inner if len(inner) else wants).nlargest(1, "weight")["page"].iloc[0])
    shown = range(max(0, centre - 2), max(0, centre - 2) + 5)
    near = read[read["page"].isin(shown)]
    floor, top = 1e-7, 30  # room above 1 for the words; a weight that float16 rounds to 0 stands on the floor
    height = near["weight"].clip(lower=floor)
    for page in shown:
        weight = wants.loc[wants["page"] == page, "weight"].sum()
        if weight:
            axes.add_patch(Rectangle((page * PAGE - 0.5, floor), PAGE, top, color=YELLOW, alpha=0.25, linewidth=0))
        axes.axvline(page * PAGE - 0.5, color="0.8", linewidth=0.6)
        text = f"page {page}\n" + (f"want: {weight:{'.2f' if weight >= 0.01 else '.0e'}}" if weight else "no want")
        axes.text((page + 0.5) * PAGE - 0.5, top * 0.7, text, ha="center", va="top", fontsize=6.5)
    axes.vlines(near["position"], floor, height, color=BLUE, linewidth=1)
    axes.plot(near["position"], height, "o", color=BLUE, markersize=2.5)
    axes.set(xlim=(shown[0] * PAGE - 0.5, (shown[-1] + 1) * PAGE - 0.5), yscale="log", ylim=(floor, top))
    axes.set_yticks([10.0**e for e in range(-7, 1)])
    axes.minorticks_off()
    axes.set_xticks([page * PAGE for page in shown])
    axes.set(xlabel=f"token position ({len(shown)} pages of the context)", ylabel="attention weight")
    axes.set_title(f"Step {step}: {len(read)} positions read, {len(wants)} pages wanted")


def _wants(axes, wants: pd.DataFrame, trace: Trace, first: int, steps: int, words: Sequence[str] | None):
    """Pages by steps, coloured by the weight read; the needle's pages marked at the side."""
    n_pages = -(-(trace.n_prompt + first + steps) // PAGE)
    grid = np.full((n_pages, steps), np.nan)
    grid[wants["page"], wants["step"] - first] = wants["weight"]
    extent = (first - 0.5, first + steps - 0.5, -0.5, n_pages - 0.5)
    image = axes.imshow(grid, origin="lower", aspect="auto", extent=extent, cmap=READ, norm=LogNorm(1e-4, 1))
    for i, (start, stop) in enumerate(trace.needle):
        low, high = start // PAGE - 0.5, -(-stop // PAGE) - 0.5
        side = {"transform": axes.get_yaxis_transform(), "clip_on": False, "color": ORANGE, "linewidth": 0}
        axes.add_patch(Rectangle((1.005, low), 0.015, high - low, label="" if i else "pages of the needle", **side))
    if trace.needle:
        axes.legend(loc="lower right", bbox_to_anchor=(1.02, 1), borderaxespad=0.1, handlelength=0.8)
    axes.set(ylabel=f"page ({PAGE} tokens)", title=f"Steps {first} to {first + steps - 1}: its wants")
    if words is None:
        axes.set_xlabel("decode step")
    else:
        shown = [repr(word.strip() or word)[1:-1] for word in words[first : first + steps]]
        axes.set_xticks(range(first, first + steps), shown, rotation=90, fontsize=6.5)
        axes.set_xlabel("token fed at each step")
    return image
