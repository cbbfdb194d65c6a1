"""What every figure is made of.

A colour is a name of the palette. `lanes` of a trace are the strategies that it stands for: it is
drawn while one of them is. Text is plain text: report.js escapes what plotly would take for markup.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from laconic.report import _words as words
from laconic.report._palette import Look
from laconic.report._tables import Table
from laconic.report._view import View

HATCH = {"shape": "/", "size": 6, "solidity": 0.25, "fgcolor": "card", "fillmode": "overlay"}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One of them; without traces it is its sentence alone."""

    id: str
    title: str
    short: str  # for links
    sentence: str
    table: Table
    more: Table | None = None
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    key: tuple[tuple[str, str], ...] = ()  # picture (HTML) and words of what the legend lacks
    scale: bool = False  # a switch between logarithmic and linear x
    bars: bool = False  # a bar a strategy, one under another


def marker(style: Look, size: float) -> dict[str, Any]:
    """A strategy's, of any size."""
    return {"color": style.colour, "symbol": style.marker, "size": size, "opacity": 1}


def axes(
    view: View, *, x: str, y: str | None = None, log: str = "", accuracy: bool = False
) -> dict[str, Any]:
    """A layout with titles; `log` names the logarithmic axes; accuracy as y, with the target."""

    def axis(title: str | None, *, logarithmic: bool) -> dict[str, Any]:
        return {
            "title": {"text": title, "standoff": 12, "font": {"color": "quiet", "size": 13}},
            "type": "log" if logarithmic else "linear",
            **({"tickformat": ",~r"} if logarithmic else {}),
            "tickfont": {"color": "quiet", "size": 12},
            "gridcolor": "grid",
            "linecolor": "line",
            "zeroline": False,
            "automargin": True,
        }

    layout: dict[str, Any] = {
        "xaxis": axis(x, logarithmic="x" in log),
        "yaxis": axis(y, logarithmic="y" in log),
        "paper_bgcolor": "card",
        "plot_bgcolor": "card",
        "font": {"color": "ink", "size": 13},
        "hoverlabel": {"bgcolor": "card", "bordercolor": "quiet", "font": {"color": "ink"}},
        "hovermode": "closest",
        "showlegend": False,
        "margin": {"l": 12, "r": 20, "t": 12, "b": 46},
    }
    if accuracy:
        target = view.target
        layout["yaxis"]["tickformat"] = ".0%"
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target,
             "line": {"color": "quiet", "width": 1, "dash": "dot"}}
        ]  # fmt: skip
        layout["annotations"] = [
            {"xref": "paper", "x": 0, "xanchor": "left", "y": target, "yanchor": "bottom",
             "text": f"target {words.goal(target)}", "showarrow": False,
             "font": {"color": "quiet", "size": 12}}
        ]  # fmt: skip
    return layout


def square(colour: str) -> str:
    """For a key."""
    stripes = '<path d="M-1 7 7-1M2 13 13 2" stroke="var(--card)" stroke-width="1.4"/>'
    hatch = stripes if colour == "codec" else ""
    return (
        '<svg class="swatch" width="12" height="12" viewBox="0 0 12 12" aria-hidden="true">'
        f'<path d="M0 0h12v12H0z" fill="var(--{colour})"/>{hatch}</svg>'
    )


def rule(colour: str) -> str:
    """For a key."""
    return (
        '<svg class="swatch" width="24" height="12" viewBox="0 0 24 12" aria-hidden="true">'
        f'<path d="M0 6h24" stroke="var(--{colour})"/></svg>'
    )
