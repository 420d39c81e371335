"""Tests of the pages in headless Chromium, opened from the file system."""

import os
import shutil
from pathlib import Path

import pytest

from fedjax_pfl.report import comparison_page, leaderboard
from tests import browser
from tests.report import comparison_test, page_test
from tests.report.comparison_test import rows_of, write_run

INSTALLED = all(map(shutil.which, ("chromium", "chromedriver")))
REQUIRED = os.environ.get("FEDJAX_PFL_REQUIRE_BROWSER") == "1"
pytestmark = [
    pytest.mark.slow("a browser"),
    pytest.mark.skipif(
        not INSTALLED and not REQUIRED, reason="chromium or chromedriver is not installed"
    ),
]
PAGES = ("run", "comparison", "leaderboard")
RESULTS = Path(__file__).parents[2] / "experiments" / "results"
# Returns the texts whose contrast with the colour behind them is below 4.5.
CONTRAST = """
const channels = text => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = element => {
  for (let e = element; e; e = e.parentElement) {
    const colour = channels(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const found = [];
for (const element of document.querySelectorAll("body, body *:not(script, style)")) {
  const texts = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.data);
  const text = texts.join("").trim();
  if (!text) continue;
  const style = getComputedStyle(element);
  const colour = channels(element.closest("svg") ? style.fill : style.color);
  const [low, high] = [luminance(colour), luminance(behind(element))].sort((a, b) => a - b);
  if ((high + 0.05) / (low + 0.05) < 4.5) found.push(`${element.tagName} ${text}`);
}
return found;
"""
# Returns the captions of tables that are wider than their place.
CUT_TABLES = """
return [...document.querySelectorAll(".wide")].filter(e => e.scrollWidth > e.clientWidth)
  .map(e => e.querySelector("caption").innerText);
"""
# Returns the number of visible letters of the texts that a printed page must have.
LETTERS = """
return [...document.querySelectorAll("main :is(h1, h2, p, th, td, caption, figcaption)")]
  .map(e => e.innerText.replace(/\\s/g, "").length).reduce((sum, n) => sum + n, 0);
"""
COLUMN = """
const head = [...document.querySelectorAll("th[scope=col]")].find(e => e.innerText === "MB");
head.click();
const at = [...head.parentNode.children].indexOf(head);
return [...head.closest("table").tBodies[0].rows].map(row => row.children[at].innerText);
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Returns the paths of the pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    run = folder / "run"
    run.mkdir()
    page_test.page_of(run, [page_test.evaluation(5), page_test.evaluation(10, before=0.625)])
    paths = []
    for algorithm, scores in comparison_test.SCORES.items():
        for seed, values in enumerate(scores):
            config = comparison_test.settings(algorithm, seed=seed)
            paths.append(write_run(folder / f"{algorithm}{seed}", values, config))
    leaderboard.write(leaderboard.read(RESULTS), folder / "leaderboard")
    return {
        "run": run / "report.html",
        "comparison": comparison_page.write(rows_of(*paths), folder / "compare"),
        "leaderboard": folder / "leaderboard" / "leaderboard.html",
    }


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """Returns a started browser."""
    assert INSTALLED, "install chromium and chromium-driver"
    with browser.started(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_is_readable_and_needs_no_network(window, pages, name):
    window.requests()
    for width in (1280, 400):
        for scheme in ("light", "dark"):
            window.open(pages[name], width, scheme)
            assert window.evaluate("return innerWidth") == width
            assert window.evaluate("return document.scrollingElement.scrollWidth") <= width
            assert window.evaluate(CONTRAST) == []
            assert window.evaluate(CUT_TABLES) == []
    assert window.messages() == []
    assert {url.partition(":")[0] for url in window.requests()} <= {"file", "data", "chrome"}


@pytest.mark.parametrize("name", PAGES)
def test_printed_page_has_all_texts(window, pages, name):
    window.open(pages[name], 1280, "dark", media="print")
    assert window.evaluate(CONTRAST) == []
    letters = window.evaluate(LETTERS)
    count, glyphs = browser.printed_glyphs(window.pdf())
    assert count >= 1
    assert glyphs >= letters > 100


def test_a_click_on_a_head_sorts_the_table(window, pages):
    window.open(pages["leaderboard"], 1280)
    for order in (-1, 1):
        values = [float(text) for text in window.evaluate(COLUMN) if text != "–"]
        assert values == sorted(values, key=lambda value: order * value)
        assert len(set(values)) > 2


@pytest.mark.parametrize("name", PAGES)
def test_figures_are_enlarged_by_a_click_and_by_the_keyboard(window, pages, name):
    letter = "return document.querySelector('figure svg text').getBoundingClientRect().height"
    window.open(pages[name], 1280)
    normal = window.evaluate(letter)
    window.evaluate("document.querySelector('figure input').click()")
    assert window.evaluate(letter) > 1.2 * normal
    window.evaluate("document.querySelector('figure input').focus()")
    window.press_space()
    assert window.evaluate(letter) == normal
