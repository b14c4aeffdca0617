"""How pages are read: what their key bounds promise, attention straight over the slots, and attention over everything
a block at a time for passes of many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from wakekv.cache import loops

ROWS = 256  # query rows that a pass of many tokens scores at once


class Block(NamedTuple):
    """Keys and values [row, token, d] of neighbouring tokens; visible bool, broadcast to [row, 1, query, token]."""

    keys: torch.Tensor
    values: torch.Tensor
    visible: torch.Tensor | None


class How(NamedTuple):
    """What a model does to a product of query and key before the softmax."""

    scaling: float
    softcap: float | None

    def scores(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """float32 [row, query, token] of queries [row, query, d] and keys [row, token, d]."""
        return self.capped(torch.bmm(query, keys.transpose(1, 2)).float().mul_(self.scaling))

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)


def digest(keys: torch.Tensor) -> torch.Tensor:
    """[..., 2 d]: the element-wise maximum and minimum of the keys [..., token, d] of a page: 1/8 of its key bytes at
    page 16."""
    return torch.cat([keys.amax(-2), keys.amin(-2)], -1)


def bounds(query: torch.Tensor, digests: torch.Tensor, how: How) -> torch.Tensor:
    """float32 [row, query, page]: no logit in the page is above this, sum over d of max(q * kmax, q * kmin) (Quest's
    bound, arXiv 2406.10774). query [row, query, d], digests [row, page, 2 d]."""
    return how.scores(torch.cat([query.clamp(min=0), query.clamp(max=0)], -1), digests)


def best_bounds(query: torch.Tensor, digests: np.ndarray, n: int, how: How) -> torch.Tensor:
    """float32 [row, page]: the largest of the `bounds` of a row's queries, for the first n pages; compiled."""
    out, parts = query.new_empty(len(query), n), torch.cat([query.clamp(min=0), query.clamp(max=0)], -1)
    loops.best_bounds(parts.numpy(), digests, np.float32(how.scaling), out.numpy())
    return how.capped(out)


def over_slots(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None, how: How
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [row, query, d], scores float32 [row, query, token]): attention of queries [row, query, d] over keys and
    values [row, token, d], but for `hidden` bool [row, token]. With grouped queries the group is the query length: keys
    are never repeated."""
    scores = how.scores(query, keys)
    if hidden is not None:
        scores.masked_fill_(hidden[:, None], -torch.inf)
    return torch.bmm(torch.softmax(scores, -1).to(values.dtype), values), scores


def over_arrays(
    query: torch.Tensor, keys: np.ndarray, values: np.ndarray, n: int, hidden: torch.Tensor | None, how: How
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over the first n tokens, compiled: the memory of keys and values is read once, at the speed it has."""
    scores, out = query.new_empty(*query.shape[:2], n), query.new_empty(*query.shape[:2], values.shape[2])
    loops.products(query.contiguous().numpy(), keys, n, np.float32(how.scaling), scores.numpy())
    how.capped(scores)
    if hidden is not None:
        scores.masked_fill_(hidden[:, None], -torch.inf)
    loops.mixtures(torch.softmax(scores, -1).numpy(), values, out.numpy())
    return out, scores


def over_blocks(
    query: torch.Tensor, arrays: tuple[np.ndarray, ...], n: int, n_open: int, pads: np.ndarray, how: How
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over `Shared.arrays`, each row's pages among the first n and then n_open tokens of its open page,
    compiled; pads int64 [row]: tokens of padding on the left. Scores are -inf where a row has fewer tokens."""
    keys, values, slot_of, open_keys, open_values = arrays
    width = loops.most(slot_of, n) * keys.shape[1] + n_open
    scores, out = query.new_empty(*query.shape[:2], width), query.new_empty(*query.shape[:2], values.shape[2])
    asked, scaling = query.contiguous().numpy(), np.float32(how.scaling)
    loops.block_products(asked, keys, slot_of, n, open_keys, n_open, pads, scaling, scores.numpy())
    if how.softcap is not None:
        nothing = scores == -torch.inf
        how.capped(scores).masked_fill_(nothing, -torch.inf)
    loops.block_mixtures(torch.softmax(scores, -1).numpy(), values, slot_of, n, open_values, n_open, out.numpy())
    return out, scores


def in_blocks(query: torch.Tensor, blocks, how: How) -> torch.Tensor:
    """[row, group, query, d]: softmax attention of queries [row, group, query, d] over all blocks, held one at a time.

    blocks(first, last) -> the Blocks that the queries first..last see.
    """
    parts = []
    for first in range(0, query.shape[2], ROWS):
        some = query[:, :, first : first + ROWS]
        high = low = total = None
        for block, scores in _scored(some, blocks(first, first + some.shape[2]), how):
            peak = scores.amax(-1, keepdim=True)
            new = peak if high is None else torch.maximum(high, peak)
            weights = torch.exp(scores - new)
            add = torch.matmul(weights.to(block.values.dtype).flatten(1, 2), block.values).float()
            add, mass = add.view(*weights.shape[:3], -1), weights.sum(-1, keepdim=True)
            if high is not None:
                fade = torch.exp(high - new)
                add, mass = add + total * fade, mass + low * fade
            high, low, total = new, mass, add
        parts.append((total / low).to(query.dtype))
    return torch.cat(parts, 2)


def page_weights(query: torch.Tensor, blocks, how: How, page: int, n_pages: int) -> torch.Tensor:
    """float32 [row, query, n_pages]: attention weight that queries [row, group, query, d] give each page, summed over
    the group. The blocks, in order, are the text from its first page on."""
    n = query.shape[2]
    whole = [torch.logsumexp(scores, -1, keepdim=True) for _, scores in _scored(query, blocks(0, n), how)]
    whole = torch.logsumexp(torch.cat(whole, -1), -1, keepdim=True)
    out, at = query.new_zeros(len(query), n, n_pages * page, dtype=torch.float32), 0
    for block, scores in _scored(query, blocks(0, n), how):
        out[:, :, at : at + block.keys.shape[1]] = torch.exp(scores - whole).sum(1)
        at += block.keys.shape[1]
    return out.unflatten(-1, (n_pages, page)).sum(-1)


def _scored(query: torch.Tensor, blocks: Iterator[Block], how: How) -> Iterator[tuple[Block, torch.Tensor]]:
    """Each block with its scores float32 [row, group, query, token]; hidden tokens have the lowest finite one, so that
    a query that sees nothing (padding) ends in numbers."""
    for block in blocks:
        scores = how.scores(query.flatten(1, 2), block.keys).view(*query.shape[:3], -1)
        if block.visible is not None:
            scores.masked_fill_(~block.visible, torch.finfo(torch.float32).min)
        yield block, scores
