"""Pictures as plain SVG: readable on a phone, in light and in dark, by any browser.

Colours follow what the reader's system prefers; a picture brings its own background, because a page
may have been switched to the other scheme by hand, which a picture cannot see.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

WIDTH = 480  # a phone shows this at 0.7 of its size, and 15 px of text stay readable
LINE = 21
COLOURS = 8

_LIGHT = (
    "#2563c9",
    "#c25e00",
    "#1b7f45",
    "#8146c4",
    "#c8323a",
    "#0b7f8a",
    "#5d6672",
    "#b23b86",
)
_DARK = (
    "#7fb2ff",
    "#ffb060",
    "#6ad79a",
    "#c9a0ff",
    "#ff8d8d",
    "#58d3dd",
    "#aab3c0",
    "#f590cb",
)


def _scheme(paper: str, ink: str, grid: str, band: str, colours: Sequence[str]) -> str:
    own = ";".join(f"--c{number}:{colour}" for number, colour in enumerate(colours))
    return f"--paper:{paper};--ink:{ink};--grid:{grid};--band:{band};{own}"


def _rules() -> str:
    colours = "".join(
        f".s{n}{{stroke:var(--c{n});fill:none}}.f{n}{{fill:var(--c{n});stroke:none}}"
        for n in range(COLOURS)
    )
    return (
        f"svg{{{_scheme('#ffffff', '#1c2128', '#d5dae1', '#eaf0f9', _LIGHT)}}}"
        "@media(prefers-color-scheme:dark){svg{"
        f"{_scheme('#1e2129', '#e4e8ee', '#3b424e', '#2a3140', _DARK)}}}}}"
        ".paper{fill:var(--paper)}.band{fill:var(--band)}.ink{stroke:var(--ink);fill:none}"
        ".grid{stroke:var(--grid);fill:none}"
        "text{fill:var(--ink);font:15px system-ui,sans-serif}"
        ".title{font-size:17px;font-weight:600}.end{text-anchor:end}.middle{text-anchor:middle}"
        f"{colours}"
    )


class Canvas:
    """Shapes from top to bottom; `text()` is the file."""

    def __init__(self, title: str, description: str) -> None:
        self._head = title, description
        self._shapes: list[str] = []
        self.y = 10.0  # below what is there
        for line in textwrap.wrap(title, 44):
            self.y += LINE
            self.label(12, self.y - 3, line, "title")
        self.y += 6

    def add(self, shape: str) -> None:
        """As it is."""
        self._shapes.append(shape)

    def label(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Words at a place; `kind` is end, middle or title."""
        own = f' class="{kind}"' if kind else ""
        self.add(f'<text x="{x:.1f}" y="{y:.1f}"{own}>{escape(words)}</text>')

    def path(self, d: str, kind: str, more: str = "") -> None:
        """A line or an area."""
        self.add(f'<path class="{kind}" d="{d}"{more and " " + more}/>')

    def marker(self, x: float, y: float, number: int, tip: str = "") -> None:
        """A dot of this series: shapes differ, so that colours need not be told apart."""
        n = number % COLOURS
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self.add(f'<path class="f{n}" d="{_shape(x, y, n)}">{inner}</path>')

    def legend(self, names: Sequence[str], lines: Sequence[str | None]) -> None:
        """Markers, or pieces of lines (dashes, or "" for none), with names, in as few rows."""
        x = 12.0
        self.y += LINE
        for number, (name, dash) in enumerate(zip(names, lines, strict=True)):
            wide = 42 + 8.6 * len(name)  # of the widest fonts that phones and desks have
            if x > 12 and x + wide > WIDTH:
                x, self.y = 12.0, self.y + LINE + 2
            if dash is None:
                self.marker(x + 10, self.y - 5, number)
            else:
                more = f'stroke-width="2.5" stroke-dasharray="{dash}"' if dash else ""
                more = more or 'stroke-width="2.5"'
                self.path(f"M{x:.1f} {self.y - 5:.1f}h20", f"s{number % COLOURS}", more)
            self.label(x + 26, self.y, name)
            x += wide
        self.y += 6

    def note(self, words: str) -> None:
        """Lines of text below."""
        for line in textwrap.wrap(words, 54):
            self.y += LINE
            self.label(12, self.y, line)

    def text(self) -> str:
        """The file."""
        title, description = (escape(part) for part in self._head)
        height = round(self.y + 14)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                f'width="{WIDTH}" height="{height}" role="img">',
                f"<title>{title}</title>",
                f"<desc>{description}</desc>",
                f"<style>{_rules()}</style>",
                f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>',
                *self._shapes,
                "</svg>",
                "",
            ]
        )


def _shape(x: float, y: float, number: int) -> str:
    """Circle, square, triangle, diamond; then each of them again."""
    kind = number % 4
    if kind == 0:
        return f"M{x - 5:.1f} {y:.1f}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z"
    if kind == 1:
        return f"M{x - 4.5:.1f} {y - 4.5:.1f}h9v9h-9z"
    if kind == 2:
        return f"M{x:.1f} {y - 6:.1f}l6 10.5h-12z"
    return f"M{x:.1f} {y - 6.5:.1f}l6.5 6.5l-6.5 6.5l-6.5 -6.5z"
