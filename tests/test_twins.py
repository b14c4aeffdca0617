"""Reversible against destructive as tables: what is said follows from the rows, and can come out either way."""

from __future__ import annotations

import numpy as np
import pytest
import section6

from wakekv.errors import InputError
from wakekv.tables import twins


def test_reversible_is_called_better_where_it_is_and_only_there():
    found = twins.verdicts(section6.contest(), resamples=50)
    assert found["lower"].all() and set(found["against"]) == set(twins.OTHERS)
    assert (found["lo"] > 0).all() and (found["won"] == found["n"]).all()
    assert found[found["regime"] == twins.ALL]["n"].tolist() == [6] * 6
    worse = twins.verdicts(section6.contest(better=2.0), resamples=50)
    assert not worse["lower"].any() and (worse["won"] == 0).all() and (worse["hi"] < 0).all()


def test_one_budget_that_speaks_against_it_is_shown():
    rows = section6.contest()
    for row in rows:
        row["kl_mean"] *= 10 if row["budget"] == 8 and row["arm"] == "reversible" else 1
    found = twins.verdicts(rows, resamples=50)
    assert found.groupby("budget")["lower"].agg(set).to_dict() == {4: {True}, 8: {False}}


def test_a_number_is_the_mean_over_prompts_and_its_interval_resamples_prompts():
    rows = section6.contest()
    numbers = twins.at_equal_memory(rows, resamples=50).numbers
    one = numbers[(numbers["regime"] == "niah") & (numbers["budget"] == 8) & (numbers["what"] == "kl_mean")]
    for row in one.to_dict("records"):
        mine = [r["kl_mean"] for r in rows if (r["regime"], r["budget"], r["arm"]) == ("niah", 8, row["arm"])]
        assert row["estimate"] == pytest.approx(np.mean(mine)) and row["n"] == 3 and row["descriptive"]
        assert min(mine) - 1e-9 <= row["lo"] <= row["estimate"] <= row["hi"] <= max(mine) + 1e-9


def test_nothing_timed_stands_among_what_is_counted():
    rows = section6.contest()
    slower = [row | {"stall_s": 9 * row["stall_s"], "score_s": 1.0} for row in rows]
    tables = [twins.at_equal_memory(some, resamples=20) for some in (rows, slower)]
    assert tables[0].numbers.equals(tables[1].numbers) and tables[0].shown.equals(tables[1].shown)
    waits = [twins.stalls(some, resamples=20).numbers for some in (rows, slower)]
    at = waits[0]["what"] == "stall_ms_per_step"
    np.testing.assert_allclose(waits[1].loc[at, "estimate"], 9 * waits[0].loc[at, "estimate"])


def test_the_parts_of_a_step_add_up_to_it():
    table = twins.split(section6.timings())
    total = table.groupby("settings", sort=False)["ms"].sum()
    assert list(total.index) == ["dynamic", "reversible, exact", "reversible, lagged, R = 4"]
    np.testing.assert_allclose(total, 2 * 12.0)  # two contexts
    assert set(table[table["settings"] == "dynamic"]["part"]) == {"whole_s"}


def test_needles_are_counted_cell_by_cell():
    table = twins.needles(section6.needles())
    cells = table.fillna({"budget": 0}).set_index(["arm", "budget", "length", "depth"])["found"]
    assert cells["full", 0, 100, 0.1] == 1 and cells["reversible", 8, 200, 0.9] == 1
    assert cells["destructive, wider", 8, 200, 0.9] == 0 and len(cells) == 20


def test_no_measurement_is_said():
    with pytest.raises(InputError, match="no measurement"):
        twins.verdicts([])
