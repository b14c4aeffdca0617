"""How fast does a model decode with a reversible cache, and how far does it stray? One run, one machine, one thread.

    OMP_NUM_THREADS=1 python benchmarks/cache.py --json

vs_dynamic     seconds a step with transformers' DynamicCache over seconds a step with ours
vs_static      the same for a preallocated StaticCache
kl_mean        KL(full || ours) in nats a token, over the text after the prompt, fed token by token
destructive_kl_mean   the same with one flag changed, reversible=False, at the same budget
scoring_share  share of our step that ranks, moves and trims pages
fast_over_budget   bytes of the fast tier's pages over those of the budget, the open page left out of both

The prompt is read once; for the batch the sequence is repeated, and all caches are fed the same tokens.
"""

from __future__ import annotations

import argparse
import json

import torch

from wakekv import quality, system
from wakekv.models import load
from wakekv.prompts import build


def measure(name: str, context: int, batch: int, steps: int, budget: int, wants: int, every: int, forced: int) -> dict:
    torch.set_num_threads(1)
    loaded = load(name, dtype="float32", device="cpu")
    prompt = build("niah", loaded.tokenizer, length=context)
    *text, last = prompt.tokens
    tokens = [last, *prompt.script]
    ours = {"budget": budget, "wants": wants, "mode": "lagged" if every > 1 else "exact", "every": every}
    room = len(text) + max(steps, forced + 1)
    start = quality.prefilled(loaded.model, text, chunk=len(text), max_tokens=room, **ours)
    dynamic, static, paged = system.measure(loaded.model, start, tokens[:steps], [ours], batch=batch)
    result = {
        "vs_dynamic": dynamic["step_s"] / paged["step_s"],
        "vs_static": static["step_s"] / paged["step_s"],
    }
    if forced:
        pair = [{}, {"policy": "evict"}]
        reversible, destructive = quality.compare(loaded.model, start, tokens[: forced + 1], pair, least=1)
        result |= {
            "kl_mean": reversible.kl_mean,
            "destructive_kl_mean": destructive.kl_mean,
            "agreement": reversible.agreement,
        }
    page_bytes = batch * sum(layer.n_rows * layer.reservoir.page_bytes for layer in start.paged)
    return result | {
        "scoring_share": paged["moving_share"],
        "fast_over_budget": (paged["tiers"]["pages"] - page_bytes) / (budget * page_bytes),
        "rows": [dynamic, static, paged],
        "environment": system.environment(loaded.model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    for name, default in (("context", 6000), ("batch", 4), ("steps", 20), ("budget", 64), ("wants", 32), ("every", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--forced", type=int, default=64, help="tokens of text for the divergence, 0: none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = vars(parser.parse_args())
    plain = not options.pop("json")
    result = measure(options.pop("model"), **options)
    print("\n".join(f"{name:22} {value}" for name, value in result.items()) if plain else json.dumps(result))


if __name__ == "__main__":
    main()
