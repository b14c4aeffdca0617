"""The tiers on trial: every method fed the same text, beside the full cache and beside whole pages at as many bytes.

Results are plain, for JSON; what is counted is the same on every run of one machine, and columns of TIMED are seconds.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from wakekv.cache import ReversibleCache
from wakekv.costs.quality import divergence
from wakekv.errors import InputError
from wakekv.policies import Policy
from wakekv.recording.texts import read_filler
from wakekv.tiers.cache import Tier, TieredCache
from wakekv.tiers.index import overlap
from wakekv.tiers.methods import FAMILIES, PAGES, Key, tiers
from wakekv.tiers.nearest import Nearest
from wakekv.tiers.panel import together
from wakekv.tiers.rope import Rope
from wakekv.tiers.sentences import Sentences
from wakekv.tiers.text import Splitter, ends_of

AT_ONCE = 16  # caches side by side
LAST = 32  # tokens at the end whose divergence is told apart
SIZES = ("fast", "codes", "index", "tables")
TIMED = ("stall_s", "attend_s", "settle_s", "score_s")
COUNTS = ("fetched", "fetched_bytes", "probed_bytes", "misses", *TIMED)
TOLD = ("n_asked", "n_fired", "best_sum")


def passage(tokenizer: Any, seed: int, n: int, path: str | None = None) -> tuple[str, list[int]]:
    """n token ids of running prose, from a place that the seed chooses, and where they are from: a text file, or the
    article of 1911.

    Raises InputError if the text is too short.
    """

    def n_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    filler = read_filler(path, n_tokens)
    _, some = filler.cut(random.Random(f"tiers {seed}"), n + 2 * max(filler.n_tokens))
    ids = tokenizer("".join(some.sentences), add_special_tokens=False).input_ids
    if len(ids) < n:
        raise InputError(f"{filler.name} has {len(ids)} tokens from there on, not {n}: give a longer text")
    return filler.name, ids[:n]


def contest(
    loaded: Any,
    *,
    seed: int,
    length: int,
    n_tokens: int,
    thresholds: Sequence[float],
    at: float,
    families: Sequence[str] = FAMILIES,
    window: int = 32,
    page: int = 16,
    path: str | None = None,
) -> dict[str, Any]:
    """Families of methods on one text: `length` tokens, `window` more to fill that of a*, and n_tokens that count.

    While it fills nothing leaves, so sentences are told what the full cache read.

    text      where it is from, its first sentences, and how many it has
    rows      one a method and threshold: residency (bytes on the fast tier, index and codes included, as a share of the
              full cache's, mean over the tokens that count), bytes by tier (means; slow and gone as it ends), what was
              fetched, probed and missed over those tokens, KL to the full cache (kl_mean, kl_p95, kl_last, nats a
              token), agreement, perplexity, and what an index was told; TIMED in seconds
    memory    method -> tier -> bytes after each token, from the first one decoded, at the one threshold
    flagged   share of the full cache's sentences whose a* is below each threshold after the window, by what it is
              pooled over
    shares    of each layer, directions a token of keys and of values (Codebook)
    overlap   of the 8 best sentences, the share that 8-bit vectors find too

    Pages, and the nearest sentences, get the bytes that reactive sentences held, so they need those at their side.
    InputError where they have not.
    """
    if "pages" in families and "sentences" not in families:
        raise InputError("pages are given as many bytes as sentences held: try both families together")
    model, total = loaded.model, length + window + n_tokens
    name, ids = passage(loaded.tokenizer, seed, total + 1, path)
    splitter = Splitter(len(loaded.tokenizer), ends_of(loaded.tokenizer))
    chosen = tiers(splitter, Rope(model), model.config.num_hidden_layers, thresholds, at, window)
    start = TieredCache(model.config, Sentences(splitter, 0.0), page=page, max_tokens=-(-total // page) * page)
    with start.attached(model):
        start.prefill(model, torch.tensor([ids[:length]], device=model.device))
    later = start.again()  # the same text, the window in the prompt
    with later.attached(model):
        later.prefill(model, torch.tensor([ids[length : length + window]], device=model.device))
    whole = start.again()
    past = _watched(model, whole, ids[length : length + window])
    cuts = [0, *splitter.cut(ids[:length])]
    first = [loaded.tokenizer.decode(ids[a:b]) for a, b in zip(cuts[:5], cuts[1:6])]
    found = {"text": {"name": name, "first": first, "n_sentences": len(cuts) - 1}, "rows": [], "memory": {}}
    about = {"seed": seed, "n_prompt": length, "n_tokens": n_tokens}
    found["flagged"] = _flagged(list(past.values()), thresholds)
    before, full = _history(whole), []

    def tried(keys: Iterable[Key], make: Callable[[Key], ReversibleCache], skip: int = 0) -> Iterator:
        """(key, cache fed) of each method; the full cache is fed beside the first that have no window to fill."""
        for some in _batches(keys):
            caches = [make(key) for key in some]
            if not (skip or full):
                caches.insert(0, whole)
            fed = _feed(model, caches, ids[length + window - skip :], skip)
            if caches[0] is whole:
                full.append(fed.pop(0))
                found["memory"]["full"] = _history(whole)
            for key, cache, own in zip(some, caches[-len(some) :], fed):
                found["rows"].append(about | _row(key, cache, own, full[0]))
                yield key, cache

    def tiered() -> Iterator:
        own = [key for key in chosen if key.family in families]
        filled = [key for key in own if key.family == "sentences" or key.threshold is None]
        yield from tried(filled, lambda key: later.again(_knowing(chosen[key], past)))
        yield from tried([key for key in own if key not in filled], lambda key: start.again(chosen[key]), window)

    for key, cache in tiered():
        if key.threshold == at and key.method in ("none", "dot", "exact"):
            found["memory"][key.method] = {name: before[name] + more for name, more in _history(cache).items()}
        shelves = [cache.steps.shelves[layer.index] for layer in cache.paged]
        if key.method == "codebook":
            found["shares"] = [shelf.shares() for shelf in shelves]
        if key == ("sentences", "dot", at):
            found["overlap"] = float(np.mean([overlap(shelf.mean_query, shelf.means, 8) for shelf in shelves]))
    if "pages" not in families:
        return found
    held = {
        row["threshold"]: row["fast_bytes"] + row["index_bytes"] for row in found["rows"] if row["method"] == "exact"
    }
    n_units = len(splitter.cut(ids[:total]))

    def nearest(key: Key) -> ReversibleCache:
        return later.again(_nearest(start, splitter, key.threshold, held[key.threshold], n_units))

    def paged(key: Key) -> ReversibleCache:
        return _pages(start, PAGES[key.method], held[key.threshold], total // page)

    pages = [Key("pages", "reactive", threshold) for threshold in thresholds]
    pages += [Key("pages", name, at) for name in PAGES if name != "reactive"]
    for _ in (
        *tried([Key("sentences", "nearest", threshold) for threshold in thresholds], nearest),
        *tried(pages, paged, window),
    ):
        pass
    return found


class Fed(NamedTuple):
    """What a cache gave for the tokens that count: logits float32 [token, vocabulary], the `truth` they foretell, mean
    bytes by tier, and what its books grew by."""

    logits: torch.Tensor
    truth: torch.Tensor
    sizes: dict[str, float]
    books: dict[str, float]


def _watched(model: torch.nn.Module, whole: TieredCache, tokens: Sequence[int]) -> dict[int, list[torch.Tensor]]:
    """Feed a cache of sentences that keeps all of them; what each layer read, step by step."""
    past: dict[int, list[torch.Tensor]] = {layer.index: [] for layer in whole.paged}

    def note() -> None:
        for index, shelf in whole.steps.shelves.items():
            past[index].append(shelf.read)

    together(model, [whole], tokens, note)
    return past


def _knowing(tier: Tier, past: dict[int, list[torch.Tensor]]) -> Tier:
    """A tier of sentences, told of what was read before it began; any other as it is."""
    return dataclasses.replace(tier, past=past) if isinstance(tier, Sentences) else tier


def _feed(model: torch.nn.Module, caches: Sequence[ReversibleCache], tokens: Sequence[int], skip: int) -> list[Fed]:
    """Feed all of them the same tokens but the last; the first `skip` do not count."""
    if skip:
        together(model, caches, tokens[:skip])
    before = [dataclasses.replace(cache.books) for cache in caches]
    sizes: list[list[dict[str, int]]] = [[] for _ in caches]

    def note() -> None:
        for own, cache in zip(sizes, caches):
            own.append(_tiers(cache))

    logits = together(model, caches, tokens[skip:-1], note)
    truth = torch.tensor(tokens[skip + 1 :])
    return [
        Fed(
            logits[i],
            truth,
            {name: float(np.mean([one.get(name, 0) for one in sizes[i]])) for name in SIZES},
            {name: getattr(cache.books, name, 0) - getattr(before[i], name, 0) for name in COUNTS + TOLD},
        )
        for i, cache in enumerate(caches)
    ]


def _row(key: Key, cache: ReversibleCache, fed: Fed, full: Fed) -> dict[str, Any]:
    kl, size = divergence(full.logits, fed.logits), _tiers(cache)
    row = key._asdict() | {"residency": (fed.sizes["fast"] + fed.sizes["index"]) / full.sizes["fast"]}
    row |= {f"{name}_bytes": fed.sizes[name] for name in SIZES}
    row |= {f"{name}_bytes": size.get(name, 0) for name in ("slow", "gone")}
    row |= fed.books | {"best": cache.books.best if fed.books["n_asked"] else None}
    row |= {"kl_mean": float(kl.mean()), "kl_p95": float(np.quantile(kl, 0.95)), "kl_last": float(kl[-LAST:].mean())}
    row["agreement"] = float((full.logits.argmax(-1) == fed.logits.argmax(-1)).float().mean())
    return row | {"perplexity": _perplexity(fed), "full_perplexity": _perplexity(full)}


def _batches(keys: Iterable[Key]) -> Iterator[list[Key]]:
    keys = list(keys)
    for at in range(0, len(keys), AT_ONCE):
        yield keys[at : at + AT_ONCE]


def _pages(start: TieredCache, policy: Policy, n_bytes: float, n_pages: int) -> ReversibleCache:
    """Whole pages under a policy, at as many bytes on the fast tier; where they may return, all their digests count."""
    layers = start.paged
    page = sum(layer.n_rows * layer.reservoir.page_bytes for layer in layers)
    digests = sum(
        layer.n_rows * n_pages * layer.digests[0, 0].numel() * layer.digests.element_size() for layer in layers
    )
    open_page = page / 2  # on average
    budget = int((n_bytes - open_page - digests * policy.reversible) // page)
    if budget < 1:
        raise InputError(f"{n_bytes:.0f} bytes do not hold a page of every head: ask for a longer text")
    settings = {"page": start.settings.page, "max_tokens": start.settings.max_tokens}
    cache = ReversibleCache(start.config, budget, policy=policy, **settings)
    cache.hold(start)
    return cache


def _nearest(start: TieredCache, splitter: Splitter, threshold: float, n_bytes: float, n_units: int) -> Nearest:
    """Sentences by similarity alone at as many bytes, the vectors of all of them counted."""
    rows = sum(layer.n_rows for layer in start.paged)
    token = start.paged[0].reservoir.page_bytes // start.settings.page
    vector = start.paged[0].digests.shape[2] // 2 * 4
    room = int((n_bytes / rows - n_units * vector) / token - start.settings.page / 2)  # less the open page, on average
    return Nearest(splitter, threshold, audit=True, room=max(1, room))


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


def _history(cache: TieredCache) -> dict[str, list[int]]:
    return {name: [sizes[name] for sizes in cache.history] for name in ("fast", "index", "slow", "gone")}


def _flagged(reads: Sequence[Sequence[torch.Tensor]], thresholds: Sequence[float]) -> list[dict[str, Any]]:
    """Of [layer][step] reads, [row, sentence]: of the sentences that were over all the while."""
    n = reads[0][0].shape[1]
    largest = torch.stack([torch.stack([x[:, :n] for x in steps]).amax(0) for steps in reads])  # [layer, row, n]
    pooled = {"KV head": largest, "layer": largest.amax(1), "model": largest.amax((0, 1))}
    return [
        {"pooled": name, "threshold": threshold, "share": float((x < threshold).float().mean())}
        for name, x in pooled.items()
        for threshold in thresholds
    ]


def _perplexity(fed: Fed) -> float:
    return math.exp(torch.nn.functional.cross_entropy(fed.logits, fed.truth).item())


TRIALS: dict[str, Callable[..., Any]] = {"tiers": contest}
