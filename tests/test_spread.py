"""Several processes count what one does, in the order that was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from wakekv.errors import TraceError
from wakekv.logs.trace import open_trace, save_trace
from wakekv.simulation.spread import opened, source, spread
from wakekv.simulation.study import studies


def test_results_come_in_the_order_of_the_items_whatever_the_workers():
    assert spread(abs, iter([-3, 2, -1]), workers=1) == spread(abs, iter([-3, 2, -1]), workers=2) == [3, 2, 1]


def test_a_mapped_trace_is_sent_as_its_folder_and_any_other_as_it_is(tmp_path, make_trace):
    kept = open_trace(save_trace(make_trace(), tmp_path / "log"))
    assert source(kept) == tmp_path / "log" and np.array_equal(opened(source(kept)).positions, kept.positions)
    loose = make_trace()
    assert source(loose) is loose and opened(loose) is loose


def test_a_study_in_two_processes_is_that_of_one(tmp_path, make_trace):
    traces = [open_trace(save_trace(make_trace(k=64, seed=seed), tmp_path / str(seed))) for seed in (0, 1)]
    one, two = (studies(traces, ("reactive", "frozen", "reasonalloc"), slow_budgets=(2, 4), held_out=True, workers=n)
                for n in (1, 2))  # fmt: skip
    assert [study.name for study in one] == [study.name for study in two]
    for name, curves in one[0].curves.items():
        for ours, theirs in zip(curves, two[0].curves[name], strict=True):
            for number in ("budgets", "misses", "missed_weight", "mean_pages", "fetched", "head_misses"):
                assert np.array_equal(getattr(ours, number), getattr(theirs, number)), (name, number)


def test_what_a_process_refuses_is_said_here():
    with pytest.raises(TraceError, match="no trace"):
        spread(opened, ["nowhere", "nowhere"], workers=2)
