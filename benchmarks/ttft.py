"""How long until the first token in vLLM, with the plugin's reservoir and without it? One run, one machine.

    OMP_NUM_THREADS=1 python benchmarks/ttft.py --json --out benchmarks/results/ttft.json

Requests come one at a time, each a passage of an encyclopaedia, to two engines of one thread that take turns: the
untouched one, and one whose pages lie in the reservoir, of which each head holds `--budget` on the fast tier. No engine
remembers what it was asked before. By prompt length, seconds from a request's arrival:

first   to its first token
second  to its second: with the plugin, that one has pages move first
cpu     CPU seconds of the engine up to the second token, which other processes disturb less

load: how many processes wanted a core as each length began and ended, a minute's mean (/proc/loadavg). Above the number
of cores, wall seconds are those of a busy machine.
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

WARM = 2  # requests of each length that do not count


def cpu_s(arm) -> float:
    """CPU seconds that all threads of an engine's process have had."""
    stats = Path(f"/proc/{arm._process.pid}/task").glob("*/schedstat")
    return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1000])
    for name, default in (("requests", 20), ("budget", 32), ("page", 16), ("every", 4)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", help="a file for the same, written after every length")
    asked = parser.parse_args()
    folder = str(fetch(asked.model))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arms = {"stock": None, "reservoir": {"budget": asked.budget, "page": asked.page, "every": asked.every}}
    start = {"dtype": asked.dtype, "max_tokens": max(asked.lengths) + 2 * asked.page, "batch": 1, "reservoir_gib": 1}
    found = {
        "hardware": serving.hardware(),
        "model": asked.model,
        "asked": {k: v for k, v in vars(asked).items() if k not in ("json", "out")},
        "rows": [],
    }
    with serving.Pair(folder, page=asked.page, **start) as pair:
        for length in asked.lengths:
            rows = {
                name: {"arm": name, "length": length, "first": [], "second": [], "cpu": [], "load": []} for name in arms
            }
            for turn, prompt in enumerate(loads.bundled(tokenizer, asked.requests + WARM, length, 2).prompts):
                for name, settings in arms.items():
                    arm, row = pair.arm(settings), rows[name]
                    arm.ask("forget")
                    if turn in (WARM, asked.requests + WARM - 1):
                        row["load"].append(os.getloadavg()[0])
                    before = cpu_s(arm)
                    batch = arm.ask("generate", prompts=[prompt], n_tokens=2)
                    if turn >= WARM:
                        row["first"].append(batch["prefill_s"])
                        row["second"].append(batch["elapsed_s"])
                        row["cpu"].append(cpu_s(arm) - before)
            found["rows"] += rows.values()
            print(f"{length} tokens: done", flush=True)
            if asked.out:
                Path(asked.out).parent.mkdir(parents=True, exist_ok=True)
                write_json(Path(asked.out), found)
    if asked.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
