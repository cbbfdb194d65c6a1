"""The report of a race: what it says, that it is safe and readable, and that browsers draw it."""

from __future__ import annotations

import json
import re
import sys
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import browser
import numpy as np
import pytest
import races

from laconic import report
from laconic.errors import ConfigError
from laconic.report import _sentences as sentences
from laconic.report import _words as words
from laconic.report._figures import Figure, figures
from laconic.report._palette import DARK, LIGHT, look
from laconic.report._view import view

pytest.importorskip("plotly", reason="reports need plotly")

FIGURES = ("time", "bytes", "parts", "codecs", "predictions")


def drawn(race: races.Race) -> dict[str, Figure]:
    return {figure.id: figure for figure in figures(view(race))}


class Page(HTMLParser):
    """Elements of a page, in order, and the text inside some."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def data_of(source: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', source, re.S)
    assert found
    return json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# --- numbers and sentences ---


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (4.1234, "4.12"), (9.996, "10.0"), (0.02134, "0.0213"), (1240.4, "1,240"),
        (99.96, "100"), (-3.2, "-3.20"), (1e-9, "1.00e-09"), (2.5e12, "2.50e+12"),
        (float("nan"), "NaN"), (float("inf"), "∞"), (None, "–"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert words.number(value) == text


def test_sentences_say_what_the_sample_shows() -> None:
    said = {
        name: one.sentence.replace("\u00a0", " ") for name, one in drawn(races.sample()).items()
    }
    assert said == {
        # 200 steps of 92.2 and of 18.1 ms; ecdq sends 0.098 of 510 KB a step
        "time": "ecdq reaches 90% first, after 3.62 s, 5.1 times faster than fp32 (18.4 s). "
        "topk does not reach it.",
        "bytes": "To reach 90%, a worker sends the least with ecdq: 10.0 MB, 10 times less than "
        "fp32 (102 MB). topk does not reach it.",
        "parts": "Of its 92.2 ms per step, fp32 spends 92.0% in communication; topk, the shortest "
        "with 17.9 ms, spends 24.6% in communication and 34.1% in its codec.",
        "codecs": "At an error of 0.034, ecdq needs 1.4 bits per value, the fewest; dqsg 3.5, qsgd "
        "3.9 and global 4.7. Not drawn: none, without error.",
        "predictions": "Half of the predictions are within 5.7% of the measured step; the largest "
        "deviation is that of topk, measured 19.0% above its prediction.",
    }


def test_sentences_of_odd_races() -> None:
    assert "does not reach" not in drawn(races.alone())["time"].sentence
    nobody = drawn(races.out_of_reach())
    assert nobody["time"].sentence == (
        "No strategy reaches 99%; fp32 comes closest, with 93.5% at the end."
    )
    assert nobody["bytes"].sentence == nobody["time"].sentence
    assert drawn(races.unpredicted())["predictions"].sentence.startswith("No step time was")
    assert drawn(races.not_begun())["time"].sentence == "No strategy has been tested yet."
    assert "no measurements to compare" in drawn(races.unshaped())["predictions"].sentence
    some = races.unshaped()
    some = replace(some, lanes=(replace(some.lanes[0], predicted_step_s=None), *some.lanes[1:]))
    assert drawn(some)["time"].sentence.endswith("There is no prediction for fp32.")


def test_bits_are_interpolated_on_logarithmic_axes() -> None:
    line = [
        races.Quantized(codec="a", spec="a", bits=bits, error=error)
        for bits, error in ((2.0, 0.1), (8.0, 0.001))
    ]
    assert sentences._bits(line, 0.01) == pytest.approx(4.0)
    assert sentences._bits(line, 0.2) is None


def test_a_strategy_is_compared_with_fp32() -> None:
    rows = {row.name: row for row in view(races.sample()).rows}
    steps = rows["fp32"].reached
    assert steps is not None and rows["fp32"].speedup == 1.0
    assert rows["ecdq"].speedup == pytest.approx(
        rows["fp32"].lane.step_s / rows["ecdq"].lane.step_s
    )  # same steps
    assert rows["ecdq"].reduction == pytest.approx(1 / 0.098)
    assert rows["topk"].speedup is None and rows["topk"].notes == ("did not reach 90%",)
    assert rows["ecdq"].notes == ("fastest",)
    assert view(races.alone()).rows[0].speedup is None


def test_times_without_a_rate_are_predicted() -> None:
    race = races.unshaped()
    figure = drawn(race)["time"]
    lane, trace = race.lanes[5], figure.traces[5]
    assert lane.predicted_step_s
    assert trace["x"] == [lane.predicted_step_s * point.step for point in lane.points]
    assert "predicted" in figure.title and "predicted" in figure.layout["xaxis"]["title"]["text"]
    page = report.html(race)
    assert "network namespaces are not allowed here" in page and "Predicted time to" in page
    assert not drawn(race)["predictions"].traces
    assert not drawn(races.unshaped_unpredicted())["time"].traces


def test_notes_tell_what_went_wrong() -> None:
    notes = [row.notes for row in view(races.diverged()).rows]
    assert notes[2][0].startswith("diverged") and "different weights" in notes[2][-1]
    notes = [row.notes for row in view(races.unfinished()).rows]
    assert notes[1] == ("at step 80 of 400",) and notes[2] == ("not started",)
    assert "not finished" in report.html(races.unfinished())
    assert "not finished" not in report.html(races.sample())


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        ("ecdq:error=0.08", "ecdq"),
        ("ecdq:error=0.08,coder=rans@ring", "ecdq+rans"),
        ("ssd k=4 ecdq:error=0.08", "ecdq"),
        ("rotate(qsgd:bits=4)", "rotate(qsgd)"),
    ],
)
def test_the_codec_of_a_strategy(strategy: str, codec: str) -> None:
    race = replace(races.sample(), lanes=(races.lane("x", strategy),))
    assert view(race).rows[0].codec == codec


# --- the page ---


@pytest.fixture(scope="module", params=["sample", *races.ODD])
def source(request: pytest.FixtureRequest) -> str:
    return report.html(getattr(races, request.param)())


def test_the_page_is_well_formed_for_everyone(source: str) -> None:
    page = Page(source)
    assert page.all("html")[0]["lang"] == "en"
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))
    assert page.texts["title"][0].startswith("laconic race")
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert len(page.all(landmark)) == 1, landmark
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(head.get("scope") in ("row", "col") for head in page.all("th"))
    assert all(button.get("type") == "button" for button in page.all("button"))
    plots = [one for one in page.all("div") if one.get("class") == "plot"]
    assert all(one["role"] == "img" and one["aria-label"] for one in plots)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for link in page.all("a"):
        assert (link["href"] or "").removeprefix("#") in ids


def test_the_page_refers_to_nothing_outside(source: str) -> None:
    page = Page(source)
    for tag, attributes in page.elements:
        assert "src" not in attributes
        assert (attributes.get("href") or "#")[0] == "#" or attributes["href"] == "data:,", tag
    policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta) or ""
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.split(";")[1]  # of scripts, only the two that we wrote
    assert "url(" not in page.texts["style"][0] and "@import" not in page.texts["style"][0]


def test_data_are_json_that_ends_no_script(source: str) -> None:
    assert source.count("</script") == 3
    assert set(data_of(source)["figures"]) <= set(FIGURES)


def test_every_figure_has_its_data_as_a_table() -> None:
    page = report.html(races.sample())
    sections = page.split('<section class="card figure"')[1:]
    assert len(sections) == len(FIGURES)
    for section in sections:
        assert "<details>" in section and '<th scope="row">' in section
    points = sum(len(lane.points) for lane in races.sample().lanes)
    assert sections[0].count('<th scope="row">') == points


def test_names_are_text() -> None:
    source = report.html(races.hostile())
    assert races.HOSTILE not in source and "<script>window.taken" not in source
    shown = Page(source)
    assert shown.texts["h1"][0].startswith(races.HOSTILE)
    assert data_of(source)["figures"]["time"]["traces"][0]["name"] == races.HOSTILE + "0"


def test_the_command_repeats_the_race() -> None:
    page = Page(report.html(races.sample()))
    assert " ".join(page.texts["pre"][0].split()) == (
        "laconic race --data digits --workers 4 --rate 50mbit --steps 400 --batch 64 --lr 0.1 "
        "--seed 0 --target 0.9 --strategies fp32,fp16,qsgd,dqsg,global,ecdq,topk"
    )


def test_write_makes_the_same_file_every_time(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(report.html(races.alone()))
    report.write(races.sample(), path)
    assert path.read_text(encoding="utf-8") == report.html(races.sample())
    assert path.stat().st_size < 2_500_000
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_without_plotly_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.report import _page

    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    _page._plotly.cache_clear()
    with pytest.raises(ConfigError, match="pip install"):
        report.html(races.sample())


@pytest.mark.parametrize("name", ["sample", *races.ODD])
def test_plotly_knows_every_attribute(name: str) -> None:
    import plotly.graph_objects as go

    def painted(value: Any, key: str = "") -> Any:
        if isinstance(value, list):
            return [painted(one) for one in value]
        if isinstance(value, dict):
            return {at: painted(one, at) for at, one in value.items()}
        return LIGHT[value] if key.endswith("color") else value

    ours = {"lanes", "after"}
    for figure in drawn(getattr(races, name)()).values():
        traces = [{at: v for at, v in trace.items() if at not in ours} for trace in figure.traces]
        go.Figure(data=painted(traces), layout=painted(figure.layout))


# --- colours ---


def linear(colour: str) -> np.ndarray:
    part = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted(float(linear(c) @ (0.2126, 0.7152, 0.0722)) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_what_wcag_says() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out(palette: dict[str, str]) -> None:
    for ink in ("ink", "quiet", "link"):
        for ground in ("page", "card"):
            assert contrast(palette[ink], palette[ground]) >= 4.5, (ink, ground)
    assert contrast(palette["notice-ink"], palette["notice"]) >= 4.5
    graphics = ["compute", "codec", "wire", *(name for name in palette if name[:5] == "lane-")]
    for name in graphics:
        assert contrast(palette[name], palette["card"]) >= 3, name


# linear RGB as people without red, green or blue cones see it (Machado, Oliveira, Fernandes 2009)
BLINDNESS = {
    "none": np.eye(3),
    "red": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                     [-0.003882, -0.048116, 1.051998]]),
    "green": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                       [-0.011820, 0.042940, 0.968881]]),
    "blue": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                      [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip


def oklab(rgb: np.ndarray) -> np.ndarray:
    """Where equal distances look equally different (Ottosson 2020)."""
    cones = np.array([[0.4122214708, 0.5363325363, 0.0514459929],
                      [0.2119034982, 0.6806995451, 0.1073969566],
                      [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
    lab = np.array([[0.2104542553, 0.7936177850, -0.0040720468],
                    [1.9779984951, -2.4285922050, 0.4505937099],
                    [0.0259040371, 0.7827717662, -0.8086757660]])  # fmt: skip
    return lab @ np.cbrt(cones @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_differ_for_everyone(palette: dict[str, str], kind: str) -> None:
    """A just noticeable difference is about 0.02."""
    seen = {
        name: oklab(BLINDNESS[kind] @ linear(colour))
        for name, colour in palette.items()
        if name.startswith("lane-")
    }
    for one, at in seen.items():
        for other, there in seen.items():
            assert one == other or np.linalg.norm(at - there) > 0.07, (one, other)


def test_looks_differ_beyond_colour() -> None:
    looks = [look(slot) for slot in range(1, 43)]
    assert len({(one.colour, one.dash) for one in looks}) == 42
    assert len({(one.colour, one.marker) for one in looks}) == 42
    assert look(0).colour not in {one.colour for one in looks}
    # neighbours in the palette also differ without colour
    assert all(len({one.marker for one in looks[at : at + 7]}) == 7 for at in range(0, 42, 7))


# --- in a browser ---


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture
def visit(driver: Any, folder: Path) -> Any:
    """Opens the report of a race by its name, waits until it is drawn, and leaves no trace."""
    from selenium.webdriver.support.ui import WebDriverWait

    def go(name: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Any:
        path = folder / f"{name}.html"
        if not path.exists():
            report.write(getattr(races, name)(), path)
        browser.size(driver, width, height, touch=width < 600)
        browser.prefer(driver, color_scheme=scheme)
        driver.get_log("browser")
        driver.get(path.as_uri())
        WebDriverWait(driver, 40).until(
            lambda page: page.execute_script("return document.documentElement.dataset.state")
        )
        return driver

    return go


LINES = """
return Object.fromEntries([...document.querySelectorAll(".figure")].map((figure) => [figure.id, {
  lines: figure.querySelectorAll(".scatterlayer .trace .lines path.js-line").length,
  markers: [...figure.querySelectorAll(".scatterlayer .trace")]
    .filter((trace) => trace.querySelector(".point")).length,
  bars: figure.querySelectorAll(".barlayer .trace.bars .point").length,
  labels: [...figure.querySelectorAll(".textpoint text")].map((text) => text.textContent),
}]));
"""


def complaints(driver: Any) -> list[str]:
    return [entry["message"] for entry in driver.get_log("browser")]


def settled(driver: Any) -> None:
    """Plotly has drawn what was asked for."""
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


@pytest.mark.parametrize("name", ["sample", *races.ODD])
@pytest.mark.parametrize("width", [1280, 920, 360])
def test_it_renders_without_errors_requests_or_sideways_scrolling(
    visit: Any, name: str, width: int
) -> None:
    driver = visit(name, width=width)
    assert driver.execute_script("return document.documentElement.dataset.state") == "drawn"
    assert complaints(driver) == []
    assert driver.execute_script("return performance.getEntriesByType('resource')") == []
    wide, inner = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert inner == width and wide <= width
    assert driver.execute_script("return window.taken") is None
    if width == 360:  # cards need no scrolling in their box either
        fits = (
            "const box = document.querySelector('.wide'); return box.scrollWidth <= box.clientWidth"
        )
        assert driver.execute_script(fits)
    for plot in driver.find_elements("css selector", ".plot"):
        assert plot.find_elements("css selector", "svg.main-svg")
        assert plot.size["height"] > 100
        box = "return arguments[0].querySelector('svg').getBoundingClientRect().width"
        assert driver.execute_script(box, plot) <= plot.size["width"] + 1


def test_every_figure_shows_every_strategy(visit: Any) -> None:
    seen = visit("sample").execute_script(LINES)
    assert seen["time"]["lines"] == seen["bytes"]["lines"] == 7
    assert seen["parts"]["bars"] == 21 and len(seen["parts"]["labels"]) == 7
    assert seen["parts"]["labels"][0] == "topk  17.9 ms"
    # five codecs, of which fp16 is a single point, and the points of five strategies
    assert seen["codecs"]["lines"] == 5 and seen["codecs"]["markers"] == 5 + 5
    assert seen["predictions"] == {"lines": 2, "markers": 7, "bars": 0, "labels": []}
    assert len(visit("sample").find_elements("css selector", "details table")) == 6


@pytest.mark.parametrize("how", ["click", "enter", "space"])
def test_a_legend_button_hides_its_strategy_everywhere(visit: Any, how: str) -> None:
    from selenium.webdriver import Keys

    driver = visit("sample")
    before = driver.execute_script(LINES)
    button = driver.find_element("css selector", ".legend [data-lane='2']")
    assert button.text == "qsgd"

    def press() -> None:
        if how == "click":
            button.click()
        else:
            button.send_keys({"enter": Keys.ENTER, "space": Keys.SPACE}[how])
        settled(driver)

    press()
    assert button.get_attribute("aria-pressed") == "false"
    seen = driver.execute_script(LINES)
    assert seen["time"]["lines"] == seen["bytes"]["lines"] == 6
    assert seen["parts"]["bars"] == 18
    assert not any(label.startswith("qsgd") for label in seen["parts"]["labels"])
    assert seen["codecs"]["lines"] == 4 and seen["predictions"]["markers"] == 6
    press()
    assert button.get_attribute("aria-pressed") == "true"
    assert driver.execute_script(LINES) == before
    assert complaints(driver) == []


def test_a_codec_is_shown_while_one_of_its_strategies_is(visit: Any) -> None:
    driver = visit("many")
    before = driver.execute_script(LINES)["codecs"]
    driver.find_element("css selector", ".legend [data-lane='1']").click()
    settled(driver)
    after = driver.execute_script(LINES)
    assert after["codecs"] == before and after["time"]["lines"] == 19


def test_show_all_brings_everything_back(visit: Any) -> None:
    driver = visit("sample")
    before = driver.execute_script(LINES)
    everything = driver.find_element("css selector", ".legend .all")
    assert not everything.is_displayed()
    for button in driver.find_elements("css selector", ".legend [data-lane]"):
        button.click()
    settled(driver)
    assert driver.execute_script(LINES)["time"]["lines"] == 0
    everything.click()
    settled(driver)
    assert driver.execute_script(LINES) == before and not everything.is_displayed()
    assert complaints(driver) == []


def test_tab_reaches_the_legend_and_shows_where_it_is(visit: Any) -> None:
    from selenium.webdriver import ActionChains, Keys

    driver = visit("sample")
    reached = []
    for _ in range(30):
        ActionChains(driver).send_keys(Keys.TAB).perform()
        lane, outline = driver.execute_script(
            "const at = document.activeElement;"
            "return [at.dataset.lane, getComputedStyle(at).outlineStyle]"
        )
        if lane is not None:
            reached.append(lane)
            assert outline == "solid"
    assert reached == list("0123456")


def luminance(driver: Any, script: str) -> float:
    """Of what the script says is a colour."""
    channels = re.findall(r"[\d.]+", driver.execute_script(script))[:3]
    return float(linear("#" + "".join(f"{int(float(c)):02x}" for c in channels)).mean())


TEXT = "return getComputedStyle(document.querySelector('#{} .xtick text')).fill"
BODY = "return getComputedStyle(document.body).{}"


def test_dark_and_light_follow_the_system(visit: Any) -> None:
    driver = visit("sample", scheme="dark")
    assert luminance(driver, BODY.format("backgroundColor")) < 0.05
    assert luminance(driver, BODY.format("color")) > 0.5
    dark = {name: luminance(driver, TEXT.format(name)) for name in FIGURES}
    assert min(dark.values()) > 0.35
    browser.prefer(driver, color_scheme="light")  # while the page is open
    settled(driver)
    assert luminance(driver, BODY.format("backgroundColor")) > 0.8
    assert all(luminance(driver, TEXT.format(name)) < 0.15 for name in FIGURES)


def test_paper_is_light(visit: Any) -> None:
    driver = visit("sample", scheme="dark")
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    settled(driver)
    assert luminance(driver, TEXT.format("time")) < 0.15
    narrow = "return document.querySelector('#time svg').clientWidth"
    assert driver.execute_script(narrow) <= 700
    driver.execute_script("dispatchEvent(new Event('afterprint'))")
    settled(driver)
    assert luminance(driver, TEXT.format("time")) > 0.35
    pdf = driver.execute_cdp_cmd("Page.printToPDF", {})
    assert b64decode(pdf["data"]).startswith(b"%PDF") and complaints(driver) == []


def test_the_time_axis_can_be_linear(visit: Any) -> None:
    driver = visit("sample")
    ticks = (
        """return [...document.querySelectorAll('#time .xtick text')].map((t) => t.textContent)"""
    )
    assert driver.execute_script(ticks) == ["0.2", "0.5", "1", "2", "5", "10", "20", "50"]
    # accuracy begins where the curves do, not at the start, which has no place on this axis
    assert driver.execute_script(ticks.replace("xtick", "ytick"))[0] == "20%"
    button = driver.find_element("css selector", "#time .scale")
    button.click()
    settled(driver)
    assert driver.execute_script(ticks.replace("xtick", "ytick"))[0] == "10%"
    linear_ticks = [float(tick) for tick in driver.execute_script(ticks)]
    assert linear_ticks[0] == 0 and len(set(np.diff(linear_ticks))) == 1
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    settled(driver)
    assert "0.2" in driver.execute_script(ticks)


def test_a_zoomed_axis_has_ticks(visit: Any) -> None:
    driver = visit("sample")
    zoom = "Plotly.relayout(document.querySelector('#time .plot'), "
    zoom += "{'xaxis.range[0]': Math.log10(6), 'xaxis.range[1]': Math.log10(9)})"
    driver.execute_script(zoom)
    settled(driver)
    ticks = "return [...document.querySelectorAll('#time .xtick text')].map((t) => t.textContent)"
    assert {"6", "7", "8", "9"} <= set(driver.execute_script(ticks))
    driver.find_element("css selector", ".legend [data-lane='2']").click()  # keeps the zoom
    settled(driver)
    seen = driver.execute_script(ticks)
    assert {"6", "7", "8", "9"} <= set(seen) and "10" not in seen
    driver.execute_script(
        "Plotly.relayout(document.querySelector('#time .plot'), {'xaxis.autorange': true})"
    )
    settled(driver)
    assert driver.execute_script(ticks) == ["0.2", "0.5", "1", "2", "5", "10", "20", "50"]


def test_a_turned_phone_draws_figures_anew(visit: Any) -> None:
    driver = visit("sample", width=360, height=740)
    browser.size(driver, 740, 360, touch=True)
    settled(driver)
    wide = "return document.querySelector('#time svg').clientWidth"
    assert 500 < driver.execute_script(wide) <= 740


def test_names_are_shown_as_they_are(visit: Any) -> None:
    driver = visit("hostile")
    name = driver.find_element("css selector", ".legend [data-lane='1'] .name")
    assert name.get_attribute("textContent") == races.HOSTILE + "1"
    label = driver.execute_script(LINES)["parts"]["labels"][0]
    assert label.startswith("</script><script>window.taken = 1</script><b>&amp;")
    assert driver.execute_script("return document.scripts.length") == 4  # ours, and plotly unpacked


def test_a_figure_can_be_saved(visit: Any) -> None:
    driver = visit("sample")
    found = driver.execute_async_script(
        "const done = arguments[0];"
        "Plotly.toImage(document.querySelector('#time .plot'), {format: 'svg'}).then(done, done)"
    )
    assert found.startswith("data:image/svg+xml") and complaints(driver) == []


def test_a_browser_that_cannot_draw_shows_the_tables(visit: Any, driver: Any) -> None:
    script = driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument", {"source": "delete window.DecompressionStream"}
    )
    try:
        visit("sample")
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    assert driver.find_element("id", "failed").is_displayed()
    assert all(one.is_displayed() for one in driver.find_elements("css selector", "details table"))
    assert not driver.find_element("css selector", ".legend").is_displayed()
    assert complaints(driver)  # the reason is there for who looks
