"""The CUDA side without CUDA: its classes in the real engine's package, with plain torch where a kernel would be.

What this cannot show: the device, pinned memory, the kernels, and whether the engine calls any of it so.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wakekv.errors import InputError
from wakekv.vllm import plugin, steps
from wakekv.vllm.backend import Split
from wakekv.vllm.settings import Settings
from wakekv.vllm.torchtier import TorchTier

PAGE, KV, GROUP, D, N_PAGES = 16, 2, 2, 32, 6
SCALE = D**-0.5


def paged_attention(q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, softcap,
                    block_table, fa_version):  # fmt: skip
    """What flash_attn_varlen_func is asked for, for one query a row: k, v [block, token, KV head, d]."""
    assert max_seqlen_q == 1 and max_seqlen_k == int(seqused_k.max()) and k.shape[2] == v.shape[2] == 1
    assert cu_seqlens_q.tolist() == list(range(len(q) + 1)) and block_table.dtype == torch.int32
    for row, n in enumerate(seqused_k.tolist()):
        blocks = block_table[row, : -(-n // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:n, 0] for x in (k, v))
        out[row] = torch.softmax(q[row] @ keys.T * softmax_scale, -1) @ values


@pytest.fixture
def cuda(monkeypatch):
    from vllm.v1.attention.backends import fa_utils, flash_attn

    for module in (fa_utils, flash_attn):
        monkeypatch.setattr(module, "flash_attn_varlen_func", paged_attention, raising=False)
    from wakekv.vllm import cuda

    monkeypatch.setattr(cuda, "flash_attn_varlen_func", paged_attention)
    return cuda


def test_a_request_that_decodes_attends_to_its_pages_through_the_flash_kernel_s_interface(cuda):
    torch.manual_seed(0)
    cache = torch.randn(N_PAGES, KV, PAGE, 2 * D)
    tier = TorchTier(Settings(budget=N_PAGES), {"layer": cache}, KV * GROUP, 1, N_PAGES * PAGE)
    impl = object.__new__(cuda.Impl)
    impl.scale, impl.logits_soft_cap, impl.vllm_flash_attn_version = SCALE, 0, 2
    impl.tier, impl.decode = tier, lambda *rest: steps.decode(tier, *rest)
    builder = object.__new__(cuda.Builder)
    builder.device = torch.device("cpu")
    position = 4 * PAGE + 5
    step = steps.plan(tier, ["a"], np.array([position]), np.arange(N_PAGES, dtype=np.int32)[None])
    split = Split(step, slice(0, 1), None, None, builder.kernel_metadata)
    query, out = torch.randn(1, KV * GROUP, D), torch.zeros(1, KV * GROUP, D)
    layer = SimpleNamespace(layer_name="layer")
    impl.forward(layer, query, None, None, cache, SimpleNamespace(wakekv=split), out)
    keys, values = cache.transpose(0, 1).flatten(1, 2)[:, : position + 1].split(D, -1)
    asked = query.view(KV, GROUP, D)
    expected = torch.softmax(asked @ keys.transpose(1, 2) * SCALE, -1) @ values
    assert torch.allclose(out.view(KV, GROUP, D), expected, atol=1e-5)
    assert cuda.Backend.get_impl_cls() is cuda.Impl and cuda.Backend.get_builder_cls() is cuda.Builder


def test_metadata_of_a_step_in_which_all_decode_is_the_engine_s_own(cuda):
    common = SimpleNamespace(
        num_actual_tokens=2, max_query_len=1, query_start_loc=1, max_seq_len=9, seq_lens=2, block_table_tensor=3,
        slot_mapping=4,
    )  # fmt: skip
    made = cuda.Builder.bare(None, common)
    assert (made.num_actual_tokens, made.max_seq_len, made.block_table, made.wakekv) == (2, 9, 3, None)


def config(**changes) -> SimpleNamespace:
    made = {"backend": None, "scheduler_cls": None, "world_size": 1, "block_size": 16, **changes}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=made["world_size"], worker_cls="auto"),
        cache_config=SimpleNamespace(user_specified_block_size=True, block_size=made["block_size"]),
        scheduler_config=SimpleNamespace(scheduler_cls=made["scheduler_cls"], async_scheduling=None),
        attention_config=SimpleNamespace(backend=made["backend"]),
        speculative_config=None,
    )


def test_a_device_is_asked_for_the_attention_that_the_plugin_extends_and_for_steps_in_turn():
    asked = config()
    plugin.ask(asked, Settings(), "cuda")
    assert asked.attention_config.backend.name == "FLASH_ATTN" and asked.scheduler_config.async_scheduling is False
    assert asked.parallel_config.worker_cls == plugin.WORKERS["cuda"]
    assert asked.scheduler_config.scheduler_cls == plugin.SCHEDULER


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"backend": SimpleNamespace(name="FLASHINFER")}, "FLASH_ATTN, not FLASHINFER"),
        ({"scheduler_cls": "mine.Scheduler"}, "leave scheduler_cls out"),
        ({"world_size": 2}, "runs on one device"),
        ({"block_size": 32}, "make them equal"),
    ],
)
def test_what_the_plugin_cannot_do_is_refused_in_one_line(changes, said):
    with pytest.raises(InputError, match=said):
        plugin.ask(config(**changes), Settings(), "cuda")
    with pytest.raises(InputError, match="not on tpu"):
        plugin.ask(config(), Settings(), "tpu")
