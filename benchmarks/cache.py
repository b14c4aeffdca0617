"""How fast does a model decode with a reversible cache, and how far does it stray? One run, one machine, one thread.

    OMP_NUM_THREADS=1 python benchmarks/cache.py --json --out benchmarks/results/cache.json

All caches read the same passages of an encyclopaedia, a different one for each sequence of the batch, and are fed what
follows, token by token and taking turns. Of the first of ours:

vs_dynamic     seconds a step with transformers' DynamicCache over seconds a step with ours, medians
vs_static      the same for a preallocated cache, the faster of two: transformers' StaticCache, which repeats keys over
               all its room (alone: vs_static_cache), and a DynamicCache that writes into such room
vs_dynamic_cpu, vs_static_cpu   the same of CPU seconds, which other processes disturb less
kl_mean        KL(full || ours) in nats a token, over all tokens fed after the context
destructive_kl_mean   with --destructive: the same with one flag changed, reversible=False, at the same budget
scoring_share  share of our step that ranks, chooses, moves and trims pages
over_budget    bytes on the fast tier over those of the budget, the digests and the open page

The budget and wants that are asked by default were chosen for their KL on neighbouring passages of the same article:
for another text it may be higher (notebook 06 has it over prompts and budgets).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys

import torch

from wakekv.cache import ReversibleCache
from wakekv.costs import system
from wakekv.recording.models import load


def verdict(rows: list[dict]) -> dict:
    """The numbers above, of the rows of `system.measure`."""
    theirs = {row["settings"]: row for row in rows if not row["asked"]}
    ours, *others = (row for row in rows if row["asked"])
    found = {"context": ours["context"], "batch": ours["batch"], "settings": ours["asked"]}
    for clock in ("", "_cpu"):
        ratio = {name: row[f"step{clock}_s"] / ours[f"step{clock}_s"] for name, row in theirs.items()}
        found[f"vs_dynamic{clock}"], found[f"vs_static_cache{clock}"] = ratio["dynamic"], ratio["static"]
        found[f"vs_static{clock}"] = min(ratio["static"], ratio["preallocated"])
    found |= {name: ours[name] for name in ("kl_mean", "kl_p95", "agreement", "n_tokens")}
    twins = [row["kl_mean"] for row in others if row["asked"].get("policy") == "evict"]
    found |= {"destructive_kl_mean": twins[0]} if twins else {}
    return found | {"scoring_share": ours["moving_share"], "over_budget": ours["over_budget"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    for name, default in (("context", 6000), ("batch", 4), ("steps", 66), ("budget", 96), ("wants", 32)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--every", type=int, nargs="*", default=[], help="lagged ones beside the exact one")
    parser.add_argument("--destructive", action="store_true", help="its twin that keeps nothing beside it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", help="a file for the same and every row, with what it takes to run it again")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(asked.model, dtype="float32", device="cpu")
    ours = {"budget": asked.budget, "wants": asked.wants}
    lagged = [{**ours, "mode": "lagged", "every": every} for every in asked.every]
    twin = [{**ours, "mode": "exact", "policy": "evict"}] if asked.destructive else []
    caches = [{**ours, "mode": "exact"}, *lagged, *twin]  # each holds the text once more, as do both of transformers'
    sizes = {"contexts": [asked.context], "batches": [asked.batch], "steps": asked.steps}
    rows = system.sweep(loaded, caches, **sizes, chunk=asked.context, **ours)
    result = verdict(rows)
    if asked.out:
        start = ReversibleCache(loaded.model.config, **ours)
        told = {"command": shlex.join(["python", *sys.argv]), "dtype": "float32", **sizes}
        system.save(asked.out, loaded.model, start, rows, verdict=result, asked=told)
    print(json.dumps(result) if asked.json else "\n".join(f"{name:22} {value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
