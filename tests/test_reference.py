"""What the repository shows of the reference run is what that run left."""

from __future__ import annotations

import csv
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_readmes_row_is_the_reference_tables():
    with open(ROOT / "artifact" / "tables" / "04_sweep.csv", newline="") as file:
        rows = [
            r
            for r in csv.DictReader(file)
            if (r["model"], r["regime"], r["text"]) == ("smollm2-135m", "niah", "scripted")
        ]
    at_32 = {r["policy"]: r for r in rows if r["budget"] == "32"}
    said = re.search(r"\| SmolLM2-135M.*\|", README).group()
    for policy in ("reactive", "evict", "optimum"):
        row = at_32[policy]
        interval = f"{float(row['miss_rate']):.3f} [{float(row['lo']):.3f}, {float(row['hi']):.3f}]"
        assert interval in said, f"README does not say {interval} of {policy}"
    assert f"{float(at_32['reactive']['mean_pages']):,.0f} pages" in said
    assert f"{at_32['reactive']['n']} prompts" in said


def test_pictures_and_tables_that_the_texts_name_are_there():
    for text in (README, (ROOT / "REPRODUCE.md").read_text()):
        for name in re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"`((?:figures|artifact)/[\w./-]+\.\w+)`", text):
            assert (ROOT / name).exists(), f"{name} is named and not there"


def test_every_figure_has_its_numbers_and_every_notebook_its_executed_copy():
    pictures = sorted((ROOT / "figures").glob("*.png"))
    assert pictures
    for picture in pictures:
        for suffix in (".svg", ".csv"):
            assert picture.with_suffix(suffix).exists(), f"{picture.stem} lacks its {suffix}"
    shown = {path.name for path in (ROOT / "artifact" / "notebooks").glob("*.ipynb")}
    assert shown == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
