"""What each command of `python -m wakekv` does; its docstring is its --help. Heavy packages load where needed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from wakekv.errors import InputError, lookup


def record(options: argparse.Namespace) -> None:
    """Log what every head of a model reads while it writes.

    Builds a prompt of one regime, decodes from it, and logs at every step, layer and query head the largest attention
    weights and where they lie. The log is a new directory. A recording that was stopped goes on with --resume and ends
    in the same bytes. The default model needs no GPU.

    examples:
      python -m wakekv record --regime niah --length 5000 --depth 0.5 --out runs/mine/niah
      python -m wakekv record --model gemma3-270m --regime cot --steps 500 --out runs/mine/cot --resume
      python -m wakekv record --model mistral-7b --text greedy --device cuda --out runs/mine/mistral
    """
    from wakekv.files import writable
    from wakekv.logs.trace import open_trace
    from wakekv.recording import models, prompts
    from wakekv.recording.record import record as record_log
    from wakekv.reproduction.profiles import SAMPLING

    lookup(options.regime, prompts.REGIMES, "regime")
    if (Path(options.out) / "manifest.json").exists() and not options.resume:
        raise InputError(f"{options.out} holds a log already: choose another --out, or remove it")
    if options.k > 1_000_000 or (options.text == "sampled" and options.seed >= 1 << 63):
        raise InputError(f"--k and --seed are at most 1000000 and {(1 << 63) - 1}, not {options.k} and {options.seed}")
    writable(options.out)
    loaded = models.load(options.model, dtype=options.dtype, device=options.device)
    prompt = prompts.build(
        options.regime,
        loaded.tokenizer,
        seed=options.seed,
        length=options.length,
        depth=options.depth,
        scripted=options.text == "scripted",
        filler=options.filler,
        problems=options.problems,
        context=loaded.context,
    )
    sample = {**SAMPLING, "seed": options.seed} if options.text == "sampled" else None
    settings = {"steps": options.steps, "k": options.k, "sample": sample}
    trace = open_trace(record_log(loaded, prompt, options.out, resume=options.resume, **settings))
    said, prefix = trace.manifest["repetition"], f"{options.out}: {trace.n_steps} steps of {trace.n_heads} heads"
    print(f"{prefix} after {trace.n_prompt} prompt tokens, {options.text} text")
    print(f"the model's own choice agrees on {trace.manifest['agreement']:.0%}; repetition {said['rate']:.2f}")
    if said["flagged"]:
        print(f"flagged, and left out of churn and wake-up statistics: {said['rule']}")


def simulate(options: argparse.Namespace) -> None:
    """Replay a policy over a log at any budgets.

    Replays one residency policy over the pages that the heads of a log wanted, and prints its miss rate and memory at
    each budget. With --json, one object: policy, head_unit, budgets, miss_rate, mean_pages, peak_pages (memory summed
    over heads), first_touch, convention. Needs no torch. An unknown policy is answered with the nearest known ones.

    examples:
      python -m wakekv simulate runs/default/traces/smollm2-135m_niah_d50_s0 --policy reactive --budgets 8,16 --json
      python -m wakekv simulate LOG --policy evict --unit kv_head --first-touch warm
      python -m wakekv simulate artifact/logs/smollm2-135m_niah_d25_s0.npz --policy reactive
    """
    from wakekv.logs import blocks
    from wakekv.policies import POLICIES

    policy = lookup(options.policy, POLICIES, "policy")
    rules = {"first_touch": options.first_touch, "convention": options.convention}
    found = blocks.simulate(options.trace, policy, numbers(options.budgets), unit=options.unit, **rules)
    columns = {name: getattr(found, name).tolist() for name in ("budgets", "miss_rate", "mean_pages", "peak_pages")}
    if options.json:
        print(json.dumps({"policy": options.policy, "head_unit": options.unit, **columns, **rules}))
        return
    print(f"{options.policy} in {options.unit}s, {options.first_touch}, {options.convention}, {found.n_wants:,} wants")
    print("".join(f"{name:>12}" for name in columns))
    for budget, miss_rate, mean, peak in zip(*columns.values()):
        print(f"{budget:>12}{miss_rate:>12.4f}{mean:>12.1f}{peak:>12.0f}")


def plan(options: argparse.Namespace) -> None:
    """Choose a budget for a workload, from logs of its own prompts.

    Replays the logs as a real cache would see them (KV heads, the prompt resident after prefill) and prints, for each
    policy and budget, the memory saved, the pages and bytes fetched a token, how long a token waits for them, and how
    much attention weight a policy that destroys pages never reads; with 95 % intervals over prompts where there are
    several. Then the smallest memory that keeps to the limits, and why; it is never less than a head reads in a step.
    Waiting is the link's latency and bandwidth, nothing hidden behind compute. Links: pcie3, pcie4, pcie5, c2c, nvme
    (stated assumptions), or measure.

    examples:
      python -m wakekv plan runs/default/traces/smollm2-135m_niah_* --link pcie4 --step-ms 30 --max-slowdown 0.05
      python -m wakekv plan LOG LOG --link measure --step-ms 12 --dtype bfloat16 --policies reactive,evict --json
    """
    from wakekv.costs import links
    from wakekv.costs import plan as planning
    from wakekv.logs.sound import open_whole

    # 0, less and nan are told by the plan itself
    if not 1e-6 <= options.step_ms <= 1e9 and options.step_ms > 0:
        raise InputError(
            f"--step-ms is a step's time in milliseconds, from 0.000001 to 1000000000: not {options.step_ms:g}"
        )
    if options.batch > 1_000_000:
        raise InputError(f"--batch counts sequences that decode together, 1000000 at most: not {options.batch}")
    traces = [open_whole(path) for path in once(options.trace)]
    made = planning.plan(
        traces,
        links.link(options.link, planning.page_bytes_of(traces[0], options.dtype)),
        options.step_ms / 1e3,
        options.max_slowdown,
        options.max_at_risk,
        names(options.policies),
        options.dtype,
        batch=options.batch,
    )
    print(json.dumps(planning.as_json(made)) if options.json else planning.as_text(made, numbers(options.budgets)))


def quality(options: argparse.Namespace) -> None:
    """Answers through a cache that keeps little, beside the full cache's.

    Without files: numbers hidden in a long article, and how many of the answers hold them. With --longbench: the
    benchmark's own files, prompts and metrics. Each prompt is answered through the full cache, through one whose pages
    come back, and through ones that destroy them, with as many pages and with as many bytes. With --json one object:
    table (a row an arm and budget; with --longbench a task, too) and answers (a row each).

    examples:
      python -m wakekv quality --budgets 16,32 --lengths 1000,2000 --depths 0.25,0.5,0.75 --seeds 2
      python -m wakekv quality --longbench 2wikimqa.jsonl qasper.jsonl --samples 5 --lengths 2000 --json
    """
    from wakekv.costs import longbench
    from wakekv.costs.quality import accuracy, needles
    from wakekv.recording import models

    budgets, lengths = (numbers(getattr(options, name), f"--{name}") for name in ("budgets", "lengths"))
    depths, seeds = numbers(options.depths, "--depths", float), range(options.seeds)
    if not seeds or min(budgets) < 1:
        raise InputError(f"--seeds and --budgets count from 1, not {options.seeds} and {options.budgets}")
    if options.longbench:
        if len(lengths) > 1:
            raise InputError("--longbench truncates prompts to one length: give --lengths one number")
        samples = longbench.read(options.longbench, options.samples)
        loaded = models.load(options.model, dtype=options.dtype, device=options.device)
        rows = longbench.answers(loaded, samples, budgets=budgets, length=lengths[0])
        table = longbench.scores(rows)
    else:
        loaded = models.load(options.model, dtype=options.dtype, device=options.device)
        rows = needles(loaded, budgets=budgets, lengths=lengths, depths=depths, seeds=seeds)
        table = accuracy(rows)
    if options.json:
        found = {"table": table, "answers": rows}
        print(json.dumps({name: json.loads(x.to_json(orient="records")) for name, x in found.items()}))
    else:
        print(table.to_string(index=False, float_format="{:.3f}".format))


def system(options: argparse.Namespace) -> None:
    """Measure throughput, stalls, memory and quality over rerank intervals (the paper's Table 2).

    In the serving engine vLLM (the untouched one, dense; FlexiCache's rule; reactive residency ranking every 1 to 16
    steps; destructive), or with the cache for transformers. Configurations take turns; each has one JSON file in --out,
    and a run that was stopped goes on with what is left. Profiles: smoke (minutes), cpu (this machine), a30 (the
    paper's run exactly; checks the GPU first). Prompts are passages of a bundled article, or a file's. Beside time: how
    far each strays from the untouched engine on the text that follows a prompt, and points for answers to LongBench's
    questions or to needles, beside the untouched engine's own.

    examples:
      python -m wakekv system --profile smoke --out runs/mine/smoke
      python -m wakekv system --only stock,reactive-r1,reactive-r16 --length 1024 --out runs/mine/1k
      python -m wakekv system --engine transformers --length 1024 --n-tokens 16 --out runs/mine/transformers
      python -m wakekv system --profile a30 --prompts leval.jsonl --longbench triviaqa.jsonl ... --out runs/a30
    """
    from wakekv.serving.table2 import asked

    asked(options)


def reproduce(options: argparse.Namespace) -> None:
    """Record what a profile needs, run the notebooks in order, and say where the results are.

    Notebooks run one after another by papermill. One that is up to date is left out; one that runs says why; the first
    that fails ends the run and is named. Profiles: smoke (minutes, tiny), default (the study, on two cores), full (the
    paper's models, on a GPU). Results go to --out: traces, figures, tables, claims, executed notebooks, run.json.

    examples:
      python -m wakekv reproduce --profile smoke
      python -m wakekv reproduce --out runs/mine --only 04
      python -m wakekv reproduce --profile full --out runs/a30
    """
    from wakekv.reproduction.reproduce import reproduce

    only, settings = names(",".join(options.only)), dict(_setting(text) for text in options.parameter)
    reproduce(options.profile, options.out, only=only, force=options.force, settings=settings)


def models(options: argparse.Namespace) -> None:
    """List the models known by name, or fetch some.

    Size, licence, where each comes from, and whether it is here already. Listing asks nothing of the network.

    examples:
      python -m wakekv models
      python -m wakekv models --fetch smollm2-135m gemma3-270m
    """
    from wakekv.recording.models import describe, fetch

    for name in options.fetch:
        print(f"{name}: {fetch(name)}")
    rows = [row for row in describe() if not options.fetch or row["name"] in options.fetch]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        there = "here" if row["cached"] else f"to fetch, {row['size']}"
        print(f"{row['name']:<22} {row['parameters']:>8}  {there:<20} {row['licence']}")
        print(f"{'':<22} {row['source']}" + (f"; {row['note']}" if row["note"] else ""))


def claims(options: argparse.Namespace) -> int:
    """What the paper claims, and what a run found.

    Each claim beside the published value, ours, and a verdict: reproduced, direction holds, not reproduced, or not run
    here and why. Exits with 1 if one is not reproduced that is declared to hold.

    examples:
      python -m wakekv claims
      python -m wakekv claims --out runs/smoke --json
    """
    from wakekv.reproduction.claims import table
    from wakekv.verdicts import VERDICTS, as_text

    if not Path(options.out).is_dir():
        raise InputError(f"{options.out} is no run: python -m wakekv reproduce --out {options.out} makes one")
    rows = table(options.out)
    for row in rows:
        try:
            known = as_text([row]) and row["verdict"] in VERDICTS
        except (TypeError, ValueError):
            known = False
        if not known:
            where = f"{Path(options.out) / 'claims'} says of {row['id']}"
            raise InputError(f"{where} what is no verdict: run notebook {row['notebook']} again")
    print(json.dumps(rows) if options.json else as_text(rows))
    return int(any(row["failed"] for row in rows))


def document(options: argparse.Namespace) -> None:
    """Write down what the reference run took and found: REPRODUCE.md's tables, and the manifest of shipped files.

    Brings the generated parts of REPRODUCE.md up to date with artifact/, and artifact/manifest.json with the files of
    artifact/ and figures/. `make reference` ends with it; so does a change of claims.yaml.

    examples:
      python -m wakekv document
    """
    from wakekv.reproduction import artifact
    from wakekv.reproduction.document import document

    changed = document()
    print(f"REPRODUCE.md: {'brought up to date' if changed else 'up to date'}")
    artifact.write_manifest()
    print(f"{artifact.MANIFEST}: {artifact.check()} files")


def names(text: str) -> list[str]:
    """Of names with commas between."""
    return [name for name in text.split(",") if name]


def once(paths: Sequence[str]) -> list[Path]:
    """The same as paths. InputError for one that is named twice: a log would count as two prompts."""
    named: dict[Path, Path] = {}
    for path in map(Path, paths):
        if named.setdefault(path.resolve(), path) is not path:
            raise InputError(f"{path} is named twice: name each log once")
    return list(named.values())


def numbers(text: str, name: str = "--budgets", kind: type = int) -> list:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        such = "whole numbers with commas between, such as 8,16,32" if kind is int else "numbers, such as 0.25,0.5"
        raise InputError(f"{name} takes {such}, not {text!r}") from None


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InputError(f"-p takes NAME=VALUE, not {text!r}")
    return name, value
