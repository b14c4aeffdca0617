"""The site opens from a folder and asks nothing of the network; the explorer replays what wakekv replays."""

from __future__ import annotations

import base64
import filecmp
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from malformed_logs import trace

from wakekv.errors import InputError
from wakekv.files import ROOT
from wakekv.logs.demand import demand
from wakekv.logs.shipped import open_shipped, pack
from wakekv.site import HERE, VENDORED, build, explorer, vendored
from wakekv.site.page import KEY, Page, read

SMOKE = ROOT / "artifact" / "logs" / "smoke_smollm2-135m_niah_d50_s1.npz"
REFERENCE = ROOT / "artifact"
BUDGETS = (1, 3, 8, 16, 40)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(REFERENCE, [SMOKE], tmp_path_factory.mktemp("site") / "site")


# ---- the replay in JavaScript against ours


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """Every policy at some budgets on some heads of the smoke log, by replay.js under node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: apt install nodejs")
    content = explorer.content("smoke", open_shipped(SMOKE), n_heads=10)
    folder = tmp_path_factory.mktemp("node")
    (folder / "log.json").write_text(json.dumps(content))
    (folder / "run.js").write_text(
        (HERE / "static" / "replay.js").read_text()
        + f"""
(async () => {{
  const log = await WakeKV.unpack(JSON.parse(require("fs").readFileSync("log.json", "utf8"))), out = [];
  for (const head of log.heads) for (const name of log.policies) for (const budget of {list(BUDGETS)}) {{
    const {{ grid, total, resident }} = WakeKV.replay(head, name, budget);
    out.push({{ head: head.id, whole: head.whole, name, budget, total, curve: head.misses[name][budget - 1],
      resident: Array.from(resident), grid: Buffer.from(grid).toString("base64") }});
  }}
  console.log(JSON.stringify({{ states: WakeKV.STATES, policies: Object.keys(WakeKV.POLICIES), out }}));
}})();
"""
    )
    done = subprocess.run([node, "run.js"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_cell_is_what_replay_says(replayed):
    mechanism = pytest.importorskip("wakekv.drawing.mechanism", reason="matplotlib is not installed")
    wants = demand(open_shipped(SMOKE))
    assert replayed["states"] == list(mechanism.STATES) and set(replayed["policies"]) == set(explorer.NAMES)
    compared = 0
    for got in replayed["out"]:
        grid = np.frombuffer(base64.b64decode(got["grid"]), np.uint8).reshape(wants.n_pages, wants.n_steps)
        if got["name"] == "frozen" and got["whole"]:  # alone, a head is none of the quarter that keeps all
            assert got["total"] == 0
            continue
        own = mechanism.states(mechanism.only(wants, got["head"]), got["name"], got["budget"])
        assert np.array_equal(grid, own), (got["head"], got["name"], got["budget"])
        compared += 1
    assert compared > 300


def test_its_misses_are_the_curves(replayed):
    assert all(got["total"] == got["curve"] for got in replayed["out"])
    assert any(got["total"] for got in replayed["out"])
    limited = [got for got in replayed["out"] if got["name"] in ("reactive", "evict", "optimum", "lfu", "fifo")]
    assert all(max(got["resident"]) <= got["budget"] for got in limited)


def test_heads_are_spread_over_the_ranks_and_those_of_figures_are_among_them():
    rate = np.linspace(0, 1, 200)
    heads = explorer.choose(rate, also=[7, 999], n_heads=20)
    assert 7 in heads and 0 in heads and 199 in heads and 999 not in heads and 20 <= len(heads) <= 21
    assert explorer.choose(rate[:5], n_heads=20) == [0, 1, 2, 3, 4]


# ---- the pages


def test_every_notebook_has_a_page_with_its_answer_and_pictures(site):
    index = (site / "index.html").read_text()
    for path in sorted((REFERENCE / "notebooks").glob("*.ipynb")):
        page, text = read(path), (site / f"{path.stem}.html").read_text()
        assert f'href="{path.stem}.html"' in index and page.title
        if page.answer:
            assert "<strong>Answer" in text and "<strong>Answer" in index
        for image in page.shown:
            assert (site / "img" / image.file).stat().st_size > 1000 and image.says and f"img/{image.file}" in text


def test_every_picture_opens_at_its_full_size_and_the_index_shows_the_one_that_answers(site):
    index = (site / "index.html").read_text()
    for path in [site / "index.html", *site.glob("[0-9]*.html")]:
        for figure in re.findall(r"<figure>.*?</figure>", path.read_text(), re.DOTALL):
            (shown,) = re.findall(r'<img src="([^"]+)"', figure)
            assert f'<a href="{shown}">Full size</a>' in figure and re.search(r' width="\d+" height="\d+"', figure)
    for name, figure in KEY.items():
        card = next(part for part in index.split("<article") if f'href="{name}.html"' in part and "<figure>" in part)
        assert f"img/{figure}-" in card, name
    assert KEY["11_scheduling"] == "11_load"


def test_nothing_on_a_page_leads_out_of_the_folder(site):
    for path in site.glob("*.html"):
        text = path.read_text()
        for target in re.findall(r'(?:src|href)="([^"]+)"', text):
            file = target.split("#")[0]
            assert re.match(r"(https?:|data:|mailto:)", file) or not file or (path.parent / file).exists(), target
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="([^"]+)"', text)
        assert not [target for target in loaded if re.match(r"(https?:)?//", target)]
    for path in [*site.glob("*.css"), *site.glob("explorer.js"), *site.glob("replay.js")]:
        assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp", path.read_text()), path.name


def test_figures_link_to_the_head_that_they_show(site):
    text = (site / "04_policies.html").read_text()
    head = re.search(r"Pages of head (\d+) at B = (\d+)", text)
    link = f"explorer.html#log={SMOKE.stem}&amp;head={head[1]}&amp;policy=reactive&amp;budget={head[2]}"
    assert link in text
    assert f'"id": {head[1]},' in (site / "logs" / f"{SMOKE.stem}.js").read_text()


def test_equal_runs_give_equal_bytes(site, tmp_path):
    again = build(REFERENCE, [SMOKE], tmp_path / "site")
    names = [path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()]
    equal, other, missing = filecmp.cmpfiles(site, again, names, shallow=False)
    assert not other and not missing and len(equal) == len(names)


def test_what_is_vendored_is_what_its_manifest_says_and_comes_with_its_licence():
    listed = json.loads((HERE / "vendor" / "manifest.json").read_text())
    assert vendored() == listed["sha256"] and set(VENDORED) == set(listed["sha256"])
    assert "MIT" in (HERE / "vendor" / "uPlot.LICENSE").read_text() and listed["version"].count(".") == 2


def test_a_folder_that_is_no_site_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="is no site"):
        build(REFERENCE, [SMOKE], tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"
    with pytest.raises(InputError, match="no executed notebooks"):
        build(tmp_path, [SMOKE], tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def little(tmp_path, name="x.npz"):
    """A run of one notebook, and a log that it is shown with."""
    run = tmp_path / "run" / "notebooks"
    run.mkdir(parents=True)
    shutil.copy(REFERENCE / "notebooks" / "00_start.ipynb", run)
    made = trace()
    return tmp_path / "run", pack(made, [str(token) for token in made.tokens], tmp_path / name)


def test_a_site_is_made_where_one_stands_and_where_a_link_leads(tmp_path, monkeypatch):
    run, log = little(tmp_path)
    build(run, [log], tmp_path / "site")
    (tmp_path / "link").symlink_to("site")
    for out in ".", "../link", str(tmp_path / "site"):
        (tmp_path / "site" / "00_start.html").unlink()
        monkeypatch.chdir(tmp_path / "site")
        assert str(build(run, [log], out)) == out
        assert (tmp_path / "site" / "00_start.html").exists() and (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "x.npz", "site", "link"}


def test_the_site_that_was_is_there_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    run, log = little(tmp_path)
    build(run, [log], tmp_path / "site")
    kept, rename = (tmp_path / "site" / "index.html").stat().st_ino, Path.rename

    def interrupted(self, target):
        if self.name.endswith(".part"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(run, [log], tmp_path / "site")
    assert (tmp_path / "site" / "index.html").stat().st_ino == kept
    assert {path.name for path in tmp_path.iterdir()} == {"run", "x.npz", "site"}


def test_what_a_log_says_of_itself_is_no_script(tmp_path):
    made = trace()
    named = replace(made, manifest=made.manifest | {"model": made.manifest["model"] | {"name": "</script><b>"}})
    run, log = little(tmp_path)
    build(run, [pack(named, ["x"] * len(made.tokens), log)], tmp_path / "site")
    page = (tmp_path / "site" / "explorer.html").read_text()
    told = re.search(r'<script type="application/json" id="config">(.*?)</script>', page)[1]
    assert json.loads(told)["logs"][0]["label"].startswith("</script><b>,")


def test_a_notebook_that_was_not_executed_is_refused():
    with pytest.raises(InputError, match="was not executed"):
        read(ROOT / "notebooks" / "04_policies.ipynb")


def test_the_shown_site_is_that_of_the_shown_notebooks():
    shown = REFERENCE / "site"
    books = sorted((REFERENCE / "notebooks").glob("*.ipynb"))
    assert {path.stem for path in shown.glob("[0-9]*.html")} == {path.stem for path in books}, "make reference"
    for path in books:
        page: Page = read(path)
        for name, content in page.images.items():
            assert hashlib.sha256((shown / "img" / name).read_bytes()).digest() == hashlib.sha256(content).digest()
    logs = {path.stem for path in (REFERENCE / "logs").glob("*.npz") if not path.name.startswith("smoke_")}
    assert {path.stem for path in (shown / "logs").glob("*.js")} == logs
    for name in ("style.css", "replay.js", "explorer.js"):
        assert (shown / name).read_bytes() == (HERE / "static" / name).read_bytes(), "python -m wakekv site"
    assert sum(path.stat().st_size for path in shown.rglob("*") if path.is_file()) <= 15e6


def test_an_installed_package_brings_what_the_site_is_made_of():
    line = re.search(r"^package-data\.wakekv = (\[.*\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    patterns = json.loads(line[1])
    for path in [*(HERE / "static").iterdir(), *(HERE / "vendor").iterdir()]:
        assert any(path.relative_to(HERE.parent).match(pattern) for pattern in patterns), path.name
