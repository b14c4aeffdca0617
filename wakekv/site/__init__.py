"""The site: executed notebooks as pages, an index that reads like a paper, and the explorer. Opens from a folder.

No request leaves a page: pictures, styles and scripts lie beside it, logs are scripts, and nothing is fetched. Equal
runs give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from wakekv.errors import InputError
from wakekv.files import writable
from wakekv.logs.shipped import open_shipped
from wakekv.reproduction.claims import table
from wakekv.site import explorer
from wakekv.site.page import Page, read
from wakekv.verdicts import VERDICTS

HERE = Path(__file__).parent
VENDORED = ("uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE")
STATIC = ("style.css", "replay.js", "explorer.js")
LABELS = {"niah": "needles in a long text", "cot": "problems worked out", "multiturn": "a long conversation"}


def build(run: Path | str, logs: Sequence[Path | str], out: Path | str) -> Path:
    """Write the site of `run` (a run's folder, or artifact/) with the explorer over shipped `logs` to the folder `out`.

    What was at `out` is replaced, all or nothing. Raises InputError where there are no executed notebooks or logs, or
    two logs of one name, and where `out` holds something that is no part of a site.
    """
    run, asked, out = Path(run), Path(out), Path(out).resolve()  # of a link, what it leads to
    if out.exists() and not (out / "explorer.html").exists():
        raise InputError(f"{asked} exists and is no site: give another --out")
    if found := next(_foreign(out), None):
        raise InputError(f"{asked} holds {found}, which is no part of a site: move it, or give another --out")
    writable(out)
    shown = {Path(path).stem: open_shipped(path) for path in logs}
    if len(shown) < len(logs):
        raise InputError(f"two of the {len(logs)} logs have one name, and would be one page: rename one")
    pages = [read(path) for path in sorted((run / "notebooks").glob("[0-9][0-9]_*.ipynb"))]
    pages = [page for page in pages if not page.name.endswith(".failed")]
    if not pages or not logs:
        raise InputError(f"{run} holds no executed notebooks, or no logs were given: make reproduce leaves them")
    part, before = (out.with_name(f".{out.name}.{os.getpid()}.{end}") for end in ("part", "before"))
    try:
        (part / "logs").mkdir(parents=True)
        (part / "img").mkdir()
        first = next(iter(shown))
        heads = {page.name: page.heads for page in pages}
        for name, log in shown.items():
            also = {h for of in heads.values() for h in of} if name == first else ()
            (part / "logs" / f"{name}.js").write_text(explorer.script(name, log, also), encoding="utf-8")
        for page in pages:
            for name, content in page.images.items():
                (part / "img" / name).write_bytes(content)
            _write(part, page.name, page.title, page.body(first), [p.name for p in pages])
        _write(part, "index", "WakeKV, repeated", _index(pages, run, first), [page.name for page in pages])
        _write(part, "explorer", "Explorer", _explorer(shown), [page.name for page in pages])
        for name in VENDORED:
            shutil.copyfile(HERE / "vendor" / name, part / name)
        for name in STATIC:
            shutil.copyfile(HERE / "static" / name, part / name)
        if out.exists():
            out.rename(before)
        part.rename(out)
        return asked
    finally:
        if before.exists() and not out.exists():  # stopped between the two
            before.rename(out)
        for left in part, before:
            shutil.rmtree(left, ignore_errors=True)


def _foreign(out: Path) -> Iterator[str]:
    """What lies in a site's folder and is no part of one, however old."""
    own = {*VENDORED, *STATIC}
    kinds = {"": ".html", "img": ".png", "logs": ".js"}
    for path in sorted(out.rglob("*")) if out.is_dir() else ():
        name = path.relative_to(out).as_posix()
        known = path.suffix == kinds.get(name.rpartition("/")[0]) or name in own
        if not (known if path.is_file() else name in kinds):
            yield name


def vendored() -> Mapping[str, str]:
    """sha256 of each vendored file, as it is: a test compares it with vendor/manifest.json."""
    return {name: hashlib.sha256((HERE / "vendor" / name).read_bytes()).hexdigest() for name in VENDORED}


def _index(pages: Sequence[Page], run: Path, log: str) -> str:
    """Question, answer, figure, of each notebook; what came out in all."""
    rows = table(run)
    counts = ", ".join(f"{n} {verdict}" for verdict in VERDICTS if (n := sum(r["verdict"] == verdict for r in rows)))
    models = ", ".join(dict.fromkeys(part for r in rows if r["model"] for part in str(r["model"]).split(", ")))
    parts = [
        "<h1>WakeKV, repeated</h1>",
        "<p>Which pages of the KV cache the heads of a language model read while it writes, what a residency policy "
        "keeps for them, and what it costs when a head changes its mind: the measurements of the paper <em>WakeKV</em> "
        "(arXiv 2610.02713), repeated on two cores without a GPU.</p>",
        f"<p>Of {len(rows)} claims of the paper: {escape(counts)}. Models: {escape(models or 'none yet')}; directions "
        "can be compared with the paper's, numbers cannot. Each question below has a page: every step, figure and "
        f'number. <a href="{explorer_link(log)}">The explorer</a> replays any policy on one head at a time.</p>',
    ]
    for page in pages:
        parts.append(f'<article class="question"><h2><a href="{page.name}.html">{escape(page.title)}</a></h2>')
        parts.append(f'<div class="answer">{page.answer}</div>' if page.answer else f"<p>{page.about}</p>")
        figure = page.key_figure()
        if figure:
            parts.append(page.figure(figure, log))
        parts.append(f'<p><a href="{page.name}.html">How this was found: {escape(page.name)}</a></p></article>')
    return "\n".join(parts)


def explorer_link(log: str, head: int | None = None, budget: int | None = None, policy: str = "") -> str:
    """Where the explorer shows this."""
    chosen = {"log": log, "head": head, "policy": policy, "budget": budget}
    return "explorer.html#" + "&amp;".join(f"{name}={value}" for name, value in chosen.items() if value)


def _explorer(logs: Mapping) -> str:
    from wakekv.drawing.picture import policy_style

    dashes = {"-": [], "--": [8, 5], ":": [2, 4]}
    styles = {name: policy_style(name) for name in explorer.NAMES}
    # two without a style of their own would look alike
    styles |= {"lfu": {"color": "#CC79A7", "linestyle": "--"}, "fifo": {"color": "#56B4E9", "linestyle": "--"}}
    config = {
        "logs": [{"name": name, "label": _label(log)} for name, log in logs.items()],
        "styles": {n: {"color": s["color"], "dash": dashes[s["linestyle"]]} for n, s in styles.items()},
    }
    scripts = "".join(f'<script src="{name}"></script>\n' for name in ("uPlot.iife.min.js", "replay.js", "explorer.js"))
    body = (HERE / "static" / "explorer.html").read_text(encoding="utf-8")
    told = json.dumps(config).replace("<", "\\u003c")  # a log's name ends no script
    return f'{body}<script type="application/json" id="config">{told}</script>\n{scripts}'


def _label(log) -> str:
    regime = log.manifest["prompt"]["regime"]
    return f"{log.manifest['model']['name']}, {LABELS.get(regime, regime)} ({regime})"


def _write(folder: Path, name: str, title: str, body: str, notebooks: Sequence[str]) -> None:
    places = {"index": "Overview", "explorer": "Explorer"} | {book: book.replace("_", " ") for book in notebooks}
    here = ' aria-current="page"'
    links = "\n".join(
        f'<a href="{place}.html"{here if place == name else ""}>{text}</a>' for place, text in places.items()
    )
    wide = ' class="wide"' if name == "explorer" else ""
    sheet = '<link rel="stylesheet" href="uPlot.min.css">\n' if name == "explorer" else ""
    (folder / f"{name}.html").write_text(
        f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
{sheet}<link rel="stylesheet" href="style.css">
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<nav aria-label="pages">
{links}
</nav>
<main id="main"{wide}>
{body}
</main>
</body>
</html>
""",
        encoding="utf-8",
    )
