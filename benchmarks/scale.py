"""A log larger than memory: written, verified and simulated a few heads at a time; and how time and memory grow.

    OMP_NUM_THREADS=1 python benchmarks/scale.py --json --out benchmarks/results/scale.json

The log is made up (100,000 tokens, 4096 steps, 1024 heads, and as many weights a row as make it larger than this
machine's memory), needs --folder a disk of 30 GB, and is gone afterwards. Each part runs in a process of its own, whose
peak resident memory is read when it ends.

write      the log, head by head, by the steps of writing that the recorder uses, and its hashes
verify     every byte against its manifest
simulate   a policy at every budget, from the disk: seconds, wants a second, peak memory
small      the same of a log of an ordinary size;  rate_ratio: wants a second of the large one over those of the small
journal    the recorder's own journal, step by step and then turned head-major, at --journal-k weights a row
growth     seconds and memory of simulating as one size grows and the others stay (drawing.scale.growth shows it)

Exits with 1 if simulating took more than --ceiling bytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from simulate import peak_bytes

from wakekv.kernels.jit import njit
from wakekv.logs.blocks import simulate
from wakekv.logs.trace import PAGE, layout, publish, verify, write_array, write_manifest
from wakekv.policies import POLICIES
from wakekv.recording.journal import Journal
from wakekv.reproduction.claims import hardware

GROWS = ("tokens", "steps", "heads")
GROUP, HEAD_DIM = 4, 8  # query heads a KV head; small, as no policy here looks at keys


@dataclass(frozen=True)
class Size:
    """A made-up log: `wants` pages a head and step, k / wants tokens of each."""

    tokens: int
    steps: int
    heads: int
    k: int
    wants: int

    @property
    def manifest(self) -> dict:
        """That of a log of this size, without its files."""
        model = {
            "name": "made-up", "source": {}, "weights_sha256": "0" * 64, "dtype": "float32", "n_layers": 1,
            "n_heads": self.heads, "n_kv_heads": self.heads // GROUP, "head_dim": HEAD_DIM, "windows": [None],
        }  # fmt: skip
        prompt = {"regime": "made-up", "seed": 0, "text_sha256": "0" * 64, "needle": [], "params": asdict(self)}
        return {
            "model": model, "prompt": prompt, "n_prompt": self.tokens - self.steps, "n_steps": self.steps, "k": self.k,
            "page_tokens": PAGE, "text": {"mode": "made-up"}, "agreement": 1.0, "device": "none", "threads": 1,
            "repetition": {"rate": 0.0, "rule": "", "flagged": False}, "versions": {}, "key": "0" * 64,
        }  # fmt: skip

    @property
    def n_bytes(self) -> int:
        sizes = layout(self.manifest).values()
        return sum(dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for dtype, shape in sizes)


@njit(cache=True)
def _draw(first, n_prompt, wants, hot, state, positions, weights, top):
    """Steps of some heads, from step `first`: nine wants in ten from a head's `hot` pages [head, n], the others from
    all there are, and then hot. positions uint [head, step, k], ascending; state uint64 [head]: random numbers."""
    n_heads, n_steps, k = positions.shape
    each, chosen, last = k // wants, np.empty(wants, np.int64), (n_prompt + first + n_steps) // 16
    for h in range(n_heads):
        seen, x = np.zeros(last + 1, np.int32), state[h]
        for t in range(n_steps):
            whole, n = (n_prompt + first + t) // 16, 0  # pages that are full
            while n < wants:
                x ^= x << np.uint64(13)
                x ^= x >> np.uint64(7)
                x ^= x << np.uint64(17)
                place = np.int64((x >> np.uint64(32)) % np.uint64(hot.shape[1]))
                if x % np.uint64(10) == 0:
                    hot[h, place] = np.int64((x >> np.uint64(20)) % np.uint64(whole))
                page = hot[h, place]
                if seen[page] != t + 1:
                    seen[page] = t + 1
                    chosen[n] = page
                    n += 1
            chosen.sort()
            for i in range(wants):
                weight = np.float32(1 + (chosen[i] * 7919 + first + t) % wants) / (wants * wants * each)
                for j in range(each):
                    positions[h, t, i * each + j] = chosen[i] * 16 + j
                    weights[h, t, i * each + j] = weight
            top[h, t] = chosen[0] * 16
        state[h] = x


class Heads:
    """Made-up heads, each the same numbers whether they are drawn head by head or step by step."""

    def __init__(self, size: Size):
        self.size, self.dtype = size, layout(size.manifest)["positions"][0]
        rng = np.random.default_rng(0)
        self.hot = rng.integers(0, size.manifest["n_prompt"] // PAGE, (size.heads, 4 * size.wants))
        self.state = rng.integers(1, 1 << 62, size.heads).astype(np.uint64)

    def draw(self, heads: slice, first: int, stop: int) -> dict[str, np.ndarray]:
        """What some heads read at steps first..stop-1, all before having been drawn: positions, weights, top."""
        hot, state, n_prompt = self.hot[heads], self.state[heads], self.size.manifest["n_prompt"]
        shape = (len(state), stop - first)
        positions, top = np.empty((*shape, self.size.k), self.dtype), np.empty(shape, self.dtype)
        weights = np.empty(positions.shape, np.float32)
        _draw(first, n_prompt, self.size.wants, hot, state, positions, weights, top)
        return {"positions": positions, "weights": weights.astype(np.float16), "top": top}

    def step(self, step: int) -> dict[str, np.ndarray]:
        """The same of all heads at one step, for a journal."""
        none = np.zeros(self.size.heads, np.float32)
        drawn = {name: array[:, 0] for name, array in self.draw(slice(None), step, step + 1).items()}
        return drawn | dict.fromkeys(("needle_mass", "sink_mass", "local_mass", "entropy"), none)


def write(path: Path, size: Size) -> None:
    """A made-up log, one array after the other, one head at a time."""
    part = path.with_name(f"{path.name}.part")
    part.mkdir(parents=True)
    for name, (dtype, shape) in layout(size.manifest).items():
        write_array(part, name, _blocks(name, size, dtype, shape), dtype, shape)
    write_manifest(part, size.manifest)
    publish(part, path)


def _blocks(name: str, size: Size, dtype: np.dtype, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    if name in ("positions", "weights", "top"):
        heads = Heads(size)
        yield from (heads.draw(slice(head, head + 1), 0, size.steps)[name] for head in range(size.heads))
    else:
        yield from (np.zeros(shape[1:] or 1, dtype) for _ in range(shape[0]))


def journal(path: Path, size: Size) -> None:
    """The same log as the recorder keeps it: a step at a time, then turned head-major."""
    kept, heads = Journal(path, size.manifest, resume=False), Heads(size)
    try:
        for step in range(size.steps):
            kept.put(step, 0, 0, heads.step(step))
        names = ("tokens", "choice", "prompt_pages", "key_means")
        kept.finish(
            size.manifest,
            {name: np.zeros(shape, dtype) for name, (dtype, shape) in layout(size.manifest).items() if name in names},
        )
    finally:
        kept.close()


def run(path: Path, policy: str, budgets: int | None) -> int:
    """Simulate a log from disk; its wants."""
    return simulate(path, POLICIES[policy], budgets and np.arange(1, budgets + 1)).n_wants


def part(work: Callable, asked: dict, repeats: int) -> dict:
    """A part in this process: its fastest run of some, and the most memory it was resident in."""
    spent = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        wants = work(**asked)
        spent.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, wall = min(spent)
    found = {"seconds": round(wall, 3), "cpu_seconds": round(cpu, 3), "peak_bytes": peak_bytes()}
    return found | ({"wants": wants, "wants_per_s": round(wants / cpu)} if wants else {})


def alone(work: Callable, repeats: int = 1, **asked) -> dict:
    """A part in a process of its own, forked off this one, which has loaded and compiled all there is."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found = pool.apply(part, (work, asked, repeats))
    print(f"{work.__name__} {asked}: {found}", file=sys.stderr)
    return found


def compile_all(folder: Path, policies: list[str]) -> None:
    """Write and simulate a tiny log, so that no part compiles while it is timed."""
    tiny = folder / "tiny"
    for tokens in 600, 70_000:  # positions of two bytes, and of four
        write(tiny, Size(tokens, 8, GROUP, 16, 8))
        for policy in policies:
            run(tiny, policy, None)
        shutil.rmtree(tiny)


def measured(size: Size, policies: list[str], folder: Path, repeats: int) -> dict:
    """A log written, verified and simulated; removed afterwards."""
    path = folder / "log"
    try:
        found = {"size": asdict(size), "log_bytes": size.n_bytes, "write": alone(write, path=path, size=size)}
        found["verify"] = alone(verify, path=path)
        found["simulate"] = {name: alone(run, repeats, path=path, policy=name, budgets=None) for name in policies}
        return found
    finally:
        shutil.rmtree(path, ignore_errors=True)


def growth(base: Size, policies: list[str], factors: list[int], budgets: list[int], folder: Path, repeats: int) -> list:
    """Rows: grows (tokens, heads, steps or budgets), at, policy, seconds, peak_bytes, all else as in `base`."""
    sizes = [(name, replace(base, **{name: factor * getattr(base, name)})) for name in GROWS for factor in factors]
    rows = []
    for name, size in [*sizes, ("budgets", base)]:
        path = folder / "log"
        try:
            alone(write, path=path, size=size)
            for policy, n in itertools.product(policies, budgets if name == "budgets" else [None]):
                found = alone(run, repeats, path=path, policy=policy, budgets=n)
                at = n or getattr(size, name)
                rows.append({"grows": name, "at": at, "policy": policy, **found})
        finally:
            shutil.rmtree(path, ignore_errors=True)
    return rows


def measure(options: argparse.Namespace, folder: Path) -> dict:
    big = Size(options.tokens, options.steps, options.heads, options.k, options.wants)
    small = replace(big, tokens=min(5000, big.tokens), steps=min(320, big.steps), heads=min(64, big.heads))
    base = Size(*(min(most, own) for most, own in zip((16_000, 500, 64), (big.tokens, big.steps, big.heads))), 64, 32)
    policies, repeats = options.policies, options.repeats
    compile_all(folder, policies)
    found = {"memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "ceiling_bytes": options.ceiling}
    budgets = [budget for budget in (1, 4, 16, 64, 256) if budget <= base.tokens // PAGE]
    found["growth"] = growth(base, policies, options.factors, budgets, folder, repeats)
    shape = replace(big, k=options.journal_k, wants=options.journal_k // 2)
    found["journal"] = {
        "size": asdict(shape),
        "log_bytes": shape.n_bytes,
        **alone(journal, path=folder / "log", size=shape),
    }
    shutil.rmtree(folder / "log")
    found["big"] = measured(big, policies, folder, 1)
    found["small"] = measured(small, policies, folder, max(5, repeats))  # next to it in time: the machine may be shared
    rates = [{name: found[which]["simulate"][name]["wants_per_s"] for name in policies} for which in ("big", "small")]
    found["rate_ratio"] = {name: round(rates[0][name] / rates[1][name], 3) for name in policies}
    most = max(one["peak_bytes"] for one in found["big"]["simulate"].values())
    return found | {"peak_bytes": most, "within_ceiling": most <= options.ceiling}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=int, default=100_000, help="of the large log (default: %(default)s)")
    add("--steps", type=int, default=4096, help="decode steps of it (default: %(default)s)")
    add("--heads", type=int, default=1024, help="query heads of it (default: %(default)s)")
    add("--k", type=int, default=1024, help="weights a head and step of it (default: %(default)s, 26 GB)")
    add("--wants", type=int, default=128, help="pages a head and step of it (default: %(default)s)")
    add("--journal-k", type=int, default=64, help="weights a head and step in the journal (default: %(default)s)")
    add("--factors", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="by which sizes grow (default: %(default)s)")
    add("--policies", nargs="+", default=["reactive", "evict", "optimum"], help="to simulate (default: %(default)s)")
    add("--repeats", type=int, default=3, help="runs of each part, of which the fastest counts; the large log has one")
    add("--ceiling", type=int, default=2 << 30, help="bytes that simulating may take (default: 2 GiB)")
    add("--folder", type=Path, help="where the logs lie meanwhile (default: a temporary folder)")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="a file for the same, with the hardware and the command")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options, Path(folder))
    if options.out:
        told = {"hardware": hardware(), "command": shlex.join(["python", *sys.argv]), "result": result}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))
    return int(not result["within_ceiling"])


if __name__ == "__main__":
    sys.exit(main())
