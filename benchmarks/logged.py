"""What logging costs in a serving engine: decode steps with and without it, in turn, in one run.

    OMP_NUM_THREADS=1 python benchmarks/logged.py [--context 1024] [--steps 32] [--json]

One request of a passage of an encyclopaedia, float32, one thread. Without: the untouched engine, in a process
of its own. `logged_over_unlogged` compares the median step, `..._cpu` its CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics

from transformers import AutoTokenizer

from wakekv.recording.models import fetch
from wakekv.serving import loads
from wakekv.serving import sweep as serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    for name, default in (("context", 1024), ("steps", 32), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    folder, n = str(fetch(asked.model)), asked.context + asked.steps
    load = loads.bundled(AutoTokenizer.from_pretrained(folder), 1, asked.context, asked.steps)
    spent = {"unlogged": [], "logged": []}
    with serving.Pair(folder, dtype="float32", max_tokens=n, batch=1) as pair:
        for _ in range(asked.repeats):
            spent["unlogged"].append(pair.run(None, load))
            arm = pair.arm({"budget": 1})
            arm.ask("forget")
            arm.ask("log", n_read=asked.context, n_tokens=n, needle=[], k=64)
            spent["logged"].append(serving.timed(arm.ask("generate", prompts=load.prompts, n_tokens=asked.steps)))
    found = {f"{name}_{clock}": statistics.median(row[clock] for row in rows)
             for name, rows in spent.items() for clock in ("step_s", "step_cpu_s")}  # fmt: skip
    found["logged_over_unlogged"] = found["logged_step_s"] / found["unlogged_step_s"]
    found["logged_over_unlogged_cpu"] = found["logged_step_cpu_s"] / found["unlogged_step_cpu_s"]
    found |= {"hardware": serving.hardware(), **vars(asked)}
    print(json.dumps(found) if asked.json else "\n".join(f"{name:26} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
