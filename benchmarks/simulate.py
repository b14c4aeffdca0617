"""How fast is one pass? Every ratio is of two things timed in this one run, in CPU seconds of one core.

    OMP_NUM_THREADS=1 python benchmarks/simulate.py --json --out benchmarks/results/simulate.json

ordereddict_sweep  time of a 64-budget sweep with an OrderedDict cache over the time of `curves`, same wants
libcachesim_sweep  the same against libcachesim's LRU at 64 sizes (its misses are checked against ours, sequential mode)
bound_fraction     time of one table update a want over the time of `curves` for reactive: 1 would be the bound. The
                   loop of updates is as one would write it, `table[page[i]] += 1`, and so tests each index for being
                   negative, which takes most of its time
bound_fraction_unsigned   the same with unsigned indices, which are not tested: the bound of the machine
any_rank           time of 64 replays of a policy written in Python over the time of its `curves`
study_seconds      seconds for --study wants (10^8) through the paper's seven policies after loading: every budget of
                   six, and the paper's four of ReasonAlloc, whose floors need a replay a budget
study_cpu_seconds  the same of CPU seconds, which other processes disturb less
study_extra_memory_bytes   the most memory in use meanwhile, over that in use once the log was loaded
study_head_bytes   the log of one head, in memory
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import sys
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wakekv.kernels.jit import njit
from wakekv.logs.demand import Demand
from wakekv.policies import POLICIES, Policy
from wakekv.reproduction.claims import hardware
from wakekv.simulation.simulate import curves, replay

PAPER = ("full", "frozen", "reactive", "evict", "snapkv", "rkv", "reasonalloc")
SWEEP = range(1, 65)
SWEPT = (8, 16, 32, 64)


@dataclass(frozen=True)
class OwnRank(Policy):
    """A user's policy: half recency, half count."""

    def rank(self, seen):
        return seen.last_read + np.sqrt(seen.reads)


@njit(cache=True)
def _draw(n_heads, n_steps, wants, n_pages, seed, page, weight):
    """Wants like a head's: most pages again, some long unread, a few new; distinct within a step."""
    np.random.seed(seed)
    used = np.zeros(n_pages, np.int64)
    stamp = 0
    recent = np.zeros(n_pages, np.int32)
    n = 0
    for _ in range(n_heads):
        for p in range(n_pages):
            recent[p] = p
        for _step in range(n_steps):
            stamp += 1
            for i in range(wants):
                while True:
                    depth = min(n_pages - 1, int(np.random.exponential(n_pages / 10.0)))
                    p = recent[depth] if np.random.random() < 0.8 else np.random.randint(n_pages)
                    if used[p] != stamp:
                        break
                used[p] = stamp
                page[n] = p
                weight[n] = (i + 1.0) / wants
                other = np.random.randint(n_pages // 4)
                recent[other], recent[min(n_pages - 1, other * 2)] = p, recent[other]
                n += 1


def made_up(n_wants: int, n_pages: int = 320, wants: int = 32, n_heads: int = 64, seed: int = 0) -> Demand:
    n_steps = max(2, n_wants // (wants * n_heads))
    page = np.empty(n_heads * n_steps * wants, np.int32)
    weight = np.empty(len(page), np.float32)
    _draw(n_heads, n_steps, wants, n_pages, seed, page, weight)
    ptr = (np.arange(n_heads)[:, None] * n_steps + np.arange(n_steps + 1)) * wants
    rng = np.random.default_rng(seed)
    return Demand(
        ptr=ptr.astype(np.int64), page=page, weight=weight,
        created=np.full(n_pages, -1, np.int32), layer=(np.arange(n_heads) // 8).astype(np.int32),
        prompt_rows=rng.random((n_heads, 32, n_pages)).astype(np.float32),
        key_means=rng.normal(size=(n_heads, n_pages, 16)).astype(np.float32),
    )  # fmt: skip


@njit(cache=True)
def _one_update_per_want(ptr, page, table):
    for h in range(len(ptr)):
        for i in range(ptr[h, 0], ptr[h, -1]):
            table[page[i]] += 1


@njit(cache=True)
def _one_unsigned_update_per_want(ptr, page, table):
    for h in range(len(ptr)):
        for i in range(np.uint64(ptr[h, 0]), np.uint64(ptr[h, -1])):
            table[np.uint64(np.uint32(page[i]))] += 1


def ordered_dict_sweep(demand: Demand) -> None:
    for h in range(demand.n_heads):
        pages = demand.page[demand.ptr[h, 0] : demand.ptr[h, -1]].tolist()
        for budget in SWEEP:
            cache, misses = OrderedDict(), 0
            for page in pages:
                if page in cache:
                    cache.move_to_end(page)
                else:
                    misses += 1
                    cache[page] = None
                    if len(cache) > budget:
                        cache.popitem(last=False)


def libcachesim_sweep(demand: Demand, folder: Path) -> tuple[float, list[int]]:
    """(seconds, misses at each size, first touches included). Heads follow one another with pages of their own, which
    for recency equals one cache a head: what an earlier head left behind always goes first."""
    import libcachesim

    record = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    requests = np.zeros(demand.n_wants, record)
    requests["id"] = demand.head_of.astype(np.uint64) * demand.n_pages + demand.page + 1
    requests["size"], requests["next"] = 1, -1
    path = folder / "requests.bin"
    requests.tofile(path)
    misses = []
    start = time.process_time()
    for budget in SWEEP:
        reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        miss_ratio, _ = libcachesim.LRU(budget).process_trace(reader)
        misses.append(round(miss_ratio * demand.n_wants))
    return time.process_time() - start, misses


def seconds(*works, repeats: int = 15) -> list[float]:
    """The fastest of some runs of each, taking turns; the first of each (which compiles) thrown away."""
    times = [[] for _ in works]
    for work in works:
        work()
    for _ in range(repeats):
        for work, spent in zip(works, times, strict=True):
            start = time.process_time()
            work()
            spent.append(time.process_time() - start)
    return [min(spent) for spent in times]


def peak_bytes() -> int:
    """The most memory that this process was resident in."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * next(int(x.split()[1]) for x in status.read_text().splitlines() if x.startswith("VmHWM"))


class Memory:
    """bytes: the most memory that this process used since, over what it used then."""

    def __init__(self):
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
        except OSError:
            pass  # then it is the highest there ever was, and what is used below that does not show
        self._before = peak_bytes()

    @property
    def bytes(self) -> int:
        return peak_bytes() - self._before


def measure(n_wants: int, study: int) -> dict:
    demand = made_up(n_wants)
    print(f"{demand.n_wants:,} wants, {demand.n_heads} heads, {demand.n_pages} pages", file=sys.stderr)
    table = np.zeros(demand.n_pages, np.int64)
    ours, bound, unsigned = seconds(
        lambda: curves(demand, POLICIES["reactive"]),
        lambda: _one_update_per_want(demand.ptr, demand.page, table),
        lambda: _one_unsigned_update_per_want(demand.ptr, demand.page, table),
    )
    start = time.process_time()
    ordered_dict_sweep(demand)
    ordered = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        library, misses = libcachesim_sweep(demand, Path(folder))
    few = made_up(200_000, n_heads=16)
    first = sum(len(np.unique(few.page[few.ptr[h, 0] : few.ptr[h, -1]])) for h in range(few.n_heads))
    with tempfile.TemporaryDirectory() as folder:
        _, checked = libcachesim_sweep(few, Path(folder))
    sequential = curves(few, POLICIES["reactive"], [4, 16, 64], "sequential").misses + first
    if [checked[b - 1] for b in (4, 16, 64)] != sequential.tolist():
        raise SystemExit(f"libcachesim misses {checked} and ours {sequential.tolist()} differ: the comparison is void")
    (swept,) = seconds(lambda: curves(few, OwnRank()), repeats=3)
    start = time.process_time()
    for budget in SWEEP:
        replay(few, OwnRank(), budget)
    replayed = time.process_time() - start
    result = {
        "ordereddict_sweep": ordered / ours,
        "libcachesim_sweep": library / ours,
        "bound_fraction": bound / ours,
        "bound_fraction_unsigned": unsigned / ours,
        "any_rank": replayed / swept,
        "reactive_wants_per_s": demand.n_wants / ours,
    }
    if study:
        large = made_up(study, n_heads=270)
        small = made_up(2_000_000, n_heads=270)
        for name in PAPER:  # compile
            curves(small, POLICIES[name], SWEPT if POLICIES[name].floor else None)
        memory, each, cpu = Memory(), {}, time.process_time()
        for name in PAPER:
            start = time.perf_counter()
            curves(large, POLICIES[name], SWEPT if POLICIES[name].floor else None)
            each[name] = round(time.perf_counter() - start, 3)
        result |= {
            "study_wants": large.n_wants,
            "study_seconds": round(sum(each.values()), 2),
            "study_cpu_seconds": round(time.process_time() - cpu, 2),
            "study_seconds_each": each,
            "study_extra_memory_bytes": memory.bytes,
            "study_head_bytes": sum(a.nbytes for a in (large.ptr, large.page, large.weight)) // large.n_heads,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wants", type=int, default=2_000_000, help="wants in the sweeps' log (default: %(default)s)")
    parser.add_argument("--study", type=int, default=100_000_000, help="wants in the study, 0 to leave it out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="a file for the same, with the hardware and the command")
    options = parser.parse_args()
    result = measure(options.wants, options.study)
    if options.out:
        told = {"hardware": hardware(), "command": shlex.join(["python", *sys.argv]), "result": result}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value if isinstance(value, dict) else format(value, ',.3g')}")


if __name__ == "__main__":
    main()
