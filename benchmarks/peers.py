"""Ours beside a peer: kvpress's SnapKV, StreamingLLM and Knorm, on the same prompts, at as many bytes.

    OMP_NUM_THREADS=1 python benchmarks/peers.py --json

kvpress takes an older transformers, so it runs in an environment of its own (made once, from peer/requirements.lock, in
the cache folder) and is compared with the full cache there; ours is compared with the full cache here. Both are fed the
same token ids: a scripted needle prompt, then its script, one token at a time, all caches of an environment in turn.

Equal bytes: ours (policy reactive, mode exact) holds a budget of pages, an open page and the digests of all pages at
every step. A press keeps some tokens of the prompt, and every token decoded after: as many of the prompt's as make its
bytes, on average over the steps, ours. "destructive" is ours with nothing kept: the same pages; "destructive, wider":
as many pages more as the digests weigh. The slow tier, where ours keeps the rest, is not counted.

One row a method and budget: bytes (mean over steps), kept_tokens (a press: of the prompt), kl_mean, kl_p95 (KL(full ||
method) in nats, over all tokens of all prompts), kl_by_prompt, top1 (share of tokens), tokens_per_s (by the median wall
time of a step), tokens_per_cpu_s, and full_... of both: the full cache's in the same environment, in the same turns.
`full_against_full`: how far apart the two environments' full caches are, in the same terms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from transformers import DynamicCache

from wakekv.costs import quality, system
from wakekv.logs.trace import sha256
from wakekv.recording import fetch, models
from wakekv.recording.prompts import build

HERE = Path(__file__).parent / "peer"
METHODS = ("snapkv", "streamingllm", "knorm")
PAGE = 16


def environment() -> Path:
    """The peer's Python; its environment is made on the first call (minutes, half a GB)."""
    lock = HERE / "requirements.lock"
    folder = fetch.cache() / f"peer-{sha256(lock)[:12]}"
    python, done = folder / "bin" / "python", folder / "installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            print(f"making the peer's environment in {folder}", file=sys.stderr)
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            install = [python, "-m", "pip", "install", "-qq", "--no-deps", "-r", lock]
            subprocess.run(install, check=True, stdout=sys.stderr)
            done.touch()
    return python


@torch.inference_mode()
def ours(model, prompt: list[int], tokens: list[int], budgets: list[int], wants: int) -> tuple[dict, dict]:
    """Logits and what is told of each cache, as the peer's decode.py gives them."""
    start = quality.prefilled(model, prompt, max_tokens=len(prompt) + len(tokens), wants=wants, page=PAGE)
    whole = DynamicCache(config=model.config)
    model.model(torch.tensor([prompt]), past_key_values=whole)
    caches, told = {"full": whole}, {"full": {"bytes": _bytes(whole)}}
    open_page = sum(layer.n_rows * layer.reservoir.page_bytes for layer in start.paged)
    for arm, budget, cache, size in quality.arms(start, budgets):
        if arm != "full":
            caches[f"{arm} {budget}"] = cache
            told[f"{arm} {budget}"] = {"bytes": size["bytes"] + open_page, "pages": size["pages"]}
    logits = {name: [] for name in caches}
    for spent in told.values():
        spent |= {"wall_s": [], "cpu_s": []}
    for token in tokens:
        for name, cache in caches.items():
            fed = torch.tensor([[token]])
            with nullcontext() if cache is whole else cache.attached(model):
                wall, cpu = time.perf_counter(), time.process_time()
                out = model(fed, past_key_values=cache).logits[0, -1]
                told[name]["wall_s"].append(time.perf_counter() - wall)
                told[name]["cpu_s"].append(time.process_time() - cpu)
            logits[name].append(out.float())
    for name, cache in caches.items():
        if cache is not whole:
            told[name]["miss_rate"] = cache.books.misses / max(cache.books.n_wants, 1)
    return {name: torch.stack(x).numpy() for name, x in logits.items()}, told


def _bytes(cache: DynamicCache) -> int:
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def theirs(python: Path, folder: Path, prompt, tokens, runs) -> tuple[dict, dict]:
    """The same from the peer's environment."""
    with tempfile.TemporaryDirectory() as work:
        job, out = Path(work) / "job.json", Path(work) / "out.npz"
        job.write_text(json.dumps({"model": str(folder), "prompt": prompt, "tokens": tokens, "runs": runs}))
        done = subprocess.run([python, HERE / "decode.py", job, out], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the peer failed:\n{done.stderr[-2000:]}")
        with np.load(out) as logits:
            return dict(logits), json.loads(done.stdout.splitlines()[-1])


class Tally:
    """What a method did, summed over prompts."""

    def __init__(self):
        self.kl, self.same, self.told = [], [], defaultdict(list)

    def add(self, full: np.ndarray, some: np.ndarray, told: dict, of_full: dict, size: float) -> None:
        full, some = torch.from_numpy(full), torch.from_numpy(some)
        self.kl.append(quality.divergence(full, some))
        self.same.append((full.argmax(-1) == some.argmax(-1)).numpy())
        self.told["bytes"].append(size)
        for who, spent in (("", told), ("full_", of_full)):
            for kind, name in (("wall_s", "tokens_per_s"), ("cpu_s", "tokens_per_cpu_s")):
                self.told[who + name] += spent[kind][system.WARM :]
        if "miss_rate" in told:
            self.told["miss_rate"].append(told["miss_rate"])

    def row(self) -> dict:
        kl = np.concatenate(self.kl)
        row = {"bytes": round(statistics.mean(self.told["bytes"])), "n_tokens": len(kl), "n_prompts": len(self.kl)}
        row |= {"kl_mean": float(kl.mean()), "kl_p95": float(np.quantile(kl, 0.95))}
        row |= {"kl_by_prompt": [float(x.mean()) for x in self.kl], "top1": float(np.concatenate(self.same).mean())}
        if "miss_rate" in self.told:
            row["miss_rate"] = statistics.mean(self.told["miss_rate"])
        rates = {name: seconds for name, seconds in self.told.items() if "tokens_per" in name}
        return row | {name: 1 / statistics.median(seconds) for name, seconds in rates.items()}


def measure(name: str, context: int, forced: int, seeds: int, budgets: list[int], wants: int) -> dict:
    torch.set_num_threads(1)
    loaded, folder, python = models.load(name, dtype="float32", device="cpu"), models.fetch(name), environment()
    tallies, both, versions, n_prompt = defaultdict(Tally), Tally(), {}, []
    for seed in range(seeds):
        prompt = build("niah", loaded.tokenizer, length=context, seed=seed)
        *text, last = prompt.tokens
        tokens = [last, *prompt.script][:forced]
        n_prompt.append(len(text))
        logits, told = ours(loaded.model, text, tokens, budgets, wants)
        token = told["full"]["bytes"] // len(text)
        kept = {b: round(told[f"reversible {b}"]["bytes"] / token - (len(tokens) - 1) / 2) for b in budgets}
        runs = [{"method": method, "kept": n} for n in kept.values() for method in METHODS]
        peer_logits, peer = theirs(python, folder, text, tokens, runs)
        versions = peer["versions"]
        for budget in budgets:
            for arm in quality.ARMS:
                key = f"{arm} {budget}"
                size = told[key]["bytes"]
                tallies[arm, budget].add(logits["full"], logits[key], told[key], told["full"], size)
                tallies[arm, budget].told["pages"].append(told[key]["pages"])
            for method in METHODS:
                key = f"{method} {kept[budget]}"
                spent = peer["caches"][key]
                size = spent["bytes"][0] + token * (len(tokens) - 1) / 2
                tallies[method, budget].add(peer_logits["full"], peer_logits[key], spent, peer["caches"]["full"], size)
                tallies[method, budget].told["kept_tokens"].append(kept[budget])
        both.add(logits["full"], peer_logits["full"], told["full"], peer["caches"]["full"], told["full"]["bytes"])
        print(f"seed {seed} done", file=sys.stderr)
    rows = []
    for (method, budget), tally in tallies.items():
        row = {"method": method, "by": "kvpress" if method in METHODS else "wakekv", "budget": budget}
        row |= {name: statistics.mean(tally.told[name]) for name in ("pages", "kept_tokens") if name in tally.told}
        rows.append(row | tally.row())
    apart = both.row()
    return {
        "rows": rows,
        "full_against_full": {name: apart[name] for name in ("kl_mean", "kl_p95", "top1")},
        "full_bytes": apart["bytes"],
        "n_prompt": n_prompt,
        "slow_tier": "host memory",
        "peer_versions": versions,
        "environment": system.environment(loaded.model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="default: %(default)s")
    for name, default in (("context", 2500), ("forced", 64), ("seeds", 3), ("wants", 32)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64], help="pages a KV head")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = vars(parser.parse_args())
    plain = not options.pop("json")
    result = measure(options.pop("model"), **options)
    if not plain:
        print(json.dumps({**result, "asked": options}))
        return
    for row in result["rows"]:
        print(f"{row['method']:20} {row['budget']:3} {row['bytes'] / 1e6:7.2f} MB  KL {row['kl_mean']:.4f}"
              f"  p95 {row['kl_p95']:.4f}  top-1 {row['top1']:.3f}  {row['tokens_per_s']:.1f} tokens/s"
              f" ({row['full_tokens_per_s']:.1f} full)")  # fmt: skip


if __name__ == "__main__":
    main()
