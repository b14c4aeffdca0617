"""Fit the order of `commons` on the training prompts: which of the pages that a head knows will it read next?

    python -m wakekv.learning.learn runs/default        writes wakekv/policies/commons.json anew

Logistic regression by L-BFGS on a sample of pages and steps, a third of each regime whatever its number of prompts,
both head units alike. Which signals there are was chosen on the same prompts (artifact/split.yaml).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml
from scipy.optimize import minimize

from wakekv.errors import InputError
from wakekv.files import ROOT, write_json
from wakekv.logs.demand import Demand, demand
from wakekv.logs.trace import Trace, open_trace
from wakekv.policies import Ledger
from wakekv.policies.pooled import SIGNALS, TABLE, signals

SPLIT = ROOT / "artifact" / "split.yaml"
PER_LOG = 60_000  # pages and steps sampled from each log in each head unit
REACH = 96  # pages a head among which they are sampled, those most read lately: what lies deeper decides nothing
RIDGE = 1e-5


def part_of(trace: Trace, path: Path | str = SPLIT) -> str:
    """ "train" or "heldout" as the split says, and "" for what is neither: a training prompt in another form."""
    rule = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["train"]
    model, prompt, text = (trace.manifest[name] for name in ("model", "prompt", "text"))
    if text["mode"] != rule["text"]:
        return ""
    if prompt["seed"] not in rule["prompts"].get(prompt["regime"], []):
        return "heldout"
    return "train" if model["name"] in rule["models"] else ""


def examples(wants: Demand, n: int = PER_LOG, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values float32 [signal, example], read bool [example], next bool [example]): pages as a step ended, whether they
    had been read in it, and whether they were read in the next."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    steps = np.arange(5, wants.n_steps - 1)
    chosen = set(steps[:: max(1, len(steps) // 64)].tolist())
    if not chosen:
        raise InputError(f"a log of {wants.n_steps} steps is too short to learn from")
    seen, parts = Ledger(wants, scope="model"), []
    for step in range(wants.n_steps - 1):
        seen.observe()
        items, read, values = signals(seen)
        if step not in chosen:
            continue
        near = np.argsort(-values[1], kind="stable")[: REACH * wants.n_heads]
        drawn = rng.choice(near, min(len(near), n // len(chosen)), replace=False)
        heads, entries = wants.at(step + 1)
        following = np.isin(items[drawn], heads * wants.n_pages + wants.page[entries])
        parts.append((values[:, drawn], read[drawn], following))
    values, read, following = zip(*parts)
    return np.concatenate(values, axis=1), np.concatenate(read), np.concatenate(following)


def logistic(values: np.ndarray, y: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, float]:
    """(coefficients [signal + 1], the intercept last; mean log loss) of values [signal, example]."""
    mean, scale = values.mean(1), values.std(1) + 1e-6
    z = np.vstack([(values - mean[:, None]) / scale[:, None], np.ones(values.shape[1])]).astype(np.float64)
    weight = weight / weight.sum()

    def loss(b):
        at = b @ z
        over = weight * (1 / (1 + np.exp(-at)) - y)
        slope = z @ over
        slope[:-1] += RIDGE * b[:-1]
        return weight @ (np.logaddexp(0, at) - y * at) + RIDGE / 2 * (b[:-1] @ b[:-1]), slope

    found = minimize(loss, np.zeros(len(z)), jac=True, method="L-BFGS-B", options={"maxiter": 500})
    b = found.x[:-1] / scale
    return np.append(b, found.x[-1] - b @ mean), float(found.fun)


def fit(demands: Mapping[str, Sequence[Demand]], n: int = PER_LOG) -> dict:
    """{"read", "rest": coefficients, "loss"} from the demands of each regime, each regime weighing the same."""
    parts = []
    for of_regime in demands.values():
        for i, wants in enumerate(of_regime):
            values, read, following = examples(wants, n, seed=i)
            parts.append((values, read, following, np.full(len(read), 1 / len(of_regime) / len(read))))
    values, read, following, weight = (np.concatenate(part, axis=-1) for part in zip(*parts))
    found, losses = {}, {}
    for name, mine in ("read", read), ("rest", ~read):
        b, losses[name] = logistic(values[:, mine], following[mine], weight[mine])
        found[name] = [float(f"{x:.5g}") for x in b]
    return found | {"loss": {name: round(loss, 5) for name, loss in losses.items()}, "examples": len(read)}


def main(out: str) -> None:
    traces = [open_trace(path.parent) for path in sorted((Path(out) / "traces").glob("*/manifest.json"))]
    training = [trace for trace in traces if part_of(trace) == "train"]
    if not training:
        raise InputError(f"{out} holds no log of a training prompt: make reproduce records them")
    demands: dict[str, list[Demand]] = {}
    for trace in training:
        own = demands.setdefault(trace.manifest["prompt"]["regime"], [])
        own += [demand(trace, unit) for unit in ("head", "kv_head")]
    about = {"made_by": "python -m wakekv.learning.learn runs/default", "signals": SIGNALS}
    about |= {"logs": {trace.manifest["key"][:16]: trace.manifest["prompt"]["regime"] for trace in training}}
    write_json(TABLE, about | fit(demands))
    print(TABLE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["runs/default"])
