"""What the engine's backends share: which requests decode in a step, and where the fast tier takes part.

A backend for a device is the engine's own, with these in front of it: passes of many tokens (prefill, whole or in
chunks) attend through the engine's kernels over the engine's cache, which is the reservoir; requests that decode attend
to the fast tier alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from wakekv.errors import InputError

if TYPE_CHECKING:  # they bring numba, which the engine does not bear before its worker has started
    from wakekv.vllm.rowlog import RowLog
    from wakekv.vllm.steps import Step
    from wakekv.vllm.tier import FastTier


class Split(NamedTuple):
    """A step's requests in two parts. decoding, others: slices or indices of query tokens, None if there are none;
    rest: the engine's metadata of the others; kernel: of lengths, what the device's attention needs beside them."""

    step: Step | None
    decoding: Any
    others: Any
    rest: Any
    kernel: Callable[[torch.Tensor], Any]


class Runner:
    """The engine's bookkeeping of the batch, as far as it is needed: names and lengths of the requests in a step."""

    def __init__(self, model_runner: Any):
        self._runner = model_runner

    def decoding(self, starts: np.ndarray) -> tuple[list[str], np.ndarray, np.ndarray] | None:
        """(names, positions int64, bool [request]: decodes) of a step with query tokens starts[i]:starts[i + 1].

        A request decodes if it feeds one token that it has generated itself. None for a dummy run."""
        batch, n = self._runner.input_batch, len(starts) - 1
        if len(batch.req_ids) != n:
            return None
        done = batch.num_computed_tokens_cpu[:n].astype(np.int64)
        return batch.req_ids[:n], done, (np.diff(starts) == 1) & (done >= batch.num_prompt_tokens[:n])


class SplitBuilder:
    """Mixed into a device's metadata builder: its metadata with a Split beside it, as `wakekv`."""

    plan: Callable[..., Step] | None = None  # steps.plan on the fast tier
    runner: Runner | None = None
    reorder_batch_threshold = 1  # requests of one token come first

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        found = None if self.plan is None else self.runner.decoding(starts)
        if found is None or not found[2].any():
            return super().build(common_prefix_len, common, fast_build)
        names, positions, decodes = found
        which = np.flatnonzero(decodes)
        blocks = common.block_table_tensor
        step = self.plan([names[i] for i in which], positions[which], self.table_of(blocks, which))
        rest, others = None, np.flatnonzero(~decodes)
        if not len(others):
            metadata = self.bare(common)
        else:
            metadata = rest = super().build(common_prefix_len, self.part(common, starts, others), fast_build)
        n_first = int(np.argmin(decodes)) if len(others) else len(decodes)
        if len(which) == n_first:  # those that decode come first, one token each
            split = slice(0, n_first), slice(n_first, int(starts[-1])) if len(others) else None
        else:
            tokens = [np.arange(starts[i], starts[i + 1]) for i in others]
            split = torch.from_numpy(starts[which].astype(np.int64)), torch.from_numpy(np.concatenate(tokens))
        return _beside(metadata, Split(step, split[0], split[1], rest, _once(self.kernel_metadata)))

    def part(self, common: Any, starts: np.ndarray, others: np.ndarray) -> Any:
        """The engine's common metadata of some requests only."""
        index = torch.from_numpy(others)
        lengths = np.diff(starts)[others]
        new = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        device = common.query_start_loc.device
        return dataclasses.replace(
            common,
            query_start_loc=new.to(device),
            query_start_loc_cpu=new,
            seq_lens=common.seq_lens[index.to(device)],
            num_reqs=len(others),
            num_actual_tokens=int(new[-1]),
            max_query_len=int(lengths.max()),
            block_table_tensor=common.block_table_tensor[index.to(device)],
        )

    def table_of(self, blocks: torch.Tensor, which: np.ndarray) -> np.ndarray:
        """The block tables of some requests, on the host."""
        return np.ascontiguousarray(blocks.cpu().numpy()[which])


class SplitImpl:
    """Mixed into a device's attention: requests that decode attend to the fast tier, all else as the engine does."""

    tier: FastTier | None = None
    decode: Callable[..., None] | None = None  # steps.decode on this tier
    log: RowLog | None = None  # while a request is logged

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        if self.tier is not None:
            self.tier.note_keys(self.tier.names[layer.layer_name], key, slot_mapping)

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> torch.Tensor:
        split = getattr(attn_metadata, "wakekv", None)
        if split is None:
            if self.log is not None:
                n, n_seen = attn_metadata.num_actual_tokens, int(attn_metadata.seq_lens[0])
                self.log.note(self.tier.names[layer.layer_name], query[:n], key[:n], n_seen, self.scale)
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if split.others is not None:
            others = _on(split.others, query.device)
            out = output[others]  # a view of a slice, a copy of an index
            super().forward(layer, query[others], key[others], value[others], kv_cache, split.rest, out)
            if not isinstance(others, slice):
                output[others] = out
        tier, decoding = self.tier, _on(split.decoding, query.device)
        mine, out, index = query[decoding], output[decoding], tier.names[layer.layer_name]
        rows = len(mine) * tier.n_kv
        asked, answer = mine.reshape(rows, tier.group, tier.d), out.view(rows, tier.group, tier.d)
        attend = partial(self.attend, asked, answer, tier.pools[index], split.kernel)
        self.decode(split.step, index, mine, attend, self.scale)
        if not isinstance(decoding, slice):
            output[decoding] = out
        return output

    def attend(
        self, query: torch.Tensor, out: torch.Tensor, pool: torch.Tensor, kernel: Callable[[torch.Tensor], Any],
        table: torch.Tensor, lengths: torch.Tensor,
    ) -> None:  # fmt: skip
        """The device's kernel: query [row, head of the group, d] reads the pool where the table says; into out."""
        raise NotImplementedError


def _on(where: Any, device: torch.device) -> Any:
    return where if isinstance(where, slice) else where.to(device)


def _once(make: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """make, but not again for the very lengths that it was last called for: layers that are alike share them."""
    kept: list[Any] = [None, None]

    def made(lengths: torch.Tensor) -> Any:
        if kept[0] is not lengths:
            kept[:] = lengths, make(lengths)
        return kept[1]

    return made


def _beside(metadata: Any, split: Split) -> Any:
    metadata = dataclasses.replace(metadata)
    metadata.wakekv = split
    return metadata


def checked(layers: dict[str, Any], tier_dtype: str) -> None:
    """InputError for a model whose attention this plugin would get wrong."""
    for name, layer in layers.items():
        impl = layer.impl
        if not hasattr(impl, "tier"):
            raise InputError(f"the engine chose {type(impl).__name__} for {name}, which this plugin does not extend")
        for what, value, plain in (
            ("a sliding window", getattr(impl, "sliding_window", -1), (-1, None, (-1, -1))),
            ("ALiBi slopes", getattr(impl, "alibi_slopes", None), (None,)),
            ("attention sinks", getattr(impl, "sinks", None), (None,)),
            ("keys of another layer", getattr(impl, "kv_sharing_target_layer_name", None), (None,)),
        ):
            if not any(value is x or value == x for x in plain):
                raise InputError(f"{name} of this model has {what}, which this plugin does not handle: run it without")
        if tier_dtype not in ("auto", "bfloat16", "float32"):
            raise InputError(f"a KV cache of {tier_dtype} is not handled: leave kv_cache_dtype at auto")
