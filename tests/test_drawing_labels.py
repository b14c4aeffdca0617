"""Labels hide nothing, and pictures say what their axes cut off, what lies on what, and what a loss is."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import section2
import section7
import section9
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from wakekv import figures
from wakekv.drawing import beyond, foresight, labels, serving, tiers
from wakekv.drawing.picture import BLUE, GREY
from wakekv.policies import POLICIES
from wakekv.simulation.study import studies
from wakekv.tables.contests import contest


def boxes(axes) -> dict[str, object]:
    """text -> where it stands, in pixels."""
    axes.figure.draw_without_rendering()
    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    return {text.get_text(): text.get_window_extent(renderer) for text in axes.texts if text.get_text()}


@pytest.fixture
def panel():
    axes = Figure(figsize=(3, 3), layout="constrained").subplots()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    return axes


@pytest.mark.parametrize("slope", [1, -1, 0.2])
def test_a_label_stands_beside_its_point_and_on_no_line(panel, slope):
    panel.plot([0, 10], [5 - 5 * slope, 5 + 5 * slope])
    panel.plot([5], [5], "o")
    labels.place(panel.figure, {panel: [("here", 5, 5)]})
    box = boxes(panel)["here"]
    line = panel.transData.transform(np.linspace((0, 5 - 5 * slope), (10, 5 + 5 * slope), 999))
    assert not any(box.contains(*at) for at in line)
    middle = panel.transData.transform((5, 5))
    assert np.hypot(box.x0 + box.width / 2 - middle[0], box.y0 + box.height / 2 - middle[1]) < 40


def test_labels_of_one_point_do_not_lie_on_each_other_and_stay_in_the_panel(panel):
    panel.plot([10], [10], "o")
    labels.place(panel.figure, {panel: [(name, 10, 10) for name in ("one", "two", "three")]})
    found, frame = boxes(panel), panel.get_window_extent()
    assert len(found) == 3
    for name, box in found.items():
        assert not any(box.overlaps(other) for of, other in found.items() if of != name)
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0


def test_a_label_that_must_stand_far_off_has_a_line_to_its_point(panel):
    panel.plot([5], [5], "o")
    labels.place(panel.figure, {panel: [("near", 5, 5)]})
    assert not [text for text in panel.texts if text.arrow_patch]
    for y in np.linspace(4, 6, 60):
        panel.plot([0, 10], [y, y])
    labels.place(panel.figure, {panel: [("far", 5, 5)]})
    assert len([text for text in panel.texts if text.arrow_patch]) == 1


def test_no_budget_of_figure_2_is_written_over_a_curve(make_trace):
    (study,) = studies([make_trace(k=64, seed=seed) for seed in range(3)])
    axes = figures.miss_curves([study], None, (2, 4, 8), resamples=20).figure.axes[0]
    curves = [line for line in axes.lines if len(line.get_xydata()) > 1 and line.get_linestyle() != "None"]
    ways = [labels._along(axes.transData.transform(line.get_xydata()), 1) for line in curves]
    points = np.concatenate([at for way in ways for at in way])
    found = {text: box for text, box in boxes(axes).items() if text in ("B = 2", "4", "8")}
    assert len(found) == 3
    for box in found.values():
        assert not ((box.x0 < points[:, 0]) & (points[:, 0] < box.x1) & (box.y0 < points[:, 1])
                    & (points[:, 1] < box.y1)).any()  # fmt: skip


def test_blanks_in_a_token_can_be_seen():
    assert [foresight.seen(said) for said in (" ", " Thomas", "\n", ".")] == ["“␣”", "“␣Thomas”", "“\\n”", "“.”"]


def test_every_marker_is_written_out(make_trace):
    many = section2.study(make_trace)
    words = section2.numbers(many)["tokens"].copy()
    regime = words["regime"].iloc[0]
    words.loc[words.index[words["regime"] == regime][:7], ["marker", "hits"]] = True, 1
    axes = figures.token_markers(many, words).figure.axes[0]
    assert {foresight.seen(said) for said in words["said"][words["marker"]]} <= {text.get_text() for text in axes.texts}


def test_a_margin_of_nothing_has_a_dot_and_a_pooled_loss_a_ring(make_trace):
    traces = [make_trace(k=64, seed=seed, n_steps=steps) for seed, steps in ((0, 40), (1, 90))]
    (study,) = studies(traces, {"reactive": POLICIES["reactive"], "snapkv": POLICIES["snapkv"]})
    n = min(trace.n_prompt for trace in traces) // 16 + 2
    picture = figures.margins([study], None, (n,), ("snapkv",), resamples=20)
    table = picture.table.set_index("budget")
    found = contest(study.curves["reactive"], study.curves["snapkv"], "step")
    pooled = {p.budget: p for p in found.pooled.points}
    assert all(table.loc[b, "pooled"] == pooled[b].margin for b in table.index if b in pooled)
    assert pooled[n].verdict == "loss" and table.loc[n, "estimate"] == 0  # it keeps everything: a tie in every prompt
    lines = picture.figure.axes[0].lines
    looks = [(line.get_markersize(), line.get_color(), list(line.get_xdata())) for line in lines]
    assert [at for size, colour, at in looks if (size, colour) == (7, BLUE)] == [[n]]
    assert [at for size, colour, at in looks if (size, colour) == (4, GREY)] == [[n]]


def test_what_the_axis_cuts_off_is_counted_at_its_foot(make_trace, monkeypatch):
    cases = section9.cases(make_trace)
    drawn = figures.gap_closed(cases, within=section9.WITHIN, resamples=20)
    monkeypatch.setattr(beyond, "LOWEST", drawn.table["estimate"].median())
    picture = figures.gap_closed(cases, within=section9.WITHIN, resamples=20)
    below = int((picture.table["estimate"] < beyond.LOWEST).sum())
    marks = sum(
        len(line.get_xdata()) for axes in picture.figure.axes for line in axes.lines if line.get_marker() == "v"
    )
    said = [
        text.get_text() for axes in picture.figure.axes for text in axes.texts if " below, down to " in text.get_text()
    ]
    assert below == marks == sum(int(text.split()[0]) for text in said) > 0
    monkeypatch.setattr(beyond, "LOWEST", drawn.table["estimate"].min() - 1)
    whole = figures.gap_closed(cases, within=section9.WITHIN, resamples=20).figure
    assert not any(" below" in text.get_text() for axes in whole.axes for text in axes.texts)


def test_lines_of_equal_memory_can_be_told_apart_and_are_named_together():
    rows = [
        {"settings": name, "asked": {}, "context": context, "step_s": 0.01, "mean_step_s": 0.01, "step_cpu_s": 0.01,
         "batch": 1, "bytes": held}
        for name in ("dynamic", "static") for context, held in ((100, 1e6), (200, 2e6))
    ]  # fmt: skip
    axes = figures.cost_growth(rows, "made-up, measured").figure.axes[1]
    assert (
        len({line.get_linewidth() for line in axes.lines}) == len({line.get_markersize() for line in axes.lines}) == 2
    )
    assert [text.get_text() for text in axes.texts] == ["dynamic\nstatic"]


def test_the_floor_of_the_answers_says_that_less_stands_there():
    assert tiers._or_less(tiers.LEAST, None) == "0.0005\nor less" and tiers._or_less(0.001, None) == "0.001"


def test_what_crowds_in_the_front_is_drawn_again_wider():
    rows = pd.DataFrame(
        {"configuration": ["stock", "reactive-r1", "reactive-r2", "destructive"], "at": [0, 0.2, 0.21, 1.4]}
    )
    for end in ("", "_lo", "_hi"):
        rows[f"decode_cpu_vs_stock{end}"] = [1, 1.1, 1.2, 1.0]
    axes = Figure().subplots()
    inset, named = serving._stretched(axes, rows)
    assert inset is not None and [text for text, *_ in named] == ["R = 1", "R = 2"]
    assert inset.get_xlim()[0] < 0.2 < 0.21 < inset.get_xlim()[1] < 0.25
    apart = rows.assign(at=[0, 0.5, 1.0, 1.4])
    assert serving._stretched(axes, apart) == (None, [])
    equal = serving._beside(pd.Series([0.0, 100.0, 0.0]))
    assert equal[1] == 100 and equal[0] == -equal[2] != 0


def test_the_front_has_a_label_for_every_interval():
    figure = section7.examples()["engine_front"]().figure
    said = [text.get_text() for axes in figure.axes for one in (axes, *axes.child_axes) for text in one.texts]
    for name in section7.sweep():
        if name.startswith("reactive-r"):
            assert name.replace("reactive-r", "R = ") in said
