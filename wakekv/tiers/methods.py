"""The methods that are on trial: tiers of sentences, of codes and of what is alike, and policies of whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from wakekv.policies import POLICIES, Policy
from wakekv.tiers.cache import Tier
from wakekv.tiers.merging import Codebook, Layered, Merged
from wakekv.tiers.quantised import Quantised
from wakekv.tiers.rope import Rope
from wakekv.tiers.sentences import Sentences
from wakekv.tiers.text import Splitter

PAGES: dict[str, Policy] = {  # policies of whole pages; G-KV's own interval of 128 steps is longer than what is fed
    "reactive": POLICIES["reactive"],
    "evict": POLICIES["evict"],
    "gkv, every 16 steps": POLICIES["gkv"].but(every=16),
    "gkv-blend, every 16 steps": POLICIES["gkv-blend"].but(every=16),
    "spindlekv": POLICIES["spindlekv"],
    "spindlekv-max": POLICIES["spindlekv-max"],
}
FAMILIES = ("sentences", "pages", "codes", "merging")


class Key(NamedTuple):
    """A method of one of FAMILIES, at a threshold where it has one."""

    family: str
    method: str
    threshold: float | None = None


def tiers(
    splitter: Splitter, rope: Rope, n_layers: int, thresholds: Sequence[float], at: float, window: int
) -> dict[Key, Tier]:
    """Recall by three rules at every threshold, all else at the one."""

    def sentences(recall: str, threshold: float = at, **more: Any) -> Sentences:
        audit = recall not in ("exact", "bounds")  # they miss nothing, and the tests say so
        return Sentences(splitter, threshold, window, recall, audit=audit, **more)

    found: dict[Key, Tier] = {}
    for threshold in thresholds:
        found |= {Key("sentences", name, threshold): sentences(name, threshold) for name in ("none", "dot", "exact")}
    found |= {Key("sentences", name, at): sentences(name) for name in ("cosine", "centred", "key", "bounds")}
    found[Key("sentences", "none, means stand in", at)] = sentences("none", stand_in=True)
    found[Key("sentences", "exact, in fours", at)] = sentences("exact", batch=4)
    found[Key("sentences", "dot, 8-bit vectors", at)] = sentences("dot", vector_bits=8)
    for bits in (8, 4, 2):
        found[Key("codes", f"{bits} bits")] = Quantised(bits)
        found[Key("codes", f"{bits} bits, other layout")] = Quantised(bits, layout="channels")
    found[Key("codes", "4 bits, plain operands")] = Quantised(4, operand_bits=None)
    for bits in (4, 2):
        found[Key("codes", f"{bits} bits, promoted", at)] = Quantised(bits, promote=at, window=window)
    single = Splitter(splitter.n_vocab, least=1, longest=1)
    found[Key("merging", "codebook")] = Codebook(rope)
    deep = Sentences(single, at, window, "none")
    found[Key("merging", "merged, deep layers evict", at)] = Layered(Merged(rope), deep, max(1, n_layers // 6))
    return found
