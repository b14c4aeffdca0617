"""What public functions are given in vain, by whoever calls them from code of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import tiny
import torch
from malformed import Case
from malformed_logs import numbers, packed, trace

from wakekv import stats
from wakekv.cache import ReversibleCache
from wakekv.costs.links import Link
from wakekv.costs.plan import plan
from wakekv.logs.demand import Demand, demand
from wakekv.logs.shipped import open_shipped, pack
from wakekv.logs.trace import open_trace, save_trace
from wakekv.policies import POLICIES, Policy
from wakekv.recording.prompts import build, find
from wakekv.recording.record import record
from wakekv.recording.rows import Rows
from wakekv.reproduction.claims import decide, load_claims, number, published
from wakekv.reproduction.recordings import logs
from wakekv.simulation.match import Curve, pooled
from wakekv.simulation.replay import replay
from wakekv.simulation.simulate import curves
from wakekv.vllm.settings import VARIABLE, Settings

WANTS = [[[0, 1], [1, 2]]]  # one head, two steps


def wanted(**changes: object) -> Demand:
    made = Demand.from_lists(WANTS)
    fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
    return Demand(**fields | changes)


def recorded(**changes: object) -> object:
    """A recording of a tiny model, with one thing of its prompt or its arguments changed."""
    prompt, loaded = tiny.prompt(50), tiny.loaded()
    own = {name: changes.pop(name) for name in [*changes] if hasattr(prompt, name)}
    vars(prompt).update(own)
    vars(loaded.model.config).update(changes.pop("config", {}))
    return record(loaded, prompt, "out", progress=False, **{"steps": 3, "k": 4, **changes})


def noted(scores: torch.Tensor) -> object:
    rows = Rows(1, 2, [], 8)
    rows.note(0, scores, torch.softmax(scores, -1))
    return rows.take()


def slow() -> object:
    return build("cot", SimpleNamespace(is_fast=False), scripted=False)


def doubled() -> object:
    return find("one", "one or one", [0], [(0, 10)], SimpleNamespace(decode=lambda *_, **__: "one or one"))


def with_manifest(**changes: object) -> object:
    made = trace()
    return save_trace(replace(made, manifest=made.manifest | changes), "new")


def asked(text: str) -> object:
    with patch.dict("os.environ", {VARIABLE: text}):
        return Settings.from_environment()


def cases() -> Iterator[Case]:
    for where, what, call, names, way, *make in CALLS:
        yield Case(where, what, names, way, call=call, make=make[0] if make else None)


CALLS = [
    (
        "demand",
        "a log whose positions do not rise",
        lambda: demand(open_trace("log")),
        "positions that do not rise",
        "again",
        numbers("positions", (0, 2, -1), 0),
    ),
    (
        "demand",
        "a log with an infinite weight",
        lambda: demand(open_trace("log")),
        "a want has a weight",
        "infinite",
        numbers("weights", (1, 2, 3), np.inf),
    ),
    ("demand", "a unit that is not known", lambda: demand(trace(), unit="heads"), "'heads'", "one of head, kv_head"),
    (
        "demand",
        "a first touch that is not known",
        lambda: demand(trace(), first_touch="hot"),
        "'hot'",
        "one of cold, warm",
    ),
    ("demand", "more weights than the log holds", lambda: demand(trace(), k=9), "not 9", "between 1 and 8"),
    ("demand", "no weights", lambda: demand(trace(), k=0), "not 0", "between 1 and 8"),
    ("demand", "pages of no tokens", lambda: demand(trace(), page_tokens=0), "page_tokens", "at least 1"),
    (
        "demand",
        "pages that a shipped log has not",
        lambda: demand(open_shipped("x.npz"), page_tokens=8),
        "pages of 16",
        "record the log",
        packed,
    ),
    ("Demand", "counts that fall", lambda: wanted(ptr=np.array([[0, 3, 2]])), "ptr", "must rise"),
    ("Demand", "counts of another number of wants", lambda: wanted(ptr=np.array([[0, 2, 3]])), "ptr", "must rise"),
    ("Demand", "a page that is not there", lambda: wanted(created=np.array([-1])), "a want names a page", "0..0"),
    (
        "Demand",
        "a weight that is not a number",
        lambda: wanted(weight=np.full(4, np.nan, np.float32)),
        "a weight",
        "not a number",
    ),
    ("Demand", "a negative weight", lambda: wanted(weight=np.full(4, -1, np.float32)), "a weight", "negative"),
    (
        "Demand",
        "a page wanted before it is there",
        lambda: wanted(created=np.full(3, 1, np.int32), first_touch="warm"),
        "wanted before",
        "created",
    ),
    (
        "curves",
        "a budget of nothing",
        lambda: curves(wanted(), POLICIES["reactive"], [0]),
        "budget 0",
        "between 1 and 3",
    ),
    ("curves", "half a page", lambda: curves(wanted(), POLICIES["reactive"], [1.5]), "budget 1.5", "between 1 and 3"),
    (
        "curves",
        "a budget that is not a number",
        lambda: curves(wanted(), POLICIES["reactive"], [np.nan]),
        "budget nan",
        "between 1 and 3",
    ),
    (
        "curves",
        "a budget in words",
        lambda: curves(wanted(), POLICIES["reactive"], ["two"]),
        "budget two",
        "between 1 and 3",
    ),
    ("curves", "no budgets", lambda: curves(wanted(), POLICIES["reactive"], []), "no budget", "at least one"),
    (
        "curves",
        "budgets that were not simulated",
        lambda: curves(wanted(), POLICIES["reactive"], [1]).at([2]),
        "budget 2",
        "1..1 were",
    ),
    (
        "replay",
        "a convention that is not known",
        lambda: replay(wanted(), POLICIES["reactive"], 1, convention="serial"),
        "'serial'",
        "batch",
    ),
    ("Policy", "a scope that is not known", lambda: Policy(scope="group"), "scope", "one of head, layer, model"),
    ("Policy", "half a step between trims", lambda: Policy(every=0.5), "every", "whole number"),
    ("Policy", "a floor above 1", lambda: Policy(floor=1.5), "floor", "between 0 and 1"),
    ("Policy", "a floor that is not a number", lambda: Policy(floor=np.nan), "floor", "between 0 and 1"),
    (
        "Policy",
        "pages that come back and do not",
        lambda: Policy(fetch="trim", reversible=False),
        "fetch='trim'",
        "reversible=True",
    ),
    (
        "Curve",
        "a memory that is not a number",
        lambda: Curve("x", np.array([1]), np.array([np.nan]), np.array([0.1])),
        "'x'",
        "leave it out",
    ),
    (
        "Curve",
        "a memory that falls",
        lambda: Curve("x", np.arange(2), np.array([2.0, 1.0]), np.zeros(2)),
        "'x'",
        "must not lose memory",
    ),
    ("Curve", "more budgets than rates", lambda: Curve("x", np.arange(2), np.zeros(2), np.zeros(1)), "'x'", "as many"),
    ("pooled", "no logs", lambda: pooled("x", []), "no log", "'x'"),
    (
        "stats.bootstrap",
        "a sum that is not a number",
        lambda: stats.bootstrap([[np.nan]], lambda total: total[..., 0]),
        "nan",
        "leave out",
    ),
    ("stats.bootstrap", "no prompts", lambda: stats.bootstrap([], lambda total: total), "at least one prompt", "shape"),
    (
        "stats.proportion",
        "more found than asked",
        lambda: stats.proportion(3, 2, unit="prompts"),
        "3 of 2",
        "0 <= count <= n",
    ),
    (
        "stats.interpolate",
        "points out of order",
        lambda: stats.interpolate(1, [2, 1], [0, 0]),
        "strictly increasing",
        "sort the points",
    ),
    (
        "stats.interpolate",
        "a point repeated",
        lambda: stats.interpolate(1, [1, 1], [0, 0]),
        "strictly increasing",
        "merge those",
    ),
    ("stats.interpolate", "a point outside", lambda: stats.interpolate(3, [1, 2], [0, 0]), "x = 3", "[1, 2]"),
    (
        "stats.permutation_p",
        "nothing to compare with",
        lambda: stats.permutation_p(1.0, []),
        "null",
        "at least one draw",
    ),
    (
        "stats.sign_test",
        "a difference that is not a number",
        lambda: stats.sign_test([np.nan]),
        "nan",
        "leave that prompt out",
    ),
    ("ReversibleCache", "no budget", lambda: ReversibleCache(tiny.model().config), "budget", "give either"),
    (
        "ReversibleCache",
        "a budget of nothing",
        lambda: ReversibleCache(tiny.model().config, budget=0),
        "budget",
        "from 1",
    ),
    (
        "ReversibleCache",
        "a policy that is misspelt",
        lambda: ReversibleCache(tiny.model().config, 4, policy="reactiv"),
        "'reactiv'",
        "did you mean reactive",
    ),
    (
        "ReversibleCache",
        "a policy that knows the future",
        lambda: ReversibleCache(tiny.model().config, 4, policy="optimum"),
        "beforehand",
        "held_out",
    ),
    (
        "ReversibleCache",
        "a mode that is not known",
        lambda: ReversibleCache(tiny.model().config, 4, mode="fast"),
        "'fast'",
        "one of exact, lagged, eps",
    ),
    (
        "ReversibleCache",
        "a bound that is not a number",
        lambda: ReversibleCache(tiny.model().config, 4, mode="eps", eps=np.nan),
        "eps",
        "from 0 up",
    ),
    ("Demand", "a page twice in a step", lambda: Demand.from_lists([[[0, 0]]]), "head 0", "name each page once"),
    (
        "bootstrap",
        "no resamples",
        lambda: stats.bootstrap(np.ones((3, 1)), np.sum, resamples=0),
        "resamples",
        "a whole number",
    ),
    (
        "bootstrap",
        "a level of 2",
        lambda: stats.bootstrap(np.ones((3, 1)), np.sum, level=2),
        "level",
        "in 0..1",
    ),
    ("ratio", "two lengths", lambda: stats.ratio([1, 2], [1]), "(2,) and (1,)", "one shape"),
    ("adjust", "a misspelt correction", lambda: stats.adjust([0.1], "bonferoni"), "'bonferoni'", "did you mean"),
    ("adjust", "a statistic for a p-value", lambda: stats.adjust([3.0]), "p-value", "give p-values"),
    ("proportion", "of endlessly many", lambda: stats.proportion(1, np.inf, unit="x"), "1 of inf", "both finite"),
    (
        "sign_test",
        "a table of differences",
        lambda: stats.sign_test(np.ones((2, 2))),
        "(2, 2)",
        "a difference a prompt",
    ),
    ("Policy", "every nan steps", lambda: POLICIES["reactive"].but(every=np.nan), "every", "a whole number of steps"),
    ("Policy", "a floor in words", lambda: POLICIES["pooled"].but(floor="half"), "'half'", "between 0 and 1"),
    ("Link", "a bandwidth in words", lambda: Link("x", "fast", 0, ""), "link x", "a number above 0"),
    ("ReversibleCache", "a budget of True", lambda: ReversibleCache(None, True), "budget", "a whole number"),
    (
        "ReversibleCache",
        "a policy in numbers",
        lambda: ReversibleCache(None, 4, policy=5),
        "not 5",
        "a name or a Policy",
    ),
    ("ReversibleCache", "a share in words", lambda: ReversibleCache(None, 4, least="x"), "least", "a number"),
    ("ReversibleCache", "a folder in numbers", lambda: ReversibleCache(None, 4, slow=5), "slow", "a folder"),
    ("Link", "a link that carries nothing", lambda: Link("x", 0, 0, ""), "link x", "above 0"),
    ("plan", "no logs", lambda: plan([], Link("x", 1, 0, ""), 1.0), "no log", "python -m wakekv record"),
    ("build", "a tokenizer that does not say where tokens stand", slow, "tokenizer", "a fast one is needed"),
    (
        "vllm.Settings",
        "a mode that is a list",
        lambda: asked('{"mode": ["reactive"]}'),
        "['reactive']",
        "one of reactive",
    ),
    ("vllm.Settings", "a profile in words", lambda: asked('{"profile": "all"}'), "'all'", "a list of KV heads"),
    ("vllm.Settings", "a profile of half heads", lambda: asked('{"profile": [0.5]}'), "[0.5]", "a list of KV heads"),
    ("vllm.Settings", "a record in words", lambda: asked('{"record": "no"}'), "'no'", "true or false"),
    ("vllm.Settings", "a folder in numbers", lambda: asked('{"folder": 5}'), "not 5", "a path"),
    ("vllm.Settings", "settings nested 100,000 deep", lambda: asked('{"a":' * 100_000), "WAKEKV_VLLM", "give a mode"),
    ("find", "a needle that stands twice", doubled, "'one' stands 2 times", "change it"),
    ("record", "an empty prompt", lambda: recorded(tokens=()), "prompt", "at least one token"),
    ("record", "an empty script", lambda: recorded(script=()), "script", "at least one token"),
    (
        "record",
        "a token that the model does not know",
        lambda: recorded(tokens=(1, 64)),
        "tiny-llama",
        "this tokenizer",
    ),
    ("record", "needles out of order", lambda: recorded(needle=((9, 12), (2, 4))), "[[9, 12], [2, 4]]", "ascending"),
    ("record", "a needle given twice", lambda: recorded(needle=((2, 4), (2, 4))), "[[2, 4], [2, 4]]", "ascending"),
    (
        "record",
        "a needle beyond the prompt",
        lambda: recorded(needle=((40, 51),)),
        "[[40, 51]]",
        "within the prompt's 50",
    ),
    ("record", "a sampling setting that is not known", lambda: recorded(sample={"top_k": 5}), "'top_k'", "known are"),
    (
        "record",
        "a temperature that is not a number",
        lambda: recorded(sample={"temperature": np.nan}),
        "nan",
        "temperature > 0",
    ),
    ("record", "a temperature in words", lambda: recorded(sample={"temperature": "hot"}), "'hot'", "temperature > 0"),
    (
        "record",
        "a model without heads of attention",
        lambda: recorded(config={"num_attention_heads": None}),
        "tiny-llama",
        "one number of each",
    ),
    (
        "record",
        "a model with heads in unequal groups",
        lambda: recorded(config={"num_key_value_heads": 3}),
        "3 groups",
        "equal size",
    ),
    (
        "record",
        "a model that misstates its heads",
        lambda: recorded(config={"num_key_value_heads": 4}),
        "its configuration says",
        "cannot be logged",
    ),
    ("Rows", "weights that are not numbers", lambda: noted(torch.tensor([[0.0, float("nan")]])), "layer 0", "float32"),
    ("Rows", "infinite scores", lambda: noted(torch.tensor([[0.0, float("inf")]])), "layer 0", "float32"),
    ("save_trace", "a log without heads", lambda: with_manifest(model={}), "n_layers", "recorded"),
    (
        "save_trace",
        "a log of more steps than its arrays have",
        lambda: with_manifest(n_steps=9),
        "tokens is int32 [206]",
        "a trace needs",
    ),
    (
        "pack",
        "a text of another number of tokens",
        lambda: pack(trace(), ["a"], "x.npz"),
        "1 pieces of text for 206",
        "give one a token",
    ),
    (
        "decide",
        "a claim that is misspelt",
        lambda: decide("one-fetch-a-mis", 1.0),
        "'one-fetch-a-mis'",
        "did you mean one-fetch-a-miss",
    ),
    ("decide", "no value and no reason", lambda: decide("one-fetch-a-miss"), "one-fetch-a-miss", "say in `note`"),
    ("number", "a range that falls", lambda: number([2, 1]), "[2, 1]", "a range that falls"),
    ("number", "a fraction of nothing", lambda: number("1/0"), "'1/0'", "fraction like '17/17'"),
    ("published", "a number that the paper did not print", lambda: published("table9"), "'table9'", "nothing at"),
    ("load_claims", "claims that are not there", lambda: load_claims("no.yaml"), "no.yaml", "checkout"),
    ("logs", "logs that were not recorded", lambda: logs("out", "smoke"), "is missing", "--only 01"),
    (
        "logs",
        "a regime that a profile has not",
        lambda: logs("out", "smoke", regime="niha"),
        "'niha'",
        "did you mean niah",
    ),
]
