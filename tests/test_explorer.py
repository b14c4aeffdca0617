"""The explorer in a real browser: clicked, typed and looked at, with the network cut off."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from wakekv.files import ROOT
from wakekv.site import build

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")

SMOKE = ROOT / "artifact" / "logs" / "smoke_smollm2-135m_niah_d50_s1.npz"
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser():
    found = os.environ.get("WAKEKV_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium: apt install chromium, or name one in WAKEKV_CHROMIUM")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return build(ROOT / "artifact", [SMOKE], tmp_path_factory.mktemp("site") / "site")


@pytest.fixture
def visit(browser, site):
    """visit(page, size="desktop", scheme="light") -> an open page. Afterwards: nothing was asked for but files."""
    asked, wrong, contexts = [], [], []

    def visit(name: str, size: str = "desktop", scheme: str = "light"):
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.goto(f"file://{site}/{name}")
        if name.startswith("explorer"):
            page.wait_for_selector("#summary[data-agrees]")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert asked and not [url for url in asked if not url.startswith(("file://", "data:"))]
    assert not wrong


def pixels(page, place: str) -> dict[str, int]:
    """How often each colour stands in the canvas of `place`."""
    return page.evaluate(
        """place => { const c = document.querySelector(place + " canvas"), found = {};
        const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) {
          const key = [data[i], data[i + 1], data[i + 2]].map((x) => x.toString(16).padStart(2, "0")).join("");
          found[key] = (found[key] || 0) + 1; }
        return found; }""",
        place,
    )


def test_it_opens_with_a_head_a_curve_and_the_text(visit):
    page = visit("explorer.html")
    assert page.get_attribute("#summary", "data-agrees") == "true"
    assert "reactive at 32 pages" in page.inner_text("#summary")
    colours = pixels(page, "#heat")
    assert colours["0072b2"] > 500 and colours["d55e00"] > 50  # read; missed and fetched
    assert pixels(page, "#curve").get("d55e00", 0) > 50
    assert "pass number" in page.inner_text("#text")
    assert page.inner_text("#text .now") and page.inner_text("#status").startswith("Step ")


def test_clicking_through_policies_and_budgets(visit):
    page = visit("explorer.html#budget=8")
    seen = {}
    for policy in page.locator("#policy option").all_inner_texts():
        page.select_option("#policy", policy)
        assert page.get_attribute("#summary", "data-agrees") == "true", policy
        seen[policy] = page.inner_text("#summary").split("(")[1].split(")")[0]
    assert seen["full"] == "0.0 %" and float(seen["reactive"][:-2]) < float(seen["evict"][:-2])
    page.select_option("#policy", "evict")
    assert pixels(page, "#heat")["000000"] > 500  # missed, gone
    page.fill("#budget-number", "40")
    page.press("#budget-number", "Enter")
    assert "evict at 40 pages" in page.inner_text("#summary") and "budget=40" in page.url


def test_a_head_a_token_and_the_next_miss(visit):
    page = visit("explorer.html#budget=4&step=0")
    before = page.inner_text("#summary")
    page.select_option("#head", index=0)
    assert page.inner_text("#summary") != before
    page.click('#text span[data-step="12"]')
    assert page.inner_text("#step-out") == "12" and page.inner_text("#status").startswith("Step 12 ")
    page.click("#next-miss")
    assert int(page.inner_text("#step-out")) != 12 and "missed and fetched" in page.inner_text("#status")
    assert page.locator("#missed li").count() >= 1 and len(page.inner_text("#missed q >> nth=0")) > 10
    heat, curve = page.locator("#heat .u-over"), page.locator("#curve .u-over")
    heat.click(position={"x": heat.bounding_box()["width"] * 0.5, "y": 20})
    assert int(page.inner_text("#step-out")) in (19, 20)
    curve.click(position={"x": 5, "y": 20})
    assert page.input_value("#budget") == "1"


def test_a_link_says_what_to_show_and_a_wrong_one_shows_something(visit):
    page = visit("explorer.html#policy=optimum&budget=5&step=7&window=60")
    assert "optimum at 5 pages" in page.inner_text("#summary") and page.inner_text("#step-out") == "7"
    page = visit("explorer.html#log=nowhere&head=99999&policy=magic&budget=-3&step=1e9")
    assert page.get_attribute("#summary", "data-agrees") == "true" and "reactive at 1 page" in page.inner_text(
        "#summary"
    )


def test_the_keyboard_is_enough(visit):
    page = visit("explorer.html#step=5")
    reached = []
    while "text" not in reached and len(reached) < 60:
        page.keyboard.press("Tab")
        focus = page.evaluate("document.activeElement.id")
        reached.append(focus)
        if focus == "step":
            page.keyboard.press("ArrowRight")
            assert page.inner_text("#step-out") == "6"
        if focus == "budget":
            page.keyboard.press("ArrowRight")
            assert "at 33 pages" in page.inner_text("#summary")
    assert {"log", "head", "policy", "budget", "budget-number", "step", "window", "next-miss", "text"} <= set(reached)


CONTRAST = """() => {
  const shade = (colour) => { // relative luminance, WCAG 2
    const [r, g, b] = colour.match(/[\\d.]+/g).map((x) => (x / 255 <= 0.03928 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const style = getComputedStyle(document.body), [a, b] = [shade(style.color), shade(style.backgroundColor)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }"""  # noqa: E501
UNNAMED = """() => [...document.querySelectorAll("input, select, button, img")].filter((e) => !(e.labels?.length ||
  e.getAttribute("aria-label") || e.textContent.trim() || e.getAttribute("alt"))).map((e) => e.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_pages_fit_the_window_and_can_be_read(visit, site, size, scheme):
    for path in sorted(site.glob("*.html")):
        page = visit(path.name, size, scheme)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path.name} scrolls sideways"
        assert page.evaluate(CONTRAST) > 7 and page.evaluate(UNNAMED) == []


def test_a_picture_keeps_a_width_on_a_phone_at_which_it_can_be_read(visit):
    wide = "[...document.querySelectorAll('figure img')].map((img) => [img.getBoundingClientRect().width, +img.width])"
    shown = visit("index.html", "phone").evaluate(wide)
    assert shown and all(width == drawn >= 700 for width, drawn in shown)
    at = "[...document.querySelectorAll('figure')].map((one) => one.getBoundingClientRect().width)"
    assert max(visit("index.html", "phone").evaluate(at)) <= 390
    assert max(width for width, _ in visit("index.html").evaluate(wide)) <= 46 * 16


def test_from_a_figure_to_its_head(visit):
    page = visit("04_policies.html")
    link = page.locator('figcaption a[href*="head="]').first
    link.scroll_into_view_if_needed()
    link.click()
    page.wait_for_selector("#summary[data-agrees]")
    head = page.url.split("head=")[1].split("&")[0]
    assert page.input_value("#head") == head and "budget=32" in page.url
