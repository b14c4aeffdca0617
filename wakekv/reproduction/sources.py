"""What a result depends on in this package: the files that a piece of code imports, each as a hash of what it does."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

from wakekv.files import ROOT


def files_of(code: ast.Module) -> dict[str, str]:
    """{"wakekv/x.py": sha256} of every file of the package that `code` imports, directly or through another.

    Comments, docstrings and what an error says do not count: they change no result.
    """
    waiting, found = [_file("wakekv"), *_imported(code, "")], {}
    while waiting:
        path = waiting.pop()
        name = path.relative_to(ROOT).as_posix()
        if name not in found:
            waiting += imported_by(path)
            found[name] = code_sha256(ast.parse(path.read_text(encoding="utf-8")))
    return dict(sorted(found.items()))


def imported_by(path: Path) -> list[Path]:
    """The package's files that one of them imports, wherever in it."""
    inside = path.parent.relative_to(ROOT).as_posix().replace("/", ".")
    return _imported(ast.parse(path.read_text(encoding="utf-8")), inside)


def code_sha256(tree: ast.Module) -> str:
    """Hash of what the code does: its syntax tree without comments, docstrings and what an error says, of which `tree`
    is stripped."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            del body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _imported(tree: ast.Module, inside: str) -> list[Path]:
    """The package's files that a module imports; `inside` is the package it lies in, for relative imports."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = inside.split(".")[: len(inside.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return [path for name in names if name.split(".")[0] == "wakekv" and (path := _file(name))]


def _file(module: str) -> Path | None:
    """The file of a module or package of ours; None for a name inside one."""
    stem = ROOT.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)
