"""Tables of what the planner predicts, of auto, and of the lab's links."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks._rows import load, markdown
from benchmarks._scatter_plot import Point, svg
from benchmarks.network import LOOPBACK
from benchmarks.predicted import missed, off, summary
from laconic._files import write_whole

PLOT = Path(__file__).parent.parent / "docs" / "predicted.svg"


def write_plot() -> None:
    """docs/predicted.svg."""
    points = [
        Point(
            row["strategy"],
            row["measured_ms"],
            row["predicted_ms"],
            f"{row['config']}, {row['strategy']}",
        )
        for row in load("predicted")["rows"]
    ]
    write_whole(PLOT, svg(points, "A step's time, predicted from a probe and measured"))


def predicted() -> str:
    """Predicted / measured ms of every strategy in every configuration."""
    found = load("predicted")["rows"]
    strategies = list(dict.fromkeys(row["strategy"] for row in found))
    lines = []
    for config in dict.fromkeys(row["config"] for row in found):
        own = {row["strategy"]: row for row in found if row["config"] == config}
        cells = [_cell(own[name]) for name in strategies]
        lines.append([_config(config), *cells, f"{missed(list(own.values())):.0%}"])
    names = " | ".join(strategies)
    return markdown(
        f"| hosts x Mbit/s, network | {names} | best predicted, above the best |", lines
    )


def predicted_summary() -> str:
    """In a sentence."""
    told = summary(load("predicted")["rows"])
    places, right = told["configurations"], told["best within 10%"]
    return (
        f"{told['predictions']} predictions in {places} configurations: the median error is "
        f"{told['median']:.1%}, the 90th percentile {told['p90']:.1%}. The strategy that was "
        f"predicted to be best is within 10% of the best one in {right} of {places}."
    )


def _cell(row: dict[str, Any]) -> str:
    return f"{row['predicted_ms']:.0f} / {row['measured_ms']:.0f} ({off(row):+.0%})"


def _config(text: str) -> str:
    place, network = text.split(":")
    hosts, rate = place.split("x")
    return f"{hosts} x {rate}, {network}"


def auto() -> str:
    """A line for each strategy and rate."""
    lines = []
    for row in load("auto")["rows"]:
        link = row["rate"] if row["rate"] == LOOPBACK else f"{row['rate']} Mbit/s"
        told = ""
        if "of_plain" in row:
            rounds = sorted(row["rounds"])
            told = f"{statistics.median(rounds):.3f} of plain DDP's speed, median of rounds "
            told += (
                f"({rounds[0]:.3f}-{rounds[-1]:.3f}; all steps together {row['of_plain']:.3f}); "
            )
            told += f"chose {_chosen(row['choices'])}"
        elif "of_best" in row:
            told = f"{row['of_best']:.3f} of {row['best']}'s speed; chose {row['choice']}"
            told += f" from step {row['step']}"
        times = f"{row['ms']:.1f} ({row['ms_q1']:.1f}-{row['ms_q3']:.1f})"
        lines.append([link, row["strategy"], times, told])
    return markdown("| link | strategy | ms per step (quartiles) | |", lines)


def _chosen(choices: list[str]) -> str:
    names = {"none": "plain DDP"}
    return ", ".join(
        f"{names.get(one, one)} in {choices.count(one)} of {len(choices)} rounds"
        for one in dict.fromkeys(choices)
    )


def lab_rate() -> str:
    """Shares of links' rates."""
    head = "| Mbit/s | ms per step | of them computation | share of the rate | of the whole step |"
    lines = []
    for row in load("lab_rate")["rows"]:
        times = (f"{row[name]:.0f}" for name in ("rate_mbit", "ms", "compute_ms"))
        lines.append([*times, f"{row['share']:.1%}", f"{row['share_of_step']:.1%}"])
    return markdown(head, lines)
