"""The policies, by name. To add one: a dataclass with a `rank` in one file of this folder, and a line below."""

from __future__ import annotations

from .classic import Born, Frequency, Full, Optimum, Random, Recency
from .ledger import Ledger
from .offload import Frozen
from .policy import Policy

__all__ = ["POLICIES", "Ledger", "Policy"]

POLICIES: dict[str, Policy] = {
    "full": Full(),
    "frozen": Frozen(),
    "reactive": Recency(),
    "evict": Recency(reversible=False),
    "shadow": Recency(sticky=True),
    "optimum": Optimum(),
    "fifo": Born(),
    "random": Random(),
    "lfu": Frequency(),
    "decayed-reads": Frequency(keep=0.6),
}
