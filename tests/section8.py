"""Made-up measurements of the tiers, and a call of each of their figures and tables."""

from __future__ import annotations

from wakekv import figures
from wakekv.tables.tiered import SAYS

ABOUT = "measured: made-up"
SHOWN = ("full", "none", "dot", "exact")


def measured(seeds=(0, 1, 2), returns=0.01, evicts=0.2):
    """What `tiers.trial.contest` returns of each passage: whatever returns is at `returns`, whatever does not at
    `evicts`."""
    codes = [("codes", name) for name in ("8 bits", "2 bits", "2 bits, promoted")]
    found = []
    for seed in seeds:
        rows = []
        for n, (family, method) in enumerate([*SAYS, *codes]):
            swept = method in ("none", "dot", "nearest", "exact", "reactive")
            thresholds = (
                (0.01, 0.02, 0.05) if swept else (None,) if method in ("codebook", "8 bits", "2 bits") else (0.02,)
            )
            for threshold in thresholds:
                kl = (evicts if method in ("none", "cosine", "evict", "2 bits") else returns) * (
                    1 + 20 * (threshold or 0)
                )
                row = {"family": family, "method": method, "threshold": threshold, "seed": seed, "n_prompt": 100}
                row |= {"n_tokens": 8, "residency": 0.6 - 5 * (threshold or 0.02), "perplexity": 9 + kl}
                row |= {
                    f"{name}_bytes": 1000 * (n + 1) for name in ("fast", "codes", "index", "tables", "slow", "gone")
                }
                row |= {"fetched": 16 * (method != "none"), "fetched_bytes": 4096, "probed_bytes": 0, "misses": 40}
                row |= {"kl_mean": kl, "kl_p95": 3 * kl, "kl_last": 2 * kl, "agreement": 0.9, "full_perplexity": 9.0}
                asks = method in ("cosine", "dot", "key")
                row |= {"n_asked": 100 * asks, "n_fired": 50 * (method == "dot"), "best_sum": 20.0 * asks}
                row |= {"best": 0.3 if asks else None, "stall_s": 0.001 * n, "attend_s": 0.1, "settle_s": 0.01}
                rows.append(row | {"score_s": 0.0})
        line = [1000 + 10 * t for t in range(40)]
        memory = {name: dict.fromkeys(("fast", "index", "slow", "gone"), line) for name in SHOWN}
        text = {"name": "made-up", "first": ["One.", " Two."], "n_sentences": 9}
        shares = [[0.3 + 0.1 * layer, 0.4 + 0.1 * layer] for layer in range(4)]
        flagged = [
            {"pooled": pooled, "threshold": threshold, "share": share + threshold}
            for pooled, share in (("KV head", 0.6), ("layer", 0.3), ("model", 0.0))
            for threshold in (0.01, 0.02, 0.05)
        ]
        found.append({"text": text, "rows": rows, "memory": memory, "shares": shares, "overlap": 0.97})
        found[-1]["flagged"] = flagged
    return found


def timed():
    """What benchmarks/ttft.py leaves: a millisecond a prompt token, the reservoir's a tenth more."""
    rows = [
        {"arm": arm, "length": n, "first": [n * slow * (1 + i / 100) / 1e3 for i in range(20)], "load": [1.0, 2.0],
         "second": [n * slow * 2e-3] * 20, "cpu": [n * slow * 1e-3] * 20}
        for n in (100, 130, 1000) for arm, slow in (("stock", 1.0), ("reservoir", 1.1))
    ]  # fmt: skip
    hardware = {"device": "made-up", "cores": 2, "threads": 1}
    return {"hardware": hardware, "model": "made-up", "asked": {"dtype": "float32"}, "rows": rows}


def examples():
    """A call of every figure and table of the tiers, by name."""
    found = measured()
    pictures = ("tier_memory", "tier_answers", "tier_sweep", "tier_codes", "tier_sharing")
    tables = ("tiers", "tiers_told", "tiers_verdict", "tiers_timed", "tiers_flagged")
    first = {
        "first_token": lambda: figures.first_token(timed()),
        "first_tokens": lambda: figures.TABLES["first_tokens"](timed()),
    }
    return (
        first
        | {name: lambda name=name: figures.FIGURES[name](found, ABOUT) for name in pictures}
        | {name: lambda name=name: figures.TABLES[name](found) for name in tables}
    )
