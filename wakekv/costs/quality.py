"""What a cache costs in answers: divergence from the full cache on a given text, and needles found.

One prefill serves every cache that is compared, so they differ in nothing but what they keep; the reference is the full
cache on the same prefill (policy "full", equal to transformers' own to rounding, which the tests hold it to).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from wakekv import stats
from wakekv.cache import ReversibleCache
from wakekv.errors import InputError
from wakekv.policies import Policy
from wakekv.recording.prompts import build

BOOKS = ("misses", "n_wants", "fetched_bytes", "stall_s", "stall_steps")
LEAST = 64  # teacher-forced tokens that a divergence is taken over, at least


@dataclass(frozen=True)
class Quality:
    """A cache against the full one, over n_tokens teacher-forced tokens.

    kl_mean, kl_p95, kl_worst  KL(full || cache) of the next token's distribution, in nats a token
    agreement                  share of tokens for which both think the same token likeliest
    perplexity, full_perplexity   of the given tokens under each
    misses, n_wants, fetched_bytes, stall_s, stall_steps: the cache's books;  n_steps: its decoded tokens
    settings                   what the cache was asked to be, in words
    """

    settings: str
    n_tokens: int
    kl_mean: float
    kl_p95: float
    kl_worst: float
    agreement: float
    perplexity: float
    full_perplexity: float
    misses: int
    n_wants: int
    fetched_bytes: int
    stall_s: float
    stall_steps: int
    n_steps: int

    @property
    def miss_rate(self) -> float:
        return self.misses / max(self.n_wants, 1)


def prefilled(model: torch.nn.Module, tokens: Sequence[int], *, chunk: int = 1024, **settings: Any) -> ReversibleCache:
    """A cache that holds `tokens`, from which `again` makes those to be compared. settings as for ReversibleCache."""
    cache = ReversibleCache(model.config, **{"budget": 1, **settings})
    with cache.attached(model):
        cache.prefill(model, torch.tensor([list(tokens)], device=model.device), chunk=chunk)
    return cache


@torch.inference_mode()
def forced(model: torch.nn.Module, cache: ReversibleCache, tokens: Sequence[int]) -> torch.Tensor:
    """Feed the tokens one by one through the cache: float32 [token, vocabulary], the logits after each."""
    out = []
    with cache.attached(model):
        for token in tokens:
            ids = torch.tensor([[token]], device=model.device)
            out.append(model(ids, past_key_values=cache).logits[0, -1].float().cpu())
    return torch.stack(out)


def divergence(full: torch.Tensor, some: torch.Tensor) -> np.ndarray:
    """float64 [token]: KL(full || some) in nats of logits [token, vocabulary]."""
    p, q = (torch.log_softmax(x.double(), -1) for x in (full, some))
    return (p.exp() * (p - q)).sum(-1).clamp(min=0).numpy()


def compare(
    model: torch.nn.Module,
    start: ReversibleCache,
    tokens: Sequence[int],
    caches: Iterable[Mapping[str, Any]],
    least: int = LEAST,
) -> list[Quality]:
    """Each cache (settings that differ from those of `start`, which holds the prompt but its last token) against the
    full one, fed with the same tokens: the prompt's last, then the text.

    Raises InputError for fewer than `least` tokens of text.
    """
    if len(tokens) - 1 < least:
        raise InputError(f"{len(tokens) - 1} tokens of text are too few to tell caches apart: give {least} or more")
    truth = torch.tensor(tokens[1:])
    full = forced(model, start.again(**FULL), tokens[:-1])

    def perplexity(logits: torch.Tensor) -> float:
        return math.exp(torch.nn.functional.cross_entropy(logits, truth).item())

    found = []
    for settings in caches:
        cache = start.again(**settings)
        some = forced(model, cache, tokens[:-1])
        kl, books = divergence(full, some), cache.books
        found.append(
            Quality(
                settings=", ".join(f"{name}={value}" for name, value in settings.items()),
                n_tokens=len(truth),
                kl_mean=float(kl.mean()),
                kl_p95=float(np.quantile(kl, 0.95)),
                kl_worst=float(kl.max()),
                agreement=float((full.argmax(-1) == some.argmax(-1)).float().mean()),
                perplexity=perplexity(some),
                full_perplexity=perplexity(full),
                n_steps=books.n_steps,
                **{name: getattr(books, name) for name in BOOKS},
            )
        )
    return found


@torch.inference_mode()
def answer(
    model: torch.nn.Module, cache: ReversibleCache, token: int, n_tokens: int, ends: frozenset[int] = frozenset()
) -> list[int]:
    """Greedy text through the cache after `token` (the prompt's last), up to n_tokens or one of `ends`."""
    out = []
    with cache.attached(model):
        while len(out) < n_tokens and token not in ends:
            ids = torch.tensor([[token]], device=model.device)
            token = int(model(ids, past_key_values=cache).logits[0, -1].argmax())
            out.append(token)
    return out


ARMS = {"reversible": "reactive", "destructive": "evict", "destructive, wider": "evict"}  # and their policies
FULL = {"policy": "full", "mode": "exact", "every": 1, "eps": None}


def needles(
    loaded: Any,
    *,
    budgets: Sequence[int],
    lengths: Sequence[int],
    depths: Sequence[float],
    seeds: Sequence[int] = (0,),
    n_tokens: int = 32,
    chunk: int = 1024,
    kinds: Mapping[str, str | Policy] = ARMS,
    **settings: Any,
) -> pd.DataFrame:
    """Does a greedy answer hold what was hidden? One row a prompt (niah, one question), arm and budget.

    loaded: models.Loaded;  budgets: pages a KV head;  lengths: tokens of a prompt;  depths: where the needle is, from 0
    to 1;  n_tokens: of the answer, at most;  kinds: arms and their policies;  chunk, settings: as for `prefilled`. A
    prompt is read once for all arms.

    arm, budget  "full" keeps everything (budget: nan) and says which prompts say anything of the others; the rest are
                 ARMS: "reversible"; "destructive", with as many pages; "destructive, wider", with as many bytes: a page
                 that is gone needs no digest, so as many pages more as reversible's digests weigh
    pages, bytes      a KV head can hold on the fast tier, beside the open page; of all pages and digests that it needs
    length, depth, seed, n_prompt (tokens), answer, text, found (is the answer in the text), as_full (text as full's)
    misses, n_wants, fetched_bytes, stall_s, stall_steps, n_steps: the cache's books
    """
    model, tokenizer, rows, full = loaded.model, loaded.tokenizer, [], None
    ends = frozenset({tokenizer.eos_token_id} - {None})
    for length, depth, seed in itertools.product(lengths, depths, seeds):
        asked = {"seed": seed, "length": length, "depth": depth, "context": getattr(loaded, "context", None)}
        prompt = build("niah", tokenizer, scripted=False, **asked)
        *start, last = prompt.tokens
        held = prefilled(model, start, chunk=chunk, **{"max_tokens": len(prompt.tokens) + n_tokens, **settings})
        own = {"length": length, "depth": depth, "seed": seed, "n_prompt": len(prompt.tokens), "answer": prompt.answer}
        for arm, budget, cache, size in arms(held, budgets, kinds):
            text = tokenizer.decode(answer(model, cache, last, n_tokens, ends))
            full = text if arm == "full" else full
            row = {"arm": arm, "budget": budget, **size, **own, "text": text, "found": prompt.answer in text}
            books = {name: getattr(cache.books, name) for name in BOOKS}
            rows.append({**row, "as_full": text == full, **books, "n_steps": cache.books.n_steps})
    return pd.DataFrame(rows)


def arms(
    held: ReversibleCache, budgets: Sequence[int], kinds: Mapping[str, str | Policy] = ARMS
) -> Iterator[tuple[str, float, ReversibleCache, dict]]:
    """Arm, budget, cache, and its size: the full cache, then `kinds` (arm -> policy) at every budget, each made when it
    is its turn. A name that ends in "wider" has as many bytes as reversible, not as many pages."""
    digests, whole = held.tiers()["digests"], held.paged[0].n_closed
    page = sum(layer.n_rows * layer.reservoir.page_bytes for layer in held.paged)  # a page of every KV head
    yield "full", math.nan, held.again(**{**FULL, "budget": 1}), {"pages": whole, "bytes": whole * page}
    for budget, (arm, policy) in itertools.product(budgets, kinds.items()):
        pages = budget + (digests // page if arm.endswith("wider") else 0)
        cache = held.again(policy=policy, budget=pages)
        needed = pages * page + (digests if cache.settings.policy.reversible else 0)
        yield arm, budget, cache, {"pages": pages, "bytes": needed}


def accuracy(rows: pd.DataFrame, by: Sequence[str] = ("arm", "budget")) -> pd.DataFrame:
    """Of `needles`' rows, grouped by columns (such as arm, budget, length, depth): n prompts, n_found, accuracy and its
    Wilson interval lo, hi at 95 %; n_as_full, answers that are the full cache's to the letter; miss_rate; stall_s
    a step.
    """
    out = []
    for names, some in rows.groupby(list(by), sort=False, dropna=False):
        found = stats.proportion(int(some["found"].sum()), len(some), unit="prompts")
        row = dict(zip(by, names)) | {"n": len(some), "n_found": int(some["found"].sum())}
        row |= {"accuracy": found.value, "lo": found.lo, "hi": found.hi, "n_as_full": int(some["as_full"].sum())}
        row["miss_rate"] = some["misses"].sum() / max(some["n_wants"].sum(), 1)
        out.append(row | {"stall_s": some["stall_s"].sum() / some["n_steps"].sum()})
    return pd.DataFrame(out)


def as_rows(found: Iterable[Quality]) -> list[dict[str, Any]]:
    """Plain rows, for a table or JSON."""
    return [{**dataclasses.asdict(q), "miss_rate": q.miss_rate} for q in found]
