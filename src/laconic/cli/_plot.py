"""Step times over link rates, as one HTML page that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from laconic._files import GENERATOR
from laconic._units import rate, seconds
from laconic._version import __version__
from laconic.errors import ConfigError
from laconic.planner import Choice, Plan, Workload
from laconic.planner._plan import At, Curves, rates

_KEPT, _CHANGED = 4, 3  # strategies shown: those that keep the training algorithm, and others
# distinguishable with colour blindness (Okabe and Ito)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933")
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{generator}">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 0 auto;
  padding: 1.5rem; }}
h1 {{ font-size: 1.4rem; margin: 0; }}
code {{ background: #f2f2f2; padding: 0.1em 0.4em; border-radius: 3px; overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{verdict}</p>
<p><code>{code}</code></p>
{figure}
<p>* changes the training algorithm, not only the gradient's precision. Predicted, not measured:
links of other rates, everything else unchanged.</p>
</body>
</html>
"""


def plotted(found: Plan, workload: Workload, at: At) -> str:
    """A page: the best, plain DDP and computation alone, from a hundredth of the rate to 100 x."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ConfigError("--plot needs plotly: pip install 'laconic[plot]'") from error
    curves, link = Curves(workload, at), found.link_bit_s
    x = rates(link)
    figure: Any = go.Figure()
    colours = iter(_COLOURS)
    for choice in _shown(found):
        y = [curves.seconds(choice.prediction.strategy, bit_s / link) for bit_s in x]
        style: dict[str, Any] = {"color": "black", "width": 3}
        if choice is not found.plain:
            dash = "dash" if choice.changes_training else "solid"
            width = 3 if choice is found.best else 2
            style = {"color": next(colours), "width": width, "dash": dash}
        name = choice.name + (" *" if choice.changes_training else "")
        _add_line(figure, x, y, name, style)
    dotted = {"color": "grey", "dash": "dot"}
    _add_line(figure, x, [found.compute_s] * len(x), "computation alone", dotted)
    figure.add_vline(x=link, line={"dash": "dash", "width": 1, "color": "grey"})
    figure.add_annotation(  # in units of a logarithmic axis, unlike the line
        x=math.log10(link),
        y=1,
        yref="paper",
        yanchor="bottom",
        text=f"now: {rate(link)}",
        showarrow=False,
    )
    heights = [value for line in figure.data for value in line.y]
    figure.update_layout(
        xaxis={"title": "link rate", "type": "log", **_ticks(x, rate)},
        yaxis={"title": "time per step", "type": "log", **_ticks(heights, seconds)},
        legend={"orientation": "h", "y": -0.2},
        template="plotly_white",
        hovermode="x unified",
        height=560,
        margin={"l": 70, "r": 20, "t": 40, "b": 20},
    )
    return _PAGE.format(
        generator=f"{GENERATOR} {__version__}",
        title=f"Predicted step times of {found.workers} workers",
        verdict=escape(found.verdict),
        code=escape(found.best.code),
        figure=figure.to_html(
            full_html=False,
            include_plotlyjs=True,
            config={"displaylogo": False, "responsive": True},
        ),
    )


def _shown(found: Plan) -> list[Choice]:
    """Plain DDP, the best, and the fastest of both kinds."""
    others = [one for one in found.choices if one not in (found.plain, found.best)]
    kept = [one for one in others if not one.changes_training][:_KEPT]
    changed = [one for one in others if one.changes_training][:_CHANGED]
    best = [] if found.best is found.plain else [found.best]
    return [found.plain, *best, *kept, *changed]


def _add_line(
    figure: Any, x: Sequence[float], y: Sequence[float], name: str, style: dict[str, Any]
) -> None:
    figure.add_scatter(
        x=x,
        y=y,
        name=name,
        mode="lines",
        line=style,
        customdata=[seconds(value) for value in y],
        hovertemplate="%{customdata}",
    )


def _ticks(values: Sequence[float], text_of: Callable[[float], str]) -> dict[str, Any]:
    """Powers of ten, as people write them."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    places = [10.0**power for power in range(low, high + 1)]
    return {"tickvals": places, "ticktext": [text_of(place) for place in places]}
