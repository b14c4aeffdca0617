"""What the precision of a model does to what its heads are seen to read: one prompt recorded in three of them.

    OMP_NUM_THREADS=1 python benchmarks/numerics.py --out benchmarks/results/numerics.json

The text is scripted, so that every precision decodes the same tokens, and its wants can be compared step by step with
those of float32, head by head. The weights are loaded in float32 and rounded, whether the processor has the precision
or emulates it, as most do on a CPU:
differ      share of pages wanted by one of the two and not the other, of those wanted by either
same_order  share of heads' steps with the same pages in the same order
top         share of heads' steps with the same position of the largest weight
choice      share of steps at which the model's own next token is the same
miss_rate   of reactive at each budget, query heads, cold start;  apart: the largest distance from float32's
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from wakekv.files import write_json
from wakekv.logs.demand import Demand, demand
from wakekv.logs.trace import Trace, open_trace
from wakekv.policies import POLICIES
from wakekv.recording import models, prompts
from wakekv.recording.record import record
from wakekv.reproduction.claims import hardware
from wakekv.simulation.simulate import curves

DTYPES, BUDGETS = ("float32", "bfloat16", "float16"), (4, 8, 16, 32)


def compared(one: Demand, other: Demand) -> dict[str, float]:
    """How far the wants of two logs of the same text are apart: differ, same_order."""
    pages, heads_steps = one.n_pages, one.n_heads * one.n_steps
    names = [(d.head_of.astype(np.int64) * d.n_steps + d.step_of) * pages + d.page for d in (one, other)]
    either = len(np.union1d(*names))
    lists = [np.split(d.page, np.cumsum(np.diff(d.ptr, axis=1).ravel())[:-1]) for d in (one, other)]
    same = sum(np.array_equal(a, b) for a, b in zip(*lists, strict=True))
    return {"differ": len(np.setxor1d(*names)) / either, "same_order": same / heads_steps}


def row(log: Trace, exact: Trace) -> dict:
    """One precision beside float32."""
    wants, other = demand(exact), demand(log)
    rates = {name: curves(d, POLICIES["reactive"], BUDGETS).miss_rate for name, d in (("is", other), ("was", wants))}
    return {
        "dtype": log.manifest["model"]["dtype"],
        **compared(wants, other),
        "top": float(np.mean(np.asarray(log.top) == np.asarray(exact.top))),
        "choice": float(np.mean(np.asarray(log.choice) == np.asarray(exact.choice))),
        "miss_rate": dict(zip(map(str, BUDGETS), rates["is"].tolist())),
        "apart": float(np.abs(rates["is"] - rates["was"]).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=600)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logs = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in DTYPES:
            loaded = models.load(options.model, dtype="float32")
            loaded.model.to(getattr(torch, dtype))
            prompt = prompts.build("niah", loaded.tokenizer, seed=0, length=options.length)
            path = record(loaded, prompt, Path(folder) / dtype, steps=options.steps)
            logs[dtype] = open_trace(path)
        exact = logs["float32"]
        found = {
            "model": options.model,
            "prompts": 1,
            "prompt_tokens": exact.n_prompt,
            "steps": exact.n_steps,
            "text": exact.manifest["text"]["mode"],
            "hardware": hardware(),
            "rows": [row(log, exact) for log in logs.values()],
        }
        del exact, logs
    print(json.dumps(found, indent=1))
    if options.out:
        write_json(options.out, found)


if __name__ == "__main__":
    main()
