"""What a worker answers when the engine's owner asks it, by `collective_rpc`: books, tiers, demands, settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from wakekv.errors import InputError
from wakekv.vllm.backend import Runner
from wakekv.vllm.settings import Settings

if TYPE_CHECKING:
    from wakekv.logs.demand import Demand
    from wakekv.vllm.tier import FastTier

FIXED = ("page", "folder")  # once an engine has started: they are its cache's


class Remote:
    """Mixed into a device's worker; `tier` is there once the engine has started."""

    tier: FastTier | None = None
    slow_tier = ""

    def wakekv_layers(self) -> dict[str, Any]:
        """The model's attention layers, by name."""
        return get_layers_from_vllm_config(self.vllm_config, Attention)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.tier is not None:
            self.tier.release(scheduler_output.finished_req_ids)
            self.tier.release(scheduler_output.preempted_req_ids or ())
            self.tier.books["preempted"] += len(scheduler_output.preempted_req_ids or ())
        return super().execute_model(scheduler_output)

    def wakekv_books(self) -> dict[str, float]:
        """The books since they were last asked for."""
        return self.tier.take_books()

    def wakekv_tiers(self) -> dict[str, Any]:
        """Bytes by tier, what the slow one is, how many requests hold pages on the fast one, and how many pages."""
        held = {"sequences": len(self.tier.sequences), "resident": int((self.tier.where >= 0).sum())}
        return {**self.tier.tiers(), "slow_tier": self.slow_tier, **held}

    def wakekv_demands(self) -> dict[str, Demand]:
        """What finished requests wanted, by name, where it was recorded; each is handed out once."""
        named = {name: self.tier.demand(name) for name, s in self.tier.finished.items() if s.wants}
        self.tier.finished.clear()
        return named

    def wakekv_log(self, **asked: Any) -> None:
        """From now on the engine attends as it does without the plugin, and logs what it reads; see RowLog."""
        from wakekv.vllm.rowlog import RowLog

        layers = self.wakekv_layers().values()
        log = RowLog(len(layers), **asked)
        for layer in layers:
            layer.impl.log = log
        for builder in self.wakekv_builders():
            builder.plan = None

    def wakekv_logged(self) -> dict[str, Any]:
        """What was logged, arrays by their name in a Trace; the plugin attends again."""
        layers = self.wakekv_layers().values()
        logged = next(iter(layers)).impl.log.arrays()
        for layer in layers:
            layer.impl.log = None
        self.attach(self.tier.settings, self.tier.digests)
        return logged

    def wakekv_builders(self) -> Iterator[Any]:
        """The builders of metadata, one a group of layers."""
        for groups in self.model_runner.attn_groups:
            for group in groups:
                yield from group.metadata_builders

    def wakekv_set(self, **changes: Any) -> None:
        """Other settings from now on: another fast tier before the same reservoir. InputError for those that are the
        reservoir's, or while requests decode."""
        for name in FIXED:
            if changes.get(name, getattr(self.tier.settings, name)) != getattr(self.tier.settings, name):
                raise InputError(f"{name} is fixed once the engine has started: start another")
        if self.tier.sequences:
            raise InputError("requests are decoding: change settings between batches")
        self.attach(Settings.of({**json.loads(self.tier.settings.as_json()), **changes}), self.tier.digests)

    def tier_class(self, mode: str) -> type:
        """The fast tier of this device."""
        from wakekv.vllm.shared import SharedTier  # numba, which the engine does not bear before it has started
        from wakekv.vllm.tier import FastTier

        return SharedTier if mode == "pooled" else FastTier

    def attach(self, settings: Settings, digests: Any = None) -> None:
        """A fast tier of these settings in front of every layer."""
        from wakekv.vllm import steps

        config, layers = self.vllm_config, self.wakekv_layers()
        self.tier = self.tier_class(settings.mode)(
            settings,
            {name: layer.kv_cache for name, layer in layers.items()},
            next(iter(layers.values())).impl.num_heads,
            config.scheduler_config.max_num_seqs,
            config.model_config.max_model_len,
            digests,
        )
        runner = Runner(self.model_runner)
        for layer in layers.values():
            layer.impl.tier, layer.impl.decode = self.tier, partial(steps.decode, self.tier)
        for builder in self.wakekv_builders():
            builder.plan, builder.runner = partial(steps.plan, self.tier), runner
