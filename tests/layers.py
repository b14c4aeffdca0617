"""The rings and the order of the files: each imports only from those before it."""

from __future__ import annotations

from pathlib import Path

from wakekv.claims import ROOT

# numpy, scipy, statsmodels, pandas; faster with numba
CORE = ["errors", "files", "verdicts", "trace", "sound", "kernels", "demand", "policies", "residency", "replay",
        "simulate", "stats", "match", "study", "tables", "contests", "matched", "reads", "churn", "wakeups", "grading",
        "bursts", "markers", "prefetch", "pools", "measured", "twins", "tiered", "shipped", "blocks", "learn", "beyond",
        "gained", "luck", "served", "scheduling", "taught"]  # fmt: skip
PICTURES = ["drawing", "figures"]  # + matplotlib, seaborn
# + torch, transformers
METAL = ["fetch", "texts", "rows", "attention", "journal", "models", "prompts", "record", "mapped", "cache", "quality",
         "longbench", "loads", "rivals", "system", "links", "plan", "witness", "trials", "tiers",
         "reinforce", "spotcheck"]  # fmt: skip
ENGINE = ["vllm", "serving", "generation", "table2", "logged"]  # + vllm, where an engine runs: tests/engine
RUN = ["children", "claims", "artifact", "document", "sources", "places", "tasks", "profiles", "recordings", "results",
       "notebooks", "reproduce", "commands", "compare", "site", "reviewing", "__main__"]  # fmt: skip
RINGS = [CORE, PICTURES, METAL, ENGINE, RUN]
ORDER = [name for ring in RINGS for name in ring]


def files(ring: list[str]) -> list[Path]:
    """The files of a ring, those of its folders too."""
    package = ROOT / "wakekv"
    return [
        path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0].removesuffix(".py") in ring
    ]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
