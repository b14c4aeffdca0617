"""One head of a real cache under watch: what its pages do, step by step, with their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wakekv.cache import ReversibleCache
from wakekv.errors import InputError


def watch(
    model: torch.nn.Module,
    start: ReversibleCache,
    tokens: Sequence[int],
    steps: int = 10,
    head: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """What one KV head's pages do in the last `steps` of the tokens, with their bytes.

    start holds one sequence; settings: as for its `again`.  head: counted over all layers with pages; None: the one
    with the most pages that leave and return within these steps (ties: the first).
    Returns head, layer, kv_head, budget, page_bytes, n_pages (full ones, as the first of the steps begins) and steps:
    one dict a step, lists of pages (resident, as it began; wanted; missed; fetched; demoted), closed (the page that its
    token filled, or None), bytes_in (slow to fast) and bytes_out (fast to slow). And of all heads: heads, fetched,
    equal (fetched pages whose bytes in their slot have the SHA-256 of what was written when the page was full),
    fetched_bytes (as in the books), written_bytes.
    InputError for too few tokens, or a head that is not there.
    """
    if not 1 <= steps < len(tokens):
        raise InputError(f"{len(tokens)} tokens are too few to watch {steps} steps after a first: give more")
    cache = start.again(**settings)
    written = {key: _sha256(*pair) for key, pair in _slow(start).items()}
    with cache.attached(model), torch.inference_mode():
        for token in tokens[:-steps]:
            _feed(model, cache, token, written)
        first, before, booked, seen = cache.books.n_steps, _resident(cache), cache.books.fetched_bytes, []
        for token in tokens[-steps:]:
            closed = _feed(model, cache, token, written)
            after = _resident(cache)
            came = after & ~_wide(before, after)
            if closed is not None:  # it goes from the open place to a slot: no fetch
                came[:, closed] = False
            equal = sum(_sha256(*_fast(cache, h, p)) == written[h, p] for h, p in zip(*np.nonzero(came)))
            seen.append({"before": before, "after": after, "came": came, "closed": closed, "equal": equal})
            before = after
    wants, n_kv, page_bytes = cache.demands()[0], cache.paged[0].n_kv, cache.paged[0].reservoir.page_bytes
    head = _returning(seen) if head is None else head
    if not 0 <= head < wants.n_heads:
        raise InputError(f"head {head} is not among the {wants.n_heads} KV heads with pages")
    of_head = [_step(one, wants, head, first + i, page_bytes) for i, one in enumerate(seen)]
    closed = sum(one["closed"] is not None for one in seen)
    return {
        "head": head, "layer": int(wants.layer[head]), "kv_head": head % n_kv, "budget": cache.steps.budget,
        "first_step": first, "page_bytes": page_bytes, "n_pages": seen[0]["before"].shape[1], "steps": of_head,
        "heads": wants.n_heads, "fetched": int(sum(one["came"].sum() for one in seen)),
        "equal": int(sum(one["equal"] for one in seen)),
        "fetched_bytes": cache.books.fetched_bytes - booked, "written_bytes": closed * page_bytes * wants.n_heads,
    }  # fmt: skip


def _feed(model, cache: ReversibleCache, token: int, written: dict) -> int | None:
    """One token. Returns the page that it filled, whose hashes are noted from the open place."""
    n = cache.paged[0].n_closed
    model(torch.tensor([[token]], device=model.device), past_key_values=cache)
    if cache.paged[0].n_closed == n:
        return None
    for i, layer in enumerate(cache.paged):
        for row in range(layer.n_rows):
            written[i * layer.n_kv + row, n] = _sha256(*(x[row] for x in layer.pool.open))
    return n


def _step(seen: Mapping, wants, head: int, step: int, page_bytes: int) -> dict[str, Any]:
    before, after = (_wide(seen[name], seen["after"])[head] for name in ("before", "after"))
    wanted = np.zeros(len(after), bool)
    wanted[wants.page[wants.ptr[head, step] : wants.ptr[head, step + 1]]] = True
    came, closed = seen["came"][head], seen["closed"]
    pages = {"resident": before, "wanted": wanted, "missed": wanted & ~before, "fetched": came}
    lists = {name: np.flatnonzero(mask).tolist() for name, mask in (pages | {"demoted": before & ~after}).items()}
    moved = {"bytes_in": int(came.sum()) * page_bytes, "bytes_out": 0 if closed is None else page_bytes}
    return {"step": step, **lists, "closed": closed, **moved}


def _returning(seen: Sequence[Mapping]) -> int:
    """The head with the most fetches of pages that left within the steps seen."""
    n = seen[-1]["after"].shape
    left, back = np.zeros(n, bool), np.zeros(n[0], int)
    for one in seen:
        before, came = (np.pad(one[name], ((0, 0), (0, n[1] - one[name].shape[1]))) for name in ("before", "came"))
        back += (came & left).sum(1)
        left |= before & ~np.pad(one["after"], ((0, 0), (0, n[1] - one["after"].shape[1])))
    return int(back.argmax())


def _resident(cache: ReversibleCache) -> np.ndarray:
    return cache.resident()[0].numpy()


def _wide(mask: np.ndarray, like: np.ndarray) -> np.ndarray:
    return np.pad(mask, ((0, 0), (0, like.shape[1] - mask.shape[1])))


def _slow(cache: ReversibleCache) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    """(head, page) -> keys and values in the slow tier, of every page that is full."""
    return {
        (i * layer.n_kv + row, page): (layer.reservoir.keys[row, page], layer.reservoir.values[row, page])
        for i, layer in enumerate(cache.paged)
        for row in range(layer.n_rows)
        for page in range(layer.n_closed)
    }


def _fast(cache: ReversibleCache, head: int, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a resident page, from its slot."""
    n_kv = cache.paged[0].n_kv
    pool = cache.paged[head // n_kv].pool
    keys, values = pool.take(pool.slot_of[:, page : page + 1])
    return keys[head % n_kv, 0], values[head % n_kv, 0]


def _sha256(keys: torch.Tensor, values: torch.Tensor) -> str:
    whole = (x.contiguous().cpu().view(torch.uint8).numpy().tobytes() for x in (keys, values))
    return hashlib.sha256(b"".join(whole)).hexdigest()
