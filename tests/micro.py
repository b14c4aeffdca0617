"""The bundled micro-trace: 12 heads and 150 steps of what SmolLM2-135M read on a cot prompt, as pages; and its counts.

tests/golden/micro.npz is a Demand, 16 tokens a page, weights, prompt rows and key means in half precision.
tests/golden/counts.json holds what every policy costs on it; tests/test_golden.py compares.

    python tests/micro.py          write counts.json anew: after a policy was added, or changed on purpose
    python tests/micro.py LOG      cut micro.npz anew from a recorded log first (a directory under OUT/traces)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from wakekv.logs.demand import Demand, demand
from wakekv.logs.trace import open_trace
from wakekv.policies import POLICIES, Policy
from wakekv.simulation.simulate import curves

GOLDEN = Path(__file__).parent / "golden"
BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16)
N_STEPS, KV_HEADS = 150, (9, 10, 60, 61)  # two of the three groups of layers 3 and 20: 3 query heads each
COUNTED = ("misses", "fetched", "peak_pages", "stall_steps")  # whole numbers, and two that are not:
ROUNDED = ("mean_pages", "missed_weight")


def micro(first_touch: str = "cold") -> Demand:
    """The bundled micro-trace."""
    with np.load(GOLDEN / "micro.npz", allow_pickle=False) as held:
        parts = dict(held)
    parts["page"] = parts["page"].astype(np.int32)
    parts |= {name: parts[name].astype(np.float32) for name in ("weight", "prompt_rows", "key_means")}
    parts["key_means"] = np.repeat(parts["key_means"], len(parts["layer"]) // len(parts["key_means"]), axis=0)
    return Demand(**parts, first_touch=first_touch)


def counts(wants: Demand, policy: Policy) -> dict[str, list]:
    """What a policy costs at each of BUDGETS."""
    found = curves(wants, policy, BUDGETS)
    whole = {name: getattr(found, name).tolist() for name in COUNTED}
    return whole | {name: np.round(getattr(found, name), 4).tolist() for name in ROUNDED}


def cut(path: Path | str) -> None:
    """micro.npz from a recorded log: some of its heads, its first steps."""
    trace = open_trace(path)
    whole = demand(trace).until(N_STEPS)
    heads = np.concatenate([np.arange(kv * trace.group, (kv + 1) * trace.group) for kv in KV_HEADS])
    n_pages = -(-(trace.n_prompt + N_STEPS) // 16)
    ptr, page, weight = [], [], []
    for head in heads:
        row = [sum(map(len, page))]
        for step in range(N_STEPS):
            at = slice(whole.ptr[head, step], whole.ptr[head, step + 1])
            half = whole.weight[at].astype(np.float16)
            order = np.lexsort((whole.page[at], half))  # rounding makes ties: in the canonical order again
            page.append(whole.page[at][order].astype(np.uint8))
            weight.append(half[order])
            row.append(row[-1] + len(half))
        ptr.append(row)
    np.savez_compressed(
        GOLDEN / "micro.npz",
        ptr=np.array(ptr, np.int64),
        page=np.concatenate(page),
        weight=np.concatenate(weight),
        created=whole.created[:n_pages],
        layer=whole.layer[heads],
        prompt_rows=whole.prompt_rows[heads, :, :n_pages].astype(np.float16),
        key_means=whole.key_means[heads[:: trace.group], :n_pages].astype(np.float16),
    )


def write() -> None:
    """counts.json, a policy a line."""
    wants = {touch: micro(touch) for touch in ("cold", "warm")}
    found = {n: {touch: counts(one, policy) for touch, one in wants.items()} for n, policy in POLICIES.items()}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(cells)}" for name, cells in found.items())
    (GOLDEN / "counts.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        cut(sys.argv[1])
    write()
