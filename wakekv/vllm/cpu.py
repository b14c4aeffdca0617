"""The plugin on a CPU: the reservoir is a memory-mapped file, attention the engine's own kernel over the pool.

Passes of many tokens read the file through the page cache; requests that decode read it only to fetch.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from wakekv.cache.mapped import mapped
from wakekv.errors import InputError
from wakekv.vllm.backend import Split, SplitBuilder, SplitImpl, checked
from wakekv.vllm.remote import Remote
from wakekv.vllm.settings import Settings


class Backend(CPUAttentionBackend):
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


@dataclass
class Metadata(CPUAttentionMetadata):
    wakekv: Split | None = None


class Builder(SplitBuilder, CPUAttentionMetadataBuilder):
    def bare(self, common: Any) -> Metadata:
        """Metadata of a step in which all requests decode: the engine's kernel schedule is not needed."""
        return Metadata(
            common.num_actual_tokens, common.max_query_len, common.query_start_loc, common.max_seq_len,
            common.seq_lens, common.block_table_tensor, common.slot_mapping, None,
        )  # fmt: skip

    def kernel_metadata(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel's schedule of rows as requests of one KV head each, and where their queries start."""
        n = len(lengths)
        starts = torch.arange(n + 1, dtype=torch.int32)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=n,
            num_heads=self.num_heads // self.num_kv_heads,
            num_kv_heads=1,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        return schedule, starts


class Impl(SplitImpl, CPUAttentionBackendImpl):
    def attend(self, query, out, pool, kernel, table, lengths) -> None:
        keys, values = pool.chunk(2, dim=2)
        schedule, starts = kernel(lengths)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=out,
            query_start_loc=starts,
            seq_lens=lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=table,
            softcap=self.logits_soft_cap,
            scheduler_metadata=schedule,
            s_aux=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class InFile(TorchFunctionMode):
    """Within this block the engine's cache, one tensor of bytes, is allocated in a memory-mapped file without a name:
    nothing is left behind when the engine goes."""

    def __init__(self, folder: str | None):
        super().__init__()
        self.folder, self.made = folder or tempfile.gettempdir(), 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (
            function is torch.zeros
            and kwargs.get("dtype") is torch.int8
            and len(args) == 1
            and isinstance(args[0], int)
        ):
            self.made += 1
            return mapped(args, torch.int8, self.folder)
        return function(*args, **kwargs)


class Worker(Remote, CPUWorker):
    """The engine's worker, its cache in a file, and a fast tier in front of it."""

    slow_tier = "memory-mapped file"

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if self.use_v2_model_runner:
            raise InputError("the plugin hooks into the engine's model runner V1: set VLLM_USE_V2_MODEL_RUNNER=0")
        register_backend(AttentionBackendEnum.CPU_ATTN, "wakekv.vllm.cpu.Backend")
        _cached_get_attn_backend.cache_clear()
        try:
            super().load_model(load_dummy_weights=load_dummy_weights)
        finally:  # another engine in this process gets the engine's own
            AttentionBackendEnum.CPU_ATTN.clear_override()
            _cached_get_attn_backend.cache_clear()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        settings = Settings.from_environment()
        checked(self.wakekv_layers(), self.vllm_config.cache_config.cache_dtype)
        with InFile(settings.folder) as where:
            super().initialize_from_config(kv_cache_config)
        if where.made != 1:
            raise InputError("this engine allocates its cache in another way than the version this plugin is made for")
        self.attach(settings)
