"""Step times over link rates, as one HTML page that needs nothing else."""

from __future__ import annotations

from pathlib import Path

from laconic.errors import ConfigError
from laconic.planner import Plan, Workload
from laconic.planner._plan import At, Curves, rates
from laconic.planner._units import rate

_BEST = 6


def write_plot(path: Path, found: Plan, workload: Workload, at: At) -> None:
    """The best, plain DDP and computation alone, from a hundredth of the rate to 100 x."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ConfigError("--plot needs plotly: pip install 'laconic[plot]'") from error
    curves, link = Curves(workload, at), found.link_bit_s
    x = rates(link)
    plain = found.plain
    shown = [one for one in found.choices if one is not plain][:_BEST]
    figure = go.Figure()
    for choice in (plain, *shown):
        strategy = choice.prediction.strategy
        y = [curves.seconds(strategy, bit_s / link) for bit_s in x]
        style = {"color": "black", "width": 3} if choice is plain else {}
        name = choice.name + (" *" if choice.changes_training else "")
        figure.add_scatter(x=x, y=y, name=name, mode="lines", line=style)
    alone = [found.compute_s] * len(x)
    dotted = {"color": "grey", "dash": "dot"}
    figure.add_scatter(x=x, y=alone, name="computation alone", mode="lines", line=dotted)
    figure.add_vline(x=link, line_dash="dash", annotation_text=f"now: {rate(link)}")
    figure.update_layout(
        title=f"{found.workers} workers. {found.verdict}",
        xaxis={"title": "link, bit/s", "type": "log"},
        yaxis={"title": "step, s", "type": "log"},
        legend={"title": "* changes training"},
        template="plotly_white",
    )
    figure.write_html(path, include_plotlyjs=True)
