"""Claims and their verdicts in words: what a row of `claims.table` is on a terminal, in a notebook, in REPRODUCE.md."""

from __future__ import annotations

VERDICTS = ("reproduced", "direction holds", "not reproduced", "not run here")


def as_text(rows: list[dict]) -> str:
    """The table for a terminal: a claim, published, ours, on what, verdict; why not, under it."""
    lines, wide = [], max((len(row["id"]) for row in rows), default=5)
    for row in rows:
        kind = row["kind"] if row["value"] is not None else ""
        said = ("FAILED: " if row["failed"] else "") + ", ".join(filter(None, [row["verdict"], kind, on_what(row)]))
        lines.append(f"{row['id']:<{wide}} {printed(row):>13}  {our_value(row):<22} {said}")
    counts = ", ".join(f"{sum(r['verdict'] == v for r in rows)} {v}" for v in VERDICTS)
    head = f"{'claim':<{wide}} {'published':>13}  {'ours':<22} verdict"
    failed = [row["id"] for row in rows if row["failed"]]
    return "\n".join(
        [head, *lines, "", counts, *([f"declared to hold, and failed: {', '.join(failed)}"] if failed else [])]
    )


def printed(row: dict) -> str:
    """What the paper printed, of a row of `table`: "0.08 to 0.2", "17/17"."""
    return " to ".join(map(str, row["published"])) if isinstance(row["published"], list) else str(row["published"])


def our_value(row: dict) -> str:
    """Our value, with its interval where there is one: "0.757 [0.748, 0.767]"; "–" where there is none."""
    value = "–" if row["value"] is None else row["value"] if isinstance(row["value"], str) else f"{row['value']:.3g}"
    return value + ("" if row["lo"] is None or row["hi"] is None else f" [{row['lo']:.3g}, {row['hi']:.3g}]")


def on_what(row: dict) -> str:
    """Whose value it is: model, how many prompts, and what is to be said of it."""
    return ", ".join(
        filter(None, [row["model"], "" if row["n"] is None else f"n = {row['n']} {row['unit']}", row["note"]])
    )


def needs(row: dict) -> str:
    """The hardware that a run needs to reproduce it: "one A30"."""
    return f"one {row['needs']}" if row["needs"] else "a GPU of 24 GB"


def cells(row: dict) -> dict[str, str]:
    """A row of `claims.table` as the cells of a table to be read, section first, verdict last but one."""
    return {
        "section": row["section"],
        "claim": row["sentence"],
        "published": printed(row),
        "ours": our_value(row),
        "rule": f"{row['rule']}, ± {row['tolerance']:g}",
        "direction": row["direction"],
        "kind": row["kind"],
        "notebook": row["notebook"],
        "verdict": row["verdict"],
        "on": on_what(row),
    }
