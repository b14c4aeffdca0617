"""The peer's half of benchmarks/peers.py, run in the peer's environment: kvpress's presses and the full cache there.

    python decode.py JOB.json OUT.npz

JOB: model (a folder), prompt and tokens (ids), runs [{method, kept}]: tokens a head keeps of the prompt. For each run
and for the full cache ("full") OUT has logits float32 [token, vocabulary]; on the standard output, one JSON object:
versions, and by name the seconds of each step, wall and CPU, and bytes of keys and values after prompt and at the end.
A press chooses at the prompt's end, before the tokens come; all caches are fed in turn, token by token.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import version

import numpy as np
import torch
from kvpress import KnormPress, SnapKVPress, StreamingLLMPress
from transformers import AutoModelForCausalLM, DynamicCache

PRESSES = {"snapkv": SnapKVPress, "streamingllm": StreamingLLMPress, "knorm": KnormPress}


@torch.inference_mode()
def decode(model, prompt: list[int], tokens: list[int], runs: list[dict]) -> tuple[dict, dict]:
    ids, caches = torch.tensor([prompt]), {}
    for name, run in {"full": None, **{f"{run['method']} {run['kept']}": run for run in runs}}.items():
        caches[name] = cache = DynamicCache(config=model.config)
        if run is None:
            model.model(ids, past_key_values=cache)
            continue
        # kvpress keeps int(n * (1 - ratio)) tokens: half a token more, so that rounding cannot lose one
        press = PRESSES[run["method"]](compression_ratio=1 - (run["kept"] + 0.5) / len(prompt))
        with press(model):
            model.model(ids, past_key_values=cache)
        assert cache.get_seq_length() == run["kept"], (cache.get_seq_length(), run)
    logits = {name: [] for name in caches}
    told = {name: {"wall_s": [], "cpu_s": [], "bytes": [_bytes(cache)]} for name, cache in caches.items()}
    for i, token in enumerate(tokens):
        for name, cache in caches.items():
            fed, at = torch.tensor([[token]]), torch.tensor([[len(prompt) + i]])
            wall, cpu = time.perf_counter(), time.process_time()
            out = model(fed, past_key_values=cache, position_ids=at).logits[0, -1]
            told[name]["wall_s"].append(time.perf_counter() - wall)
            told[name]["cpu_s"].append(time.process_time() - cpu)
            logits[name].append(out.float())
    for name, cache in caches.items():
        told[name]["bytes"].append(_bytes(cache))
    return {name: torch.stack(x).numpy() for name, x in logits.items()}, told


def _bytes(cache: DynamicCache) -> int:
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def main() -> None:
    torch.set_num_threads(1)
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa").eval()
    logits, told = decode(model, job["prompt"], job["tokens"], job["runs"])
    np.savez(sys.argv[2], **logits)
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch", "numpy")}
    print(json.dumps({"versions": {"python": platform.python_version(), **versions}, "caches": told}))


if __name__ == "__main__":
    main()
