"""Commands for whoever checks the work or widens it: tables from shipped logs, studies, comparing runs, spot checks,
the pages to read."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path

from wakekv.commands import names, numbers, once
from wakekv.errors import InputError
from wakekv.files import ROOT, writable
from wakekv.reproduction.claims import published

SHIPPED = ROOT / "artifact" / "logs"


def verify(options: argparse.Namespace) -> None:
    """Check that logs, and what the repository shows, are whole.

    Compares every file of a log with its manifest, names the first that is missing, cut short, changed or foreign, and
    the first number that attention cannot give. A shipped log, or a folder of them, is compared with the manifest that
    lies beside it. Without a log: every file of artifact/ and figures/ with artifact/manifest.json.

    examples:
      python -m wakekv verify runs/default/traces/smollm2-135m_niah_d50_s0
      python -m wakekv verify
      python -m wakekv verify runs/default/traces/*/ artifact/logs
    """
    from wakekv.logs import sound
    from wakekv.logs.shipped import is_shipped, verify_shipped
    from wakekv.logs.trace import open_trace, read_manifest, verify
    from wakekv.reproduction import artifact

    for path in options.trace or [ROOT / "artifact"]:
        if Path(path).resolve() == (ROOT / "artifact").resolve():
            print(f"what the repository shows: whole, {artifact.check()} files as {artifact.MANIFEST} says")
        elif is_shipped(path):
            names = verify_shipped(path)
            print(f"{path}: whole, {len(names)} shipped log{'s' * (len(names) > 1)} as the manifest says")
        else:
            verify(path)
            sound.check(open_trace(path), path)
            print(f"{path}: whole, {len(read_manifest(path)['files'])} files as its manifest says")


def tables(options: argparse.Namespace) -> None:
    """Tables of the policy notebooks from shipped logs, without torch or a model.

    Replays the policies over page-level logs (by default every one in artifact/logs) and writes, as CSV and Markdown,
    04_sweep, 04_sweep_kv_heads, 05_table3 and 05_systems. Reactive, evict, frozen and the optimum cost in query heads
    what they cost on the whole logs, to the last miss. Not from these logs: R-KV and ReasonAlloc, which compare keys;
    sections 2.1 and 2.2, which need positions; other page sizes. One prompt of each regime: no intervals. Half a minute
    of computing with numba (pip install '.[fast]'); without it minutes, and the first two tables only.

    examples:
      python -m wakekv tables --out runs/shipped
      python -m wakekv tables artifact/logs/gemma3-270m_cot_s0.npz --out runs/one
    """
    from wakekv import kernels
    from wakekv import tables as written
    from wakekv.logs.shipped import open_log
    from wakekv.policies import POLICIES
    from wakekv.reproduction.profiles import PROFILES
    from wakekv.simulation.study import PAPER, pages, studies
    from wakekv.tables import matched
    from wakekv.tables.contests import SEVEN, SURVEY

    folder, paths = writable(_outside(options.out) / "tables"), once(options.log) or _shipped()
    logs, budgets, paper = [open_log(path) for path in paths], PROFILES["default"].budgets, published()
    for path, log in zip(paths, logs):
        if pages(log) < min(budgets):
            raise InputError(
                f"{path} has {pages(log)} pages, and the tables begin at {min(budgets)}: take a longer log"
            )
    names = list(dict.fromkeys([*PAPER, *SEVEN, *SURVEY]))
    needs_keys = [] if all(path.is_dir() for path in paths) else ["rkv", "reasonalloc"]
    rules = {name: POLICIES[name] for name in names if name not in needs_keys}
    quoted = studies(logs, PAPER, budgets)
    made = {
        "04_sweep": written.sweep(quoted, budgets, paper),
        "04_sweep_kv_heads": written.sweep(studies(logs, PAPER, budgets, unit="kv_head"), budgets),
    }
    if kernels.AVAILABLE:  # equal memory wants every budget, which takes numba's one pass
        chosen = studies(logs, rules, slow_budgets=budgets)
        made |= {"05_table3": matched.seven(chosen, budgets, paper), "05_systems": matched.systems(chosen, budgets)}
    for name, table in made.items():
        table.save(folder, name)
    print(made["04_sweep"].markdown(), end="")
    left_out = "" if kernels.AVAILABLE else "; 05_table3 and 05_systems take numba: pip install 'wakekv[fast]'"
    print(f"{len(logs)} logs; {', '.join(made)} in {folder}{left_out}")


def study(options: argparse.Namespace) -> int:
    """Policies over many logs, in several processes or on a cluster.

    Models x regimes x prompts x policies x budgets as tasks that know nothing of each other: a log under a policy, at
    all budgets where one pass gives them. Each result is kept in OUT/tasks under a hash of the log, the policy, the
    rules and the code: a study that was stopped goes on, a second run does nothing, and what comes out does not depend
    on how many workers there were. What fails is told in a line each, the rest is kept, and the exit status is 1.
    OUT/study.csv: miss rates of all prompts of a model and regime together, with 95 % intervals over prompts;
    OUT/prompts.csv: every log on its own. LOG: a log, a shipped one, a folder of them, or such a place in a store that
    fsspec knows (s3://bucket/logs takes pip install s3fs). Workers of a cluster need the same wakekv, and read the logs
    themselves: give URLs that they reach. A worker that dies loses no task.

    examples:
      python -m wakekv study artifact/logs/smollm2-* --policies reactive,evict,optimum --jobs 2 --out runs/study
      python -m wakekv study runs/default/traces --models gemma3-270m --regimes niah,cot --jobs 4 --out runs/study
      python -m wakekv study s3://bucket/logs --dask tcp://scheduler:8786 --out runs/study
    """
    from wakekv.reproduction import tasks
    from wakekv.simulation.study import PAPER

    if options.jobs < 1:
        raise InputError(f"--jobs counts processes from 1, not {options.jobs}")
    if options.dask and not re.fullmatch(r"(tcp|tls|wss?|ucx)://\S+:\d+", options.dask):
        raise InputError(f"--dask takes a scheduler's address, tcp://host:8786, not {options.dask!r}")
    if options.dask:
        from distributed import Client

    with Client(options.dask) if options.dask else nullcontext() as client:
        failed = tasks.study(
            options.log,
            _outside(options.out),
            policies=names(options.policies) or PAPER,
            budgets=numbers(options.budgets),
            models=names(options.models),
            regimes=names(options.regimes),
            unit=options.unit,
            first_touch=options.first_touch,
            jobs=options.jobs,
            client=client,
        )
    for task, why in failed.items():
        print(f"wakekv: failed: {task}: {why}", file=sys.stderr)
    return int(bool(failed))


def pack(options: argparse.Namespace) -> None:
    """Make page-level logs small enough to ship, out of whole ones.

    Writes one .npz a log, with the text of its tokens, and manifest.json with sizes, sha256, licence and the command
    that records each anew. Needs the tokenizer of the model that was recorded.

    examples:
      python -m wakekv pack runs/default/traces/smollm2-135m_niah_d25_s0 --out artifact/logs
    """
    from wakekv.logs import shipped
    from wakekv.logs.sound import open_whole
    from wakekv.recording import spotcheck

    if Path(options.prefix).name != options.prefix:
        raise InputError(f"--prefix {options.prefix!r} is put before a file's name: leave slashes out")
    folder, logs, pieces, about = writable(options.out), {}, {}, {}
    shipped.listed(folder)  # what is packed and what lies there are looked at before anything is written
    for path in once(options.log):
        name = options.prefix + Path(os.path.abspath(path)).name + shipped.SUFFIX
        if name in logs:
            raise InputError(f"{path} and another of these would both be {name}: pack them apart, with a --prefix each")
        logs[name] = open_whole(path)
    for name, log in logs.items():
        pieces[name] = spotcheck.pieces(log)
        try:
            about[name] = spotcheck.about(log.manifest)
        except KeyError as error:
            raise InputError(
                f"{name}: its log's manifest lacks {error}, so none could make it again: record it anew"
            ) from None
    for other in set(folder.glob(f"*{shipped.SUFFIX}")) - {folder / name for name in logs}:
        shipped.open_shipped(other)
    for name, log in logs.items():
        shipped.pack(log, pieces[name], folder / name)
    listed = json.loads(shipped.describe(options.out, about).read_text(encoding="utf-8"))["files"]
    for name, entry in listed.items():
        print(f"{name}: {entry['bytes']:,} bytes, {entry['sizes']['wants']:,} wants")
    print(f"{sum(entry['bytes'] for entry in listed.values()):,} bytes in {options.out}")


def compare(options: argparse.Namespace) -> int:
    """What differs between two runs, or a run and the reference, in numbers.

    Tables and the numbers behind figures cell by cell, verdicts of claims, and what the runs depended on. Exits with 1
    where a cell, row, file or verdict differs beyond the tolerances of artifact/tolerances.yaml, which says why each is
    what it is; what a clock measured is shown and not judged. `reference` is what the repository shows.

    examples:
      python -m wakekv compare reference runs/default
      python -m wakekv compare runs/smoke runs/again --exact
      python -m wakekv compare reference runs/mine --both --only tables --json
    """
    from wakekv.reproduction import compare as comparing

    rules = comparing.load_rules(options.tolerances or comparing.TOLERANCES)
    rules = comparing.exact(rules) if options.exact else rules
    sides = comparing.open_run(options.a), comparing.open_run(options.b)
    found = comparing.compare(*sides, rules, options.only or comparing.PARTS, options.both)
    print(json.dumps(found) if options.json else comparing.as_text(found))
    return int(found["beyond"] > 0)


def spotcheck(options: argparse.Namespace) -> int:
    """Record a shipped log again from its model, and compare the two in numbers.

    By default the smoke-size one, in a minute. Prints the share of equal tokens and wants, of heads' steps with the
    same pages in the same order, and the weights' largest difference; exits with 1 if less than --share of the wants
    are equal. On the machine that made the log everything is equal; elsewhere the last bits of a sum can differ. With
    --engine vllm the serving engine logs it, with kernels of its own.

    examples:
      python -m wakekv spotcheck
      python -m wakekv spotcheck artifact/logs/gemma3-270m_niah_d25_s0.npz --steps 50
      python -m wakekv spotcheck artifact/logs/*.npz --json
      python -m wakekv spotcheck --engine vllm --steps 20 --share 0.99
    """
    from wakekv.logs.shipped import verify_shipped
    from wakekv.recording import record
    from wakekv.recording.spotcheck import spotcheck as again
    from wakekv.serving import logged

    by = {"transformers": record.record, "vllm": logged.record}[options.engine]
    if not 0 <= options.share <= 1:
        raise InputError(f"--share is a share between 0 and 1, not {options.share}")
    rows = []
    for path in options.log or sorted(SHIPPED.glob("smoke_*.npz")):
        verify_shipped(path)
        rows.append(again(path, options.steps, (lambda text: None) if options.json else print, by))
        if not options.json:
            print("; ".join(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
                            for name, value in rows[-1].items()))  # fmt: skip
    if not rows:
        raise InputError(f"no shipped logs in {SHIPPED}: they lie in a checkout of the repository; or name a log")
    if options.json:
        print(json.dumps(rows))
    return int(any(row["equal"] < options.share or row["tokens_equal"] < 1 for row in rows))


def site(options: argparse.Namespace) -> None:
    """Pages to read a run in, offline: every notebook as it ran, an overview, and the explorer.

    Open index.html in any browser: nothing is asked of the network. The explorer replays policies on heads of shipped
    logs (by default those in artifact/logs), step by step. Without --run: what the repository shows.

    examples:
      python -m wakekv site --run runs/default --out runs/default/site
      python -m wakekv site --out runs/site
    """
    from wakekv.site import build

    logs = [Path(log) for log in options.log] or _shipped()
    out = build(options.results or ROOT / "artifact", logs, options.out)
    files = [path for path in out.rglob("*") if path.is_file()]
    print(f"{out / 'index.html'}: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")


def _outside(out: str) -> Path:
    """`out` as a folder of results. InputError where they would take the place of what the repository shows."""
    if any(Path(out).resolve().is_relative_to(ROOT / name) for name in ("artifact", "figures")):
        raise InputError(f"{out} belongs to the repository: give another --out, such as runs/mine")
    return Path(out)


def _regime_first(path: Path) -> tuple:
    """The order in which the explorer offers logs: the default model first, and of each the needles first."""
    return "smollm2" not in path.name, "niah" not in path.name, path.name


def _shipped() -> list[Path]:
    found = sorted((p for p in SHIPPED.glob("*.npz") if not p.name.startswith("smoke_")), key=_regime_first)
    if not found:
        raise InputError(f"no shipped logs in {SHIPPED}: they lie in a checkout of the repository; or name a log")
    return found
