"""Decoding one token: rank the pages, have them come, attend."""

from __future__ import annotations

import math

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from wakekv.cache.books import Books
from wakekv.cache.host import Host
from wakekv.cache.layer import PagedLayer
from wakekv.cache.reading import How
from wakekv.cache.settings import Settings
from wakekv.cache.settling import Settling
from wakekv.cache.swapping import Swapping
from wakekv.errors import InputError


class Steps:
    """The steps of one batch from its first decoded token on; before it there is no `host`."""

    def __init__(self, settings: Settings, paged: list[PagedLayer], books: Books):
        self.settings, self.paged, self.books = settings, paged, books
        self.host: Host | None = None

    @property
    def budget(self) -> int:
        """Pages a KV head. InputError if budget_bytes is less than one."""
        n_pages, budget = self.paged[0].sizes.n_pages, self.settings.budget
        if budget is None:
            each = sum(layer.n_rows * layer.reservoir.page_bytes for layer in self.paged)
            budget = self.settings.budget_bytes // each
            if budget < 1:
                raise InputError(
                    f"budget_bytes={self.settings.budget_bytes} is less than a page for every KV head: {each} bytes"
                )
        return min(budget, n_pages)

    def attend(self, module: torch.nn.Module, layer: PagedLayer, query: torch.Tensor, how: How) -> torch.Tensor:
        """The output [sequence, 1, head, d] of a layer for the token it holds; query [sequence, head, 1, d]."""
        if self.host is None:
            self._begin()
        mode = self.settings.mode
        grouped = query.reshape(layer.n_rows, -1, query.shape[-1])  # [row, group, d]: the group is the query length
        due = layer.n_closed > 0 and (self.host.step + 1) % self.settings.every == 0
        score = self._rank(layer, grouped, how) if due and mode != "lagged" else None
        with self.books.timing("attend_s"):
            if self.settings.kernel == "sdpa" and how.softcap is None:
                keys, values, seen = (None if x is None else x.unflatten(0, (-1, layer.n_kv)) for x in layer.in_order())
                seen = None if seen is None else seen.repeat_interleave(query.shape[1] // layer.n_kv, 1)[:, :, None]
                out = sdpa_attention_forward(module, query, keys, values, seen, scaling=how.scaling)[0]
            else:
                out, scores = layer.over_slots(grouped, how)
        if due and mode == "eps":
            out = self._until(layer, grouped, how, score, out, scores)
        if due and mode == "lagged":
            self._rank(layer, grouped, how)
        return out.reshape(query.shape[0], 1, query.shape[1], -1)

    def _begin(self) -> None:
        """The policy is asked which pages of the prompt stay."""
        settings, books = self.settings, self.books
        kind = Swapping if Swapping.serves(settings.policy) and settings.mode != "eps" else Settling
        host = kind(self.paged, settings.policy, self.budget, books, settings.mode == "lagged", settings.least)
        host.admit()
        self.host = host
        books.admitted_bytes, books.fetched_bytes, books.fetched = books.fetched_bytes, 0, 0

    def _rank(self, layer: PagedLayer, query: torch.Tensor, how: How) -> torch.Tensor | None:
        """The best pages are wanted. In mode eps, the bounds of all, float32 [row, group, page]."""
        stalled = self.books.stall_s
        with self.books.timing("score_s"):
            score = layer.scores(query, how) if self.settings.mode == "eps" else None
            best = layer.best(query, how) if score is None else score.amax(1)
            self.host.want(layer, best, min(self.settings.wants, self.budget))
        self.books.score_s -= self.books.stall_s - stalled
        return score

    def _until(self, layer, query, how, score, out, scores) -> torch.Tensor:
        """Fetch on until what is left out cannot matter.

        The pages left out could hold a share of the weight, from their bounds `score` [row, group, page] and the sum
        over the logits of the slots, `scores` [row, group, token]; the output is off by at most that share times
        (longest value left out + longest kept).
        """
        eps, best = self.settings.eps, score.amax(1)
        among = torch.zeros_like(best, dtype=torch.bool)
        among.scatter_(1, best.topk(min(self.settings.wants, self.budget, best.shape[1])).indices, True)
        while True:
            there = layer.pool.slot_of[:, : layer.n_closed] >= 0
            left = ~there & (best > -torch.inf)
            most = torch.logsumexp(score.masked_fill(there[:, None], -torch.inf), -1) + math.log(layer.sizes.page)
            share = torch.sigmoid(most - torch.logsumexp(scores, -1))  # [row, group]
            reach = layer.reach[:, : layer.n_closed]
            open_reach = layer.pool.open[1][:, : layer.n_open + 1].float().norm(dim=-1).amax(1)
            longest = (reach * left).amax(1) + torch.maximum((reach * there).amax(1), open_reach)
            short = left.any(1) if eps == 0 else (share.amax(1) * longest > eps) & left.any(1)
            if not bool(short.any()):
                return out
            n = left.shape[1] if eps == 0 else min(left.shape[1], max(self.settings.wants, int(left.sum(1).max()) // 4))
            more = best.masked_fill(~left, -torch.inf).topk(n).indices
            among |= torch.zeros_like(left).scatter_(1, more, True) & left & short[:, None]
            self.host.want(layer, best, int(among.sum(1).max()), among)
            out, scores = layer.over_slots(query, how)


def windowed(module, query, key, value, mask, how: How, kwargs) -> torch.Tensor:
    """Attention of a layer with a window: SDPA, or with the weights at hand where the scores have a soft cap."""
    if how.softcap is None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=how.scaling, **kwargs)[0]
    n, n_seen = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(n, n_seen, dtype=torch.bool, device=key.device).tril(n_seen - n)[None, None]
    grouped = query.reshape(-1, query.shape[1] // key.shape[1] * n, query.shape[3])
    scores = how.scores(grouped, key.flatten(0, 1)).view(*query.shape[:3], n_seen)
    weights = torch.softmax(scores.masked_fill(~mask, torch.finfo(torch.float32).min), -1).to(value.dtype)
    out = torch.bmm(weights.view(*grouped.shape[:2], n_seen), value.flatten(0, 1))
    return out.view(*query.shape[:3], -1).transpose(1, 2)
