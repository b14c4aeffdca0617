"""Caches that keep all on the fast tier, to time ours beside: transformers' own, and one without their detours."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator

import torch
from transformers import DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from wakekv.cache import ReversibleCache
from wakekv.cache.layer import PagedLayer
from wakekv.errors import InputError

RIVALS = ("dynamic", "static", "preallocated", "offloaded")


def rivals(
    start: ReversibleCache, batch: int, steps: int, names: Collection[str] = RIVALS
) -> Iterator[tuple[str, Cache]]:
    """Other caches, holding what `start` does, each of its sequences `batch` times. transformers' own: dynamic; static
    (for models without window layers); offloaded (whole layers moved to host memory and back; where there is a GPU).
    preallocated: the dynamic one, writing into room made before. names: which of them."""
    whole = [_tokens(layer) if isinstance(layer, PagedLayer) else layer for layer in start.layers]
    on_gpu = start.paged[0].digests.is_cuda
    kinds = {"dynamic": lambda: DynamicCache(config=start.config)}
    if len(start.paged) == len(start.layers):
        room = start.get_seq_length() + steps
        kinds["static"] = lambda: StaticCache(config=start.config, max_cache_len=room)
        kinds["preallocated"] = lambda: preallocated(start.config, room)
    if on_gpu:
        kinds["offloaded"] = lambda: DynamicCache(config=start.config, offloading=True)
    for name in (name for name in kinds if name in names):
        cache = kinds[name]()
        with torch.inference_mode():
            for i, held in enumerate(whole):
                if isinstance(held, tuple):
                    cache.update(*(x.repeat_interleave(batch, 0) for x in held), i)
                else:
                    cache.layers[i] = copy.deepcopy(held)
                    cache.layers[i].batch_repeat_interleave(batch)
        yield name, cache


class Preallocated(DynamicLayer):
    """A layer that writes into room made before, where a DynamicLayer concatenates. Attention gets the part in use, so
    it runs as with a DynamicLayer; over all of a StaticLayer, with a mask for what is empty, CPUs repeat the keys."""

    def __init__(self, room: int):
        super().__init__()
        self.room, self.buffers = room, ()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_, **__) -> tuple[torch.Tensor, ...]:
        """Keys and values [sequence, kv_head, token, d] of all tokens; InputError where there is no room for them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [x.new_empty(*x.shape[:2], self.room, x.shape[3]) for x in (key_states, value_states)]
        first = self.get_seq_length()
        stop = first + key_states.shape[2]
        if stop > self.room:
            raise InputError(f"there is room for {self.room} tokens, not {stop}: make the cache with more")
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, first:stop] = new
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self.buffers)
        return self.keys, self.values


def preallocated(config: PreTrainedConfig, room: int) -> Cache:
    """A cache with room for `room` tokens a sequence, filled from the front."""
    return Cache(layers=[Preallocated(room) for _ in range(config.num_hidden_layers)])


def _tokens(layer: PagedLayer) -> tuple[torch.Tensor, ...]:
    """Keys and values [sequence, kv_head, token, d] of all that a layer holds."""
    tiers = zip((layer.reservoir.keys, layer.reservoir.values), layer.pool.open)
    rows = (torch.cat([x[:, : layer.n_closed].flatten(1, 2).to(y.device), y[:, : layer.n_open]], 1) for x, y in tiers)
    return tuple(x.unflatten(0, (-1, layer.n_kv)) for x in rows)
