"""How the engine comes to use our worker and scheduler: its platform's own check of a configuration, ours before it."""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from wakekv.errors import InputError
from wakekv.vllm.settings import Settings

SCHEDULER = "wakekv.vllm.scheduler.Scheduler"
WORKERS = {"cpu": "wakekv.vllm.cpu.Worker", "cuda": "wakekv.vllm.cuda.Worker"}


def install() -> None:
    """From now on this process's engines use the plugin, as long as the environment asks for it. Once is enough."""
    platform = type(current_platform)
    if getattr(platform, "wakekv", False):
        return
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # the model runner whose batch backend.py reads
    theirs = platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        settings = Settings.from_environment()
        if settings is not None:
            ask(vllm_config, settings, current_platform.device_type)
        theirs(vllm_config)

    platform.check_and_update_config = staticmethod(check_and_update_config)
    platform.wakekv = True


def ask(config: Any, settings: Settings, device: str) -> None:
    """Our worker, scheduler and page size in a configuration. InputError for what the plugin does not handle."""
    if device not in WORKERS:
        raise InputError(f"the plugin runs on {' and '.join(WORKERS)}, not on {device}")
    parallel, cache = config.parallel_config, config.cache_config
    if parallel.world_size > 1:
        raise InputError("the plugin runs on one device: leave tensor, pipeline and context parallelism at 1")
    if config.speculative_config is not None:
        raise InputError("speculative decoding is not handled: leave it off")
    if cache.user_specified_block_size and cache.block_size != settings.page:
        raise InputError(f"block_size={cache.block_size} is not the page of {settings.page} tokens: make them equal")
    cache.block_size, cache.user_specified_block_size = settings.page, True
    if parallel.worker_cls not in ("auto", WORKERS[device]):
        raise InputError(f"the worker {parallel.worker_cls} is not the plugin's: leave worker_cls out")
    parallel.worker_cls = WORKERS[device]
    if device == "cuda":  # on some devices the engine would choose another
        if config.attention_config.backend not in (None, AttentionBackendEnum.FLASH_ATTN):
            raise InputError(f"the plugin attends with FLASH_ATTN, not {config.attention_config.backend.name}")
        config.attention_config.backend = AttentionBackendEnum.FLASH_ATTN
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls not in (None, SCHEDULER):
        raise InputError(f"the scheduler {scheduler.scheduler_cls} is not the plugin's: leave scheduler_cls out")
    scheduler.scheduler_cls, scheduler.async_scheduling = SCHEDULER, False
