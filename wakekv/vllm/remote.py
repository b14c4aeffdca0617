"""What a worker answers when the engine's owner asks it, by `collective_rpc`: books, tiers, demands, settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wakekv.errors import InputError

if TYPE_CHECKING:
    from wakekv.demand import Demand
    from wakekv.vllm.tier import FastTier

CHANGEABLE = ("every", "timing", "wants", "record")  # of a running engine, while nothing decodes


class Remote:
    """Mixed into a device's worker; `tier` is there once the engine has started."""

    tier: FastTier | None = None
    slow_tier = ""

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.tier is not None:
            self.tier.release(scheduler_output.finished_req_ids)
            self.tier.release(scheduler_output.preempted_req_ids or ())
        return super().execute_model(scheduler_output)

    def wakekv_books(self) -> dict[str, float]:
        """The books since they were last asked for."""
        return self.tier.take_books()

    def wakekv_tiers(self) -> dict[str, Any]:
        """Bytes by tier, how many requests hold pages on the fast one, and what the slow one is."""
        return {**self.tier.tiers(), "slow_tier": self.slow_tier, "sequences": len(self.tier.sequences)}

    def wakekv_demands(self) -> dict[str, Demand]:
        """What finished requests wanted, by name, where it was recorded; each is handed out once."""
        named = {name: self.tier.demand(name) for name, s in self.tier.finished.items() if s.wants}
        self.tier.finished.clear()
        return named

    def wakekv_set(self, **changes: Any) -> None:
        """Other settings from now on, of those that leave the memory as it is. InputError for others, or while
        requests decode."""
        fixed = set(changes) - set(CHANGEABLE)
        if fixed:
            raise InputError(f"{min(fixed)} is fixed once the engine has started: start another")
        if self.tier.sequences:
            raise InputError("requests are decoding: change settings between batches")
        self.tier.change(self.tier.settings.but(**changes))
