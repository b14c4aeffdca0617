"""What a cache costs in answers: divergence from the full cache on a given text, and needles found.

One prefill serves every cache that is compared, so they differ in nothing but what they keep; the reference is the full
cache on the same prefill (policy "full", equal to transformers' own to rounding, which the tests hold it to).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wakekv.cache import ReversibleCache
from wakekv.errors import InputError
from wakekv.prompts import build

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
    full = forced(model, start.again(policy="full", mode="exact", every=1, eps=None), tokens[:-1])

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
                **{
                    name: getattr(books, name)
                    for name in ("misses", "n_wants", "fetched_bytes", "stall_s", "stall_steps", "n_steps")
                },
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


def needles(
    loaded: Any,
    caches: Iterable[Mapping[str, Any]],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    seeds: Sequence[int] = (0,),
    n_tokens: int = 32,
    chunk: int = 1024,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Does the answer hold what was hidden? One row a prompt and cache: length, depth, seed, settings, found, text,
    misses, stall_s. The full cache answers too, in rows of their own (settings "full"): what it does not find either
    says nothing of a cache.

    loaded: models.Loaded.  caches: settings that differ from `settings`; see ReversibleCache.
    """
    model, tokenizer, rows, caches = loaded.model, loaded.tokenizer, [], list(caches)
    ends = frozenset({tokenizer.eos_token_id} - {None})
    for length in lengths:
        for depth in depths:
            for seed in seeds:
                prompt = build("niah", tokenizer, seed=seed, length=length, depth=depth, scripted=False)
                *start, last = prompt.tokens
                room = {"max_tokens": len(prompt.tokens) + n_tokens}
                held = prefilled(model, start, chunk=chunk, **{**room, **settings})
                for asked in [{"policy": "full", "mode": "exact", "every": 1, "eps": None}, *caches]:
                    cache = held.again(**asked)
                    text = tokenizer.decode(answer(model, cache, last, n_tokens, ends))
                    full = asked.get("policy") == "full"
                    said = "full" if full else ", ".join(f"{name}={value}" for name, value in asked.items())
                    row = {"length": length, "depth": depth, "seed": seed, "settings": said}
                    row |= {"found": prompt.answer in text, "text": text}
                    rows.append(row | {"misses": cache.books.misses, "stall_s": cache.books.stall_s})
    return rows


def as_rows(found: Iterable[Quality]) -> list[dict[str, Any]]:
    """Plain rows, for a table or JSON."""
    return [{**dataclasses.asdict(q), "miss_rate": q.miss_rate} for q in found]
