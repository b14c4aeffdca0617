"""Would the tests notice? One operator, number or condition of a module is changed, and its tests are run on that.

    python tests/mutants.py --n 60 --out benchmarks/results/mutants.json

A mutant is killed if a test fails or takes ten times the processor time of all of them on the module as it is. Mutants
are drawn at random, as many of each module, all if there are fewer. Nothing is written to a source file: each mutant
lives in a process of its own, which compiles the changed module in memory. Survivors are listed with their lines: each
is a test to write, or means the same as what it changed, and then EXPLAINED says why. With --only, what --out says of
the other modules stays.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from wakekv.files import ROOT, write_json
from wakekv.reproduction.claims import hardware

# The modules that are changed, and the tests that are to notice.
TESTED = {
    "stats": ("test_stats.py",),
    "simulation/match": ("test_match.py",),
    "simulation/simulate": ("test_simulate.py", "test_blocks.py"),
    "policies/ledger": ("test_golden.py", "test_policies.py"),
    "policies/classic": ("test_golden.py", "test_published_policies.py", "test_blocks.py", "test_policies.py"),
    **{f"policies/{name}": ("test_golden.py", "test_published_policies.py", "test_policies.py")
       for name in ("compress", "offload", "allocate", "hetero", "roles", "order", "spindle")},
    "policies/pooled": ("test_golden.py", "test_beyond.py", "test_policies.py"),
    "policies/experts": ("test_taught.py",),
    "policies/learned": ("test_taught.py",),
    "policies/history": ("test_beyond.py",),
    "policies/policy": ("test_golden.py", "test_policies.py"),
}  # fmt: skip
# Survivors that no test can notice: (module, line as it was, changed) and why.
NEGATIVE = "numpy takes any negative size for the one to be worked out"
UNREAD = "one more bound, row or layer at the end, that nothing reads"
BLOCKS = "a log is read whole or a few heads at a time: the same numbers in more memory or less"
EXPLAINED: dict[tuple[str, str, str], str] = {
    (
        "simulation/match",
        "rising = np.concatenate([np.diff(ours.memory) > 1e-9, [True]])  # of points with one memory, the last",
        "np.diff(ours.memory) >= 1e-09",
    ): "memories are whole pages over a number of steps, so none lie a billionth of a page apart",
    **{
        ("simulation/simulate", was, "groups.max() + 3"): UNREAD
        for was in (
            "member_start = np.searchsorted(groups[members], np.arange(groups.max() + 2))",
            "start = np.searchsorted(groups[head[best]], np.arange(groups.max() + 2))",
        )
    },
    (
        "simulation/simulate",
        "depth, nominal = np.arange(deepest + 1), np.arange(n_pages + 1)",
        "deepest + 2",
    ): UNREAD,
    ("policies/offload", "layers = np.arange(seen.layer.max() + 1)", "seen.layer.max() + 2"): UNREAD,
    (
        "policies/offload",
        "common, mean = np.zeros((1, demand.n_steps - 1), np.int64), np.zeros(demand.n_heads)",
        "(2, demand.n_steps - 1)",
    ): UNREAD,
    **{
        (module, was, "-2"): NEGATIVE
        for module, was in (
            (
                "simulation/simulate",
                "rank, seen.recency.reshape(-1), seen.known.reshape(-1), depth.reshape(-1), heads, group_start,",
            ),
            ("simulation/simulate", "rank = np.ascontiguousarray(ranked(policy, seen), np.float64).reshape(-1)"),
            (
                "policies/roles",
                'return tuple((score if unit == "head" else score.reshape(-1, trace.group).max(1)).tolist())',
            ),
            ("policies/learned", "out[-5] = np.log1p(seen.step - seen.born.reshape(-1)[items])"),
            ("policies/pooled", "out[7], out[8] = before.reshape(-1)[items], near.reshape(-1)[items]"),
            (
                "policies/experts",
                "places = np.stack([_places(order.reshape(1, -1)).reshape(order.shape) for order in orders])",
            ),
        )
    },
    ("policies/classic", "alone = True", "alone = False"): BLOCKS,
    ("policies/policy", "alone: ClassVar[bool] = False", "alone: ClassVar[bool] = True"): BLOCKS,
    (
        "stats",
        "knots = np.union1d(knots[(knots >= lo) & (knots <= hi)], [lo, hi])",
        "knots > lo",
    ): "lo itself is added again",
    ("policies/classic", "every: int = 0", "every: int = 1"): "with room for every page there is nothing to give up",
    ("policies/pooled", "self.last = np.full(shape, -1, np.int32)", "-2"): "asked only whether it is negative",
    (
        "policies/experts",
        "orders = [np.where(seen.known, score, -1) for score in (seen.recency, seen.reads)]",
        "-2",
    ): "below every score either way",
    (
        "policies/experts",
        'weights, places, _ = seen.running("lecar", lambda: self._now(seen, np.full(2, 0.5)), self._learn(seen))',
        "np.full(2, 1.5)",
    ): "only the ratio of the two weights counts",
    (
        "policies/history",
        'weight if self.blend == 1.0 else (1 - self.blend) * seen.decayed("reads", self.keep) + self.blend * weight',
        "self.blend == 2.0",
    ): "the blend of 1 comes to the same, by a longer way",
    **{
        (
            "policies/hetero",
            was,
            changed,
        ): "only the ratio of the needs counts, and where no head is small none is asked"
        for was, changed in (
            (
                "need = 1.0 / np.maximum(np.asarray(self.steady), 0.05)",
                "2.0 / np.maximum(np.asarray(self.steady), 0.05)",
            ),
            (
                "return np.where(small, need / need[small].mean() if small.any() else 1.0, np.inf)",
                "need / need[small].mean() if small.any() else 2.0",
            ),
        )
    },
    (
        "policies/hetero",
        "steady, alike = (np.mean(part, axis=0) for part in zip(*found, strict=True))",
        "strict=False",
    ): "every log gives a pair",
    (
        "policies/roles",
        "return self if self.scores is not None else self.but(scores=far_weight(demands, 4, self.rows))",
        "far_weight(demands, 5, self.rows)",
    ): "four tokens or five, both are the first page",
    (
        "policies/compress",
        "first = np.where(prompt & (np.cumsum(prompt[::-1])[::-1] * seen.page_tokens <= self.rows), np.inf, 0)",
        "np.where(prompt & (np.cumsum(prompt[::-1])[::-1] * seen.page_tokens <= self.rows), np.inf, 1)",
    ): "one more for every page alike",
}
SWAPS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And, ast.LShift: ast.RShift,
}  # fmt: skip
PRELOADED = "numpy scipy.stats statsmodels.stats.multitest pandas yaml hypothesis numba pytest".split()


def changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str, object, object]]:
    """Every (node, field, index, new value): what a mutant of `tree` can be. Annotations and messages stay."""
    waiting = [tree]
    for node in waiting:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(value, ast.JoinedStr):
                continue
            for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(item, ast.AST) and not isinstance(item, ast.Raise):
                    waiting.append(item)
                    yield from ((node, name, index, new) for new in _instead(item))


def _instead(item: ast.AST) -> list[ast.AST]:
    if type(item) in SWAPS:
        return [SWAPS[type(item)]()]
    if isinstance(item, ast.Constant) and type(item.value) in (bool, int, float):
        return [ast.Constant(not item.value if isinstance(item.value, bool) else item.value + 1)]
    if isinstance(item, ast.UnaryOp) and isinstance(item.op, (ast.Not, ast.USub)):
        return [item.operand]
    if isinstance(item, (ast.If, ast.IfExp)):
        negated = ast.UnaryOp(ast.Not(), item.test)
        return [type(item)(**{**dict(ast.iter_fields(item)), "test": negated})]
    return []


def mutant(source: str, number: int) -> tuple[ast.Module, dict]:
    """The module with one change, and where it is: its line, before and after."""
    tree = ast.parse(source)
    node, name, index, new = list(changes(tree))[number]
    here = next(at for at in _lines(tree, node) if at)
    before = source.splitlines()[here - 1].strip()
    if index is None:
        setattr(node, name, new)
    else:
        getattr(node, name)[index] = new
    shown = ast.unparse(node).splitlines()
    return ast.fix_missing_locations(tree), {"line": here, "was": before, "changed": shown[0][:160]}


def _lines(tree: ast.AST, node: ast.AST) -> Iterator[int]:
    """Lines of a node, of what is in it, and of the module."""
    yield from (getattr(part, "lineno", 0) for part in ast.walk(node))
    yield 1


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a syntax tree."""

    def __init__(self, module: str, path: Path, tree: ast.Module):
        self.module, self.path, self.tree = module, path, tree

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.module else None

    def exec_module(self, module):
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)


def tested(module: str, tree: ast.Module, limit_s: float) -> tuple[int, float]:
    """(status of its tests in a process of their own, 0 if all passed; processor seconds)."""
    sys.stdout.flush()
    begun = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 1))
        sys.meta_path.insert(0, Instead(f"wakekv.{module.replace('/', '.')}", ROOT / f"wakekv/{module}.py", tree))
        for name in [name for name in sys.modules if name.split(".")[0] == "wakekv"]:
            del sys.modules[name]
        import pytest

        files = [str(ROOT / "tests" / name) for name in TESTED[module]]
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not model", *files]))
    status, spent = os.waitpid(child, 0)[1], resource.getrusage(resource.RUSAGE_CHILDREN)
    return status, spent.ru_utime + spent.ru_stime - begun.ru_utime - begun.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--n", type=int, default=20, help="mutants of each module (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=TESTED, default=list(TESTED))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("WAKEKV_PAIRS", "200")
    for name in PRELOADED:
        importlib.import_module(name)
    before = json.loads(options.out.read_text(encoding="utf-8")) if options.out and options.out.exists() else {}
    found = {name: told for name, told in before.get("modules", {}).items() if name in TESTED}
    for module in options.only:
        source = (ROOT / "wakekv" / f"{module}.py").read_text(encoding="utf-8")
        status, base_s = tested(module, ast.parse(source), 3600)
        if status:
            raise SystemExit(f"the tests of {module} fail on it as it is: {' '.join(TESTED[module])}")
        n_all = len(list(changes(ast.parse(source))))
        drawn = sorted(random.Random(options.seed).sample(range(n_all), min(options.n, n_all)))
        survivors = []
        for number in drawn:
            tree, what = mutant(source, number)
            if tested(module, tree, 10 * base_s + 5)[0] == 0:
                survivors.append(what)
        found[module] = {"possible": n_all, "tried": len(drawn), "killed": len(drawn) - len(survivors),
                         "tests": TESTED[module], "survivors": survivors}  # fmt: skip
        for name, told in found.items():
            for what in told["survivors"]:
                what["why"] = EXPLAINED.get((name, what["was"], what["changed"]), "")
        print(module, json.dumps(found[module], indent=1), flush=True)
        if options.out:
            told = {name: found[name] for name in TESTED if name in found}
            write_json(options.out, {"seed": options.seed, "hardware": hardware(), "modules": told})


if __name__ == "__main__":
    main()
