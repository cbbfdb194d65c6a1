"""Pictures are those of the kept rows, and anybody can read them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import _planner_tables
from benchmarks._line_plot import Axis, Series, line_plot
from benchmarks._svg import WIDTH, Canvas
from benchmarks.pictures import FOLDER, PICTURES, drawn

DOCS = FOLDER.parent
README = DOCS.parent / "README.md"
FILES = [*(FOLDER / f"{name}.svg" for name in PICTURES), DOCS / "predicted.svg"]
SVG = "{http://www.w3.org/2000/svg}"
WIDEST = {"title": 10.5}  # px of a letter, bold; of others:
WIDE = 8.6

STALE = "run python -m benchmarks.pictures, and benchmarks.tables for predicted.svg"


def words(element: ElementTree.Element) -> str:
    return element.text or ""


def test_pictures_are_made_of_the_kept_rows() -> None:
    for path, text in drawn():
        assert path.read_text() == text, f"{path.name}: {STALE}"


def test_predicted_is_made_of_the_kept_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_planner_tables, "PLOT", tmp_path / "predicted.svg")
    _planner_tables.write_plot()
    made = (tmp_path / "predicted.svg").read_text()
    assert made == (DOCS / "predicted.svg").read_text(), STALE


def test_no_picture_is_left_over_and_all_are_shown() -> None:
    assert set(FOLDER.iterdir()) == {FOLDER / f"{name}.svg" for name in PICTURES}
    pages = "\n".join(page.read_text() for page in (README, *DOCS.rglob("*.md")))
    for path in FILES:
        assert re.search(rf"!\[[^]]+\]\([^)]*{path.name}\)", pages), f"no page shows {path.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_picture_says_what_it_shows_in_light_and_dark_and_on_a_phone(path: Path) -> None:
    text = path.read_text()
    root = ElementTree.fromstring(text)
    title, described = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and words(title)
    assert described is not None and len(words(described)) > 40
    assert root.get("role") == "img"
    style = words(root.findall(f"{SVG}style")[0])
    light, dark = style.split("@media(prefers-color-scheme:dark)")
    assert "--paper:" in light and "--paper:" in dark and "--ink:" in dark
    assert root.findall(f"{SVG}rect")[0].get("class") == "paper", "it brings its own background"
    assert min(map(int, re.findall(r"(\d+)px", style))) >= 15
    assert 'fill="#' not in text and 'stroke="#' not in text, "colours belong to the style"
    assert not re.search(r"(href|src)=|url\(|@import", text), "nothing is loaded"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_words_stay_inside_the_picture(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    height = float(root.attrib["viewBox"].split()[3])
    for text in root.iter(f"{SVG}text"):
        kind, x, y = text.get("class", ""), float(text.attrib["x"]), float(text.attrib["y"])
        wide = WIDEST.get(kind, WIDE) * len(words(text))
        left = {"end": x - wide, "middle": x - wide / 2}.get(kind, x)
        assert left >= -2 and left + wide <= WIDTH + 2, words(text)
        assert 10 <= y <= height - 2, words(text)


# -- the plots themselves


def simple(**changes: object) -> str:
    settings: dict[str, object] = {
        "title": "a <title>",
        "description": "words & more",
        "x": Axis(label="x", low=1, high=100, log=True, ticks=((10, "ten"),)),
        "y": Axis(label="y", low=0, high=10, ticks=((5, "five"),)),
        "series": [Series(name="s", points=[(1, 0), (10, 5), (100, 10), (1000, 5)])],
    }
    return line_plot(**{**settings, **changes})  # pyright: ignore[reportArgumentType]


def dots(text: str) -> list[tuple[float, float]]:
    """Centres of circles: the shape of the first series."""
    found = re.findall(r'class="f0" d="M([\d.]+) ([\d.]+)a5', text)
    return [(float(x) + 5, float(y)) for x, y in found]


def test_points_are_where_their_values_are() -> None:
    found = dots(simple())[:-1]  # the last is the legend's
    assert len(found) == 3, "what is outside an axis is not drawn"
    (left, low), (middle, half), (right, high) = found
    assert middle == pytest.approx((left + right) / 2, abs=0.2), "10 is halfway from 1 to 100"
    assert half == pytest.approx((low + high) / 2, abs=0.2)
    assert high < half < low and left < right


def test_words_are_escaped() -> None:
    root = ElementTree.fromstring(simple())
    assert words(root.findall(f"{SVG}title")[0]) == "a <title>"
    assert words(root.findall(f"{SVG}desc")[0]) == "words & more"


def test_series_differ_by_shape_and_not_by_colour_alone() -> None:
    canvas = Canvas("t", "d")
    for number in range(4):
        canvas.marker(0, 0, number)
    shapes = re.findall(r'class="f\d" d="([^"]+)"', canvas.text())
    assert len(set(shapes)) == 4


def test_long_titles_and_legends_are_broken_into_lines() -> None:
    names = [f"a name of some length {number}" for number in range(5)]
    text = simple(
        title="A title of many words that does not fit into a single line of a picture",
        series=[Series(name=name, points=[(1, 1)]) for name in names],
    )
    root = ElementTree.fromstring(text)
    lines = {one.text: float(one.attrib["y"]) for one in root.iter(f"{SVG}text")}
    assert len({lines[name] for name in names}) >= 3
    assert sum(one.get("class") == "title" for one in root.iter(f"{SVG}text")) == 2
