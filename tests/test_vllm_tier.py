"""The engine's fast tier without the engine: its rule is the simulator's, its bytes are the reservoir's, its scores are
those of plain torch. (tests/engine holds it to the real engine.)"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wakekv.errors import CacheError, InputError
from wakekv.policies import POLICIES
from wakekv.policies.ledger import Ledger
from wakekv.simulation.replay import replay
from wakekv.simulation.residency import Residency, trim
from wakekv.vllm import scoring, steps
from wakekv.vllm.settings import Settings
from wakekv.vllm.shared import SharedTier, TorchSharedTier
from wakekv.vllm.tier import FastTier, bits
from wakekv.vllm.torchtier import TorchTier

PAGE, KV, GROUP, D, LAYERS, BLOCKS = 16, 2, 3, 32, 2, 64


class FakeEngine:
    """Sequences whose keys, values and queries are drawn at random, their blocks scattered over the reservoir."""

    def __init__(self, settings: Settings, dtype=torch.float32, sequences: int = 2, seed: int = 0, torches=False):
        self.rng = torch.Generator().manual_seed(seed)
        self.layers = {f"layer{i}": torch.zeros(BLOCKS, KV, PAGE, 2 * D, dtype=dtype) for i in range(LAYERS)}
        self.tier = kind_of(settings, torches)(settings, self.layers, KV * GROUP, sequences, 24 * PAGE)
        self.free = torch.randperm(BLOCKS, generator=self.rng).tolist()
        self.length, self.blocks, self.drift = {}, {}, {}
        self.seen: list = []

    def random(self, *shape):
        return torch.randn(*shape, generator=self.rng).to(self.layers["layer0"].dtype)

    def write(self, name: str, n: int) -> None:
        """n more tokens, in every layer."""
        start = self.length.get(name, 0)
        blocks = self.blocks.setdefault(name, [])
        while len(blocks) * PAGE < start + n:
            blocks.append(self.free.pop())
        at = torch.arange(start, start + n)
        block, offset = torch.tensor(blocks)[at // PAGE], at % PAGE
        for i, cache in enumerate(self.layers.values()):
            keys, values = self.random(n, KV, D), self.random(n, KV, D)
            halves = cache.view(BLOCKS, KV, 2 * PAGE, D)
            halves[block, :, offset], halves[block, :, PAGE + offset] = keys, values
            self.tier.note_keys(i, keys, block * PAGE + offset)
        self.length[name] = start + n

    def step(self, names: list[str]) -> steps.Step:
        """Each of these requests decodes a token, all together."""
        positions = np.array([self.length[name] for name in names])
        for name in names:
            self.write(name, 1)
        blocks = np.zeros((len(names), 24), np.int32)
        for i, name in enumerate(names):
            blocks[i, : len(self.blocks[name])] = self.blocks[name]
        step = steps.plan(self.tier, names, positions, blocks)
        for i in range(LAYERS):
            move = torch.stack([self.drift.setdefault((name, i), self.random(KV * GROUP, D)) for name in names])
            query = (0.9 * move + 0.45 * self.random(*move.shape)).to(move.dtype)  # what is read drifts slowly
            for name, q in zip(names, query):
                self.drift[name, i] = q
            self.scores = steps.reference(self.tier, step, i, query, 1.0)
            steps.decode(self.tier, step, i, query, lambda *read, i=i: self.attend(step, i, *read), 1.0)
        return step

    def attend(self, step: steps.Step, layer: int, table: torch.Tensor, lengths: torch.Tensor) -> None:
        """What attention would read, checked: bytes of the reservoir, no page twice, the open one last."""
        tier, cache, shared = self.tier, list(self.layers.values())[layer], isinstance(self.tier, SharedTier)
        for i in range(len(step.seqs)):
            for h in range(KV):
                row, length = step.seqs[i] * KV + h, int(lengths[i * KV + h])
                n = int((tier.where[layer, row] >= 0).sum()) if shared else int(step.held[i])
                held = np.flatnonzero(tier.where[layer, row] >= 0) if shared else tier.page_of[layer, row, :n]
                places, pages = table[i * KV + h, : n + 1].long(), [*held.tolist(), int(step.closed[i])]
                assert len(set(pages)) == n + 1 and min(pages) >= 0
                blocks = torch.from_numpy(step.blocks[i, pages].astype(np.int64))
                assert torch.equal(tier.pools[layer][places, 0].flatten(1), cache[blocks, h].flatten(1))
                assert length == n * PAGE + self.length[step.names[i]] - step.closed[i] * PAGE
                self.seen.append((step.names[i], layer, h, frozenset(pages[:-1])))


def kind_of(settings: Settings, torches: bool = False) -> type:
    if settings.mode == "pooled":
        return TorchSharedTier if torches else SharedTier
    return TorchTier if torches else FastTier


def decoded(settings: Settings, n_steps: int = 70, dtype=torch.float32, torches: bool = False) -> FakeEngine:
    engine = FakeEngine(settings, dtype, torches=torches)
    engine.write("a", 10 * PAGE + 3)
    engine.write("b", 5 * PAGE)
    for _ in range(n_steps):
        engine.step(["a", "b"])
    return engine


RULES = [
    {"mode": "reactive", "every": 1, "timing": "exact"},
    {"mode": "reactive", "every": 1, "timing": "lagged"},
    {"mode": "reactive", "every": 5, "timing": "exact"},
    {"mode": "reactive", "every": 16, "timing": "lagged"},
    {"mode": "reactive", "every": 1, "timing": "exact", "wants": 2},
    {"mode": "reactive", "every": 1, "timing": "exact", "least": 1.0},
    {"mode": "destructive", "every": 1, "timing": "exact"},
    {"mode": "destructive", "every": 4, "timing": "lagged", "wants": 3},
    {"mode": "flexicache", "every": 16, "timing": "lagged", "profile": (1, 2)},
    {"mode": "flexicache", "every": 1, "timing": "lagged", "profile": (0,)},
    {"mode": "flexicache", "every": 7, "timing": "lagged", "profile": (3,)},
    {"mode": "pooled", "every": 1, "timing": "exact"},
    {"mode": "pooled", "every": 1, "timing": "lagged"},
    {"mode": "pooled", "every": 5, "timing": "exact"},
    {"mode": "pooled", "every": 16, "timing": "lagged"},
    {"mode": "pooled", "every": 1, "timing": "exact", "least": 1.0},
    {"mode": "pooled", "every": 4, "timing": "lagged", "wants": 2, "least": 0.5},
]


def n_stayed(demand, settings: Settings) -> int:
    """Pages that came back from the reservoir and were resident as their step ended."""
    rule, n = Residency(demand, settings.policy, settings.budget), 0
    for step in range(demand.n_steps):
        before = rule.resident.copy()
        rule.step()
        n += int((rule.resident & ~before & (demand.created < step)).sum())
    return n


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(str(x) for x in rule.values()))
def test_its_wants_replayed_by_the_simulator_give_its_misses_and_fetches(rule):
    settings = Settings(budget=4, record=True, **rule)
    engine = decoded(settings)
    found = [replay(engine.tier.demand(name), settings.policy, settings.budget) for name in ("a", "b")]
    books = engine.tier.take_books()
    assert books["misses"] == sum(int(x.misses.sum()) for x in found) > 0
    fetched = sum(int(x.fetched.sum()) for x in found)
    if engine.tier.late:  # pages that would not have stayed never came
        stayed = sum(n_stayed(engine.tier.demand(name), settings) for name in ("a", "b"))
        assert books["fetched"] == stayed <= fetched
    else:
        assert books["fetched"] == fetched
    assert books["fetched_bytes"] == books["fetched"] * PAGE * 2 * D * 4
    assert books["wants"] == sum(engine.tier.demand(name).n_wants for name in ("a", "b"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(str(x) for x in rule.values()))
def test_the_pages_it_leaves_are_those_the_rule_leaves(rule):
    settings = Settings(budget=4, record=True, **rule)
    engine = decoded(settings, 37)
    tier = engine.tier
    for name in ("a", "b"):
        demand = tier.demand(name)
        rule_says = Residency(demand, settings.policy, settings.budget)
        for _ in range(demand.n_steps):
            rule_says.step()
        rows = slice(tier.sequences[name].slot * KV, (tier.sequences[name].slot + 1) * KV)
        there = tier.where[:, rows, : demand.n_pages].reshape(LAYERS * KV, -1) >= 0
        assert np.array_equal(there, rule_says.resident)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(str(x) for x in rule.values()))
def test_in_torch_operations_as_on_a_gpu_it_reads_and_moves_the_same(rule):
    """A GPU's tier, on the CPU: the same pages attended at each step, the same books, the same bytes."""
    settings = Settings(budget=4, record=True, **rule)
    loops, torches = decoded(settings, 40), decoded(settings, 40, torches=True)
    assert loops.seen == torches.seen
    for a, b in zip(loops.tier.pools, torches.tier.pools, strict=True):
        assert torch.equal(a.flatten(), b.flatten())
    books = [engine.tier.take_books() for engine in (loops, torches)]
    assert all(books[0][name] == books[1][name] for name in ("wants", "misses", "fetched", "admitted"))


def by_moved_shares(demand, budget: int) -> tuple[int, np.ndarray]:
    """Misses and, in the end, residents of the model's scope as the tier has it, from the simulator's own parts: a
    layer is trimmed to its share, and that is as many of the best of all pages as lay in it a step before."""
    policy = POLICIES["pooled"].but(scope="model")
    seen, layer, ones, misses = Ledger(demand, policy.start, policy.scope), demand.layer, np.ones(demand.n_heads), 0

    def kept(pages, groups, share):
        return trim(pages, policy.rank(seen), seen.recency, budget, groups, share, 0.0)

    share, resident = ones, kept(seen.known, layer, ones)
    for _ in range(demand.n_steps):
        heads, entries, births, _ = seen.observe()
        pages = demand.page[entries]
        misses += int((~resident[heads, pages]).sum())
        resident = resident | births
        resident[heads, pages] = True
        resident = kept(resident, layer, share)
        best = kept(seen.known, np.zeros(demand.n_heads, int), ones)
        of_layer = np.bincount(layer, best.sum(1)) / (budget * KV)
        share = ones if best.sum() == seen.known.sum() else of_layer[layer]
        resident = kept(resident, layer, share)
    return misses, resident


@pytest.mark.parametrize(
    "rule", [{}, {"timing": "lagged"}, {"every": 5, "wants": 3}, {"least": 1.0}, {"wants": 1}], ids=str
)
@pytest.mark.parametrize("torches", [False, True], ids=["loops", "torch"])
def test_over_the_whole_model_layers_are_trimmed_to_shares_that_move(rule, torches):
    engine = FakeEngine(Settings(mode="pooled", scope="model", budget=4, record=True, **rule), torches=torches)
    engine.write("a", 10 * PAGE + 3)
    shares = []
    for _ in range(60):
        engine.step(["a"])
        shares.append(engine.tier.quota[:, engine.tier.sequences["a"].slot].tolist())
    misses, resident = by_moved_shares(engine.tier.demand("a"), 4)
    slot, total = engine.tier.sequences["a"].slot, LAYERS * KV * 4
    there = engine.tier.where[:, slot * KV : (slot + 1) * KV, : resident.shape[1]].reshape(LAYERS * KV, -1) >= 0
    assert np.array_equal(there, resident)
    assert 0.8 * total < there.sum() <= total  # a share that grew is filled by wants
    assert engine.tier.take_books()["misses"] == misses > 0
    assert len(set(map(tuple, shares))) > 2 and {sum(x) for x in shares} == {total}


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("timing", ["exact", "lagged"])
def test_heads_that_share_have_the_memory_of_as_many_that_do_not_and_leave_none_behind(scope, timing):
    """But for the room that one layer's wants have while it attends, which takes that of the open pages, one a head."""
    settings = Settings(mode="pooled", scope=scope, timing=timing, budget=4, wants=2)
    engine, page = decoded(settings, 30), 2 * PAGE * D * 4
    tier, own = engine.tier, LAYERS * 2 * KV * 4
    coming = 0 if timing == "lagged" else 2 * KV * 2
    assert tier.tiers()["pages"] == (own + 2 * KV + coming) * page
    of_heads = (tier.where >= 0).sum(2)
    assert of_heads.max() > 4 and of_heads.sum() == tier.held.sum() == own
    assert scope == "model" or (of_heads.reshape(LAYERS, 2, KV).sum(2) == 4 * KV).all()
    tier.release(["a", "b"])
    assert (tier.where < 0).all() and tier.n_blocks == own + coming
    assert sorted(tier.blocks) == list(range(2 * KV, 2 * KV + own + coming))


def test_a_budget_of_all_pages_never_misses_and_reads_everything():
    for mode in ("reactive", "destructive", "pooled"):
        engine = decoded(Settings(mode=mode, budget=24), 40)
        books = engine.tier.take_books()
        assert books["misses"] == books["fetched"] == 0
        assert all(len(pages) in (10, 11, 12, 5, 6, 7) for *_, pages in engine.seen)


def test_memory_is_bounded_by_the_budget_not_by_the_text():
    small, large = (FakeEngine(Settings(budget=b)).tier.tiers()["pages"] for b in (2, 4))
    page = 2 * PAGE * D * 4
    assert small == LAYERS * 2 * KV * (2 + 1) * page and large == LAYERS * 2 * KV * (4 + 1) * page


def test_what_a_request_held_is_free_once_it_is_released():
    engine = FakeEngine(Settings(budget=3))
    for name in ("a", "b", "c"):
        engine.write(name, 4 * PAGE + 1)
    engine.step(["a", "b"])
    with pytest.raises(CacheError, match="more requests"):
        engine.step(["c"])
    engine.tier.release(["a", "nobody"])
    engine.step(["c", "b"])
    assert set(engine.tier.sequences) == {"b", "c"} and not engine.tier.free
    engine.tier.release(["b", "c"])
    assert len(engine.tier.free) == 2 and (engine.tier.where == -1).all() and (engine.tier.page_of == -1).all()


def test_what_is_recorded_can_be_had_after_the_end_and_only_if_asked_for():
    engine = FakeEngine(Settings(budget=3, record=True))
    engine.write("a", 4 * PAGE)
    engine.step(["a"])
    engine.tier.release(["a"])
    assert engine.tier.demand("a").n_steps == 1
    with pytest.raises(CacheError, match="nothing is recorded of 'b'"):
        engine.tier.demand("b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_and_choice_equal_those_of_plain_torch(dtype):
    rng = torch.Generator().manual_seed(1)
    engine = FakeEngine(Settings(budget=4), dtype)
    engine.write("a", 12 * PAGE)
    blocks = np.array([engine.blocks["a"]], np.int32)
    step = steps.Step(["a"], *[np.array([12])] * 10)
    step.blocks = blocks
    query = torch.randn(1, KV * GROUP, D, generator=rng).to(dtype)
    expected = steps.reference(engine.tier, step, 1, query, 1.0)[0]
    q = query[0].float().view(KV, GROUP, D)
    for h in range(KV):
        parts = torch.stack([q[h].clamp(min=0), q[h].clamp(max=0)], 1).contiguous().numpy()
        got = np.empty(12, np.float32)
        scoring.score_pages(parts, bits(engine.tier.digests[1]), blocks[0], h, 12, got)
        assert np.allclose(got, expected[h].numpy(), rtol=1e-5, atol=1e-4)
        out = np.zeros(5, np.int32)
        assert scoring.choose(got, 12, 5, np.empty(12, np.float32), out) == 5
        assert out.tolist() == sorted(np.argsort(-got)[:5], key=lambda p: got[p])


@pytest.mark.parametrize("mode", ["reactive", "pooled"])
def test_of_the_best_pages_only_those_that_would_have_the_mean_weight_are_wanted(mode):
    every, some = (decoded(Settings(mode=mode, budget=4, least=least, record=True), 15) for least in (0.0, 1.0))
    dropped = 0
    for name, n_prompt in (("a", 10), ("b", 5)):
        for t, steps_of in enumerate(
            zip(*(engine.tier.sequences[name].wants for engine in (every, some)), strict=True)
        ):
            n = n_prompt + (t + (3 if name == "a" else 0)) // PAGE
            for layer, h in np.ndindex(LAYERS, KV):
                (pages, found, shares), (kept, n_kept, _) = (step[layer] for step in steps_of)
                assert found[h] == 3
                there = shares[h] * n >= 1
                dropped += int((~there).sum())
                assert kept[h, : n_kept[h]].tolist() == pages[h][there].tolist() != []
    assert dropped > 20


def test_ties_go_to_the_first_pages_in_their_order():
    score, out = np.array([1.0, 3.0, 1.0, 1.0, 3.0], np.float32), np.zeros(3, np.int32)
    assert scoring.choose(score, 5, 3, np.empty(5, np.float32), out) == 3
    assert out.tolist() == [0, 1, 4]


def test_bounds_are_those_of_the_keys_written_also_when_a_block_is_written_anew():
    engine = FakeEngine(Settings(budget=4))
    engine.write("a", 2 * PAGE)
    engine.free.extend(engine.blocks.pop("a"))
    engine.length.pop("a")
    engine.write("b", PAGE)
    keys = engine.layers["layer1"].view(BLOCKS, KV, 2 * PAGE, D)[engine.blocks["b"][0], :, :PAGE]
    bounds = engine.tier.digests[1][engine.blocks["b"][0]]
    assert torch.equal(bounds[:, 0], keys.amax(1)) and torch.equal(bounds[:, 1], keys.amin(1))


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"mode": "reactve"}, "did you mean reactive"),
        ({"budget": 0}, "budget counts from 1"),
        ({"budgets": 4}, "did you mean budget"),
        ({"every": 1.5}, "every counts from 1"),
        ({"timing": "late"}, "exact or lagged"),
        ({"page": 24}, "multiples of 16"),
        ({"wants": 40, "budget": 4}, "more than the budget"),
        ({"mode": "flexicache", "timing": "lagged"}, "needs the profile"),
        ({"mode": "flexicache", "profile": [1]}, "timing='lagged'"),
        ({"profile": [1]}, "for mode flexicache"),
        ({"mode": "pooled", "scope": "head"}, "layer or model in mode pooled"),
        ({"scope": "layer"}, "no other mode has one"),
        ({"least": -1}, "least must be"),
        ({"mode": "flexicache", "timing": "lagged", "profile": [1], "least": 1}, "leave wants and least out"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(asked, said):
    with pytest.raises(InputError, match=said):
        Settings.of(asked)


def test_settings_come_from_the_environment_and_the_plugin_does_nothing_without(monkeypatch):
    import wakekv.vllm

    monkeypatch.delenv("WAKEKV_VLLM", raising=False)
    assert Settings.from_environment() is None
    assert wakekv.vllm.register() is None  # it would import the engine, which is not here
    monkeypatch.setenv("WAKEKV_VLLM", "destructive")
    assert Settings.from_environment().mode == "destructive"
    asked = Settings(budget=9, every=4, record=True)
    monkeypatch.setenv("WAKEKV_VLLM", asked.as_json())
    assert Settings.from_environment() == asked
    monkeypatch.setenv("WAKEKV_VLLM", "{reactive")
    with pytest.raises(InputError, match="no JSON"):
        Settings.from_environment()


def test_a_profile_of_another_model_and_a_cache_in_another_type_are_refused():
    with pytest.raises(InputError, match="names KV head 9"):
        FakeEngine(Settings(mode="flexicache", timing="lagged", profile=(9,)))
    with pytest.raises(InputError, match="bfloat16 or float32"):
        FakeEngine(Settings(), torch.float16)
    with pytest.raises(InputError, match="make them equal"):
        FakeEngine(Settings(page=32))
