"""The engine's scheduler, for requests whose pages depend on what they decoded.

The untouched engine, when it runs out of blocks, takes those of a request and later reads prompt and text again in one
pass. Here that would be another text: tokens that were decoded saw B pages a KV head, and which ones followed from all
steps before. So a request that comes back decodes its text again, a token a step, and what it holds in the end is what
it would have held; that takes as many steps as it had decoded, where the untouched engine takes one pass.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler as EngineScheduler


class Scheduler(EngineScheduler):
    """A pass ends with the prompt, and only prompts are prefixes for other requests."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        coordinator = self.kv_cache_manager.coordinator
        share = coordinator.cache_blocks
        coordinator.cache_blocks = lambda request, n: share(request, min(n, request.num_prompt_tokens))

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[Any, int, int, bool]:
        """Blocks found for a request, and their tokens: none of what it decoded, though another's prompt have it."""
        blocks, n, boundary, diverged = super()._get_local_prefix_cache_hit(request)
        most = request.num_prompt_tokens // self.block_size * self.block_size
        if n > most:
            blocks, n = self.kv_cache_manager.truncate_computed_blocks(blocks, most), most
        return blocks, n, boundary, diverged

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """How many of num_new_tokens to take in a step: what is left of the prompt, then one."""
        return min(num_new_tokens, max(1, request.num_prompt_tokens - num_computed_tokens))
