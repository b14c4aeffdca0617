"""What a cache can be asked to be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from wakekv.errors import InputError, lookup
from wakekv.policies import POLICIES, Policy

MODES, KERNELS = ("exact", "lagged", "eps"), ("matmul", "sdpa")


@dataclass(frozen=True)
class Settings:
    """The arguments of a ReversibleCache beside the model's configuration; InputError for those that do not fit.

    budget        pages per KV head on the fast tier, beside the open page; or budget_bytes for all of them together.
                  Under a policy of scope "layer" or "model" the heads of a layer, or all, share so many pages each in
                  one pool a sequence, and hold what the policy gives them
    policy        a name in POLICIES, or a Policy: which pages stay. evict is reactive with reversible=False. One that
                  is offline must be `held_out` first.
    mode          "exact": every step ranks all pages by their key bounds, brings the `wants` best, then attends;
                  "lagged": attends first, ranks after every `every` steps, for the next step;
                  "eps": as exact, and fetches on until the error of the output that the pages left out could cause
                  (a bound, as a length of the output of each head) is at most `eps`; 0 is the full cache.
                  Attention reads the fast tier: under recency what the step's trim leaves, under other policies, which
                  trim as the step ends, what was resident and what was brought, for which there is room meanwhile
    wants         pages a KV head wants in a step, the best; no more than the budget are
    least         of these only pages that, were all bounds logits, would have `least` times the mean weight or more, so
                  that a head with its eye on few pages wants few; 0: all of them
    page          tokens a page;  max_tokens: the most tokens a sequence can have (default: the model's own limit)
    block         tokens read at once by a pass of many tokens: prefill in chunks of this size needs no more fast memory
                  than one chunk of tokens, one block and the digests, and after it the budget
    slow          a folder for the slow tier's file, mapped into memory; None: host memory, pinned beside a GPU
    kernel        "matmul": straight over the slots; "sdpa": torch's own over the pages in the order of the text, which
                  gives the bits of a full cache where nothing is left out, and is slower
    """

    budget: int | None = None
    budget_bytes: int | None = None
    policy: str | Policy = "reactive"
    mode: Literal["exact", "lagged", "eps"] = "exact"
    every: int = 1
    eps: float | None = None
    wants: int = 32
    least: float = 0.0
    page: int = 16
    max_tokens: int | None = None
    block: int = 1024
    slow: str | Path | None = None
    kernel: Literal["matmul", "sdpa"] = "matmul"

    def __post_init__(self):
        if isinstance(self.policy, str):
            object.__setattr__(self, "policy", lookup(self.policy, POLICIES, "policy"))
        if not isinstance(self.policy, Policy):
            raise InputError(f"policy must be a name or a Policy, not {self.policy!r}")
        if not (self.slow is None or isinstance(self.slow, str | Path)):
            raise InputError(f"slow must be a folder, or None for host memory, not {self.slow!r}")
        for name in ("eps", "least"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | float | np.number):
                raise InputError(f"{name} must be a number, not {value!r}")
        for name in ("budget", "budget_bytes", "every", "wants", "page", "max_tokens", "block"):
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if value is not None and not (whole and value >= 1):
                raise InputError(f"{name} counts from 1 and must be a whole number, not {value!r}")
            if value is not None:
                object.__setattr__(self, name, int(value))
        if (self.budget is None) == (self.budget_bytes is None):
            raise InputError("give either budget (pages per KV head) or budget_bytes")
        for name, allowed in (("mode", MODES), ("kernel", KERNELS)):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        if self.every != 1 and self.mode != "lagged":
            raise InputError(f"every={self.every} is for mode='lagged'; in mode {self.mode!r} each step ranks")
        if (self.mode == "eps") != (self.eps is not None) or (self.eps is not None and not self.eps >= 0):
            raise InputError("mode='eps' and eps, a number from 0 up, go together")
        if self.mode == "eps" and not (self.policy.reversible and self.policy.fetch == "miss"):
            raise InputError("mode='eps' fetches what it needs: take a reversible policy that fetches on a miss")
        if not self.least >= 0 or (self.least and self.mode == "eps"):
            raise InputError(
                f"least must be 0 or more, and 0 in mode 'eps', which fetches what it needs: {self.least!r}"
            )
        if self.mode == "eps" and self.kernel != "matmul":
            raise InputError("mode='eps' needs the scores at hand: take kernel='matmul'")
        if self.policy.offline:
            raise InputError(
                f"{type(self.policy).__name__} looks at its own log beforehand, which a real cache cannot: "
                "calibrate it on another with policy.held_out(demand)"
            )
