"""What does one budget for all heads of a layer change in vLLM, at as many pages? One run, one machine.

    OMP_NUM_THREADS=1 python benchmarks/pooled.py --out benchmarks/results/vllm-pooled.json

Requests read passages of an encyclopaedia and write 48 tokens; others are asked for a number hidden in a long text. The
untouched engine and the one with the plugin (exact ranking) are two processes of one thread that take turns. Every
prompt is read once by each, and what is timed is decoding, beside whatever else the machine ran (`load` of each row).
ARMS at every R: reactive has the pages of a budget for each head and an open page each, and pooled has as many for all
heads and, for the open pages, the room that one layer's wants take. Each head wants its best pages, those of them whose
bound gives at least the mean weight (`least` 1): were all heads to want the same number, a pool would have little to
give, and that is asked too, with `least` 0, at the first R.

A row an arm: of every repeat what `serving.Pair.run` tells; `quality`, KL(untouched || arm) in nats a token over the
passages' own next tokens, with room for all pages as well; `answers`, as `serving.graded`. `served.pooled` reads it. A
run that was stopped goes on with the arms that are left.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from transformers import AutoTokenizer

from wakekv.files import write_json
from wakekv.recording.models import fetch
from wakekv.serving import loads
from wakekv.serving import sweep as serving

ARMS = {
    "reactive": {"mode": "reactive"},
    "pooled, layer": {"mode": "pooled", "scope": "layer"},
    "pooled, model": {"mode": "pooled", "scope": "model"},
}


def arms(asked) -> dict[str, dict | None]:
    """Settings by name, the untouched engine first."""
    ours = {"budget": asked.budget, "page": asked.page}
    found: dict[str, dict | None] = {"stock": None}
    for every in asked.every:
        found |= {f"{name}, R = {every}": {**ours, **mode, "every": every, "least": 1.0} for name, mode in ARMS.items()}
    first = asked.every[0]
    for name in ("reactive", "pooled, layer"):
        found[f"{name}, R = {first}, as many wants"] = {**ours, **ARMS[name], "every": first}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 4], help="R (default: %(default)s)")
    for name, default in (
        ("context", 1536), ("requests", 4), ("tokens", 48), ("budget", 24), ("page", 16), ("repeats", 3),
        ("questions", 6), ("reservoir-gib", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--out", required=True, help="a JSON file")
    asked = parser.parse_args()
    folder, out = str(fetch(asked.model)), Path(asked.out)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    both = loads.bundled(tokenizer, asked.requests, asked.context + asked.tokens, asked.tokens)
    load = loads.Load(both.source, tuple(p[: asked.context] for p in both.prompts), asked.tokens)
    texts = [p[asked.context :] for p in both.prompts]
    questions = loads.needles(asked.questions, tokenizer, asked.context - 24)
    table, full = arms(asked), {"budget": -(-(asked.context + asked.tokens) // asked.page), "page": asked.page}
    about = {"hardware": serving.hardware(), "load": load.source, "key": load.key,
             "asked": {k: v for k, v in vars(asked).items() if k != "out"}}  # fmt: skip
    found = json.loads(out.read_text()) if out.exists() else {**about, "rows": {}}
    if any(found[name] != value for name, value in about.items()):
        parser.error(f"{out} is of another run: choose another --out, or remove it")
    rows = found["rows"]
    start = {"dtype": asked.dtype, "max_tokens": asked.context + asked.tokens + asked.page, "batch": asked.requests}

    def keep(name: str, said: str) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, found)
        print(f"{name}: {said}", flush=True)

    with serving.Pair(folder, page=asked.page, reservoir_gib=asked.reservoir_gib, **start) as pair:
        log = None
        for name, settings in {**table, "room for all": full}.items():
            row = rows.setdefault(name, {"settings": settings, "repeats": []})
            if "quality" in row:
                continue
            log = pair.forced(None, load, texts) if log is None else log
            row["quality"] = serving.divergence(log, log if settings is None else pair.forced(settings, load, texts))
            keep(name, f"KL from stock {row['quality']['kl_mean']:.5f} nats a token")
        for name, settings in table.items():
            if "answers" not in rows[name]:
                stock = None if settings is None else rows["stock"]["answers"]
                rows[name]["answers"] = serving.graded(pair, settings, questions, tokenizer, stock)
                keep(name, f"{rows[name]['answers']['mean']:.1f} of 100 points")
        for turn in range(asked.repeats):
            for name, settings in table.items():
                if len(rows[name]["repeats"]) <= turn:
                    rows[name]["repeats"].append({**pair.run(settings, load, cold=False), "load": os.getloadavg()[0]})
                    keep(name, f"{1e3 * rows[name]['repeats'][-1]['step_s']:.1f} ms a step")


if __name__ == "__main__":
    main()
