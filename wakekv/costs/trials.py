"""The real cache on trial: exactness, and reversible against destructive at equal memory.

Everything here runs a model. What is compared starts from one prefill and is fed the same tokens, so it differs in what
stays and nothing else. Rows are plain, for JSON; those of `contest` hold seconds in the columns of TIMED only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from wakekv.costs import links, plan
from wakekv.costs.quality import ARMS, arms, divergence, forced, needles, prefilled
from wakekv.costs.system import measure, sweep
from wakekv.costs.witness import watch
from wakekv.errors import InputError
from wakekv.logs.trace import open_trace
from wakekv.policies import POLICIES
from wakekv.recording.prompts import Prompt, build
from wakekv.recording.record import record
from wakekv.simulation.replay import replay
from wakekv.simulation.simulate import curves

KINDS = ARMS | {"snapkv, wider": "snapkv"}  # and a destructive one that chooses at prefill what it keeps
TIMED = ("stall_s", "score_s", "attend_s", "settle_s")
POOLS = {  # a budget a head, as the paper has it, and one budget for all heads; what a page's return is worth in each
    "reactive": POLICIES["reactive"],
    "pooled": POLICIES["pooled"],
    "commons": POLICIES["commons"],
    "reactive, destructive": POLICIES["evict"],
    "pooled, destructive": POLICIES["pooled"].but(reversible=False),
}
WIDER = "reactive, a quarter more pages"  # than a pool, which needs room for what a step brings


@torch.inference_mode()
def exactness(
    model: torch.nn.Module, tokens: Sequence[int], n_tokens: int = 24, chunks: Sequence[int] = (1024,), page: int = 16
) -> list[dict[str, Any]]:
    """A budget of every page against transformers' DynamicCache, a row a kernel and chunk of the prefill.

    Over n_tokens of greedy text: largest_logit (absolute difference) and largest_share (the same as a share of the
    largest logit), equal_bits, equal_text (the greedy text is the same), misses, n_pages.
    """
    ids, plain, logits = torch.tensor([list(tokens)], device=model.device), DynamicCache(config=model.config), []
    logits.append(model(ids, past_key_values=plain, logits_to_keep=1).logits[0, -1].float().cpu())
    while len(logits) <= n_tokens:
        ids = logits[-1].argmax().view(1, 1).to(model.device)
        logits.append(model(ids, past_key_values=plain).logits[0, -1].float().cpu())
    greedy, truth = [int(x.argmax()) for x in logits[:-1]], torch.stack(logits[1:])
    n_pages, rows = -(-(len(tokens) + n_tokens) // page), []
    for chunk in chunks:
        room = {"budget": n_pages, "page": page, "max_tokens": n_pages * page}
        start = prefilled(model, tokens, chunk=chunk, **room)
        for kernel in ("sdpa", "matmul"):
            cache = start.again(kernel=kernel)
            ours = forced(model, cache, greedy)
            same = ours.argmax(-1)[:-1].tolist() == greedy[1:]
            apart = float((ours - truth).abs().max())
            row = {"kernel": kernel, "chunk": chunk, "largest_logit": apart}
            row |= {
                "largest_share": apart / float(truth.abs().max()),
                "equal_bits": bool(torch.equal(ours, truth)),
                "equal_text": same,
                "n_tokens": n_tokens,
            }
            rows.append(row | {"misses": cache.books.misses, "n_pages": n_pages})
    return rows


def contest(
    model: torch.nn.Module,
    prompt: Prompt,
    budgets: Iterable[int],
    *,
    n_tokens: int = 64,
    chunk: int = 1024,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Reversible against destructive at equal memory on one scripted prompt: a row a budget and arm of KINDS.

    Over n_tokens of the prompt's script, fed one by one: kl_mean, kl_p95, kl_worst against the full cache (nats a
    token), agreement (share of tokens for which both have the same one on top); n_wants, misses, n_steps, fetched,
    fetched_bytes, stall_steps; replay_differs (misses of the cache less those that `replay` counts of its recorded
    wants); pages and bytes on the fast tier as in `quality.needles`, slots_bytes (what its slots really take), n_pages
    of a KV head as decoding ends; and TIMED, in seconds over all steps.  settings: as for ReversibleCache.
    InputError for a script that is too short, or budgets at which nothing would ever leave.
    """
    *text, last = prompt.tokens
    if len(prompt.script or ()) < n_tokens:
        raise InputError(f"a script of {len(prompt.script or ())} tokens is too short to feed {n_tokens}: ask for less")
    tokens = [last, *prompt.script][:n_tokens]
    page, budgets = settings.get("page", 16), list(budgets)
    n_pages = (len(text) + n_tokens) // page
    if max(budgets) >= n_pages:
        raise InputError(f"budget {max(budgets)} keeps all {n_pages} pages, so nothing leaves: ask for less")
    start = prefilled(model, text, chunk=chunk, **{"max_tokens": len(text) + n_tokens, **settings})
    forced(model, start.again(budget=min(budgets), policy=ARMS["reversible"]), tokens[:2])  # compiles what is timed
    rows, full = [], None
    for arm, budget, cache, size in arms(start, budgets, KINDS):
        some = forced(model, cache, tokens)
        if full is None:
            full = some
            continue
        kl, books = divergence(full, some), cache.books
        counted = replay(cache.demands()[0], cache.settings.policy, cache.steps.budget).misses[0]
        row = {"regime": prompt.regime, "seed": prompt.seed, "n_prompt": len(prompt.tokens), "arm": arm}
        row |= {"budget": budget, **size, "n_pages": n_pages, "n_tokens": n_tokens}
        row |= {"kl_mean": float(kl.mean()), "kl_p95": float(np.quantile(kl, 0.95)), "kl_worst": float(kl.max())}
        row |= {"agreement": float((full.argmax(-1) == some.argmax(-1)).float().mean())}
        row |= {name: getattr(books, name) for name in ("n_steps", "n_wants", "misses", "fetched")}
        row |= {name: getattr(books, name) for name in ("fetched_bytes", "stall_steps")}
        row |= {"replay_differs": int(books.misses - counted), "slots_bytes": cache.tiers()["pages"]}
        rows.append(row | {name: getattr(books, name) for name in TIMED})
    return rows


def pools(
    model: torch.nn.Module, prompt: Prompt, budgets: Iterable[int], *, n_tokens: int = 66, **settings: Any
) -> list[dict[str, Any]]:
    """One budget for all heads against a budget each on one scripted prompt: a row a budget and arm, those of POOLS and
    WIDER, which at one budget take turns step by step.

    The rows of `system.measure` beside transformers' dynamic cache, and regime, seed, arm, budget (pages a head, so B
    times the heads in all).  n_tokens: of the prompt's script, the first of which are not timed; settings: as for
    ReversibleCache.
    """
    *text, last = prompt.tokens
    tokens = [last, *prompt.script][:n_tokens]
    start = prefilled(model, text, **{"max_tokens": len(text) + n_tokens, **settings})
    rows = []
    for budget in budgets:
        asked = {arm: {"policy": policy, "budget": budget} for arm, policy in POOLS.items()}
        asked[WIDER] = {"policy": POOLS["reactive"], "budget": budget + budget // 4}
        _, *found = measure(model, start, tokens, asked.values(), beside=("dynamic",))
        own = {"regime": prompt.regime, "seed": prompt.seed, "budget": budget}
        rows += [{**row, **own, "arm": arm} for arm, row in zip(asked, found, strict=True)]
    return rows


def foreseen(
    loaded: Any, prompt: Prompt, budget: int, n_tokens: int, policies: Sequence[str] = ("reactive", "pooled", "commons")
) -> list[dict[str, Any]]:
    """What a plan says of a prompt from its log, beside what the cache does on the same text: a row a policy.

    policy, budget, wants (pages of a KV head in a step: as many as the plan says that a head reads), n_steps, and of a
    step
    log_fetches, log_stall_ms      as the plan has them: the log's wants, the link as `links.measured` finds it
    wants_fetches, wants_stall_ms  the same from the wants that the cache had
    fetches, stall_ms              what the cache did
    """
    *text, last = prompt.tokens
    tokens = [last, *prompt.script][:n_tokens]
    with TemporaryDirectory() as folder:
        log = open_trace(record(loaded, prompt, Path(folder) / "log", steps=n_tokens, progress=False))
        link = links.measured(page_bytes := plan.page_bytes_of(log))
        made = plan.plan([log], link, step_s=1.0, policies=policies)
    said = made.rows.set_index(["policy", "budget"])
    room = {"budget": budget, "wants": min(made.least, budget), "max_tokens": len(text) + n_tokens}
    start, rows = prefilled(loaded.model, text, **room), []
    for name in policies:
        forced(loaded.model, start.again(policy=name), tokens[:2])  # compiles what is timed
        cache = start.again(policy=name)
        forced(loaded.model, cache, tokens)
        wants, n = cache.demands()[0], cache.books.n_steps
        found = curves(wants, POLICIES[name], [budget])
        row = {"policy": name, "budget": budget, "wants": room["wants"], "n_steps": n}
        row |= {f"log_{what}": float(said.loc[(name, budget), what]) for what in ("fetches", "stall_ms")}
        waited = plan.stall_s(POLICIES[name], found, wants, page_bytes, link)[0]
        row |= {"wants_fetches": float(found.fetched[0] / n), "wants_stall_ms": 1e3 * float(waited / n)}
        rows.append(row | {"fetches": cache.books.fetched / n, "stall_ms": 1e3 * cache.books.stall_s / n})
    return rows


def _watch(loaded, length: int, n_tokens: int, budget: int, wants: int) -> dict:
    *text, last = (prompt := build("niah", loaded.tokenizer, length=length)).tokens
    tokens = [last, *prompt.script][:n_tokens]
    start = prefilled(loaded.model, text, budget=budget, wants=wants, max_tokens=len(text) + len(tokens))
    first = watch(loaded.model, start, tokens, policy=ARMS["reversible"])
    twin = watch(loaded.model, start, tokens, head=first["head"], policy=ARMS["destructive"])
    return {"reversible": first, "destructive": twin}


def _exactness(loaded, length: int, n_tokens: int) -> list[dict]:
    tokens = build("niah", loaded.tokenizer, length=length, scripted=False).tokens
    return exactness(loaded.model, tokens, n_tokens, chunks=(len(tokens), 256))


def _contest(loaded, regime: str, seed: int, length: int, budgets, n_tokens: int) -> list[dict]:
    prompt = build(regime, loaded.tokenizer, seed=seed, length=length)
    return contest(loaded.model, prompt, budgets, n_tokens=n_tokens, budget=1)


def _parts(loaded, context: int, budget: int, steps: int) -> list[dict]:
    lagged = [{"mode": "lagged", "every": every} for every in (1, 4, 16)]
    caches = [{"policy": "reactive"}, *lagged, {"policy": "evict"}]
    return sweep(loaded, caches, contexts=[context], steps=steps, budget=budget)


def _needles(loaded, length: int, depth: float, among: str = "twins", **asked) -> list[dict]:
    found = needles(loaded, lengths=[length], depths=[depth], kinds=ARMS_OF[among], **asked)
    return found.astype({"budget": object}).where(found.notna(), None).to_dict("records")


def _growth(loaded, contexts, budget: int, steps: int) -> list[dict]:
    caches = [{"policy": "reactive"}, {"mode": "lagged", "every": 4}, {"policy": "evict"}]
    return sweep(loaded, caches, contexts=contexts, steps=steps, budget=budget)


def _pools(loaded, regime: str, seed: int, length: int, budgets, n_tokens: int) -> list[dict]:
    prompt = build(regime, loaded.tokenizer, seed=seed, length=length)
    return pools(loaded.model, prompt, budgets, n_tokens=n_tokens, least=1.0)


def _foreseen(loaded, regime: str, seed: int, length: int, budget: int, n_tokens: int) -> list[dict]:
    return foreseen(loaded, build(regime, loaded.tokenizer, seed=seed, length=length), budget, n_tokens)


ARMS_OF = {"twins": KINDS, "pools": POOLS}
TRIALS: dict[str, Callable[..., Any]] = {  # kind -> (models.Loaded, what is asked) -> rows
    "watch": _watch,
    "exactness": _exactness,
    "contest": _contest,
    "parts": _parts,
    "needles": _needles,
    "growth": _growth,
    "pools": _pools,
    "foreseen": _foreseen,
}
