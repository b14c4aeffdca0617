"""The policies, by name. To add one: a dataclass with a `rank` in one file of this folder, and a line below.

Where one stands among the published methods it says itself: `when` what a head keeps is decided (offline, at prefill,
while decoding), whether what it gives up is `reversible`, its `source`, and the numbers `withheld` from it because a
page-level log cannot give them, each with the reason.
"""

from __future__ import annotations

from .allocate import CAKE, AdaKV, DynamicKV, LAVa, PyramidKV
from .classic import Born, Frequency, Full, Optimum, Random, Recency
from .compress import GKV, H2O, RKV, SCOPE, GKVBlend, ReasonAlloc, SnapKV, StreamingLLM, ThinKV
from .hetero import HeteroCache
from .ledger import Ledger
from .offload import ArkVale, FlexiCache, Frozen, HeadInfer, InfiniGen, Quest, ShadowKV
from .policy import Policy
from .pooled import Commons, Pooled
from .roles import DuoAttention, HeadKV, MoA, RazorAttention
from .spindle import SpindleKV, SpindleMax

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
    # one budget for all heads: ours
    "pooled": Pooled(),
    "commons": Commons(),
    # heads have roles, settled offline
    "duoattention": DuoAttention(),
    "razorattention": RazorAttention(),
    "moa": MoA(),
    "headkv": HeadKV(),
    "heterocache": HeteroCache(),
    "flexicache": FlexiCache(),
    # the prompt decides
    "snapkv": SnapKV(),
    "snapkv-one-query": SnapKV(rows=1),
    "adakv": AdaKV(),
    "cake": CAKE(),
    "lava": LAVa(),
    "dynamickv": DynamicKV(),
    "pyramidkv": PyramidKV(),
    "spindlekv": SpindleKV(),
    # pages are destroyed while decoding
    "rkv": RKV(),
    "rkv-importance": RKV(lam=1.0),
    "reasonalloc": ReasonAlloc(),
    "gkv": GKV(),
    "gkv-blend": GKVBlend(),
    "spindlekv-max": SpindleMax(),
    "thinkv": ThinKV(),
    "scope": SCOPE(),
    "h2o": H2O(),
    "streamingllm": StreamingLLM(),
    # pages go to a reservoir and come back
    "flexicache-m0-r1": FlexiCache(dense=0.0, offline=False, every=1),
    "flexicache-m0-r2": FlexiCache(dense=0.0, offline=False, every=2),
    "flexicache-m0-r4": FlexiCache(dense=0.0, offline=False, every=4),
    "flexicache-m0-r8": FlexiCache(dense=0.0, offline=False, every=8),
    "flexicache-m0-r16": FlexiCache(dense=0.0, offline=False, every=16),
    "quest": Quest(),
    "arkvale": ArkVale(),
    "shadowkv": ShadowKV(),
    "infinigen": InfiniGen(),
    "headinfer": HeadInfer(),
}
