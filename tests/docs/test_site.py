"""The documents as a site: built without a warning, complete, and nothing in it from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S

ROOT = Path(__file__).parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings_handlers", "typer")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="the site needs mkdocs-material and mkdocstrings: pip install 'laconic[docs]'",
)
# what a browser fetches by itself, and from which attribute; <a href> waits for a click
LOADED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


class Loads(HTMLParser):
    """Addresses that a page loads by itself, and what it says in code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._style = tag == "style"
        given = dict(attrs)
        value = given.get(LOADED.get(tag, ""))
        if value and not (tag == "link" and given.get("rel") in ("next", "prev", "canonical")):
            self.found.append(value)
        self.found += in_css(given.get("style") or "")

    def handle_data(self, data: str) -> None:
        if self._style:
            self.found += in_css(data)


def in_css(text: str) -> list[str]:
    imported = re.findall(r"@import\s+[\"']([^\"']+)", text)
    return imported + re.findall(r"url\(\s*[\"']?([^\"')]+)", text)


def external(address: str) -> bool:
    return bool(re.match(r"^(https?:)?//", address.strip()))


def pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [page for child in children for page in pages(child)]


def configured() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_all_pages_are_built_and_in_the_navigation(site: Path) -> None:
    listed = pages(configured()["nav"])
    assert len(listed) == len(set(listed))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert set(listed) == there
    for name in listed:
        assert (site / name).with_suffix(".html").is_file()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    found = [
        (path.name, address)
        for path in site.rglob("*.html")
        for address in Loads(path.read_text()).found
    ]
    found += [(path.name, one) for path in site.rglob("*.css") for one in in_css(path.read_text())]
    found += [(path.name, one) for path in site.rglob("*.svg") for one in in_css(path.read_text())]
    assert len(found) > 100
    assert not [one for one in found if external(one[1])]
    assert configured()["theme"]["font"] is False


def test_no_page_needs_what_the_theme_would_fetch(site: Path) -> None:
    """Its scripts fetch mermaid where a page has a diagram of it, and stars of a repository."""
    assert not [path.name for path in site.rglob("*.html") if 'class="mermaid"' in path.read_text()]
    assert "repo_url" not in configured()


def test_pictures_are_there_and_have_words(site: Path) -> None:
    shown = 0
    for path in site.rglob("*.html"):
        for tag in re.findall(r"<img[^>]*>", path.read_text()):
            source, words = re.search(r'src="([^"]+)"', tag), re.search(r'alt="([^"]+)"', tag)
            assert source and words, tag
            assert (path.parent / source[1]).is_file(), f"{path.name}: {source[1]}"
            shown += 1
    assert shown >= 8


def test_generated_parts_are_filled_in(site: Path) -> None:
    commands = (site / "cli.html").read_text()
    for name in ("plan", "probe", "lab run"):
        assert f">laconic {name}<" in commands
    assert "--workers" in commands
    names = (site / "api.html").read_text()
    for name in ("laconic.compress", "laconic.codecs.DQSG", "laconic.schedules.SSD"):
        assert f'id="{name}"' in names
    assert "House rules" in (site / "contributing.html").read_text()
    for path in site.rglob("*.html"):
        assert not re.search(r"<!-- (commands|modules|contributing) -->", path.read_text())


def test_sources_of_the_site_are_not_part_of_it(site: Path) -> None:
    assert not list(site.rglob("*.py")) and not list(site.rglob("*.pyc"))


def test_the_site_is_found_by_search(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert "scatter-reduce" in index and "which-strategy.html" in index


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/x.css">',
        '<img src="http://example/x.png">',
        '<p style="background: url(https://example/x.png)">',
        "<style>@import 'https://example/x.css';</style>",
        "<style>a { background: url('https://example/x.png') }</style>",
    ],
)
def test_what_is_external_is_seen(page: str) -> None:
    assert any(map(external, Loads(page).found))


def test_what_is_not_loaded_is_not_counted() -> None:
    page = '<a href="https://example/">x</a><link rel="canonical" href="https://example/">'
    assert not Loads(page).found
    assert not any(map(external, Loads('<script src="assets/x.js"></script>').found))
