"""How fast does vLLM decode with B pages a head, against itself with all of them? One run, one machine.

    OMP_NUM_THREADS=1 python benchmarks/vllm.py --json --out benchmarks/results/vllm.json

8 requests read passages of an encyclopaedia and write 64 tokens. The untouched engine (its own defaults, all pages
read) and the one with the plugin (exact ranking) are two processes of one thread that take turns; prompts are
prefilled where an engine has no memory of them, and all that is compared is decoding. Seconds of a step, medians:

r1_4k, r16_4k   untouched over ours, ranking every 1 and every 16 steps, after 4096 tokens
r1_2k, r16_2k   the same after 2048
..._cpu         the same of CPU seconds, which other processes disturb less
..._flexicache  the step of the flexicache mode, which ranks every 16, over ours
..._kl          KL(untouched || ours) in nats a token, fed with the passages' own next 64 tokens
full_..._kl     the same of the plugin with room for all pages: what rounding alone does

float32 by default: a CPU without instructions for bfloat16 is slower in it, the untouched engine too, and spends the
more of a step outside attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from transformers import AutoTokenizer

from wakekv.files import write_json
from wakekv.recording.models import fetch
from wakekv.serving import loads
from wakekv.serving import sweep as serving


def measured(pair: serving.Pair, tokenizer, context: int, profile: list[int], asked) -> tuple[dict, dict]:
    """(numbers by name, every repeat's rows) at one context."""
    both = loads.bundled(tokenizer, asked.requests, context + asked.tokens, asked.tokens)
    load = loads.Load(both.source, tuple(p[:context] for p in both.prompts), asked.tokens)
    texts = [p[context:] for p in both.prompts]
    ours = {"budget": asked.budget, "page": asked.page}
    flexi = {**ours, "mode": "flexicache", "every": 16, "timing": "lagged", "profile": profile}
    arms = {"stock": None, "flexicache": flexi, "r1": {**ours, "every": 1}, "r16": {**ours, "every": 16}}
    rows = {name: [] for name in arms}
    for turn in range(asked.repeats):
        for name, settings in arms.items():
            rows[name].append(pair.run(settings, load, cold=False))
            print(f"{context}, {name}, {turn + 1}: {1e3 * rows[name][-1]['step_s']:.1f} ms a step", flush=True)
    tag, found = f"{round(context / 1024)}k", {}
    for name in ("r1", "r16", "flexicache"):
        for clock, end in (("step_s", ""), ("step_cpu_s", "_cpu")):
            ratios = {
                base: [a[clock] / b[clock] for a, b in zip(rows[base], rows[name])] for base in ("stock", "flexicache")
            }
            found[f"{name}_{tag}{end}"] = statistics.median(ratios["stock"])
            found[f"{name}_{tag}{end}_spread"] = [min(ratios["stock"]), max(ratios["stock"])]
            found[f"{name}_{tag}{end}_flexicache"] = statistics.median(ratios["flexicache"])
    if asked.quality:
        full = pair.forced(None, load, texts)
        arms["full"] = {**ours, "budget": -(-(context + asked.tokens) // asked.page)}
        for name in ("flexicache", "r1", "r16", "full"):
            found[f"{name}_{tag}_kl"] = serving.divergence(full, pair.forced(arms[name], load, texts))["kl_mean"]
    return found, {"context": context, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 2048], help="default: %(default)s")
    for name, default in (("requests", 8), ("tokens", 64), ("budget", 32), ("page", 16), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache", type=int, default=2, help="GiB of the engine's own cache (default: %(default)s)")
    parser.add_argument("--no-quality", dest="quality", action="store_false", help="leave the divergences out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", help="a file for the same and every row")
    asked = parser.parse_args()
    folder = str(fetch(asked.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    longest = max(asked.contexts) + asked.tokens + asked.page
    start = {"dtype": asked.dtype, "max_tokens": longest, "batch": asked.requests, "reservoir_gib": asked.cache}
    found = {
        "hardware": serving.hardware(),
        "model": asked.model,
        "asked": {k: v for k, v in vars(asked).items() if k not in ("json", "out")},
    }
    every = []
    with serving.Pair(folder, page=asked.page, **start) as pair:
        other = loads.calibration(tokenizer, min([1024, *asked.contexts]), asked.tokens)
        profile = serving.profiled(pair, other, asked.budget, asked.page)
        found["profile"] = profile
        for context in asked.contexts:
            numbers, rows = measured(pair, tokenizer, context, profile, asked)
            found |= numbers
            every.append(rows)
    if asked.out:
        Path(asked.out).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(asked.out), {**found, "measured": every})
    print(json.dumps(found) if asked.json else "\n".join(f"{name:<24}{value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
