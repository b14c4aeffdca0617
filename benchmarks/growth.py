"""How does decoding gain over the untouched engine as contexts grow and requests come together? One run, one machine.

    OMP_NUM_THREADS=1 python benchmarks/growth.py --most 16384 --out benchmarks/results/growth.json

Requests read passages of an encyclopaedia; a shorter context is the beginning of a longer one. The untouched engine and
the one with the plugin (exact ranking) are two processes of one thread that take turns; each prompt is read once, by
both at the same time, and all that is timed is decoding. A cell is a context and a number of requests: a row of
`serving.Pair.run` for every configuration and repeat. A run that was stopped goes on with the cells that are left.
`served.grown` reads the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import AutoTokenizer

from wakekv.files import write_json
from wakekv.recording.models import fetch
from wakekv.serving import loads
from wakekv.serving import sweep as serving

NAMES = ("stock", "flexicache", "reactive-r1", "reactive-r16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    for name, default in (("contexts", [1024, 2048, 4096, 8128]), ("requests", [1, 2, 4, 8])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default, help="default: %(default)s")
    for name, default in (("tokens", 32), ("budget", 32), ("repeats", 3), ("reservoir-gib", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--most", type=int, help="leave out cells of more tokens than this over all requests")
    parser.add_argument("--out", required=True, help="a JSON file")
    asked = parser.parse_args()
    folder, out = str(fetch(asked.model)), Path(asked.out)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    most, longest = max(asked.requests), max(asked.contexts) + asked.tokens
    texts = loads.bundled(tokenizer, most, longest, asked.tokens)
    about = {"model": asked.model, "dtype": asked.dtype, "hardware": serving.hardware(), "load": texts.source,
             "budget": asked.budget, "n_tokens": asked.tokens}  # fmt: skip
    found = json.loads(out.read_text()) if out.exists() else {**about, "rows": []}
    if any(found[name] != value for name, value in about.items()):
        parser.error(f"{out} is of another run: choose another --out, or remove it")
    done = {(row["context"], row["requests"]) for row in found["rows"]}
    table = serving.chosen(NAMES, serving.configurations(asked.budget, "exact"))
    start = {"dtype": asked.dtype, "max_tokens": longest, "batch": most, "reservoir_gib": asked.reservoir_gib}
    with serving.Pair(folder, **start) as pair:
        if "profile" not in found:
            found["profile"] = serving.profiled(pair, loads.calibration(tokenizer, 1024, 48), asked.budget)
        table["flexicache"]["profile"] = found["profile"]
        for context, requests in itertools.product(sorted(asked.contexts), sorted(asked.requests, reverse=True)):
            if (context, requests) in done or (asked.most and context * requests > asked.most):
                continue
            prompts = tuple(prompt[:context] for prompt in texts.prompts[:requests])
            print(f"reading {requests} of {context}", flush=True)
            with ThreadPoolExecutor() as both:  # each engine reads what it has not read
                list(both.map(pair.answers, (None, table["reactive-r16"]), (prompts, prompts), (1, 1)))
            for turn, name in itertools.product(range(asked.repeats), NAMES):
                row = pair.run(table[name], loads.Load(texts.source, prompts, asked.tokens), cold=False)
                kept = {"context": context, "requests": requests, "configuration": name, "repeat": turn}
                found["rows"].append(kept | row)
                print(f"{name}, {turn + 1}: {1e3 * row['step_s']:.1f} ms a step", flush=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, found)


if __name__ == "__main__":
    main()
