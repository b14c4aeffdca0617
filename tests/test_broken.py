"""Claims that must turn red: something upstream is broken, and the verdict of the claim it carries changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import section2
from micro import micro

from wakekv.heads import pools, wakeups
from wakekv.policies import POLICIES
from wakekv.reproduction import claims
from wakekv.reproduction.claims import decide, published
from wakekv.simulation.simulate import curves
from wakekv.tables import contests, measured


def drifting(traces) -> str:
    """The verdict on "heads change", as notebook 02 comes to it."""
    most, _, n = measured.drifting(pools.churn(pools.pools(traces), published()))
    return decide("heads-change", f"{most}/{n}").verdict


def test_heads_that_always_read_the_same_pages_do_not_change(make_trace):
    still = []
    for trace in (section2.log(make_trace, seed=seed) for seed in range(3)):
        first = np.broadcast_to(np.asarray(trace.positions)[:, :1], trace.positions.shape)
        still.append(replace(trace, positions=first.copy()))
    assert drifting(still) == "not reproduced"


def unreliable(traces) -> str:
    """The verdict on "signals do not anticipate", as notebook 03 comes to it."""
    seen = measured.foresight(pools.wakeups(pools.pools(traces), published(), leads=(pools.LEAD,)))
    return decide("signals-unreliable", **measured.unreliable(seen)).verdict


def test_a_signal_that_knows_the_future_is_reliable(make_trace, monkeypatch):
    traces = [section2.log(make_trace, seed=seed) for seed in range(3)]
    assert unreliable(traces) == "direction holds"

    def clairvoyant(reads):
        soon = np.zeros(reads.score.shape)
        for head, step in np.argwhere(wakeups.events(reads.score)):
            soon[head, max(0, step - 1)] = 1
        return soon + 1e-6 * np.random.default_rng(0).random(soon.shape)

    monkeypatch.setitem(wakeups.SIGNALS, "entropy_trend", clairvoyant)
    assert unreliable(traces) == "not reproduced"


def fetches(policy) -> str:
    """The verdict on "one fetch a miss", as notebook 04 comes to it."""
    found = curves(micro(), policy)
    return decide("one-fetch-a-miss", float(found.fetched.sum() / found.misses.sum())).verdict


def test_a_reactive_that_destroys_fetches_nothing():
    assert fetches(POLICIES["reactive"]) == "direction holds"
    assert fetches(POLICIES["reactive"].but(reversible=False)) == "not reproduced"


def test_a_dynamic_and_reversible_system_in_the_survey_contradicts_the_paper(monkeypatch, make_trace):
    from wakekv.simulation.study import studies

    chosen = studies([make_trace(k=64)], contests.SEVEN, slow_budgets=(2, 4))
    assert decide("none-both", **contests.claim_values(chosen, (2, 4))["none-both"]).verdict == "direction holds"
    monkeypatch.setattr(type(POLICIES["arkvale"]), "roles", "decode")
    assert decide("none-both", **contests.claim_values(chosen, (2, 4))["none-both"]).verdict == "not reproduced"


@pytest.mark.parametrize("other", ["frozen", "evict"])
def test_a_comparator_that_never_misses_turns_the_count_red(other):
    wants = micro()
    found = {name: [curves(wants, POLICIES[name])] for name in (*contests.SEVEN, "optimum")}
    found[other] = [replace(found[other][0], misses=np.zeros_like(found[other][0].misses))]
    per_head = wants.ptr[:, -1] - wants.ptr[:, 0]
    study = contests.Study("made-up", "cot", "scripted", "", "head", wants.layer, per_head, found, wants.n_pages)
    claim = {"frozen": "frozen-17-of-17", "evict": "evict-19-of-20"}[other]
    values = contests.claim_values([study], (2, 4, 8, 16))
    assert decide(claim, **values[claim]).verdict == "not reproduced"
    assert claims.load_claims()[claim].expected == "holds"
