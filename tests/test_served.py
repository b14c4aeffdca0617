"""A sweep in numbers: ratios within a repeat, Table 2, predictions, growth."""

from __future__ import annotations

import json

import numpy as np
import pytest
import section7

from wakekv.errors import InputError
from wakekv.logs.demand import Demand
from wakekv.serving import table2
from wakekv.tables import served


@pytest.fixture
def found(tmp_path):
    for name, row in section7.sweep().items():
        (tmp_path / f"{name}.json").write_text(json.dumps(row))
    return served.load(tmp_path)


def test_ratios_are_taken_within_a_repeat_and_table_2_stands_beside_what_was_published(found):
    rates = served.rates(found).set_index("configuration")
    assert rates.loc["reactive-r1", "decode_vs_stock"] == 2 and rates.loc["reactive-r16", "decode_vs_flexi"] == 3
    predicted = {"misses": {"reactive-r1": 7.0, "destructive": 9.0}}
    table = served.table_2(found, table2.published(), predicted).set_index("configuration")
    assert table.loc["reactive-r1", "published"] == 1.34 and table.loc["flexicache", "published"] == 1.0
    assert table.loc["reactive-r1", "decode, predicted"] == table.loc["reactive-r1", "decode, measured"] == 1.5
    assert (
        table.loc["reactive-r1", "misses a step, predicted"] == table.loc["reactive-r1", "misses a step, measured"] == 7
    )
    assert tuple(table.loc["reactive-r1", ["points of 100", "stock's points"]]) == (20.0, 40.0)
    parts = served.parts(found)
    assert parts.groupby("configuration")["ms"].sum()["reactive-r1"] == pytest.approx(3000)
    assert "made-up, 1 thread" in served.about(found)


def test_what_is_printed_has_a_line_a_configuration_and_points_beside_stocks(found):
    lines = served.as_text(found).splitlines()
    assert len(lines) == 5 and lines[0].split()[-2:] == ["points", "full_points"]
    assert lines[3].split()[0] == "reactive-r1" and lines[3].split()[-2:] == ["20.000", "40.000"]


def test_a_folder_without_a_sweep_is_answered_with_the_command(tmp_path):
    with pytest.raises(InputError, match="python -m wakekv system"):
        served.load(tmp_path)
    assert served.find(tmp_path)[1] == "a recorded sweep"


WANTS = Demand.from_lists([[[0, 1], [2, 3], [0, 1], [2, 3]], [[1], [], [2], [3]]], first_touch="warm")


def test_a_thinned_demand_wants_what_the_whole_one_does_at_every_rth_step():
    assert served.thinned(WANTS, 1).page.tolist() == WANTS.page.tolist()
    thin = served.thinned(WANTS, 2)
    assert thin.page.tolist() == [0, 1, 0, 1, 1, 2] and np.diff(thin.ptr, axis=1).tolist() == [
        [2, 0, 2, 0],
        [1, 0, 1, 0],
    ]


def test_the_prediction_counts_what_a_replay_does_and_charges_ranking_by_r_and_waiting_by_the_misses():
    from wakekv.policies import POLICIES
    from wakekv.simulation.replay import replay

    misses = served.predict([WANTS], 2)
    for name, every in served.RANKS.items():
        policy = POLICIES["evict" if name == "destructive" else "reactive"]
        assert misses[name] == replay(served.thinned(WANTS, every), policy, 2).misses[0] / 4
    steps = served.foreseen(misses, {"step_s": 10.0, "score_s": 4.0, "stall_s": 2.0, "misses": 0.5})
    assert steps["reactive-r4"] == pytest.approx(4.0 + 4.0 / 4 + 4.0 * misses["reactive-r4"])
    assert steps["destructive"] == 8.0


def test_growth_is_the_ratio_within_a_repeat_by_context_and_requests():
    grown = served.grown(section7.growth()).set_index(["context", "requests", "configuration"])
    row = grown.loc[(2048, 2, "reactive-r16")]
    assert row["decode_vs_stock"] == row["lo"] == row["hi"] == 2 and row["decode_cpu_vs_stock"] == 4
    assert grown.loc[(1024, 1, "reactive-r1"), "decode_vs_stock"] == 0.5
    assert "stock" not in grown.reset_index()["configuration"].tolist()


def test_pools_are_set_against_reactive_of_the_same_rounds_and_wants():
    def arm(cpu: float, misses: float) -> dict:
        repeat = {"wants": 10.0, "misses": misses, "miss_rate": misses / 10, "fetched_bytes": 2e6, "stall_s": 0.002}
        repeat |= {"resident_bytes": 3e6, "score_s": 0.001, "step_s": 0.5, "step_cpu_s": cpu, "decode_tokens_per_s": 16}
        quality = {"kl_mean": 0.1, "agreement": 0.9}
        return {"quality": quality, "answers": {"mean": 50.0}, "repeats": [repeat, {**repeat, "step_cpu_s": 2 * cpu}]}

    stock = {"step_s": 1.0, "step_cpu_s": 1.0, "decode_tokens_per_s": 8}
    rows = {
        "stock": {"quality": {"kl_mean": 0.0, "agreement": 1.0}, "repeats": [stock]},
        "reactive, R = 1": arm(0.3, 4),
    }
    rows |= {"pooled, layer, R = 1": arm(0.2, 3), "reactive, R = 4": arm(9.0, 4), "room for all": arm(1.0, 0)}
    rows["room for all"]["repeats"] = []
    table = served.pooled({"rows": rows}).set_index("arm")
    one = table.loc["pooled, layer, R = 1"]
    assert one["vs_reactive"] == pytest.approx(1.5) and one["misses"] == 3 and one["fetched_mb"] == 2
    assert one["step_cpu_ms"] == pytest.approx(300) and one["stall_ms"] == 2 and one["resident_mb"] == 3
    assert np.isnan(table.loc["stock", "misses"]) and np.isnan(table.loc["room for all", "step_ms"])
    assert table.loc["reactive, R = 1", "vs_reactive"] == 1 and table.loc["stock", "tokens_per_s"] == 8
