"""Policy: an order of pages. Which page does a head give up last?

The host (simulate.py, cache.py) trims to a budget; the policy never sees the budget, holds no state and cannot tell a
simulation from a real cache. Subclass, write `rank`, and every budget's exact miss count comes from one pass:

    @dataclass(frozen=True)
    class Oldest(Policy):
        def rank(self, seen):
            return -seen.born
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from wakekv.errors import InputError
from wakekv.logs.demand import Demand

from .ledger import Ledger


@dataclass(frozen=True)
class Policy:
    """What is kept, and how a page comes and goes.

    reversible  a page that left is in the reservoir and can come back; False: it is destroyed, each later want misses
    every       decode steps between trims to the budget; 0: once, before the first step
    scope       over what one budget is shared: each "head" has its own (the paper), a "layer", the whole "model"
    fetch       when a page comes back: on a "miss", or only at a "trim", as all pages are ranked again
    start       "demand": a cold cache fills by wants; "prompt": the prompt's pages are there and are trimmed once
                before the first step, whatever the demand's first-touch rule (which then only excuses first wants)
    floor       for a shared scope: the part of the equal share each head keeps whatever it ranks (Ada-KV's alpha)
    sticky      a page that missed once misses for ever, though the schedule goes on (the control `shadow`)
    offline     sees the log it is run on beforehand (a calibration, or the future): an upper bound, said in every table

    What the survey of methods (the paper's Figure 1a) asks of each, as plain class attributes:
    source      where the rule was published
    foresight   is handed the future (Ledger.next_use), as the optimum is; such a policy is `offline`
    alone       a head's pages depend on its own wants only, if the scope is the head: heads can be simulated in blocks
    roles       when heads come to be treated unequally: "offline", "prefill", "decode"; "" if they never are
    withheld    numbers this policy does not get, by their name in Curves, each with the reason a page-level log cannot
                give it; tables and figures print the reason in place of the number
    """

    source: ClassVar[str] = ""
    roles: ClassVar[str] = ""
    foresight: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    withheld: ClassVar[Mapping[str, str]] = {}

    reversible: bool = True
    every: int = 1
    scope: Literal["head", "layer", "model"] = "head"
    fetch: Literal["miss", "trim"] = "miss"
    start: Literal["demand", "prompt"] = "demand"
    floor: float = 0.0
    sticky: bool = False
    offline: bool = False

    def __post_init__(self):
        choices = {"scope": ("head", "layer", "model"), "fetch": ("miss", "trim"), "start": ("demand", "prompt")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        whole = isinstance(self.every, int | np.integer) and not isinstance(self.every, bool)
        if not whole or self.every < 0:
            raise InputError(f"every must be a whole number of steps, 0 for once at the start, not {self.every!r}")
        if isinstance(self.floor, str) or not 0.0 <= self.floor <= 1.0:
            raise InputError(f"floor must lie between 0 and 1, not {self.floor!r}")
        if self.fetch == "trim" and not self.reversible:
            raise InputError("fetch='trim' brings pages back, so it needs reversible=True")

    def rank(self, seen: Ledger) -> np.ndarray:
        """[head, page], larger stays longer. Ties stay in order of recency. Unknown pages are ignored."""
        raise NotImplementedError(f"{type(self).__name__} must say which page stays longest: write rank(self, seen)")

    def share(self, seen: Ledger) -> np.ndarray:
        """[head]: each head's budget as a multiple of B, asked once before the first step; inf keeps every page."""
        return np.ones(len(seen.layer))

    def fit(self, *demands: Demand) -> Policy:
        """The policy calibrated on some logs, for those that are (once: a fitted one stays as it is)."""
        return self

    def held_out(self, *demands: Demand) -> Policy:
        """The policy calibrated on other logs than those it will run on, so no longer an upper bound; as it is, if it
        has nothing to calibrate."""
        fitted = self.fit(*demands)
        return self if fitted is self else fitted.but(offline=False)

    @property
    def nested(self) -> bool:
        """Do the pages at one budget hold those at every smaller one? Then one pass gives all budgets (simulate.py)."""
        return not (self.floor and self.scope != "head")

    @property
    def when(self) -> str:
        """When what a head keeps is decided: its role if it has one, else the choice of its pages."""
        return self.roles or ("decode" if self.every else "prefill")

    def but(self, **changes) -> Policy:
        """The same policy with one thing changed, for controls: reactive.but(reversible=False) is evict."""
        return dataclasses.replace(self, **changes)
