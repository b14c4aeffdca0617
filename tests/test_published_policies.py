"""Each published rule on a small example whose answer is known by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_simulate import random_demand

from wakekv.errors import InputError
from wakekv.logs.demand import Demand, demand
from wakekv.policies import POLICIES, Ledger
from wakekv.policies.hetero import ALONE, HeteroCache, leaders, overlaps
from wakekv.policies.offload import adjacent_jaccard, instability
from wakekv.policies.order import interleave, newest_first, places
from wakekv.policies.roles import echo_scores, far_weight, needle_scores, spans
from wakekv.simulation.simulate import Curves, curves, replay

PUBLISHED = [name for name, policy in POLICIES.items() if policy.source and "WakeKV" not in policy.source]
FOR_EACH = pytest.mark.parametrize("name", POLICIES)


def kept(demand, policy, budget, step=-1, head=0):
    """Pages a head holds as a step ends."""
    seen = []
    replay(demand, policy, budget, on_step=lambda t, resident, missed: seen.append(resident.copy()))
    return set(np.flatnonzero(seen[step][head]).tolist())


def prompted(rows, n_decoded=0, n_steps=4, wants=None, **options) -> Demand:
    """A demand with prompt rows rows[head][row][page], then n_decoded pages, one a step, each wanted as it comes."""
    rows = np.array(rows, np.float32)
    n_heads, _, n_prompt = rows.shape
    rows = np.concatenate([rows, np.zeros((*rows.shape[:2], n_decoded), np.float32)], axis=2)
    created = [-1] * n_prompt + list(range(n_decoded))
    wants = wants or [[[n_prompt - 1 + min(t + 1, n_decoded)] for t in range(n_steps)]] * n_heads
    return Demand.from_lists(wants, created, prompt_rows=rows, **options)


# --- what every policy says of itself


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_policy_says_when_it_decides_and_what_it_does_not_get(name):
    policy = POLICIES[name]
    assert policy.when in ("offline", "prefill", "decode") and type(policy).__doc__
    assert set(policy.withheld) <= {f.name for f in dataclasses.fields(Curves)}
    assert all(len(reason) > 20 for reason in policy.withheld.values())


def test_where_the_methods_stand_on_the_two_axes():
    where = {name: (POLICIES[name].when, POLICIES[name].reversible) for name in PUBLISHED}
    for name in ("duoattention", "razorattention", "moa", "headkv"):
        assert where[name] == ("offline", False)
    for name in ("adakv", "cake", "lava", "dynamickv", "snapkv"):
        assert where[name] == ("prefill", False)
    for name in ("rkv", "gkv", "thinkv", "scope", "reasonalloc", "h2o"):
        assert where[name] == ("decode", False)
    assert where["flexicache"] == where["heterocache"] == ("offline", True)
    assert where["arkvale"] == ("decode", True)


@FOR_EACH
def test_it_runs_without_prompt_rows_and_keys_or_says_in_one_line_what_is_missing(name):
    for first_touch in ("cold", "warm"):
        full = random_demand(np.random.default_rng(3), first_touch)
        bare = dataclasses.replace(full, prompt_rows=None, key_means=None)
        try:
            curves(bare, POLICIES[name])
        except InputError as error:
            assert "this log has no" in str(error) and "\n" not in str(error)


@FOR_EACH
def test_it_ranks_every_known_page_by_a_number(name):
    full = random_demand(np.random.default_rng(5), "warm", n_heads=4)
    policy = POLICIES[name].fit(full)
    seen = Ledger(full, policy.start, policy.scope, policy.offline)
    for _ in range(full.n_steps):
        seen.observe()
        rank = np.broadcast_to(policy.rank(seen), seen.known.shape)[seen.known]
        assert (np.isfinite(rank) | (rank == np.inf)).all()


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if not policy.offline])
def test_it_does_not_read_the_keys_of_pages_that_are_yet_to_come(name):
    full = random_demand(np.random.default_rng(4), "warm", n_heads=3)
    keys = np.where((full.created < 10)[:, None], full.key_means, 9.0)
    seen = [[], []]
    for past, one in zip(seen, (full, dataclasses.replace(full, key_means=keys)), strict=True):
        replay(one, POLICIES[name].but(every=3), 3, on_step=lambda t, r, m, past=past: past.append(r.copy()))
    assert all((a == b).all() for a, b in zip(seen[0][:10], seen[1][:10], strict=True))


def test_a_policy_calibrated_on_other_logs_is_no_upper_bound_and_stays_as_calibrated():
    rng = np.random.default_rng(0)
    logs = [random_demand(rng, "cold", n_heads=8) for _ in range(3)]
    calibrated = {name for name, policy in POLICIES.items() if policy.held_out(*logs) is not policy}
    sighted = {name for name, policy in POLICIES.items() if policy.offline} - calibrated
    assert sighted == {"optimum", "quest"}, "what is offline and not calibrated is handed the future"
    for name in calibrated:
        fitted = POLICIES[name].held_out(*logs[1:])
        assert not fitted.offline and fitted.fit(logs[0]) is fitted
        assert curves(logs[0], fitted).policy == fitted


def test_a_profile_of_another_unit_is_refused():
    rng = np.random.default_rng(0)
    many, few = random_demand(rng, "cold", n_heads=8), random_demand(rng, "cold", n_heads=2)
    for name in ("duoattention", "razorattention", "moa", "headkv", "heterocache"):
        with pytest.raises(InputError, match="8 heads"):
            curves(few, POLICIES[name].fit(many))
    with pytest.raises(InputError, match="profile names head"):
        curves(few, POLICIES["flexicache"].but(profile=(5,)))
    with pytest.raises(InputError, match="calibrated"):
        POLICIES["headkv"].share(Ledger(few))


# --- orders


@given(st.lists(st.sampled_from([-1.5, -0.0, 0.0, 0.25, 7.0]), min_size=1, max_size=9))
def test_places_are_a_sort_with_ties_to_the_later_page(scores):
    order = sorted(range(len(scores)), key=lambda p: (-scores[p], -p))
    place = places(np.array([scores]), np.ones((1, len(scores)), bool))[0]
    assert [int(place[p]) for p in order] == list(range(len(scores)))


def test_small_scores_are_told_apart_and_zeros_are_not():
    assert places(np.array([[2e-9, 1e-9], [0.0, -0.0]]), np.ones((2, 2), bool)).tolist() == [[0, 1], [1, 0]]


@given(st.integers(1, 40))
def test_an_interleaved_order_gives_each_its_part_at_every_budget(budget):
    among = np.ones((1, 100), bool)
    old, new = places(-np.arange(100.0)[None], among), newest_first(among[0])
    rank = interleave((old, 3.0), (new, 1.0))[0]
    best = np.argsort(-rank, kind="stable")[:budget]
    assert abs((best < 50).sum() - 0.75 * budget) <= 1


def test_newest_counts_tokens_in_whole_pages():
    seen = Ledger(random_demand(np.random.default_rng(0), "warm"), "prompt")
    n_prompt = (seen.created < 0).sum()
    assert np.flatnonzero(seen.newest(1)).tolist() == [n_prompt - 1]
    assert seen.newest(17).sum() == min(2, n_prompt) and seen.newest(16).sum() == 1


# --- the prompt decides


def test_snapkv_keeps_the_window_the_best_of_the_prompt_and_all_that_is_decoded():
    log = prompted([[[5, 1, 9, 3, 0, 0]] * 32], n_decoded=3)
    assert kept(log, POLICIES["snapkv"], 4) == {0, 2, 4, 5} | {6, 7, 8}


def test_snapkv_of_one_query_looks_at_the_last_row_alone():
    log = prompted([[[9, 0, 0, 0]] * 31 + [[0, 0, 9, 0]]])
    assert kept(log, POLICIES["snapkv-one-query"], 2) == {2, 3}
    assert kept(log, POLICIES["snapkv"], 3) == {0, 2, 3}


def test_snapkv_pools_over_neighbours_if_asked():
    log = prompted([[[0, 9, 0, 0, 1, 0, 0]] * 32])
    assert kept(log, POLICIES["snapkv"], 4) == {1, 4, 5, 6}
    assert kept(log, POLICIES["snapkv"].but(kernel=3), 4) == {1, 2, 5, 6}, "pages 0, 1 and 2 tie: the later two stay"


def test_snapkv_while_decoding_is_rkv_without_redundancy():
    log = random_demand(np.random.default_rng(6), "cold", n_heads=4, n_steps=40)
    one = POLICIES["snapkv"].but(rows=8, every=8, start="demand")
    assert (curves(log, one).misses == curves(log, POLICIES["rkv-importance"].but(every=8)).misses).all()


def test_adakv_gives_more_pages_to_the_head_whose_pages_are_worth_more():
    spread, sharp = [4, 4, 4, 4, 4, 4, 0, 0], [0, 0, 9, 0, 0, 0, 0, 0]
    log = prompted([[spread] * 32, [sharp] * 32])
    policy = POLICIES["adakv"]
    sizes = [len(kept(log, policy, 5, head=h)) for h in (0, 1)]
    assert sizes == [7, 3], "of ten pages 4 are windows, then 9 and five 4s: 7 and 3, and the floor of 1 is met"
    assert kept(log, policy, 5, head=1) == {2, 6, 7}
    assert [len(kept(log, policy.but(floor=1.0), 5, head=h)) for h in (0, 1)] == [5, 5]


def test_lava_and_cake_give_layers_with_spread_attention_more():
    spread, sharp = [[1, 1, 1, 1]] * 32, [[4, 0, 0, 0]] * 32
    log = prompted([spread, sharp], layer=[0, 1])
    assert POLICIES["lava"].share(Ledger(log, "prompt")).tolist() == [2.0, 0.0]
    moving = [[2, 1, 1, 0], [0, 1, 1, 2]] * 16
    share = POLICIES["cake"].share(Ledger(prompted([moving, sharp], layer=[0, 1]), "prompt"))
    assert share.tolist() == [2.0, 0.0], "what never moves and sits on one page needs nothing"
    alike = POLICIES["cake"].share(Ledger(prompted([moving, moving], layer=[0, 1]), "prompt"))
    assert alike.tolist() == [1.0, 1.0]


def test_cake_weighs_spread_and_shift_as_its_formulas_say():
    rows = np.array([[[0.5, 0.3, 0.2, 0.0], [0.7, 0.1, 0.2, 0.0]], [[0.9, 0.1, 0.0, 0.0], [0.1, 0.8, 0.1, 0.0]]])
    seen, policy = Ledger(prompted(rows, layer=[0, 1]), "prompt"), POLICIES["cake"]
    mean, var = rows.mean(1), rows.var(1)
    entropy = [-sum(p * np.log(p) for p in head if p > 0) for head in mean]
    value = np.sqrt(entropy) * var.sum(1) ** 4
    assert policy.but(tau=2.0, shift_tau=0.25).share(seen) == pytest.approx(value / value.mean(), rel=1e-4)
    rank = policy.rank(seen)
    assert rank[:, :2] == pytest.approx((mean + 200 * var)[:, :2], rel=1e-4)
    assert np.isinf(rank[:, 2:]).all(), "the last 32 tokens stay"


def test_cake_keeps_what_shifts_over_what_is_steady_and_goes_on_evicting():
    steady, shifting = 0.3, (0.0, 0.5)
    log = prompted([[[steady, shifting[i % 2], 0.0, 0.0] for i in range(32)]], n_decoded=3)
    policy = POLICIES["cake"]
    assert kept(log, policy.but(every=0), 3) >= {1, 2, 3}
    assert kept(log, policy.but(every=0, gamma=0.0), 3) >= {0, 2, 3}
    assert all(len(kept(log, policy, 3, step=t)) == 3 for t in range(4))


def test_dynamickv_keeps_the_best_pages_of_the_model():
    log = prompted([[[1, 1, 1, 0]] * 32, [[9, 8, 7, 0]] * 32], layer=[0, 1])
    assert kept(log, POLICIES["dynamickv"], 2, head=0) == {3} and kept(log, POLICIES["dynamickv"], 2, head=1) == {
        0,
        1,
        3,
    }


def test_pyramidkv_falls_from_layer_to_layer_and_spends_the_same():
    log = prompted([[[1, 1]] * 32] * 5, layer=[0, 1, 2, 3, 4])
    share = POLICIES["pyramidkv"].share(Ledger(log, "prompt"))
    assert np.allclose(share, [1.95, 1.475, 1.0, 0.525, 0.05])


# --- pages are destroyed while decoding


def test_spindlekv_is_a_pyramid_and_does_not_tell_its_memory():
    log = prompted([[[0.1, 0.5, 0.4, 0.0]]] * 3, layer=[0, 1, 2])
    share = POLICIES["spindlekv"].share(Ledger(log, "prompt"))
    assert share[0] > share[1] > share[2] and share.mean() == pytest.approx(1)
    assert "mean_pages" in POLICIES["spindlekv"].withheld


def test_spindlekv_as_retold_gives_up_the_page_whose_largest_weight_of_late_is_smallest():
    wants = [[{0: 0.9}, {1: 0.3}, {2: 0.2, 1: 0.1}, {3: 0.5}]] * 4
    seen, policy = Ledger(Demand.from_lists(wants, layer=[0, 1, 2, 3])), POLICIES["spindlekv-max"].but(steps=3)
    for _ in range(4):
        seen.observe()
    assert np.allclose(policy.rank(seen)[3], [0.0, 0.3, 0.2, 0.5])
    assert policy.share(seen).tolist() == [np.inf, np.inf, 1, 1]  # the first third merges instead
    three = Ledger(Demand.from_lists(wants[:3], layer=[0, 1, 2]))
    assert policy.share(three).tolist() == [np.inf, 1, 1]


def test_rkv_keeps_the_latest_of_three_alike_and_all_that_differ():
    keys = np.eye(6, dtype=np.float32)[[0, 0, 0, 1, 2, 3]][None]
    wants = [[dict.fromkeys(range(5), 1.0)] * 7 + [dict.fromkeys(range(6), 1.0)]]
    log = Demand.from_lists(wants, key_means=keys)
    # pages 0, 1, 2 alike. rows 0 and 1 let off page 2, row 2 lets off page 1: cosines left are 0<-1, 0<-2, 1<-0
    assert kept(log, POLICIES["rkv"].but(every=8), 5) == {1, 2, 3, 4, 5}
    assert kept(log, POLICIES["rkv"].but(every=8), 4) == {2, 3, 4, 5}
    assert 0 in kept(log, POLICIES["rkv-importance"].but(every=8, rows=1), 6)


def test_rkv_weighs_importance_by_lam():
    keys = np.eye(6, dtype=np.float32)[[0, 0, 0, 1, 2, 3]][None]
    heavy = {0: 100.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0}
    log = Demand.from_lists([[heavy] * 8], key_means=keys)
    policy = POLICIES["rkv"].but(every=8)
    # redundancy 0.2 + a little each, importance 0.96 for page 0 and 0.01 for the others
    assert 0 in kept(log, policy.but(lam=0.9), 2) and 0 not in kept(log, policy.but(lam=0.01), 4)
    with pytest.raises(InputError, match="lam"):
        policy.but(lam=1.5)


def test_rkv_prunes_at_its_interval_and_grows_between():
    log = random_demand(np.random.default_rng(2), "cold", n_heads=1, n_steps=30)
    sizes = [len(kept(log, POLICIES["rkv"].but(every=10), 2, step=t)) for t in range(30)]
    assert sizes[9] <= 2 and sizes[19] <= 2 and max(sizes) > 2
    untouched = curves(log, POLICIES["rkv"])
    assert not untouched.misses.any(), "an answer shorter than the interval is never pruned"


def test_reasonalloc_moves_pages_between_heads_and_layers():
    sharp, flat = {0: 9.0, 1: 0.5, 2: 0.5, 3: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}
    log = Demand.from_lists([[sharp] * 8, [flat] * 8])
    policy = POLICIES["reasonalloc"].but(every=8, lam=1.0)
    # page 3 is the window. of the other scores 0.9, 0.05, 0.05 and three of 1/3 the best four stay: heads have 2 and 4
    # of the six, and 0.2 * 3 + 0.8 * (2, 4) = 2.2 and 3.8 pages
    assert [len(kept(log, policy, 3, head=h)) for h in (0, 1)] == [2, 4]
    assert [len(kept(log, policy.but(floor=1.0), 3, head=h)) for h in (0, 1)] == [3, 3]
    two = Demand.from_lists([[[0, 1, 2]] * 4, [[0]] * 4], layer=[0, 1])
    layerwise = policy.but(layerwise="demand").fit(two)
    assert np.allclose(layerwise.share(Ledger(two)), [1.5, 0.5])
    assert policy.fit(two) is policy


def test_gkv_remembers_what_mattered_at_an_earlier_pruning():
    def log(later):
        first = {0: 1.0, 1: 0.1, 2: 1.0, 3: 0.5}
        return Demand.from_lists([[first, {1: later, 2: 1.0, 3: 0.1}]])

    policy = POLICIES["gkv"].but(every=1, rows=1)
    # page 3 is the window. F of page 0 fades from 1 to 0.8; page 1 has what it weighs now, over a maximum of 1
    for later, winner in ((0.7, 0), (0.9, 1)):
        seen = Ledger(log(later))
        for _ in range(2):
            seen.observe()
            rank = policy.rank(seen)[0]
        assert rank[3] == np.inf and np.isclose(rank[0], 0.8) and np.isclose(rank[1], later)
        assert rank[:2].argmax() == winner


def test_gkv_takes_off_what_other_pages_say_too():
    keys = np.eye(4, dtype=np.float32)[[0, 0, 0, 1, 2]][None]  # pages 0, 1, 2 alike; page 4 is the window
    seen = Ledger(Demand.from_lists([[{0: 0.2, 1: 0.4, 2: 0.1, 3: 0.3, 4: 0.05}]], key_means=keys))
    seen.observe()
    rank = POLICIES["gkv"].but(every=1, rows=1, lam=0.25).rank(seen)[0]
    twin = np.exp([2 / 4, 1 / 4, 0, 0])  # cosines left, as in R-KV's test: 0<-1, 0<-2, 1<-0
    assert rank[4] == np.inf
    assert rank[:4] == pytest.approx(0.25 * np.array([0.5, 1, 0.25, 0.75]) - 0.75 * twin / twin.max())


def test_gkv_blend_weighs_the_largest_weight_and_how_often_it_was_wanted():
    log = Demand.from_lists([[{0: 0.9, 1: 0.1}, {1: 0.1}, {1: 0.1}, {1: 0.1}]])
    seen = Ledger(log)
    for _ in range(4):
        seen.observe()
    assert np.allclose(POLICIES["gkv-blend"].rank(seen)[0], [0.5 * 0.9 + 0.5 / 4, 0.5 * 0.1 + 0.5])


def test_thinkv_thins_earlier_thoughts_and_sparser_ones_more():
    # pages 0..3 are the prompt, 4..9 are decoded in two steps each. As 4 and 5 are written nearly every page is wanted,
    # from then on only the newest, of ever more: thoughts 0, 0, 1, 1, 2, 2, so four segments with the prompt
    created = [-1] * 4 + [0, 2, 4, 6, 8, 10]
    wants = [[[0, 1, 2, 3, 4 + t // 2] if t < 4 else [4 + t // 2] for t in range(12)]]
    seen = Ledger(Demand.from_lists(wants, created), "prompt")
    for _ in range(12):
        seen.observe()
    # place from 1, heaviest first and ties to the later page, over the part 4, 4, 2, 1 of a thought, doubled with each
    # later change; the newest page stays
    prompt, dense, sparser, sparsest = [-8, -6, -4, -2], [-2, -1], [-2, -1], [-2, np.inf]
    assert POLICIES["thinkv"].rank(seen)[0].tolist() == prompt + dense + sparser + sparsest


def test_scope_holds_prompt_heavy_and_newest_in_their_parts():
    wants = [[[40 + t] if t < 5 else {45: 1.0} for t in range(30)]]
    log = prompted([[list(range(40, 0, -1))] * 32], n_decoded=30, n_steps=30, wants=wants)
    window = {38, 39}
    assert kept(log, POLICIES["scope"], 10) == {0, 1, 2, 3, 4, 5} | window | {45, 69}
    assert kept(log, POLICIES["scope"].but(prompt_tokens=512), 4) == window | {45, 69}


def test_h2o_keeps_the_heavy_hitter_and_the_newest():
    wants = [[{0: 0.1, 2: 5.0, 4 + t: 0.1} for t in range(6)]]
    log = prompted([[[0.1, 0.1, 0.1, 0.1]] * 32], n_decoded=6, n_steps=6, wants=wants)
    assert kept(log, POLICIES["h2o"], 2) == {2, 9}
    assert kept(log, POLICIES["h2o"], 4) >= {2, 8, 9}
    with pytest.raises(InputError, match="heavy"):
        POLICIES["h2o"].but(heavy=1.0)


def test_streamingllm_keeps_the_first_page_and_the_newest_whatever_is_read():
    log = prompted([[[0, 9, 9, 9]]], n_decoded=5, n_steps=5, wants=[[[1, 2]] * 5], first_touch="warm")
    assert kept(log, POLICIES["streamingllm"], 4) == {0, 6, 7, 8}


# --- pages go to a reservoir and come back


def test_instability_is_one_minus_the_overlap_corrected_for_chance():
    wants = [[[0, 1], [0, 1], [0, 2], [3, 4]], [[0, 1]] * 4]
    log = Demand.from_lists(wants, created=[-1] * 6)
    # of 6 pages two are wanted, so chance is 1/3: overlaps 1, 1/2, 0 become 1, 1/4, 0
    assert np.allclose(instability(log, chunk=4), [[1 - (1 + 0.25 + 0) / 3], [0.0]])
    assert np.allclose(instability(log, chunk=2), [[0.0, 1.0], [0.0, 0.0]])
    heaviest = Demand.from_lists([[{0: 1.0, 1: 2.0}, {0: 2.0, 1: 1.0}]], created=[-1] * 6)
    assert instability(heaviest, chunk=2, top=1)[0, 0] == 1.0 and instability(heaviest, chunk=2, top=2)[0, 0] == 0.0
    assert np.isnan(instability(Demand.from_lists([[[0, 1]] * 2]), chunk=2)).all(), "no chance left to correct for"


def test_flexicache_keeps_whole_the_heads_that_other_logs_found_restless():
    def log(restless):
        steady = [[0, 1]] * 32
        moving = [[t % 8, (t + 3) % 8] for t in range(32)]
        return Demand.from_lists([moving if h == restless else steady for h in range(4)], created=[-1] * 9)

    policy = POLICIES["flexicache"].held_out(log(2), log(2), log(1))
    assert policy.profile == (2,)
    held = policy.but(start="prompt", every=0)
    rows = np.ones((4, 1, 9), np.float32)
    one = dataclasses.replace(log(1), prompt_rows=rows)
    assert [len(kept(one, held, 3, head=h)) for h in range(4)] == [3, 3, 9, 3]


def test_flexicache_holds_what_its_last_ranking_chose_and_what_came_since():
    wants = [[[1, 2], [3], [3], [3]]]
    log = prompted([[[0, 0, 5, 4, 0]] * 32], n_decoded=4, wants=wants)
    policy = POLICIES["flexicache-m0-r16"].but(start="prompt")
    assert kept(log, policy, 2, step=0) == {2, 4, 5}, "the newest page and the best, then the page born in step 0"
    assert kept(log, policy, 2, step=2) == {2, 4, 5, 6, 7} and replay(log, policy, 2).fetched[0] == 0
    assert kept(log, policy.but(every=2), 2, step=1) == {3, 6}


def test_quest_and_arkvale_leave_the_first_two_layers_whole():
    wants = [[[0, 1, 2]] * 2 + [[3]] * 2] * 3
    log = Demand.from_lists(wants, created=[-1] * 6, layer=[0, 1, 2])
    for name in ("quest", "arkvale"):
        assert curves(log, POLICIES[name]).at([1]).head_misses[:2].sum() == 0
        assert curves(log, POLICIES[name]).at([1]).head_misses[2].sum() > 0


def test_quest_leaves_unread_what_a_step_wants_beyond_its_budget():
    wants = [[[0, 1, 2, 3], [4], [2, 0, 1], [1, 3, 2, 0, 4]]]
    log = Demand.from_lists(wants, created=[-1] * 6, layer=[2], first_touch="warm")
    assert curves(log, POLICIES["quest"]).misses.tolist() == [3 + 0 + 2 + 4, 2 + 0 + 1 + 3, 1 + 0 + 0 + 2, 1, 0, 0]


def test_arkvale_keeps_the_pages_that_the_layer_reads():
    wants = [[{1: 1.0, 2: 2.0, 3: 1.0}], [{1: 9.0}]]
    log = Demand.from_lists(wants, created=[-1] * 8, layer=[2, 2])
    assert kept(log, POLICIES["arkvale"], 1, head=0) == {1}, "page 2 weighs more to this head, page 1 to the layer"
    assert kept(log, POLICIES["reactive"], 1, head=0) == {2}


def test_a_page_decoded_at_the_first_step_is_decoded():
    log = prompted([[[1, 1, 1, 1]] * 32], n_decoded=2, wants=[[[0, 4], [1, 5]]], first_touch="warm")
    seen = Ledger(log)
    for _ in range(2):
        seen.observe()
    assert np.isinf(POLICIES["shadowkv"].rank(seen)[0]).tolist() == [False, False, True, True, True, True]


def test_steps_at_which_a_head_wants_nothing_have_no_overlap():
    log = Demand.from_lists([[[0, 1], [0], [], [], [2]], [[], [], [], [], []]])
    assert adjacent_jaccard(log).tolist() == [pytest.approx((1 / 2 + 0 + 0) / 3), 0.0]


def test_chance_is_over_the_pages_that_there_are_and_a_chunk_is_16_steps():
    log = Demand.from_lists([[[0, 1]] * 2 + [[0, 2]] * 16], created=[-1, -1, 1, 17])
    overlap = [(1 - 2 / 3) / (1 - 2 / 3)] + [max(0.0, (0.5 - 2 / 3) / (1 - 2 / 3))] * 14
    found = instability(log)
    assert found[0] == pytest.approx([1 - np.mean(overlap), 0.0]) and found.shape == (1, 2)


def test_shadowkv_never_lets_go_of_what_was_decoded():
    log = prompted([[[1, 1, 1, 1]] * 32], n_decoded=4, wants=[[[0, 4], [1, 5], [0, 6], [1, 7]]], first_touch="warm")
    assert kept(log, POLICIES["shadowkv"], 5) >= {4, 5, 6, 7}
    assert replay(log, POLICIES["shadowkv"], 1).fetched[0] > 0


@pytest.mark.parametrize("name", ["headinfer", "infinigen"])
def test_streaming_systems_hold_nothing_and_are_not_given_a_miss_rate(name):
    log = random_demand(np.random.default_rng(1), "cold")
    whole = curves(log, POLICIES[name])
    assert not whole.mean_pages.any() and "misses" in POLICIES[name].withheld
    assert (whole.fetched == log.n_wants - whole.n_cold).all()


# --- heads have roles


def test_duoattention_keeps_the_half_that_reads_far_whole():
    near, far = [[{19: 1.0}] * 3], [[{8: 1.0, 19: 1.0}] * 3]
    log = prompted([[[1] * 40] * 2] * 4, wants=[*near, *far, *near, *far], first_touch="warm")
    log = dataclasses.replace(log, page=np.where(log.page == 19, 39, log.page))
    assert far_weight([log], 64, 256) == (0.0, 0.5, 0.0, 0.5)
    policy = POLICIES["duoattention"].fit(log)
    assert [len(kept(log, policy, 20, head=h)) for h in range(4)] == [20, 40, 20, 40]
    assert kept(log, policy, 20, head=0) == set(range(4)) | set(range(24, 40)), "64 tokens of sinks, 256 newest"
    assert kept(log, policy, 5, head=0) == {0, 36, 37, 38, 39}
    razor = POLICIES["razorattention"].but(scores=(0.0, 0.0, 0.0, 1.0), dense=0.25)
    assert [len(kept(log, razor, 20, head=h)) for h in range(4)] == [20, 20, 20, 40]


def test_moa_widens_the_window_where_more_is_lost():
    # head 0 reads up to 9 pages back, head 1 the newest page alone; ten pages of prompt after four of sinks
    wants = [[{13 - 9: 3.0, 13: 1.0}] * 4, [{13: 1.0}] * 4]
    log = prompted([[[1] * 14] * 2] * 2, wants=wants)
    assert spans([log], 64, density=0.7) == (14.0, 5.0)
    share = POLICIES["moa"].but(density=0.7).fit(log).share(Ledger(log))
    assert np.allclose(share, [14 / 9.5, 5 / 9.5])


def test_headkv_gives_each_head_its_part_and_its_score_of_the_pool():
    log = prompted([[[1] * 8] * 32] * 4)
    policy = POLICIES["headkv"].but(scores=(0.0, 0.0, 1.0, 3.0), beta=2.0)
    assert policy.share(Ledger(log)).tolist() == [0.5, 0.5, 1.0, 2.0]
    assert [len(kept(log, policy, 4, head=h)) for h in range(4)] == [2, 2, 4, 8]


def test_probes_find_heads_by_tokens(make_trace):
    trace = make_trace(n_layers=1, heads_per_layer=4, kv_per_layer=2, n_prompt=8, n_steps=2, k=4, needle=((2, 4),))
    tokens = np.array(
        [5, 6, 7, 8, 9, 5, 6, 7, 9, 9], np.int32
    )  # step 0 feeds token 7 at position 7, step 1 feeds 9 at 8
    positions = np.tile(np.array([0, 2, 3, 4], trace.positions.dtype), (4, 2, 1))
    weights = np.zeros((4, 2, 4), np.float16)
    weights[0, :, 1] = 1.0  # position 2: the needle, and an earlier 7
    weights[1, :, 2] = 1.0, 0.75  # position 3: the needle, and what followed that 7; a 9 comes after it
    weights[2, :, 0] = 1.0  # position 0: neither
    weights[3, 0, 0], weights[3, 0, 3] = 0.25, 0.5  # position 4: an earlier 9, fed at step 1, where its weight is 0
    trace = dataclasses.replace(trace, tokens=tokens, positions=positions, weights=weights)
    assert np.allclose(needle_scores(trace), [0.5, 0.4375, 0.0, 0.0]), "one of two heaviest, over two needle tokens"
    assert np.allclose(echo_scores(trace), [0.5, 0.5, 0.0, 0.0]), "at step 0 only"
    assert np.allclose(needle_scores(trace, "kv_head"), [0.5, 0.0])
    with pytest.raises(InputError, match="needle"):
        needle_scores(make_trace(needle=()))


def test_heterocache_finds_stars_anchors_and_volatile_heads():
    alike = np.eye(6)
    for a, b in ((0, 1), (0, 2), (1, 2), (2, 5)):
        alike[a, b] = alike[b, a] = 0.9
    steady, layer = np.array([0.9, 0.9, 0.2, 0.2, 0.9, 0.9]), np.array([0, 0, 0, 0, 0, 1])
    # heads 0, 1, 2 form a star led by the first of them; 3 is volatile, 4 an anchor; 5 is alike but in another layer
    assert leaders(steady, alike, layer, 0.5, 0.5).tolist() == [0, 0, 0, 3, ALONE, ALONE]


def test_heterocache_measures_overlap_with_the_prompt_and_between_heads():
    rows = [[[9, 8, 0, 0]] * 2, [[0, 0, 9, 8]] * 2]
    log = prompted(rows, wants=[[[0, 1]] * 4, [[0, 1], [0, 1], [0, 2], [2, 3]]])
    steady, alike = overlaps(log)
    assert np.allclose(steady, [1.0, 0.25]) and np.allclose(alike[0], [1.0, (1 + 1 + 0.5 + 0) / 4])


def test_heterocache_reloads_at_every_so_many_steps_and_not_between():
    pivot = [[0, 1]] + [[2, 3]] * 4
    log = prompted([[[9, 8, 1, 1]] * 2] * 2, wants=[pivot, [[0]] * 5], n_steps=5, first_touch="warm")
    policy = HeteroCache(leader=(0, 0), steady=(1.0, 1.0), every=4)
    assert [kept(log, policy, 2, step=t, head=1) for t in range(5)] == [{0, 1}] * 3 + [{2, 3}] * 2
    late = prompted([[[9, 8, 1, 1]] * 2] * 2, wants=[[[0, 1]] * 3 + [[2, 3]], [[0]] * 4], first_touch="warm")
    assert kept(late, policy, 2, step=3, head=1) == {0, 1}, "one step of four is not the median"


def test_what_was_fitted_is_not_printed_with_every_head():
    log = random_demand(np.random.default_rng(0), "warm", n_heads=4)
    log = dataclasses.replace(log, prompt_rows=np.ones((4, 2, log.n_pages), np.float32))
    for name in ("frozen", "flexicache", "heterocache", "duoattention", "headkv"):
        assert "(" not in repr(POLICIES[name].fit(log)).split("(", 1)[1], name


def test_heterocache_reloads_the_satellites_when_their_pivot_drifts():
    rows = [[[9, 8, 1, 1]] * 2] * 3
    pivot = [[0, 1]] * 2 + [[2, 3]] * 4
    log = prompted(rows, wants=[pivot, [[0]] * 6, [[0]] * 6], n_steps=6, first_touch="warm")
    policy = HeteroCache(leader=(0, 0, ALONE), steady=(1.0, 1.0, 1.0), every=2)
    assert kept(log, policy, 2, step=1, head=1) == {0, 1}
    assert kept(log, policy, 2, step=3, head=1) == {2, 3}, "the pivot moved in steps 2 and 3"
    assert kept(log, policy, 2, step=5, head=2) == {0, 1}, "an anchor stays where it was"
    assert kept(log, policy, 2, step=5, head=0) == {0, 1, 2, 3}
    assert replay(log, policy, 2).fetched[0] == 2


def test_published_policies_run_on_a_log_in_both_units(make_trace):
    trace = make_trace(n_layers=3, n_prompt=120, n_steps=40)
    for unit in ("head", "kv_head"):
        wants = demand(trace, unit)
        for name in PUBLISHED:
            whole = curves(wants, POLICIES[name])
            assert (whole.misses >= 0).all() and (np.diff(whole.mean_pages) >= -1e-9).all(), name
