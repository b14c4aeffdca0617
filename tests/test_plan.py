"""A plan counts what a real cache moves, keeps to its limits, and says in a line what it cannot do."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from wakekv.__main__ import main
from wakekv.cache import ReversibleCache
from wakekv.costs import links, plan
from wakekv.costs.links import LINKS, Link
from wakekv.errors import InputError
from wakekv.logs.demand import demand
from wakekv.logs.trace import save_trace
from wakekv.policies import POLICIES
from wakekv.simulation.replay import replay
from wakekv.simulation.simulate import curves

SLOW = Link("slow", 1e6, 1e-3, "made up")


@pytest.fixture(scope="module")
def traces(make_trace):
    return [make_trace(k=16, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def made(traces):
    return plan.plan(traces, SLOW, 0.05, max_slowdown=1.0, resamples=50)


def row(made, policy, budget):
    return made.rows.set_index(["policy", "budget"]).loc[(policy, budget)]


def test_what_is_planned_is_what_the_replay_counts(traces, made):
    page = 2 * 16 * 8 * 4  # keys and values, tokens, head_dim, float32
    wants = [demand(trace, "kv_head", "warm") for trace in traces]
    for name in plan.DEFAULT:
        found = [replay(one, POLICIES[name], 5) for one in wants]
        at, steps = row(made, name, 5), sum(one.n_steps for one in found)
        assert at["fetches"] == pytest.approx(sum(one.fetched[0] for one in found) / steps)
        assert at["fetched_bytes"] == pytest.approx(at["fetches"] * page)
        assert at["memory_bytes"] == pytest.approx(np.mean([one.mean_pages[0] for one in found]) * page)
        lost = sum(one.missed_weight[0] for one in found) / sum(one.weight for one in found)
        assert at["at_risk"] == pytest.approx(lost if name == "evict" else 0.0)
    assert row(made, "evict", 5)["stall_ms"] == 0 and row(made, "reactive", 5)["stall_ms"] > 0


def test_stall_is_bytes_over_bandwidth_and_a_latency_for_each_layer_that_waits(traces):
    wants = demand(traces[0], "kv_head", "warm")
    alone = replace(traces[0], manifest=traces[0].manifest)
    for link, expected in (
        (Link("wide", 1e30, 1e-3, ""), lambda found, waits: 1e-3 * waits),
        (Link("instant", 1e6, 0.0, ""), lambda found, waits: found.fetched[0] * 1024 / 1e6),
    ):
        at = row(plan.plan([alone], link, 0.05, resamples=10), "reactive", 4)
        missed = np.zeros((2, wants.n_steps), bool)

        def note(step, resident, misses, missed=missed):
            missed[:, step] = [misses[wants.layer == layer].any() for layer in (0, 1)]

        found = replay(wants, POLICIES["reactive"], 4, on_step=note)
        least, most = (1e3 * expected(found, n) / found.n_steps for n in (missed.sum(), 2 * missed.any(0).sum()))
        assert least - 1e-9 <= at["stall_ms"] <= most + 1e-9


def test_the_choice_is_the_smallest_memory_within_both_limits(made):
    fits = made.rows[made.rows["fits"]]
    assert made.best["memory_bytes"] == fits["memory_bytes"].min()
    assert made.best["slowdown_hi"] <= 1.0 and made.best["at_risk_hi"] <= 0.001
    assert made.best["policy"] in made.why and str(made.best["budget"]) in made.why


def test_a_tighter_limit_or_a_slower_link_never_asks_for_less_memory(traces):
    def memory(link, limit):
        return plan.plan(traces, link, 0.05, limit, policies=["reactive"], resamples=20).best["memory_bytes"]

    assert memory(SLOW, 0.2) >= memory(SLOW, 1.0) >= memory(replace(SLOW, bytes_per_s=1e9, latency_s=0.0), 1.0)


def test_where_nothing_fits_the_nearest_is_named(traces):
    none = plan.plan(traces, SLOW, 1e-6, max_slowdown=0.0, policies=["evict"], max_at_risk=0.0, resamples=20)
    kept = none.rows[none.rows["budget"] < none.rows["budget"].max()]
    assert not kept["fits"].any() and (none.best is None or none.best["at_risk"] == 0)
    impossible = plan._choose(none.rows.assign(fits=False), 0.0, 0.0, 3)
    assert impossible[0] is None and "nearest is evict" in impossible[1]


def test_one_prompt_has_no_interval_and_the_reason_says_so(traces):
    alone = plan.plan(traces[:1], SLOW, 0.05, 1.0, resamples=20)
    assert alone.rows["slowdown_lo"].isna().all() and "without an interval" in alone.why
    assert json.dumps(plan.as_json(alone))


def test_layers_with_a_window_are_left_out(traces):
    windows = [traces[0].manifest["model"] | {"windows": [8, None]}]
    trace = replace(traces[0], manifest=traces[0].manifest | {"model": windows[0]})
    some, whole = (plan.plan([t], SLOW, 0.05, resamples=10) for t in (trace, traces[0]))
    assert some.left_out == 1 and row(some, "reactive", 4)["fetches"] < row(whole, "reactive", 4)["fetches"]
    wants = demand(trace, "kv_head", "warm")
    part = plan.paged_only(wants, [1])
    whole_misses = curves(wants, POLICIES["reactive"], [4]).head_misses[wants.layer == 1]
    assert (curves(part, POLICIES["reactive"], [4]).head_misses == whole_misses).all()


def test_the_served_dtype_sets_the_bytes(traces):
    assert plan.page_bytes_of(traces[0]) == 1024 and plan.page_bytes_of(traces[0], "bfloat16") == 512
    with pytest.raises(InputError, match="dtype"):
        plan.page_bytes_of(traces[0], "int3")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"step_s": 0}, "some time"),
        ({"max_slowdown": -1}, "max_slowdown"),
        ({"policies": ["optimum"]}, "its own log"),
        ({"policies": ["reactiv"]}, "reactive"),
    ],
)
def test_what_cannot_be_planned_is_said(traces, change, says):
    with pytest.raises(InputError, match=says):
        plan.plan(traces, **{"link": SLOW, "step_s": 0.05} | change)


def test_logs_of_two_models_or_none_are_refused(traces):
    other = replace(traces[1], manifest=traces[1].manifest | {"model": traces[1].manifest["model"] | {"name": "other"}})
    with pytest.raises(InputError, match="several models"):
        plan.plan([traces[0], other], SLOW, 0.05)
    with pytest.raises(InputError, match="no log"):
        plan.plan([], SLOW, 0.05)


def test_links_are_assumptions_that_say_so_or_measured():
    assert all(link.about.startswith("assumed") for link in LINKS.values())
    here = links.measured(4096, seconds_s=0.05)
    assert here.about.startswith("measured") and 1e6 < here.bytes_per_s < 1e13 and 0 <= here.latency_s < 0.1
    assert here.seconds(4096 * 100, 1) > here.seconds(4096, 1)
    with pytest.raises(InputError, match="pcie4"):
        links.link("pcie44", 4096)


def test_the_command_prints_a_plan_and_one_line_for_what_is_wrong(traces, tmp_path, capsys):
    for i, trace in enumerate(traces):
        save_trace(trace, tmp_path / str(i))
    logs = [str(tmp_path / str(i)) for i in range(3)]
    assert main(["plan", *logs, "--step-ms", "5", "--budgets", "4,8"]) == 0
    said = capsys.readouterr().out
    assert "pcie4" in said and "assumed" in said and "smallest memory" in said
    assert main(["plan", *logs, "--step-ms", "5", "--json", "--policies", "reactive,commons"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n_prompts"] == 3 and {one["policy"] for one in found["rows"]} == {"reactive", "commons"}
    assert main(["plan", *logs, "--step-ms", "5", "--link", "string"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("policy", ["reactive", "pooled", "commons"])
def test_the_bytes_planned_are_the_bytes_that_a_real_cache_fetches(policy):
    """The same wants: those of a tiny model's cache, replayed as a plan does."""
    model = tiny.model("llama", num_hidden_layers=2)
    model.set_attn_implementation("sdpa")
    ids = torch.randint(0, 64, (1, 90), generator=torch.Generator().manual_seed(1))
    cache = ReversibleCache(model.config, 4, page=4, max_tokens=96, policy=policy, wants=3)
    with torch.inference_mode(), cache.attached(model):
        cache.prefill(model, ids[:, :50])
        for t in range(50, 90):
            model(ids[:, t : t + 1], past_key_values=cache)
    books, wants = cache.books, cache.demands()[0]
    found = curves(wants, POLICIES[policy], [4])
    page_bytes = cache.paged[0].reservoir.page_bytes
    assert found.misses[0] == books.misses
    assert found.fetched[0] == books.fetched and found.fetched[0] * page_bytes == books.fetched_bytes
    assert found.stall_steps[0] == books.stall_steps
    assert SLOW.seconds(found.fetched * page_bytes, plan.waits(POLICIES[policy], found, wants))[0] > 0
