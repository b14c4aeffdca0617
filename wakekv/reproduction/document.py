"""The parts of REPRODUCE.md that are measured: written from the reference run's records, never typed.

Between `<!-- begin NAME -->` and `<!-- end -->` stands what the function of that name in PARTS makes of artifact/. To
add an item of the paper: a line in ITEMS; a part: a function and a line in PARTS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wakekv.errors import InputError
from wakekv.files import ROOT, write
from wakekv.reproduction.claims import table
from wakekv.verdicts import VERDICTS, on_what, our_value, printed

PART = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = 200  # a minute, read with some care
NOTEBOOKS = ROOT / "notebooks"


@dataclass(frozen=True)
class Item:
    """A table, figure or section of the paper, and what of the reference run answers it.

    names: as claims.yaml says where a claim stands. leaves: the files to look at first, as a run names them.
    """

    names: tuple[str, ...]
    about: str
    notebook: str
    leaves: tuple[str, ...]


ITEMS = (
    Item(("§4",), "the log", "01_record", ("figures/01_one_head.png", "tables/01_logs.csv")),
    Item(("Figure 1a",), "who is dynamic, who is reversible", "05_matched",
         ("figures/05_figure1a.png", "tables/05_systems.csv")),
    Item(("Figure 1b", "§3"), "the rule", "04_policies", ("figures/04_mechanism.png",)),
    Item(("Table 4", "§2.1"), "do heads change", "02_churn", ("figures/02_table4.png", "tables/churn.csv")),
    Item(("§2.2",), "could one tell beforehand", "03_wakeups",
         ("figures/03_signals.png", "figures/03_bursts.png", "tables/wakeups.csv", "tables/markers.csv")),
    Item(("Figure 2",), "miss rate against memory", "04_policies", ("figures/04_figure2.png",)),
    Item(("Table 1", "§5"), "how often reactive misses no more", "05_matched",
         ("tables/05_table1.csv", "figures/05_margins.png")),
    Item(("§5.2, its open end",), "reversible against destructive by stall time", "06_reversible_cache",
         ("figures/06_equal_memory.png", "figures/06_stall_price_timed.png", "tables/06_equal_memory.csv")),
    Item(("Table 2", "§5.2"), "throughput and quality", "07_real_system", ()),
    Item(("Table 3",), "the sweep", "05_matched", ("tables/05_table3.csv", "tables/04_sweep.csv")),
    Item(("beyond the paper",), "one budget for all heads, a rule of ours", "09_beyond",
         ("figures/09_gap_closed.png", "tables/beyond.csv")),
    Item(("beyond the paper",), "several requests on one server, and eviction by reward", "11_scheduling",
         ("figures/11_load.png", "figures/11_eviction.png", "tables/11_scheduled.csv")),
    Item(("all",), "every claim", "10_claims", ("figures/10_claims.png", "tables/10_claims.csv")),
)  # fmt: skip


def document(path: Path | str = ROOT / "REPRODUCE.md", shown: Path | str = ROOT / "artifact") -> bool:
    """Bring the generated parts of `path` up to date with the reference results in `shown`. Was anything changed?"""
    path = Path(path)
    was = path.read_text(encoding="utf-8")
    now = render(was, Path(shown))
    if now != was:
        write(path, now)
    return now != was


def render(text: str, shown: Path) -> str:
    """`text` with every generated part as the results in `shown` have it. InputError on a part that nobody makes."""
    for _, name, _ in PART.findall(text):
        if name not in PARTS:
            raise InputError(f"REPRODUCE.md has a part {name!r}, and there is: {', '.join(PARTS)}")
    return PART.sub(lambda found: f"{found[1]}{PARTS[found[2]](shown)}{found[3]}", text)


def reference(shown: Path) -> dict:
    """The reference run's record, artifact/run.json; empty if none was kept."""
    path = shown / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"stages": {}, "volatile": {}}
        record["stages"].keys(), record["volatile"].keys()
        return record
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}): take it from the repository again") from None


def run_at_a_glance(shown: Path) -> str:
    """Which machine the reference run was made on, how long it took, and how much memory."""
    record = reference(shown)
    costs = {
        name: cost for name, cost in record["volatile"].items() if "peak_bytes" in cost and name in record["stages"]
    }
    if not costs:
        return "There is no record of a reference run yet.\n"
    recorded = record["volatile"].get("recordings")
    logs = f"its {recorded['logs']} recordings took {_minutes(recorded['seconds_s'])} minutes, and " if recorded else ""
    took, most = sum(map(_seconds, costs.values())), max(cost["peak_bytes"] for cost in costs.values())
    absent = sorted(path.stem[:2] for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb") if path.stem not in record["stages"])
    without = f" Not part of it, and so without numbers here: {', '.join(absent)}." if absent else ""
    return (
        f"The reference run (profile {record['profile']}) was made on {_machine(record, shown)}: {logs}"
        f"its {len(costs)} notebooks took {_minutes(took)} minutes, one after another, with at most "
        f"{most / 1e9:.1f} GB of memory.{without}\n"
    )


def items(shown: Path) -> str:
    """A row an item of the paper, then one for each notebook that goes beyond it."""
    record, rows = reference(shown), table(shown)
    books = {path.stem: path for path in sorted((shown / "notebooks").glob("*.ipynb"))}
    known = [*ITEMS, *(Item((), _title(path), name, ()) for name, path in books.items() if name not in _BOOKS)]
    lines = []
    for item in known:
        cost = record["volatile"].get(item.notebook, {})
        own = [row for row in rows if _belongs(row, item)]
        counts = [f"{sum(row['verdict'] == v for row in own)} {v}" for v in VERDICTS]
        lines.append([
            f"{', '.join(item.names)}: {item.about}" if item.names else item.about,
            f"`make reproduce ONLY={item.notebook[:2]}`",
            f"[{item.notebook[:2]}](artifact/notebooks/{item.notebook}.ipynb)" if item.notebook in books else "–",
            cost.get("hardware", _machine(record, shown)) if cost else "–",
            f"1, and {_reading(books[item.notebook])} to read" if item.notebook in books else "–",
            _took(cost) if "seconds_s" in cost else "–",
            f"{cost['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in cost else "–",
            ", ".join(_link(name, shown) for name in item.leaves or _leaves(record, item.notebook)) or "–",
            ", ".join(part for part in counts if not part.startswith("0 ")) or "–",
        ])  # fmt: skip
    head = ["paper", "command", "notebook", "hardware", "human min", "machine min", "memory", "leaves", "claims"]
    return _markdown(head, lines)


def claims(shown: Path) -> str:
    """A row a claim: where, what, published, ours, verdict, on what."""
    lines = [
        [row["place"], row["sentence"], printed(row), our_value(row), row["verdict"], row["kind"], on_what(row)]
        for row in table(shown)
    ]
    return _markdown(["where", "claim", "published", "ours", "verdict", "kind", "ours is of"], lines)


PARTS: dict[str, Callable[[Path], str]] = {"run": run_at_a_glance, "items": items, "claims": claims}
_BOOKS = {item.notebook for item in ITEMS}


def _belongs(row: dict, item: Item) -> bool:
    """Does the place of a claim name this item? "§5" is not "§5.1"."""
    return "all" in item.names or any(re.search(rf"{re.escape(name)}(?![\w.])", row["place"]) for name in item.names)


def _leaves(record: dict, notebook: str) -> list[str]:
    """Tables and pictures that a notebook left, where no item names the ones to look at."""
    outputs = record["stages"].get(notebook, {}).get("outputs", {})
    return [name for name in outputs if name.endswith(".png") or re.fullmatch(r"tables/.*\.csv", name)]


def _link(name: str, shown: Path) -> str:
    """A file of a run as a link to where the repository shows it, if it does; a table to its rendered form."""
    folder, file = name.split("/")
    where = f"figures/{file}" if folder == "figures" else f"artifact/{folder}/{file.replace('.csv', '.md')}"
    there = shown.parent / where if folder == "figures" else shown / where.removeprefix("artifact/")
    return f"[{file}]({where})" if there.exists() else f"`{file}`"


def _machine(record: dict, shown: Path) -> str:
    """The machine of the reference run: from its record, or else from its verdicts."""
    named = {cost["hardware"] for cost in record["volatile"].values() if "hardware" in cost}
    named = named or {row["hardware"] for row in table(shown) if row["hardware"]}
    return " / ".join(sorted(named)) or "an unknown machine"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds < 570 else f"{seconds / 60:.0f}"


def _seconds(cost: dict) -> float:
    """What a notebook took, and what went into the measurements that it found made."""
    return cost["seconds_s"] + cost.get("kept_s", 0.0)


def _took(cost: dict) -> str:
    return _minutes(_seconds(cost)) + (", measurements kept" if cost.get("kept_s") else "")


def _reading(path: Path) -> int:
    """Minutes to read an executed notebook's prose, at least 1."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    words = sum(len("".join(cell["source"]).split()) for cell in cells if cell["cell_type"] == "markdown")
    return max(1, round(words / WORDS))


def _title(path: Path) -> str:
    first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
    return "".join(first).splitlines()[0].removeprefix("# ")


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |\n" for row in rows)
