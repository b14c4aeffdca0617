"""What the engine's tests share: an engine in a process of its own, and the rules that pages can follow."""

from __future__ import annotations

import sys
from pathlib import Path

from wakekv.vllm.arm import Arm

ALL = [
    {"mode": "reactive", "timing": "exact", "every": 1},
    {"mode": "reactive", "timing": "lagged", "every": 16},
    {"mode": "destructive", "timing": "exact", "every": 1},
    {"mode": "flexicache", "timing": "lagged", "every": 16, "profile": [0, 4, 8, 33, 60]},
    {"mode": "pooled", "timing": "exact", "every": 1},
    {"mode": "pooled", "timing": "lagged", "every": 4, "scope": "model"},
]
ANY = {"profile": [], "scope": None}  # what a rule does not name
RULES = [*ALL, {"mode": "destructive", "timing": "lagged", "every": 4}]


def name_of(rule: dict) -> str:
    return f"{rule['mode']}-{rule['timing']}-{rule['every']}"


def arm(folder: Path, **start) -> Arm:
    made = Arm(sys.executable, folder / "engine.log")
    made.ask("start", **start)
    return made
