"""How a strategy looks: colour, dash and marker, the same in every figure.

Colours are CSS variables with a value for a light and for a dark page. Those of a page differ from
one another under the three kinds of colour blindness and stand out from the page (tests compute
both); dash and marker say the same without colour.
"""

from __future__ import annotations

from dataclasses import dataclass

# ink is for the baseline alone; the others follow in the order of the race
_LIGHT_LANES = (
    *("#1f2328", "#0d60bd", "#d26b0f", "#09a491"),
    *("#9b7fea", "#6d3700", "#8e4d68", "#0b3581"),
)
_DARK_LANES = (
    *("#e6e8eb", "#8b88fa", "#ec7058", "#3dc3ca"),
    *("#ddc832", "#b94a03", "#91557a", "#555ecd"),
)
LIGHT = {
    "page": "#f5f6f8",
    "card": "#ffffff",
    "ink": "#1f2328",
    "quiet": "#57606a",
    "line": "#d5d9df",
    "grid": "#e6e9ed",
    "link": "#0b57c2",
    "notice": "#fff4d6",
    "notice-ink": "#5c3d00",
    "compute": "#8b95a3",
    "codec": "#c87606",
    "wire": "#2e5cc0",
}
DARK = {
    "page": "#0f1216",
    "card": "#171a1f",
    "ink": "#e6e8eb",
    "quiet": "#a3adb8",
    "line": "#343a43",
    "grid": "#272c33",
    "link": "#8ab4ff",
    "notice": "#3a2e10",
    "notice-ink": "#ffdf9b",
    "compute": "#7d8896",
    "codec": "#eda63a",
    "wire": "#5b8ff2",
}
LIGHT |= {f"lane-{slot}": colour for slot, colour in enumerate(_LIGHT_LANES)}
DARK |= {f"lane-{slot}": colour for slot, colour in enumerate(_DARK_LANES)}

_COLOURS = len(_LIGHT_LANES) - 1
# pixels on and off; none is a whole line
_DASHES = ("", "9,4", "3,3", "10,3,3,3", "16,5", "14,3,3,3,3,3")
_MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "triangle-down", "star")
# in a box of 12 x 12
_SHAPES = {
    "circle": "M6 1.5a4.5 4.5 0 1 0 .01 0z",
    "square": "M2 2h8v8h-8z",
    "diamond": "M6 .5 11.5 6 6 11.5.5 6z",
    "triangle-up": "M6 1 11.2 10H.8z",
    "x": "M3.2 1 6 3.8 8.8 1 11 3.2 8.2 6 11 8.8 8.8 11 6 8.2 3.2 11 1 8.8 3.8 6 1 3.2z",
    "cross": "M4.3 1h3.4v3.3H11v3.4H7.7V11H4.3V7.7H1V4.3h3.3z",
    "triangle-down": "M6 11 .8 2h10.4z",
    "star": "M6 .5 7.5 4.4l4.1.2-3.2 2.6 1.1 4L6 8.9l-3.5 2.3 1.1-4L.4 4.6l4.1-.2z",
}


@dataclass(frozen=True, kw_only=True)
class Look:
    """Of one strategy."""

    colour: str  # a name of LIGHT and DARK
    dash: str  # as SVG has it
    marker: str

    @property
    def line(self) -> dict:
        """As plotly has it; report.js puts the colour of the page's variable in its place."""
        dash = ",".join(f"{part}px" for part in self.dash.split(",")) if self.dash else "solid"
        return {"color": self.colour, "dash": dash, "width": 2.25}

    @property
    def swatch(self) -> str:
        """A piece of its line, for legends."""
        return (
            '<svg class="swatch" width="34" height="12" viewBox="0 0 34 12" aria-hidden="true">'
            f'<path d="M0 6H34" stroke="var(--{self.colour})" stroke-width="2.25" '
            f'stroke-dasharray="{self.dash}" fill="none"/>'
            f'<path transform="translate(11)" d="{_SHAPES[self.marker]}" '
            f'fill="var(--{self.colour})"/></svg>'
        )


def look(slot: int) -> Look:
    """The baseline's, for 0, or the slot's; colours return after seven, in another dash, marker."""
    turn, colour = divmod(max(0, slot - 1), _COLOURS)
    colour += slot > 0
    return Look(
        colour=f"lane-{colour}",
        dash=_DASHES[(colour + turn) % len(_DASHES)],
        marker=_MARKERS[(colour + turn) % len(_MARKERS)],
    )


def css() -> str:
    """The variables; `data-theme` holds a page to light, for paper."""
    return (
        f":root{{color-scheme:light;{_variables(LIGHT)}}}"
        "@media screen and (prefers-color-scheme:dark){"
        f":root:not([data-theme=light]){{color-scheme:dark;{_variables(DARK)}}}}}"
    )


def _variables(palette: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in palette.items())
