"""The rings and the order of the files: each imports only from those before it."""

from __future__ import annotations

from pathlib import Path

from wakekv.files import ROOT

# numpy, scipy, statsmodels, pandas; faster with numba
CORE = ["errors", "files", "verdicts", "stats", "logs/trace", "logs/sound", "kernels", "logs/demand", "policies",
        "simulation/residency", "simulation/replay", "simulation/simulate", "simulation/match", "simulation/spread",
        "simulation/study", "heads", "logs/shipped", "logs/blocks", "tables/__init__", "tables/contests",
        "tables/matched", "tables/measured", "tables/twins", "tables/tiered", "learning/learn", "simulation/beyond",
        "tables/gained", "learning/luck", "tables/served", "scheduling", "learning/taught"]  # fmt: skip
PICTURES = ["drawing", "figures"]  # + matplotlib, seaborn
# + torch, transformers
METAL = ["recording/fetch", "recording/texts", "recording/rows", "recording/attention", "recording/journal",
         "recording/models", "recording/prompts", "recording/record", "cache", "costs/quality", "costs/longbench",
         "serving/loads", "costs/rivals", "costs/system", "costs/links", "costs/plan", "costs/witness", "costs/trials",
         "tiers", "learning/reinforce", "recording/spotcheck"]  # fmt: skip
ENGINE = ["vllm", "serving/sweep", "serving/generation", "serving/table2", "serving/logged"]  # + vllm: tests/engine
RUN = ["reproduction/children", "reproduction/claims", "reproduction/artifact", "reproduction/document",
       "reproduction/sources", "reproduction/places", "reproduction/tasks", "reproduction/profiles",
       "reproduction/recordings", "reproduction/results", "reproduction/notebooks", "reproduction/reproduce",
       "commands", "reproduction/compare", "site", "reviewing", "__main__"]  # fmt: skip
RINGS = [CORE, PICTURES, METAL, ENGINE, RUN]
ORDER = [name for ring in RINGS for name in ring]


def place(path: Path) -> str | None:
    """The file, or the folder it lies in, as ORDER lists it; itself if it is not there, None for an __init__ that only
    says what its folder is for."""
    name = path.relative_to(ROOT / "wakekv").with_suffix("").as_posix()
    found = next((known for known in ORDER if name == known or name.startswith(known + "/")), name)
    return None if found == name and path.stem == "__init__" and name not in ORDER else found


def files(ring: list[str]) -> list[Path]:
    """The files of a ring, those of its folders too."""
    return [path for path in sorted((ROOT / "wakekv").rglob("*.py")) if place(path) in ring]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
