"""Any bytes in place of a file that wakekv reads: they end in an error of ours, or in something valid.

    python tests/fuzz.py --seconds 3600 --out benchmarks/results/fuzz.json

An input names a file of a small set of valid ones, and holds the bytes to put in its place: a changed bit, a piece cut
out or doubled, a number of a JSON text that is suddenly a list. Where atheris is (`make fuzz` brings it) its coverage
chooses which inputs to change further, and each may take a minute and 3 GB; without it they are changed blindly.
An input that ends in anything but an error of ours is written to --found, and run again by naming it.
"""

from __future__ import annotations

import argparse
import inspect
import io
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import yaml
from conftest import _make_trace

from wakekv.errors import WakeKVError
from wakekv.files import ROOT, write, write_json
from wakekv.logs.demand import UNITS, demand
from wakekv.logs.shipped import describe, open_shipped, pack, verify_shipped
from wakekv.logs.sound import check
from wakekv.logs.trace import NAMES, open_trace, save_trace, verify
from wakekv.policies import POLICIES
from wakekv.reproduction import artifact
from wakekv.reproduction.claims import hardware, load_claims, table
from wakekv.reproduction.compare import compare, load_rules, open_run
from wakekv.reproduction.places import find
from wakekv.reproduction.reproduce import _open_record
from wakekv.simulation.simulate import curves

ODD = [None, True, 0, -1, 1, 2**16, 2**31, 2**63, 10**40, 0.5, -0.0, float("nan"), float("inf"), "", "a", "../x",
       "\ud800", "1/0", "NaN", [], {}, [[]], [[0, 0]], [1, 2], {"a": 1}]  # fmt: skip
PIECES = [b"\0", b"\xff", b"NaN", b"1e999", b"[" * 5000, b"&a [*a, *a]", b"\xed\xa0\x80", b"!!python/object:os.system",
          b"-", b"'descr': '|O'", b"<f8", b"(99999999999,)", b"\x93NUMPY\x03\x00"]  # fmt: skip
CLAIMS, RULES = load_claims(), load_rules()
LIMIT_S, LIMIT_MB = 60, 3000  # that one input may take, on a machine that may be busy
MOST = 10_000  # values of a text that may be changed
MEMORY = Path("/dev/shm")  # a file system in memory, where there is one


def build(root: Path) -> None:
    """One valid file of every kind that is read, in the new folder `root`."""
    trace = _make_trace(n_layers=1, heads_per_layer=2, kv_per_layer=1, n_prompt=40, n_steps=4, k=4, needle=((9, 20),))
    save_trace(trace, root / "log")
    pack(trace, [str(token) for token in trace.tokens], root / "logs" / "x.npz")
    describe(root / "logs", {})
    entries = [(ROOT / "artifact" / name).read_text().split("\n- ") for name in ("claims.yaml", "tolerances.yaml")]
    claims, rules = ("\n- ".join([*some[:3], some[-1]]) for some in entries)
    verdict = {"id": "x", "verdict": "direction holds", "value": "3/4", "number": 0.75}
    write_json(_in(root / "run" / "claims" / "00.json"), {"notebook": "00", "verdicts": [verdict]})
    write(_in(root / "run" / "tables" / "x.csv"), "name,value\na,1\nb,2.5\n")
    write_json(root / "run" / "run.json", {"profile": "smoke", "stages": {}, "volatile": {}})
    shutil.copytree(root / "run", root / "other")
    write(_in(root / "artifact" / "claims.yaml"), claims)
    write(root / "tolerances.yaml", rules)
    artifact.write_manifest(root)


def _in(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def use_log(root: Path) -> None:
    """What `verify` and `simulate` do with a log."""
    _all([lambda: find([str(root / "log")]), lambda: verify(root / "log"), lambda: check(open_trace(root / "log"))])
    log = open_trace(root / "log")
    _all([lambda unit=unit: curves(demand(log, unit), POLICIES["reactive"], [2]) for unit in UNITS])


def use_shipped(root: Path) -> None:
    find([str(root / "logs")])
    log = open_shipped(root / "logs" / "x.npz")
    uses = [lambda unit=unit: curves(demand(log, unit), POLICIES["lfu"], [2]) for unit in UNITS]
    _all([lambda: verify_shipped(root / "logs"), *uses])


def use_run(root: Path) -> None:
    reads = [lambda: table(root / "run", CLAIMS), lambda: _open_record(root / "run", "smoke")]
    _all([*reads, lambda: compare(open_run(root / "run"), open_run(root / "other"), RULES)])


def _all(calls: list[Callable]) -> None:
    """Each of them, whatever the others say; then the refusal of the last that refused."""
    refusal = None
    for call in calls:
        try:
            call()
        except WakeKVError as error:
            refusal = error
    if refusal:
        raise refusal


# What may be put in the place of each file, and what reads it then.
READERS: dict[str, Callable[[Path], object]] = {
    "log/manifest.json": use_log,
    **{f"log/{name}.npy": use_log for name in NAMES},
    "logs/x.npz": use_shipped,
    "logs/manifest.json": use_shipped,
    "run/claims/00.json": use_run,
    "run/tables/x.csv": use_run,
    "run/run.json": use_run,
    "artifact/claims.yaml": lambda root: load_claims(root / "artifact" / "claims.yaml"),
    "artifact/manifest.json": artifact.check,
    "tolerances.yaml": lambda root: load_rules(root / "tolerances.yaml"),
}
FILES = list(READERS)


def seeds(root: Path) -> list[bytes]:
    """The valid files as inputs: the place in FILES as one byte, then what to put there."""
    return [bytes([i]) + (root / name).read_bytes() for i, name in enumerate(FILES)]


def run(root: Path, data: bytes) -> bool:
    """Put an input in its place, read, put the valid file back. Was it read without an error?"""
    name = FILES[data[0] % len(FILES)] if data else FILES[0]
    valid = (root / name).read_bytes()
    try:
        (root / name).write_bytes(data[1:])
        READERS[name](root)
        return True
    except WakeKVError:
        return False
    finally:
        (root / name).write_bytes(valid)


def change(data: bytes, rng: random.Random) -> bytes:
    """Another input: what a file of its kind is made of is changed, or its plain bytes are."""
    name, content = FILES[data[0] % len(FILES)] if data else FILES[0], data[1:]
    kind = STRUCTURED.get(name.rsplit(".", 1)[1])
    for _ in range(rng.randint(1, 3)):
        content = kind(content, rng) if kind and rng.random() < 0.7 else _bytes(content, rng)
    return data[:1] + content


def _bytes(content: bytes, rng: random.Random) -> bytes:
    at, stop = sorted(rng.randint(0, len(content)) for _ in range(2))
    stop = min(stop, at + rng.choice([1, 8, 64, 4096]))
    piece = rng.choice([b"", rng.randbytes(stop - at), content[at:stop] * 2, rng.choice(PIECES)])
    return content[:at] + piece + content[stop:]


def _tree(text: bytes, rng: random.Random, load: Callable, dump: Callable) -> bytes:
    """One value somewhere in a JSON or YAML text is replaced, doubled or taken away."""
    try:
        whole = {"": load(text)}
        holders = [(whole, "")]
        for holder, key in holders:
            value = holder[key]
            if isinstance(value, (dict, list)) and len(holders) < MOST:  # what names itself has no end
                holders += [(value, k) for k in (value if isinstance(value, dict) else range(len(value)))]
        holder, key = rng.choice(holders)
        if rng.random() < 0.2 and holder is not whole:
            del holder[key]
        elif rng.random() < 0.2 and isinstance(holder, list):
            holder.insert(key, holder[key])
        else:
            holder[key] = rng.choice(ODD)
        return dump(whole[""]).encode(errors="surrogatepass")
    except (ValueError, yaml.YAMLError, RecursionError):
        return _bytes(text, rng)


def _json(text: bytes, rng: random.Random) -> bytes:
    return _tree(text, rng, json.loads, lambda value: json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _yaml(text: bytes, rng: random.Random) -> bytes:
    return _tree(text, rng, yaml.safe_load, yaml.safe_dump)


def _zip(content: bytes, rng: random.Random) -> bytes:
    """One member is changed, its checksum with it."""
    made = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as held:
            members = {name: held.read(name) for name in held.namelist()}
        name = rng.choice(sorted(members))
        members[name] = STRUCTURED[name.rsplit(".", 1)[1]](members[name], rng)
        with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as held:
            for name, part in members.items():
                held.writestr(name, part)
    except Exception:  # what is no zip any more, for whichever of many reasons
        return _bytes(content, rng)
    return made.getvalue()


STRUCTURED = {"json": _json, "yaml": _yaml, "npz": _zip, "npy": _bytes}


def blindly(root: Path, n: int, seed: int) -> int:
    """Change valid files, and what came of them, n times: how many could still be read. Raises what should not be."""
    rng, pool, accepted = random.Random(seed), seeds(root), 0
    for _ in range(n):
        pool.append(change(rng.choice(pool), rng))
        accepted += run(root, pool[-1])
    return accepted


def guided(root: Path, seconds: int, seed: int, found: Path) -> None:
    """The same by atheris, which ends the process: with 0, or after the first input that should not be."""
    import atheris

    for name in [name for name in sys.modules if name.startswith("wakekv.") and "kernels" not in name]:
        for value in vars(sys.modules[name]).values():
            if inspect.isfunction(value) and value.__module__ == name:
                atheris.instrument_func(value)
    corpus = root / "corpus"
    corpus.mkdir()
    for i, data in enumerate(seeds(root)):
        (corpus / str(i)).write_bytes(data)
    flags = {"max_total_time": seconds, "timeout": LIMIT_S, "report_slow_units": LIMIT_S, "rss_limit_mb": LIMIT_MB,
             "seed": seed, "max_len": 1 << 16, "print_final_stats": 1, "verbosity": 0,
             "artifact_prefix": f"{found}/"}  # fmt: skip
    atheris.Setup(
        [sys.argv[0], *(f"-{name}={value}" for name, value in flags.items()), str(corpus)],
        lambda data: run(root, data) and None,
        custom_mutator=lambda data, most, seed: change(data, random.Random(seed))[:most],
    )
    atheris.Fuzz()


def campaign(seconds: int, seed: int, found: Path) -> dict:
    """Guided fuzzing in one process after another, until an input is found or the time is over."""
    found.mkdir(parents=True, exist_ok=True)
    begun, executions, before = time.monotonic(), 0, set(found.iterdir())
    while (left := seconds - int(time.monotonic() - begun)) > 0:
        argv = [sys.executable, __file__, "--child", f"--seconds={left}", f"--seed={seed}", f"--found={found}"]
        told = subprocess.run(argv, capture_output=True, text=True, errors="replace")
        stats = re.findall(r"stat::number_of_executed_units: (\d+)", told.stderr)
        if not stats:
            raise SystemExit(f"the fuzzer did not run:\n{told.stderr[-2000:]}")
        executions, seed = executions + int(stats[-1]), seed + 1
        said = told.stdout + "\n".join(told.stderr.splitlines()[-25:])
        print(said if told.returncode else f"{executions:,} executions", flush=True)
    return {
        "seconds_s": round(time.monotonic() - begun),
        "executions": executions,
        "found": len(set(found.iterdir()) - before),
        "files": FILES,
        "limits": {"seconds_s": LIMIT_S, "rss_mb": LIMIT_MB},
        "hardware": hardware(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("again", nargs="*", type=Path, help="inputs to run again")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--found", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.child and not options.again:
        told = campaign(options.seconds, options.seed, options.found)
        print(json.dumps(told, indent=1))
        if options.out:
            write_json(options.out, told)
        return bool(told["found"])
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        build(Path(folder))
        for path in options.again:
            data = path.read_bytes()
            print(f"{path}, as {FILES[data[0] % len(FILES)]}: {'read' if run(Path(folder), data) else 'refused'}")
        if options.child:
            guided(Path(folder), options.seconds, options.seed, options.found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
