"""The plugin on a CUDA device: the reservoir is pinned host memory, attention FlashAttention's kernel over the pool.

NOT YET RUN ON HARDWARE: written and read again against the engine's source (FlashAttentionBackend, vllm 0.32). Tested
on a CPU: the fast tier in torch operations, and the step below with plain torch in the place of FlashAttention's kernel
(tests/engine/test_cuda.py). Not tested: the device, the kernel, pinned memory, and the engine's own calls.

The engine sees the pinned memory through unified addressing: its own kernels write and read it as they would GPU
memory, so passes of many tokens read earlier chunks over the bus. Requests that decode read it only to fetch. The rule
runs on the host, so there are no CUDA graphs: enforce_eager=True.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides, get_accelerator_view_from_cpu_tensor
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from wakekv.errors import InputError
from wakekv.vllm.backend import Split, SplitBuilder, SplitImpl, checked
from wakekv.vllm.remote import Remote
from wakekv.vllm.settings import Settings


class Backend(FlashAttentionBackend):
    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # a page of one KV head in one piece

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


@dataclass
class Metadata(FlashAttentionMetadata):
    wakekv: Split | None = None


class Builder(SplitBuilder, FlashAttentionMetadataBuilder):
    def bare(self, common: Any) -> Metadata:
        return Metadata(
            common.num_actual_tokens, common.max_query_len, common.query_start_loc, common.max_seq_len,
            common.seq_lens, common.block_table_tensor, common.slot_mapping,
        )  # fmt: skip

    def kernel_metadata(self, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Where the rows' queries start, how many tokens each row sees, and the most of these."""
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=self.device)
        return starts, lengths.to(self.device), int(lengths.max())


class Impl(SplitImpl, FlashAttentionImpl):
    def attend(self, query, out, pool, kernel, table, lengths) -> None:
        halves = pool.transpose(1, 2).split(query.shape[2], dim=-1)
        keys, values = (canonicalize_singleton_dim_strides(x) for x in halves)
        starts, lengths, longest = kernel(lengths)
        flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=lengths,
            max_seqlen_k=longest,
            softmax_scale=self.scale,
            causal=True,
            softcap=self.logits_soft_cap,
            block_table=table,
            fa_version=self.vllm_flash_attn_version,
        )


class InPinned(TorchFunctionMode):
    """Within this block the engine's cache, one tensor of bytes, is pinned host memory that the device sees."""

    made = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        of_bytes = len(args) == 1 and isinstance(args[0], int) and kwargs.get("dtype") is torch.int8
        if function is torch.zeros and of_bytes:
            self.made += 1
            pinned = torch.zeros(args[0], dtype=torch.int8, device="cpu", pin_memory=True)
            return get_accelerator_view_from_cpu_tensor(pinned)
        return function(*args, **kwargs)


class Worker(Remote, GPUWorker):
    """The engine's worker, its cache in pinned host memory, and a fast tier on the device in front of it."""

    slow_tier = "pinned host memory"

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if self.use_v2_model_runner:
            raise InputError("the plugin hooks into the engine's model runner V1: set VLLM_USE_V2_MODEL_RUNNER=0")
        if not self.model_config.enforce_eager:
            raise InputError("the plugin's rule runs on the host, outside CUDA graphs: start with enforce_eager=True")
        register_backend(AttentionBackendEnum.FLASH_ATTN, "wakekv.vllm.cuda.Backend")
        _cached_get_attn_backend.cache_clear()
        try:
            super().load_model(load_dummy_weights=load_dummy_weights)
        finally:  # another engine in this process gets the engine's own
            AttentionBackendEnum.FLASH_ATTN.clear_override()
            _cached_get_attn_backend.cache_clear()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        checked(self.wakekv_layers(), self.vllm_config.cache_config.cache_dtype)
        with InPinned() as where:
            super().initialize_from_config(kv_cache_config)
        if where.made != 1:
            raise InputError("this engine allocates its cache in another way than the version this plugin is made for")
        self.attach(Settings.from_environment())

    def tier_class(self, mode: str) -> type:
        from wakekv.vllm.shared import TorchSharedTier
        from wakekv.vllm.torchtier import TorchTier

        return TorchSharedTier if mode == "pooled" else TorchTier
