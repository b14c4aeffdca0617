"""One executed notebook as a page: text as it is, code folded away, pictures with what they say, tables that scroll."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from wakekv.errors import InputError

KEY = {  # the figure that the index shows of a notebook; of others the first
    "01_record": "01_needle_scores", "02_churn": "02_table4", "03_wakeups": "03_signals", "04_policies": "04_figure2",
    "05_matched": "05_margins", "11_scheduling": "11_load",
}  # fmt: skip
SAYS = re.compile(r"says=(['\"])(.*?)(?<!\\)\1[,)]", re.DOTALL)  # what a Picture says of itself, in its repr
SAVED = re.compile(r"""\.save\([^)]*?figures["'],\s*["'](\w+)["']\)""")


@dataclass(frozen=True)
class Image:
    """A picture on a page: its file, what it says, and the figure that it is ("" if it is none of the figures); how
    wide and high it is drawn, in pixels of a page (0 where the notebook does not say)."""

    file: str
    says: str
    name: str
    width: int = 0
    height: int = 0


@dataclass
class Page:
    """name: the notebook's; title, about (the first paragraph) and answer as HTML; images: file name -> bytes."""

    name: str
    title: str
    about: str
    answer: str
    images: dict[str, bytes] = field(default_factory=dict)
    shown: list[Image] = field(default_factory=list)
    parts: list[str | Image] = field(default_factory=list)

    @property
    def heads(self) -> list[int]:
        """Query heads that its pictures of one head show."""
        return [head for image in self.shown if (head := _number("head", image.says)) is not None]

    def key_figure(self) -> Image | None:
        named = [image for image in self.shown if image.name == KEY.get(self.name)]
        return next(iter([*named, *self.shown]), None)

    def body(self, log: str) -> str:
        return "\n".join(part if isinstance(part, str) else self.figure(part, log) for part in self.parts)

    def figure(self, image: Image, log: str) -> str:
        """The picture with its caption, a link to it at full size, and a way into the explorer where it is about heads
        or policies. On a narrow window it keeps a width at which it can be read, and scrolls sideways."""
        from wakekv.site import explorer_link

        says, head = html.escape(image.says), _number("head", image.says)
        link = ""
        if head is not None or self.name[:2] in ("04", "05"):
            to = explorer_link(log, head, _number("B =", image.says), "reactive")
            link = f' <a href="{to}">{"This head" if head is not None else "Heads one by one"} in the explorer</a>'
        size = f' width="{image.width}" height="{image.height}"' if image.width else ""
        shown = f'<img src="img/{image.file}" alt="{says}"{size} loading="lazy">'
        return (
            f'<figure><div class="scroll"><a href="img/{image.file}">{shown}</a></div>'
            f"<figcaption>{says}{'.' if says else ''} "
            f'<a href="img/{image.file}">Full size</a>.{link}</figcaption></figure>'
        )


def read(path: Path | str) -> Page:
    """The page of an executed notebook. InputError if it is none, or was not executed."""
    path = Path(path)
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        page = Page(path.stem, *_head(cells, path))
        for cell in cells:
            page.parts += _cell(cell, page)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is no executed notebook: {error!r}") from None
    return page


def _head(cells: list[dict], path: Path) -> tuple[str, str, str]:
    text = _text(cells[0]["source"])
    title = re.match(r"# (.+)", text)
    if not title or not any(cell.get("execution_count") for cell in cells if cell["cell_type"] == "code"):
        raise InputError(f"{path} was not executed, or its first cell is not its title")
    paragraphs = [p for p in text[title.end() :].split("\n\n") if p.strip()]
    answers = [
        _text(output["data"]["text/markdown"])
        for cell in cells
        for output in cell.get("outputs", [])
        if "text/markdown" in output.get("data", {}) and "**Answer" in _text(output["data"]["text/markdown"])
    ]
    return title[1], markdown(paragraphs[-1]) if paragraphs else "", markdown(answers[-1]) if answers else ""


def _cell(cell: dict, page: Page) -> Iterator[str | Image]:
    source = _text(cell["source"])
    if cell["cell_type"] == "markdown":
        yield markdown(source)
    elif cell["cell_type"] == "code" and source.strip():
        yield f"<details><summary>code</summary>{_highlighted(source)}</details>"
        names = SAVED.findall(source)
        for output in cell.get("outputs", []):
            yield from _output(output, names, page)


def _output(output: dict, names: list[str], page: Page) -> Iterator[str | Image]:
    data = output.get("data", {})
    if output["output_type"] == "stream":
        yield f"<pre>{html.escape(_text(output['text']))}</pre>"
    elif "image/png" in data:
        content = base64.b64decode(_text(data["image/png"]))
        said = SAYS.search(_text(data.get("text/plain", "")))
        name = names.pop(0) if names else ""
        file = f"{name or page.name}-{hashlib.sha256(content).hexdigest()[:12]}.png"
        page.images[file] = content
        size = output.get("metadata", {}).get("image/png", {})
        says = said[2].replace("\\'", "'") if said else ""
        page.shown.append(Image(file, says, name, int(size.get("width", 0)), int(size.get("height", 0))))
        yield page.shown[-1]
    elif "text/html" in data:
        table = re.sub(r"<style.*?</style>", "", _text(data["text/html"]), flags=re.DOTALL)
        table = re.sub(r' (?:border|style|class)="[^"]*"', "", table)
        yield f'<div class="scroll" tabindex="0">{table}</div>'
    elif "text/markdown" in data:
        text = _text(data["text/markdown"])
        yield f'<div class="answer">{markdown(text)}</div>' if "**Answer" in text else markdown(text)
    elif "text/plain" in data:
        yield f"<pre>{html.escape(_text(data['text/plain']))}</pre>"


def markdown(text: str) -> str:
    """HTML of a notebook's Markdown, without links of its own to headings; tables scroll in a box."""
    from nbconvert.filters.markdown_mistune import markdown2html_mistune

    made = re.sub(r'<a class="anchor-link".*?</a>', "", markdown2html_mistune(text).strip())
    return re.sub(r"<table>.*?</table>", lambda found: f'<div class="scroll" tabindex="0">{found[0]}</div>', made,
                  flags=re.DOTALL)  # fmt: skip


def _highlighted(source: str) -> str:
    from nbconvert.filters.highlight import Highlight2HTML

    return Highlight2HTML(pygments_lexer="python3")(source)


def _number(what: str, text: str) -> int | None:
    found = re.search(rf"\b{what} (\d+)", text)
    return int(found[1]) if found else None


def _text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
