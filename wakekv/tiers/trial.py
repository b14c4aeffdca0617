"""The tiers on trial: every method fed the same text, beside the full cache and beside whole pages at as many bytes.

Rows are plain, for JSON; what is counted is the same on every run of one machine, and the columns of TIMED are seconds.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wakekv.cache import ReversibleCache
from wakekv.errors import InputError
from wakekv.policies import POLICIES
from wakekv.quality import divergence
from wakekv.texts import read_filler
from wakekv.tiers.cache import Tier, TieredCache
from wakekv.tiers.index import overlap
from wakekv.tiers.merging import Codebook, Layered, Merged
from wakekv.tiers.panel import together
from wakekv.tiers.quantised import Quantised
from wakekv.tiers.rope import Rope
from wakekv.tiers.sentences import Sentences
from wakekv.tiers.text import Splitter, ends_of

WINDOW = 32  # steps of a*, which are fed before anything is counted
AT_ONCE = 8  # caches side by side
LAST = 32  # tokens at the end whose divergence is told apart
SIZES = ("fast", "codes", "index", "tables")
TIMED = ("stall_s", "attend_s", "settle_s", "score_s")
COUNTS = ("fetched", "fetched_bytes", "probed_bytes", "misses", *TIMED)
PAGES = ("reactive", "evict", "gkv", "gkv-blend")  # policies of whole pages, at matched bytes


def passage(tokenizer: Any, seed: int, n: int, path: str | None = None) -> list[int]:
    """n token ids of running prose, from a place that the seed chooses: a text file, or the article of 1911.

    Raises InputError if the text is too short.
    """

    def n_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    filler = read_filler(path, n_tokens)
    _, some = filler.cut(random.Random(f"tiers {seed}"), n + 2 * max(filler.n_tokens))
    ids = tokenizer("".join(some.sentences), add_special_tokens=False).input_ids
    if len(ids) < n:
        raise InputError(f"{filler.name} has {len(ids)} tokens from there on, not {n}: give a longer text")
    return ids[:n]


def tiers(splitter: Splitter, rope: Rope, n_layers: int, thresholds: Sequence[float], at: float) -> dict:
    """(method, threshold or None) -> Tier: recall by three rules at every threshold, all else at the one."""
    found: dict[tuple[str, float | None], Tier] = {}
    for threshold in thresholds:
        for recall in ("none", "dot", "exact"):
            found[recall, threshold] = Sentences(splitter, threshold, WINDOW, recall, audit=True)
    for recall in ("cosine", "centred", "key", "bounds"):
        found[recall, at] = Sentences(splitter, at, WINDOW, recall, audit=True)
    found["none, means stand in", at] = Sentences(splitter, at, WINDOW, "none", stand_in=True, audit=True)
    found["dot, 8-bit vectors", at] = Sentences(splitter, at, WINDOW, "dot", vector_bits=8, audit=True)
    for bits in (8, 4, 2):
        found[f"codes, {bits} bits", None] = Quantised(bits)
        found[f"codes, {bits} bits, other layout", None] = Quantised(bits, layout="channels")
    found["codes, 4 bits, plain operands", None] = Quantised(4, operand_bits=None)
    found["codes, 2 bits, promoted", at] = Quantised(2, promote=at, window=WINDOW)
    found["codes, 4 bits, promoted", at] = Quantised(4, promote=at, window=WINDOW)
    single = Splitter(splitter.n_vocab, least=1, longest=1)
    found["codebook", None] = Codebook(rope)
    deep = Sentences(single, at, WINDOW, "none")
    found["merged, deep layers evict", at] = Layered(Merged(rope), deep, max(1, n_layers // 6))
    return found


def contest(
    loaded: Any,
    *,
    seed: int,
    length: int,
    n_tokens: int,
    thresholds: Sequence[float],
    at: float,
    page: int = 16,
    path: str | None = None,
) -> dict[str, Any]:
    """One text of `length` tokens, then WINDOW more to fill the window of a*, then n_tokens that count.

    rows    one a method and threshold: residency (bytes on the fast tier, index and codes included, as a share of the
            full cache's, mean over the tokens that count), bytes by tier (means; slow and gone as it ends), what was
            fetched, probed and missed over those tokens, KL to the full cache (kl_mean, kl_p95, kl_last, nats a token),
            agreement, perplexity, and what an index was told; TIMED in seconds
    memory  "method|threshold" -> bytes on the fast tier after each token, from the first one decoded
    shares  of each layer, directions a token of keys and of values (Codebook)
    overlap of the 8 best sentences, the share that 8-bit vectors find too
    """
    model, about = loaded.model, {"seed": seed, "n_prompt": length, "n_tokens": n_tokens}
    total = length + WINDOW + n_tokens
    ids = passage(loaded.tokenizer, seed, total + 1, path)
    splitter = Splitter(len(loaded.tokenizer), ends_of(loaded.tokenizer))
    chosen = tiers(splitter, Rope(model), model.config.num_hidden_layers, thresholds, at)
    start = TieredCache(model.config, Sentences(splitter, 0.0), page=page, max_tokens=-(-total // page) * page)
    with start.attached(model):
        start.prefill(model, torch.tensor([ids[:length]], device=model.device))
    run, found = Run(model, start, ids[length:]), {"rows": [], "memory": {}}
    for some in _batches(chosen.items()):
        caches = {key: start.again(tier) for key, tier in some}
        for (key, cache), row in zip(caches.items(), run.rows(caches, about)):
            found["rows"].append(row)
            found["memory"]["|".join(map(str, key))] = [_fast(tiers) for tiers in cache.history]
            if key[0] == "codebook":
                found["shares"] = [shelf.shares() for _, shelf in sorted(cache.steps.shelves.items())]
            if key == ("dot", at):
                found["overlap"] = np.mean(
                    [overlap(x.mean_query, x.means, 8) for x in cache.steps.shelves.values()]
                ).item()
    found["memory"]["full"] = [_fast(tiers) for tiers in run.full.history]
    bytes_of = {
        row["threshold"]: row["fast_bytes"] + row["index_bytes"] for row in found["rows"] if row["method"] == "exact"
    }
    pages = [("reactive", threshold) for threshold in thresholds] + [(policy, at) for policy in PAGES[1:]]
    for some in _batches(pages):
        found["rows"] += run.rows({key: _pages(start, key[0], bytes_of[key[1]], total // page) for key in some}, about)
    return found


class Run:
    """Caches that hold one text and are fed the same tokens, beside the full one; tokens: those, and one more."""

    def __init__(self, model: torch.nn.Module, start: TieredCache, tokens: Sequence[int]):
        self.model, self.start, self.tokens = model, start, tokens
        self.full, self.whole_bytes = start, 0.0

    def rows(self, caches: Mapping[tuple, ReversibleCache], about: Mapping[str, int]) -> list[dict[str, Any]]:
        """A row a cache, in order."""
        self.full = self.start.again()
        fed = [self.full, *caches.values()]
        together(self.model, fed, self.tokens[:WINDOW])
        before = [dataclasses.replace(cache.books) for cache in fed]
        sizes: list[list[dict[str, int]]] = [[] for _ in fed]
        logits = together(
            self.model, fed, self.tokens[WINDOW:-1], lambda: [x.append(_tiers(c)) for x, c in zip(sizes, fed)]
        )
        mean = [{name: float(np.mean([t.get(name, 0) for t in own])) for name in SIZES} for own in sizes]
        truth, full = torch.tensor(self.tokens[WINDOW + 1 :]), logits[0]
        found = []
        for i, ((method, threshold), cache) in enumerate(caches.items(), 1):
            row = {"method": method, "threshold": threshold, **about}
            row["residency"] = (mean[i]["fast"] + mean[i]["index"]) / mean[0]["fast"]
            row |= {f"{name}_bytes": mean[i][name] for name in SIZES}
            row |= {f"{name}_bytes": _tiers(cache).get(name, 0) for name in ("slow", "gone")}
            row |= {name: getattr(cache.books, name, 0) - getattr(before[i], name, 0) for name in COUNTS}
            row |= {name: getattr(cache.books, name, 0) for name in ("n_asked", "n_fired", "best_sum")}
            row["best"] = cache.books.best if row["n_asked"] else None
            kl = divergence(full, logits[i])
            row |= {
                "kl_mean": float(kl.mean()),
                "kl_p95": float(np.quantile(kl, 0.95)),
                "kl_last": float(kl[-LAST:].mean()),
            }
            row["agreement"] = float((full.argmax(-1) == logits[i].argmax(-1)).float().mean())
            row |= {"perplexity": _perplexity(logits[i], truth), "full_perplexity": _perplexity(full, truth)}
            found.append(row)
        return found


def _batches(items: Any) -> list[list]:
    items = list(items)
    return [items[i : i + AT_ONCE] for i in range(0, len(items), AT_ONCE)]


def _pages(start: TieredCache, policy: str, n_bytes: float, n_pages: int) -> ReversibleCache:
    """Whole pages under a policy, at as many bytes on the fast tier; where they may return, all their digests count."""
    layers, reversible = start.paged, POLICIES[policy].reversible
    page = sum(layer.n_rows * layer.reservoir.page_bytes for layer in layers)
    digests = sum(
        layer.n_rows * n_pages * layer.digests[0, 0].numel() * layer.digests.element_size() for layer in layers
    )
    open_page = page / 2  # on average
    budget = int((n_bytes - open_page - digests * reversible) // page)
    if budget < 1:
        raise InputError(f"{n_bytes:.0f} bytes do not hold a page of every head: ask for a longer text")
    settings = {"page": start.settings.page, "max_tokens": start.settings.max_tokens}
    cache = ReversibleCache(start.config, budget, policy=policy, **settings)
    cache.hold(start)
    return cache


def _tiers(cache: ReversibleCache) -> dict[str, int]:
    """Bytes by tier; of whole pages those that are resident, the part of the open page that is written, and digests of
    pages that are."""
    if isinstance(cache, TieredCache):
        return cache.history[-1]
    found = {"fast": 0, "index": 0, "tables": cache.tiers()["tables"], "slow": 0, "gone": 0}
    for layer in cache.paged:
        page, there = layer.reservoir.page_bytes, int((layer.pool.slot_of >= 0).sum())
        n, held = layer.n_closed * layer.n_rows, int(layer.reservoir.held.sum())
        found["fast"] += there * page + layer.n_rows * layer.n_open * page // layer.sizes.page
        found["gone"] += (n - held) * page
        if cache.settings.policy.reversible:
            found["index"] += n * layer.digests[0, 0].numel() * layer.digests.element_size()
            found["slow"] += held * page
    return found


def _fast(tiers: Mapping[str, int]) -> int:
    return tiers["fast"] + tiers["index"]


def _perplexity(logits: torch.Tensor, truth: torch.Tensor) -> float:
    return math.exp(torch.nn.functional.cross_entropy(logits, truth).item())


TRIALS: dict[str, Callable[..., Any]] = {"tiers": contest}
