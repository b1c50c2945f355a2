"""The documentation as a site: built without a warning, and its pages lead to each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from desktop import FLAGS, find_chromium
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ["tutorials", "how-to", "reference", "explanation", "administrators"]
#: Tags, and the attribute that names another file.
LINKS = {"a": "href", "img": "src", "script": "src", "link": "href"}


class Page(HTMLParser):
    """Links of one page, and the names that others can link to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.names |= {found["id"] or ""} if "id" in found else set()
        if link := found.get(LINKS.get(tag, "")):
            self.links.append(link)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", output / "html"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return output / "html"


@pytest.mark.slow
def test_every_page_can_be_reached_from_the_landing_page(site):
    """By the sections; a page that no section has is a warning, and so fails the build."""
    landing = Page(site / "index.html")
    assert {f"{name}.html" for name in SECTIONS} <= set(landing.links)
    assert "_images/flow.webp" in landing.links
    sections = {link.partition("#")[0] for name in SECTIONS for link in Page(site / f"{name}.html").links}
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 30
    assert {str(page) for page in pages} - sections <= {"index.html", *(f"{name}.html" for name in SECTIONS)}


@pytest.mark.slow
def test_links_inside_the_site_lead_somewhere(site):
    pages = {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}
    broken, followed = [], 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            name = unquote(parts.fragment)
            followed += 1
            if not target.exists() or (name and target in pages and name not in pages[target].names):
                broken.append((str(path.relative_to(site)), link))
    assert followed > 1000 and broken == []


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    """An administrator may serve it where there is no other network."""
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="(https?:[^"]+)"', path.read_text()
        )
        assert loaded == [], path


@pytest.mark.slow
def test_the_search_finds_words_of_pages(site):
    text = (site / "searchindex.js").read_text()
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    hits = index["terms"]["papermil"]  # words are stemmed
    assert "usage" in {index["docnames"][hit] for hit in ([hits] if isinstance(hits, int) else hits)}


@pytest.mark.slow
def test_pages_fit_a_desktop_and_a_phone_in_both_themes(site):
    """No page scrolls sideways (wide tables and blocks do so by themselves), pictures are shown, and search finds."""
    if (chromium := find_chromium()) is None:
        pytest.skip("no Chromium on this host: `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        grounds = set()
        for theme in ("light", "dark"):
            for width in (390, 1280):
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
                for name in ("index", "usage", "frontend", "errors", "admin/slurm", "reference/process-state"):
                    page.goto((site / f"{name}.html").as_uri())
                    spilled = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                    blank = page.evaluate("[...document.images].filter(one => !one.naturalWidth).map(one => one.src)")
                    assert (spilled, blank) == (0, []), (name, theme, width)
                grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
                page.close()
        assert len(grounds) == 2
        page = browser.new_page()
        page.goto((site / "search.html").as_uri() + "?q=papermill")
        page.locator("#search-results a", has_text="Usage").wait_for()
        browser.close()
