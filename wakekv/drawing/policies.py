"""What policies cost: Figure 2 (memory against misses) and where in the model the misses fall."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.lines import Line2D

from wakekv import tables
from wakekv.drawing.labels import SIDES, Label, place
from wakekv.drawing.picture import Picture, canvas, policy_style, round_numbers, styled
from wakekv.errors import InputError
from wakekv.simulation.study import PAPER, Study

BUDGETS = (8, 16, 32, 64)  # the paper's
BELOW = sorted(SIDES, key=lambda side: (side[1] == "above", side[0] == "right"))  # of a falling curve: left, and below


@styled
def miss_curves(
    studies: Sequence[Study],
    published: dict | None = None,
    budgets: Sequence[int] = BUDGETS,
    policies: Sequence[str] = PAPER,
    resamples: int = 1000,
) -> Picture:
    """Figure 2: miss rate against memory, a row a regime. Ours at every budget; the paper's four points in grey panels.

    published: the content of artifact/published.json; None leaves its panels out. budgets: marked on the lines.
    Bands are bootstrap intervals over prompts, so there is none where there is one prompt.
    """
    if not studies:
        raise InputError("no study to draw: record logs of at least one model and regime")
    rows = list(dict.fromkeys(study.regime for study in studies))
    ours = {regime: [s for s in studies if s.regime == regime] for regime in rows}
    theirs = {regime: list(_paper(published, regime, policies)) for regime in rows}
    n_ours, n_theirs = (max(len(part[regime]) for regime in rows) for part in (ours, theirs))
    shape = (len(rows), n_ours + n_theirs)
    height, width = shape if shape[1] > 1 else shape[::-1]  # one panel a regime: side by side
    figure = canvas(max(7.5, 2.5 * width), 0.9 + 2.1 * height, stamp(studies))
    grid = figure.subplots(height, width, squeeze=False, sharey=True)
    for axes in grid.flat:
        axes.set_visible(False)
    panels = grid if shape[1] > 1 else grid.T
    shown, labels = [], {}
    for i, regime in enumerate(rows):
        for j, study in enumerate(ours[regime]):
            table, labels[panels[i, j]] = _ours(panels[i, j], study, policies, budgets, resamples)
            shown.append(table)
        for j, points in enumerate(theirs[regime]):
            shown.append(points)
            _published(panels[i, n_ours + j], points)
    grid[0, 0].set_ylim(-0.02, None)
    grid[0, 0].text(0.02, 0.03, "↙ better", transform=grid[0, 0].transAxes, fontsize=7, color="0.3")
    for axes in grid[:, 0]:
        axes.set_ylabel("miss rate")
    for column in grid.T:
        [axes for axes in column if axes.get_visible()][-1].set_xlabel("resident pages, all heads (mean)")
    _legend(figure, policies)
    place(figure, labels, sides=BELOW)
    return Picture(figure, pd.concat(shown, ignore_index=True), "Miss rate against memory of " + ", ".join(policies))


@styled
def miss_map(
    study: Study, budget: int, policies: Sequence[str] = ("frozen", "reactive", "evict", "optimum")
) -> Picture:
    """Where the misses fall: miss rate of each head (layers down, heads across) at one budget, a panel a policy."""
    n_layers = int(study.layer.max()) + 1
    rates = {policy: study.head_rates(policy, budget).reshape(n_layers, -1) for policy in policies}
    figure = canvas(9, 4.2, stamp([study]))
    panels = figure.subplots(1, len(policies), sharey=True, squeeze=False)[0]
    colours = sns.color_palette("rocket_r", as_cmap=True)
    for axes, (policy, rate) in zip(panels, rates.items()):
        image = axes.imshow(rate, cmap=colours, vmin=0, vmax=1, aspect="auto")
        point = study.curve(policy).at([budget])
        axes.set_title(f"{policy}\n{point.rate[0]:.2f} with {point.memory[0]:,.0f} pages")
        axes.set_xlabel("head of the layer" if study.unit == "head" else "KV head of the layer")
        axes.set_xticks(range(rate.shape[1]))
        axes.tick_params(length=0)
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, pad=0.01, label=f"miss rate at B = {budget} (lower is better)")
    table = pd.concat([_long(policy, rate) for policy, rate in rates.items()], ignore_index=True)
    return Picture(figure, table, f"Miss rate of each head at {budget} pages a head, by policy")


def stamp(studies: Sequence[Study]) -> str:
    """What was simulated, from how many prompts, recorded on what."""
    n = sorted({study.n_prompts for study in studies})
    many = f"{n[0]}" if len(n) == 1 else f"{n[0]} to {n[-1]}"
    plural = "prompt" if n == [1] else "prompts"
    each = " each" if len(studies) > 1 else ""
    models, texts, machines, units = (
        ", ".join(dict.fromkeys(getattr(study, what) for study in studies))
        for what in ("model", "text", "machine", "unit")
    )
    unit = {"head": "per query head", "kv_head": "per KV head"}.get(units, units)
    return (
        f"simulated from logs of {many} {plural}{each}: {models}, {texts} text, recorded in {machines}; budgets {unit}"
    )


def _ours(axes, study: Study, policies, budgets, resamples) -> tuple[pd.DataFrame, list[Label]]:
    """One study's panel: every budget as a line, its interval as a band, some budgets marked; and labels for those."""
    axes.set_visible(True)
    table = tables.rates(study, policies, None, resamples).drop(columns=["unit", "method"])
    for policy, curve in table.groupby("policy", sort=False):
        look = policy_style(policy)
        marked = curve[curve["budget"].isin(budgets)]
        if policy == "full":  # one point: it holds the same at every budget
            marked = curve.iloc[:1]
        else:
            axes.plot(curve["mean_pages"], curve["miss_rate"], color=look["color"], linestyle=look["linestyle"])
            axes.fill_between(
                curve["mean_pages"], curve["lo"], curve["hi"], color=look["color"], alpha=0.18, linewidth=0
            )
        if look["marker"]:
            axes.plot(marked["mean_pages"], marked["miss_rate"], color=look["color"], marker=look["marker"], ls="")
    reactive = study.curve("reactive" if "reactive" in policies else policies[-1])
    smallest = reactive.at([max(1, min(budgets) // 2)]).memory[0]
    _axis(axes, smallest, study.curve("full").memory[0] if "full" in policies else reactive.memory[-1])
    marked = reactive.at(budgets)
    named = [f"B = {budget}" if budget == min(budgets) else f"{budget}" for budget in marked.budgets]
    axes.set_title(f"{study.name}, n = {study.n_prompts}")
    return table, list(zip(named, marked.memory, marked.rate))


def _published(axes, points: pd.DataFrame) -> None:
    """One of the paper's combinations: its four points a policy, dashed, on grey. Unpublished memory: no line."""
    axes.set_visible(True)
    axes.set_facecolor("#ececec")
    drawn = points.dropna(subset="mean_pages")
    for policy, curve in drawn.groupby("policy", sort=False):
        look = policy_style(policy) | {"linestyle": "--"}
        axes.plot(curve["mean_pages"], curve["miss_rate"], markerfacecolor="white", linewidth=1, **look)
    _axis(axes, drawn["mean_pages"].min() / 2, drawn["mean_pages"].max())
    axes.set_title(f"published: {points['model'].iloc[0]} / {points['regime'].iloc[0]}", color="0.3")


def _axis(axes, smallest: float, largest: float) -> None:
    axes.set_xscale("log")
    axes.set_xlim(smallest, largest * 1.25)
    round_numbers(axes.xaxis)


def _legend(figure, policies) -> None:
    names = {"optimum": "optimum (knows the future)", "full": "full (keeps all)"}
    looks = {policy: policy_style(policy) | ({"linestyle": ""} if policy == "full" else {}) for policy in policies}
    handles = [Line2D([], [], label=names.get(policy, policy), **look) for policy, look in looks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(policies))


def _paper(data: dict | None, regime: str, policies) -> list[pd.DataFrame]:
    """The paper's points of a regime, a table a combination."""
    if data is None:
        return []
    return [points for _, points in tables.published(data, regime, policies).groupby("model", sort=False)]


def _long(policy: str, rate: np.ndarray) -> pd.DataFrame:
    layer, head = np.indices(rate.shape)
    return pd.DataFrame({"policy": policy, "layer": layer.ravel(), "head": head.ravel(), "miss_rate": rate.ravel()})
