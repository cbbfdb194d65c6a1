"""The five figures, as plotly's data; report.js draws them and hides what is switched off.

Colours are names of the palette. `lanes` of a trace are the strategies that it belongs to: it is
drawn while one of them is shown. Text is plain text: report.js escapes what plotly would take for
markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from laconic.report import _sentences as sentences
from laconic.report import _words as words
from laconic.report._palette import Look, look
from laconic.report._view import Row, View, finite

HATCH = {"shape": "/", "size": 6, "solidity": 0.25, "fgcolor": "card", "fillmode": "overlay"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Plain text, the first column naming each row; `text_columns` of them have no numbers."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    text_columns: int = 1


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


_PARTS = (
    ("compute", "computation", "compute_s"),
    ("codec", "codec", "codec_s"),
    ("wire", "communication and waiting", "wire_s"),
)


def figures(view: View) -> list[Figure]:
    """In the order of the page."""
    return [_time(view), _sent(view), _parts(view), _codecs(view), _predictions(view)]


def _time(view: View) -> Figure:
    rate = view.race.settings.rate
    seconds = "seconds of training" if view.shaped else f"predicted seconds of training at {rate}"
    return Figure(
        id="time",
        title="Accuracy against time" if view.shaped else "Accuracy against predicted time",
        short="Time",
        sentence=sentences.time(view),
        table=_points(view, seconds, lambda row, at: words.number(row.seconds[at])),
        traces=_curves(view, lambda row, at: row.seconds[at], "%{x:.3~g} s"),
        layout=axes(view, x=seconds, log="x", accuracy=True),
        scale=True,
    )


def _sent(view: View) -> Figure:
    title = "MB sent by a worker"
    return Figure(
        id="bytes",
        title="Accuracy against bytes sent",
        short="Bytes",
        sentence=sentences.sent(view),
        table=_points(view, title, lambda row, at: words.megabytes(row.lane.points[at].sent_bytes)),
        more=Table(
            head=("Strategy", "KB per step, counted by laconic", "KB per step, through the link"),
            rows=[
                (row.name, _kilobytes(row.lane.sent_bytes), _kilobytes(row.lane.link_bytes))
                for row in view.rows
            ],
        ),
        traces=_curves(view, lambda row, at: row.lane.points[at].sent_bytes / 1e6, "%{x:.3~g} MB"),
        layout=axes(view, x=title, log="x", accuracy=True),
        scale=True,
    )


def _kilobytes(value: float | None) -> str:
    return words.number(None if value is None else value / 1e3)


def _curves(view: View, x: Callable[[Row, int], float | None], hover: str) -> list[dict]:
    traces = []
    for row in view.rows:
        every = range(len(row.lane.points))
        xs = [finite(x(row, at)) for at in every]
        # a logarithmic axis cannot show a curve of zeros
        if not any(xs):
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": row.name,
                "lanes": [row.index],
                "x": xs,
                "y": [finite(point.accuracy) for point in row.lane.points],
                "text": [f"step {point.step:,}" for point in row.lane.points],
                "line": row.look.line,
                "marker": marker(row.look, 7) | {"maxdisplayed": 9},
                "hovertemplate": f"<b>%{{fullData.name}}</b><br>%{{y:.1%}} after {hover}, %{{text}}"
                "<extra></extra>",
            }
        )
    return traces


def _points(view: View, title: str, value: Callable[[Row, int], str]) -> Table:
    return Table(
        head=("Strategy", "Step", title[0].upper() + title[1:], "Accuracy", "Loss"),
        rows=[
            (row.name, f"{point.step:,}", value(row, at), words.percent(point.accuracy),
             words.number(point.loss if point.step else None))
            for row in view.rows
            for at, point in enumerate(row.lane.points)
        ],
    )  # fmt: skip


def _parts(view: View) -> Figure:
    rows = sorted(view.rows, key=lambda row: row.lane.step_s)
    traces = []
    for row in rows:
        for colour, name, part in _PARTS:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": row.name,
                    "lanes": [row.index],
                    "x": [1e3 * max(0.0, finite(getattr(row.lane.parts, part)) or 0.0)],
                    "marker": {
                        "color": colour,
                        "line": {"color": "card", "width": 1},
                        **({"pattern": HATCH} if colour == "codec" else {}),
                    },
                    "hovertemplate": f"<b>%{{fullData.name}}</b><br>{name}: %{{x:.3~g}} ms"
                    "<extra></extra>",
                }
            )
        # the name stands above its bar, where it has the figure's whole width
        traces.append(
            {
                "type": "scatter",
                "mode": "text",
                "name": row.name,
                "lanes": [row.index],
                "x": [0],
                "text": [row.name],
                "after": f"{words.milliseconds(row.lane.step_s)} ms",
                "textposition": "middle right",
                "cliponaxis": False,
                "hoverinfo": "skip",
            }
        )
    layout = axes(view, x="ms per step" if view.shaped else "ms per step, no set link rate")
    layout |= {"barmode": "stack", "bargap": 0.5}
    layout["yaxis"] = {"visible": False, "fixedrange": True}
    layout["xaxis"] |= {"rangemode": "tozero", "zeroline": True, "zerolinecolor": "line"}
    layout["margin"] = {"l": 12, "r": 20, "t": 8, "b": 46}
    return Figure(
        id="parts",
        title="Time per step, by part",
        short="A step",
        sentence=sentences.parts(view) if view.rows else "No strategy has been measured yet.",
        table=Table(
            head=("Strategy", *(f"{name}, ms".capitalize() for _, name, _ in _PARTS), "Step, ms"),
            rows=[
                (row.name, *(words.milliseconds(getattr(row.lane.parts, part))
                             for _, _, part in _PARTS), words.milliseconds(row.lane.step_s))
                for row in rows
            ],
        ),
        traces=traces,
        layout=layout,
        key=tuple((square(colour), name) for colour, name, _ in _PARTS),
        bars=True,
    )  # fmt: skip


def _codecs(view: View) -> Figure:
    points = view.race.codecs
    lines = sentences.by_codec(points)
    traces, key, spare = [], [], len(view.rows) + 1
    for codec, line in lines.items():
        owners = [row for row in view.rows if row.codec == codec]
        # a codec that no strategy uses has a style of its own, and is never hidden
        style = owners[0].look if owners else look(spare)
        spare += not owners
        key.append((style.swatch, codec))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": codec,
                "lanes": [row.index for row in owners],
                "x": [point.bits for point in line],
                "y": [point.error for point in line],
                "text": [point.spec for point in line],
                "line": style.line,
                "marker": marker(style, 7),
                "hovertemplate": "<b>%{text}</b><br>%{x:.3~g} bits per value, error %{y:.3~g}"
                "<extra></extra>",
            }
        )
    at = {point.spec: point for line in lines.values() for point in line}
    taken = Counter[str]()
    for row in view.rows:
        spec = row.lane.choice or row.lane.strategy
        point = at.get(spec)
        if point:
            # a second strategy at the same point is drawn as a ring around the first
            ring = marker(row.look, 13 + 8 * taken[spec])
            if taken[spec]:
                ring["symbol"] += "-open"
            ring["line"] = {"color": row.look.colour if taken[spec] else "ink", "width": 1.5}
            taken[spec] += 1
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": row.name,
                    "lanes": [row.index],
                    "x": [point.bits],
                    "y": [point.error],
                    "marker": ring,
                    "hovertemplate": "<b>%{fullData.name}</b> in this race<br>%{x:.3~g} bits per "
                    "value, error %{y:.3~g}<extra></extra>",
                }
            )
    layout = axes(view, x="bits per value", y="error: E|decoded − x|² / |x|²", log="xy")
    layout["xaxis"] |= {"tickvals": [2.0**power for power in range(-6, 6)]}
    layout["yaxis"] |= {"tickformat": "", "dtick": 1, "exponentformat": "power"}
    layout["yaxis"]["tickfont"] |= {"size": 10}  # plotly makes powers larger
    lossless = sentences.exact(points)
    note = f" Not drawn: {words.listed(lossless)}, without error." if lossless and lines else ""
    return Figure(
        id="codecs",
        title="Error against bits",
        short="Codecs",
        sentence=sentences.codecs(points) + note,
        table=Table(
            head=("Codec", "Bits per value", "Error"),
            rows=[(one.spec, words.number(one.bits), words.number(one.error)) for one in points],
        ),
        traces=traces,
        layout=layout,
        key=tuple(key),
    )


def _predictions(view: View) -> Figure:
    pairs = [
        (row, 1e3 * row.lane.predicted_step_s, 1e3 * row.lane.step_s)
        for row in view.rows
        if view.shaped and row.lane.predicted_step_s and sentences.off_by(row) is not None
    ]
    traces: list[dict[str, Any]] = []
    if pairs:
        every = [value for _, *both in pairs for value in both]
        low, high = min(every) / 1.4, max(every) * 1.4
        guide = {"type": "scatter", "lanes": [], "hoverinfo": "skip", "mode": "lines"}
        band = {"x": [low, high, high, low], "y": [0.9 * low, 0.9 * high, 1.1 * high, 1.1 * low]}
        traces = [
            guide | band | {"fill": "toself", "fillcolor": "line", "line": {"width": 0}},
            guide | {"x": [low, high], "y": [low, high], "line": {"color": "quiet", "width": 1}},
        ]
    for row, predicted, measured in pairs:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": row.name,
                "lanes": [row.index],
                "x": [predicted],
                "y": [measured],
                "marker": marker(row.look, 12) | {"line": {"color": "card", "width": 1}},
                "hovertemplate": "<b>%{fullData.name}</b><br>predicted %{x:.3~g} ms, measured "
                "%{y:.3~g} ms<extra></extra>",
            }
        )
    return Figure(
        id="predictions",
        title="Predicted against measured step",
        short="Predictions",
        sentence=sentences.predictions(view),
        table=Table(
            head=("Strategy", "Predicted, ms", "Measured, ms", "Measured over predicted"),
            rows=[
                (row.name, words.number(predicted), words.number(measured),
                 f"{100 * (measured / predicted - 1):+.1f}%")
                for row, predicted, measured in pairs
            ],
        ),
        traces=traces,
        layout=axes(view, x="predicted ms per step", y="measured ms per step", log="xy"),
        key=((rule("quiet"), "as predicted"), (square("line"), "within 10%")),
    )  # fmt: skip
