"""The server and its schedulers: alone as in closed form, never idle, half the best at worst, fair where promised."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wakekv.errors import InputError, WakeKVError
from wakekv.logs.demand import demand
from wakekv.policies import POLICIES
from wakekv.scheduling import costs as priced
from wakekv.scheduling import foresight, study
from wakekv.scheduling.agents import Agent, Reserved, Split, fair_shares, jain
from wakekv.scheduling.costs import Costs, calibrate, hidden_ratio
from wakekv.scheduling.profile import KEPT, SIGNS, Profile, profile, profiles
from wakekv.scheduling.schedulers import SCHEDULERS, FirstCome, Option, TwoQueues, ValuePerMemory, greedy
from wakekv.scheduling.server import Choice, Request, Server, alone, simulate
from wakekv.scheduling.store import Store
from wakekv.simulation.replay import replay

COSTS = Costs(0.01, 0.002, 1e-5, 1e-6, 0.001, 4096, 1e8, 1e-4)


def made_up(rng, n_steps=12, most=40) -> Profile:
    fetched = rng.integers(0, most, n_steps)
    return Profile(
        "made up", "niah", "train", 4, np.arange(rng.integers(40, 200)),
        fetched, rng.integers(1, 16, n_steps).astype(np.uint64) * (fetched > 0).astype(np.uint64),
        fetched // 2, fetched, rng.integers(5, 20, n_steps), rng.integers(20, 40, n_steps),
        rng.random((n_steps, len(SIGNS))),
    )  # fmt: skip


def asked(of, arrivals, **changes) -> list[Request]:
    rng = np.random.default_rng(1)
    own = {"ttft_s": 1.0, "tbt_s": 0.1} | changes
    return [
        Request(i, p, t, p.n_steps, chance=rng.random(p.n_steps), **own) for i, (p, t) in enumerate(zip(of, arrivals))
    ]


@pytest.fixture(scope="module")
def kept(make_trace):
    return profiles([make_trace(k=8, seed=seed, n_steps=24) for seed in range(3)], budget=4)


@pytest.fixture(scope="module")
def model(kept):
    return foresight.fit(kept["reactive"])


# a log as a request


def test_a_profile_is_what_the_log_really_misses(make_trace):
    trace = make_trace(k=8, n_steps=24)
    wants, of = demand(trace, "kv_head", "warm"), profile(trace, 4)
    seen = []
    found = replay(
        wants, POLICIES["reactive"], 4, on_step=lambda t, resident, missed: seen.append((resident.sum(), missed))
    )
    assert of.fetched.sum() == found.fetched[0] == found.misses[0] and of.fetched.any()
    assert of.resident.tolist() == [held for held, _ in seen]
    layers = [{int(x) for x in wants.layer[missed.any(1)]} for _, missed in seen]
    assert [{i for i in range(64) if int(mask) >> i & 1} for mask in of.layers] == layers
    assert (of.foreseen <= np.minimum(of.fetched, of.ahead)).all() and of.foreseen.any()


def test_keeping_everything_brings_back_nothing_and_warming_brings_back_less_at_first_where_the_prompt_tells(kept):
    assert set(kept) == set(KEPT)
    full, cold = kept["full"][0], kept["reactive"][0]
    assert not full.fetched.any() and not full.ranked.any()
    assert (full.resident > cold.resident).all()
    assert any((a.fetched != b.fetched).any() for a, b in zip(kept["warmed"], kept["reactive"]))


def test_signs_are_of_the_past_alone(make_trace):
    trace = make_trace(k=8, n_steps=24)
    assert np.array_equal(profile(trace, 4).signs[:10], profile(trace, 4, steps=10).signs)


# costs


def test_costs_come_back_from_steps_made_of_them():
    rng = np.random.default_rng(0)
    rows = [
        {"requests": n, "pages": p, "ranked": r, "step_s": COSTS.compute(n, p, r)}
        for n, p, r in zip(rng.integers(1, 9, 12), rng.integers(1000, 90000, 12), rng.integers(0, 90000, 12))
    ]
    found, error = calibrate(rows, 0.001, 4096, 1e8, 1e-4)
    assert error < 1e-6
    for name, value in vars(COSTS).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4), name
    with pytest.raises(InputError, match="four costs"):
        calibrate(rows[:3], 0.001, 4096, 1e8, 1e-4)


def test_the_measured_steps_are_there_and_a_fit_of_them_is_of_their_size():
    rows = priced.rows()
    found, error = calibrate(rows, priced.prompt_token(), 4096, 25e9, 20e-6)
    assert len(rows) > 12 and len({row["requests"] for row in rows}) > 2
    assert error < 0.5 and found.page_s > 0 and found.prefill_s > 0


def test_hidden_states_take_more_where_query_heads_share_keys():
    assert hidden_ratio(576, 3, 64) == 1.5
    assert hidden_ratio(768, 12, 64) == 0.5


# the server


def test_one_request_alone_takes_what_the_closed_form_says():
    of = made_up(np.random.default_rng(3))
    for chunk in (16, 1000):
        (request,) = asked([of], [0.5])
        simulate([request], FirstCome(), Server(COSTS, 1000, chunk))
        np.testing.assert_allclose(np.array(request.came) - 0.5, alone(of, of.n_steps, COSTS))


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=5)
@given(seed=st.integers(0, 10**6))
def test_every_request_ends_the_server_never_idles_while_one_could_run_and_all_comes_out_the_same_twice(name, seed):
    rng = np.random.default_rng(seed)
    of = [made_up(rng) for _ in range(8)]
    arrivals = rng.exponential(0.2, 8).cumsum()
    server = Server(COSTS, 45, 32)
    runs = [simulate(asked(of, arrivals), SCHEDULERS[name].scheduler(), server) for _ in range(2)]
    lines, own = runs[0].iterations, runs[0].requests
    assert len(own) == 8 and (lines["held_pages"] <= 45).all()
    ends = (lines["start_s"] + lines["compute_s"] + lines["wait_s"]).to_numpy()
    for end, start in zip(ends[:-1], lines["start_s"].to_numpy()[1:]):
        waiting = (own["arrival_s"] <= end - 1e-12) & (own["end_s"] > end + 1e-12)
        assert start == pytest.approx(end) or not waiting.any()
    assert lines["running"].sum() == sum(p.n_steps for p in of)
    assert runs[0].requests.equals(runs[1].requests) and lines.equals(runs[1].iterations)


def test_attainment_falls_with_load(kept, model):
    server = Server(COSTS, 100, 64)
    found = study.study(kept, model, server, [0.2, 1.5, 20], [0], n=10)
    mean = found.groupby(["scheduler", "load"])["attainment"].mean().unstack()
    assert (mean[0.2] >= mean[1.5]).all() and (mean[1.5] >= mean[20]).all() and (mean[0.2] > mean[20]).any()
    most = study.bearable(found, 0.5)
    assert set(most.index) == set(SCHEDULERS) and (most >= 0).all()


def test_what_comes_ahead_is_not_waited_for_and_knowing_it_exactly_is_best():
    rng = np.random.default_rng(5)
    of, waited = [made_up(rng, most=4000) for _ in range(6)], {}
    for brings in ("nothing", "named", "exact"):
        requests = asked(of, np.zeros(6))
        for r in requests:
            r.chance[:] = 1.0
            r.chance[::2] = 0.0
        waited[brings] = simulate(requests, TwoQueues(brings), Server(COSTS, 200, 64)).iterations["wait_s"].sum()
    assert waited["exact"] < waited["named"] < waited["nothing"]


def test_who_loses_its_memory_fetches_its_pages_when_it_goes_on():
    class Turns:
        brings = "nothing"

        def choose(self, now, there, server):
            one = min(there, key=lambda r: (len(r.came), r.number))
            return Choice([one], [one])

    of = [replace(made_up(np.random.default_rng(2)), fetched=np.zeros(12, int)) for _ in range(2)]
    lines = simulate(asked(of, [0, 0]), Turns(), Server(COSTS, 20, 1000)).iterations
    assert lines["fetched_pages"].sum() > 0
    together = simulate(asked(of, [0, 0]), FirstCome(), Server(COSTS, 40, 1000)).iterations
    assert together["fetched_pages"].sum() == 0


def test_a_request_larger_than_the_pool_and_a_scheduler_that_holds_too_much_are_refused():
    of = made_up(np.random.default_rng(0))
    with pytest.raises(WakeKVError, match="wait for ever"):
        simulate(asked([of], [0]), FirstCome(), Server(COSTS, 2))

    class Greed:
        brings = "nothing"

        def choose(self, now, there, server):
            return Choice(there, there)

    with pytest.raises(WakeKVError, match="holds"):
        simulate(asked([of] * 3, [0] * 3), Greed(), Server(COSTS, 20))
    with pytest.raises(InputError, match="tokens to give"):
        Request(0, of, 0.0, 99, 1.0, 1.0, np.zeros(12))


# the greedy


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(0, 20), st.integers(1, 12)), max_size=6),
    st.integers(1, 30),
)
def test_the_greedy_is_worth_half_the_best_choice_with_two_ways_to_serve_each(rows, room):
    options = [Option(i, v, p) for i, (v, p, _, _) in enumerate(rows)]
    options += [Option(i, v, p, True) for i, (_, _, v, p) in enumerate(rows)]
    check_half(options, room)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), max_size=10), st.integers(1, 40))
def test_the_greedy_is_worth_half_the_best_choice(rows, room):
    check_half([Option(i, v, p) for i, (v, p) in enumerate(rows)], room)


def check_half(options, room):
    best = 0
    each = {i: [None, *(o for o in options if o.request == i)] for i in {o.request for o in options}}
    for chosen in product(*each.values()):
        held = [o for o in chosen if o]
        if sum(o.pages for o in held) <= room:
            best = max(best, sum(o.value for o in held))
    taken = greedy(options, room)
    assert sum(o.pages for o in taken) <= room and len({o.request for o in taken}) == len(taken)
    assert 2 * sum(o.value for o in taken) >= best


def test_hidden_states_are_refused_where_they_take_more_memory_and_used_where_they_take_less():
    of = [made_up(np.random.default_rng(4)) for _ in range(6)]
    held = {}
    for ratio in (1.5, 0.5):
        requests = asked(of, np.zeros(6))
        simulate(requests, ValuePerMemory(), Server(COSTS, 40, 1000, hidden=(ratio, 1e-4)))
        held[ratio] = any(r.hidden for r in requests)
    assert held == {1.5: False, 0.5: True}


# foresight


def test_the_miss_model_knows_more_than_a_rate_where_there_is_something_to_know(kept):
    rng = np.random.default_rng(0)

    def one(seed):
        fetched = np.repeat(rng.integers(0, 100, 20), 10)  # the next step is as this one, mostly
        signs = np.zeros((200, len(SIGNS)))
        signs[1:, 0], signs[:, SIGNS.index("usual")] = np.log1p(fetched[:-1]), np.log1p(50)
        return replace(kept["reactive"][0], name=str(seed), fetched=fetched, signs=signs)

    fitted = foresight.fit([one(s) for s in range(3)])
    scores = foresight.brier(fitted, [one(s) for s in range(3, 8)], resamples=50).set_index("predictor")["estimate"]
    assert scores["miss model"] < 0.6 * scores["rate of the training prompts"]
    table = foresight.reliability(fitted, [one(9)])
    assert table["steps"].sum() == 197 and np.corrcoef(table["said"], table["came"])[0, 1] > 0.8
    with pytest.raises(InputError, match="training"):
        foresight.fit([])


# agents


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 10), st.floats(0.1, 5)), min_size=1, max_size=5),
    st.floats(60, 200),
)
def test_shares_keep_minima_waste_nothing_and_take_from_nobody_who_has_less(rows, total):
    demands, minima, weights = map(np.array, zip(*rows))
    given_ = fair_shares(demands, minima, weights, total)
    assert (given_ <= demands + 1e-6).all() and (given_ >= np.minimum(demands, minima) - 1e-6).all()
    assert given_.sum() == pytest.approx(min(total, demands.sum()), abs=1e-5)
    over = (given_ - np.minimum(demands, minima)) / weights
    short = given_ < demands - 1e-5
    for i in np.flatnonzero(short):
        assert (over <= over[i] + 1e-5).all()


def test_minima_beyond_the_pool_are_refused():
    with pytest.raises(InputError, match="minima"):
        fair_shares([10, 10], [8, 8], [1, 1], 10)


def test_jain_says_one_for_equals_and_one_nth_for_one_who_has_it_all():
    assert jain([0.5, 0.5, 0.5]) == pytest.approx(1.0) and jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) == 1.0


def test_an_agent_gets_its_minimum_whoever_came_before():
    of = [made_up(np.random.default_rng(s), n_steps=40) for s in range(7)]
    agents = {"many": Agent("many", 0), "one": Agent("one", 25)}
    came = {}
    for scheduler in (FirstCome(), Reserved(agents, load=1e9), Split(agents)):
        requests = asked(of, [0.0] * 6 + [0.01])
        for r in requests:
            r.agent = "one" if r.number == 6 else "many"
        simulate(requests, scheduler, Server(COSTS, 50, 1000))
        came[type(scheduler).__name__] = requests[6].came[0]
    assert came["Reserved"] < 0.5 * came["FirstCome"] and came["Split"] < 0.5 * came["FirstCome"]


def test_the_link_s_load_keeps_requests_out(kept):
    of = [made_up(np.random.default_rng(s), most=20000) for s in range(4)]
    agents = {"": Agent("", 0)}
    running = {}
    for load in (1e-9, 1e9):
        lines = simulate(asked(of, [0.0] * 4), Reserved(agents, load), Server(COSTS, 1000, 1000)).iterations
        running[load] = lines["running"].max()
    assert running == {1e-9: 1, 1e9: 4}


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=6), st.data())
def test_the_store_holds_each_page_of_equal_prefixes_once(prompts, data):
    store, kept = Store(page_tokens=2), {}
    for who, prompt in enumerate(prompts):
        there = {tuple(p[:end]) for p in kept.values() for end in range(2, len(p) + 1, 2)}
        own = [tuple(prompt[:end]) for end in range(2, len(prompt) + 1, 2)]
        assert store.add(who, np.array(prompt, int)) == sum(page in there for page in own)
        kept[who] = prompt
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(kept)))
            store.drop(gone)
            del kept[gone]
        pages = [tuple(p[:end]) for p in kept.values() for end in range(2, len(p) + 1, 2)]
        assert len(store) == len(set(pages)) and store.unshared == len(pages)


def test_tenants_share_prefixes_and_every_rule_serves_the_same_requests(kept, model):
    agents = (Agent("a", 20, share=3), Agent("b", 20))
    found = study.tenants(kept["reactive"], model, Server(COSTS, 100, 64), agents, 1.0, [0], n=10)
    assert found["rule"].nunique() == 3 and (found["stored"] < found["unshared"]).all()
    assert found["jain"].between(0, 1).all() and found["attainment"].between(0, 1).all()


def test_objectives_that_nobody_could_keep_are_refused(kept):
    drawn = study.traffic(kept["reactive"], 4, 0)
    with pytest.raises(InputError, match="patience"):
        study.requests(kept["reactive"], drawn, 1.0, Server(COSTS, 100), [np.zeros(24)] * 3, patience=0.5)
