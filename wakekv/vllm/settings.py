"""What the engine's cache can be asked to be. Needs neither torch nor the engine."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from wakekv.errors import InputError, lookup

if TYPE_CHECKING:
    from wakekv.policies import Policy

VARIABLE = "WAKEKV_VLLM"  # the environment's way to ask: a mode, or settings as JSON
MODES = {  # by whose policy, in POLICIES
    "reactive": "reactive", "destructive": "evict", "flexicache": "flexicache", "pooled": "pooled",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The arguments of the plugin; InputError for those that do not fit.

    mode      "reactive": pages that leave come back when wanted; "destructive": they do not; "flexicache": a profiled
              quarter of the KV heads has every page resident, the others what each ranking chooses; "pooled": pages
              come back, and all heads' pages compete for one budget, in the order of reads that fade
    scope     pooled: over what a sequence's budget is shared, the heads of a "layer" (the default) or "model"
    budget    pages per KV head on the fast tier, beside the open page (flexicache: and beside those that came to be
              since the last ranking)
    every     decode steps between rankings, R
    timing    "exact": rank, fetch, attend; "lagged": attend, rank, fetch for the next step (as the paper's section 5.2)
    wants     pages a KV head wants in a ranking; by default budget - 1, so that the page just closed has room, and the
              budget in flexicache mode, whose rule always chooses that page itself
    least     of these only pages that, were all bounds logits, would have `least` times the mean weight or more, so
              that a head with its eye on few pages wants few; 0: all of them
    page      tokens a page: the engine's block_size, which must be the same
    folder    where the reservoir's memory-mapped file lies (CPU); None: the system's folder for temporary files
    profile   flexicache: the KV heads (layer * KV heads + head) that keep every page
    record    keep what is wanted, so that the simulator can replay it
    """

    mode: Literal["reactive", "destructive", "flexicache", "pooled"] = "reactive"
    scope: Literal["layer", "model"] | None = None
    budget: int = 32
    every: int = 1
    timing: Literal["exact", "lagged"] = "exact"
    wants: int | None = None
    least: float = 0.0
    page: int = 16
    folder: str | None = None
    profile: tuple[int, ...] = field(default=(), repr=False)
    record: bool = False

    def __post_init__(self):
        if not isinstance(self.mode, str):
            raise InputError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        lookup(self.mode, MODES, "mode")
        if self.timing not in ("exact", "lagged"):
            raise InputError(f"timing must be exact or lagged, not {self.timing!r}")
        if self.scope not in ((None, "layer", "model") if self.mode == "pooled" else (None,)):
            raise InputError(f"scope is layer or model in mode pooled and no other mode has one: not {self.scope!r}")
        if not (isinstance(self.least, (int, float)) and 0 <= self.least < float("inf")):
            raise InputError(f"least must be a number from 0 up, not {self.least!r}")
        for name in ("budget", "every", "page", "wants"):
            value = getattr(self, name)
            if name == "wants" and value is None:
                continue
            if not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
                raise InputError(f"{name} counts from 1 and must be a whole number, not {value!r}")
        if self.page % 16:
            raise InputError(f"page={self.page}: the engine's kernels take multiples of 16 tokens")
        if not (isinstance(self.profile, (list, tuple)) and all(type(one) is int and one >= 0 for one in self.profile)):
            raise InputError(f"profile must be a list of KV heads, counted from 0, not {self.profile!r:.60}")
        object.__setattr__(self, "profile", tuple(self.profile))
        if not isinstance(self.record, bool):
            raise InputError(f"record must be true or false, not {self.record!r}")
        if not (self.folder is None or isinstance(self.folder, (str, os.PathLike))):
            raise InputError(f"folder must be a path, not {self.folder!r}")
        object.__setattr__(self, "folder", None if self.folder is None else os.fspath(self.folder))
        if self.mode == "flexicache":
            if self.timing != "lagged":
                raise InputError("flexicache ranks after it attends: ask for timing='lagged'")
            if not self.profile:
                raise InputError("flexicache needs the profile of a calibration: serving.sweep.profiled makes one")
            if self.wants not in (None, self.budget) or self.least:
                raise InputError("flexicache chooses its budget whole: leave wants and least out")
        elif self.profile:
            raise InputError(f"a profile is for mode flexicache, not {self.mode}")
        if self.wants is not None and self.wants > self.budget:
            raise InputError(f"wants={self.wants} is more than the budget of {self.budget} pages can hold")

    @property
    def policy(self) -> Policy:
        """The simulator's policy by whose rule pages move here."""
        from wakekv.policies import POLICIES  # they bring numba, and the engine must have started before that

        rule = POLICIES[MODES[self.mode]]
        if self.mode == "pooled":
            return rule.but(scope=self.scope or "layer")
        if self.mode != "flexicache":
            return rule
        return rule.but(every=self.every, profile=self.profile, offline=False)  # the profile is of another text

    @property
    def n_wants(self) -> int:
        if self.wants is not None:
            return self.wants
        return self.budget if self.mode == "flexicache" else max(1, self.budget - 1)

    @property
    def n_slots(self) -> int:
        """Slots a KV head: the budget, and in flexicache mode the pages that come to be between two rankings."""
        return self.budget + (-(-self.every // self.page) + 1 if self.mode == "flexicache" else 0)

    def but(self, **changes: Any) -> Settings:
        return dataclasses.replace(self, **changes)

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Settings:
        """From names and values. InputError for a name that is none."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        for name in asked:
            lookup(name, known, "setting")
        return cls(**asked)

    @classmethod
    def from_environment(cls) -> Settings | None:
        """What the variable asks for; None if it is not set or empty."""
        text = os.environ.get(VARIABLE, "").strip()
        if not text:
            return None
        if not text.startswith("{"):
            return cls.of({"mode": text})
        try:
            return cls.of(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(
                f"{VARIABLE} holds no JSON ({error}): give a mode such as reactive, or an object"
            ) from None

    def as_json(self) -> str:
        return json.dumps({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
