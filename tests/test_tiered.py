"""The tables of the tiers say what was measured, and fail what failed."""

from __future__ import annotations

import numpy as np
import pytest
import section8

from wakekv.errors import InputError
from wakekv.tables import tiered


def test_the_table_has_a_row_a_method_threshold_and_passage():
    found = section8.measured()
    table = tiered.tiers(found)
    assert len(table.numbers) == sum(len(one["rows"]) for one in found)
    assert not table.numbers.duplicated([*tiered.KEY, "seed"]).any()
    for name in ("residency", "fast_bytes", "slow_bytes", "fetches_per_step", "kl_mean", "kl_p95", "kl_last"):
        assert table.numbers[name].notna().all()
    dot = table.numbers[table.numbers["method"] == "dot"].iloc[0]
    assert dot["fetches_per_step"] == 16 / 8 and dot["misses_per_step"] == 5.0
    assert table.numbers.loc[table.numbers["family"] == "codes", "misses_per_step"].isna().all()
    assert not any("_s" in name and "_seconds" in name for name in table.numbers)
    assert len(table.shown) == len(table.numbers) / 3


def judged(found, method="exact"):
    table = tiered.verdict(found).numbers
    return table[(table["family"] == "sentences") & (table["method"] == method) & (table["threshold"] == 0.02)].iloc[0]


def test_what_is_too_far_or_holds_too_much_does_not_hold():
    assert judged(section8.measured())["holds"] and not judged(section8.measured(), "none")["holds"]
    far, full = section8.measured(), section8.measured()
    for found, passage, name, value in ((far, 1, "kl_mean", 0.06), (full, 2, "residency", 0.61)):
        rows = found[passage]["rows"]
        next(row for row in rows if row["method"] == "exact" and row["threshold"] == 0.02)[name] = value
        assert not judged(found)["holds"]
    assert judged(far)["below"] == 2 and judged(far)["worst"] == 0.06 and judged(full)["below"] == 3


def test_what_similarity_said_is_pooled_over_the_times_it_was_asked():
    found = section8.measured(seeds=(0, 1))
    next(row for row in found[1]["rows"] if row["method"] == "cosine")["best"] = 0.8
    table = tiered.told(found).numbers.set_index("method")
    assert set(table.index) == {"cosine", "dot", "key"}
    assert table.loc["cosine", "best"] == 0.8 and table.loc["cosine", "mean_best"] == pytest.approx(0.2)
    assert table.loc["dot", "share_fired"] == 0.5 and table.loc["cosine", "n_fired"] == 0


def test_the_sweep_and_the_sharing_are_means_over_passages():
    found = section8.measured(seeds=(0, 1))
    for row in found[1]["rows"]:
        row["stall_s"] *= 3
    table = tiered.retrieval(found).numbers
    exact = table[(table["method"] == "exact") & (table["threshold"] == 0.02)].iloc[0]
    once = next(row for row in found[0]["rows"] if row["method"] == "exact")["stall_s"]
    assert exact["retrieval_ms"] == pytest.approx(1e3 * 2 * once / 8)
    found[1]["shares"] = (np.array(found[0]["shares"]) + 0.2).tolist()
    assert tiered.sharing(found)["keys"].iloc[0] == pytest.approx(0.4)


def test_nothing_measured_is_refused():
    with pytest.raises(InputError, match="measure at least one passage first"):
        tiered.tiers([])


def test_what_a_star_flags_is_the_mean_over_passages_of_exact_tiers():
    found = section8.measured(seeds=(0, 1))
    found[1]["flagged"] = [row | {"share": row["share"] + 0.2} for row in found[1]["flagged"]]
    less = {"rows": [{"family": "codes"}], "flagged": [{"pooled": "KV head", "threshold": 0.02, "share": 0.0}]}
    share = tiered.flagged([*found, less]).numbers.set_index(["pooled", "threshold"])["share"]
    assert share["KV head", 0.02] == pytest.approx(0.72) and share["model", 0.01] == pytest.approx(0.11)


def test_a_first_token_is_within_150_ms_if_its_95th_percentile_is():
    numbers = tiered.first_token(section8.timed()).numbers.set_index(["arm", "length"])
    assert numbers["within"].to_dict() == {
        ("stock", 100): True, ("reservoir", 100): True, ("stock", 130): False, ("reservoir", 130): False,
        ("stock", 1000): False, ("reservoir", 1000): False,
    }  # fmt: skip
    assert numbers.loc[("stock", 100), "p50_s"] == pytest.approx(0.1095) and numbers["requests"].eq(20).all()
    assert numbers.loc[("stock", 130), "p50_s"] < 0.15 < numbers.loc[("stock", 130), "p95_s"]
    timed = section8.timed()
    assert tiered.soon(tiered.first_token(timed)).endswith(
        "untouched: up to 100 prompt tokens; with the reservoir: up to 100 prompt tokens."
    )
    timed["rows"][0]["first"] = [1.0] * 20  # a longer prompt that is quicker is no reach
    timed["rows"][2]["first"] = [0.1] * 20
    assert "untouched: at no length that was asked" in tiered.soon(tiered.first_token(timed))
    with pytest.raises(InputError, match="run benchmarks/ttft.py"):
        tiered.first_token({"rows": []})


def test_a_result_in_words_says_what_failed():
    judged = tiered.verdict(section8.measured())
    assert tiered.result(judged, "exact") == "0.0140 (50% held, within 0.05 at 60%)"
    assert tiered.result(judged, "none") == "0.2800 (50% held, not within 0.05 at 60%)"
    with pytest.raises(KeyError):
        tiered.result(judged, "codebook")
