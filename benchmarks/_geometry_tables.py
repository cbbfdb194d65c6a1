"""The tables of docs/benchmarks.md that compare units in which gradients are encoded."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks._rows import markdown

Rows = list[dict[str, Any]]
_OPTIMIZERS = {
    "adamw": "AdamW",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "adafactor": "Adafactor",
    "muon": "Muon",
}
_PLACE = ("optimizer", "workers", "steps", "width", "layers", "batch", "pairs")
_HEADS = (
    "loss: mean (least to most; seeds)",
    "against plain, %: mean (least to most)",
    "bits per value",
    "steps clipped",
    "error, steps 1-20: plain / in units",
    "later",
    "largest of a tensor",
)


def sizes(rows: Rows) -> str:
    """Of the networks that were trained."""
    found = sorted({(row["layers"], row["width"], row["parameters"]) for row in rows})
    return "; ".join(f"{a} layers, width {b}, {c:,} parameters" for a, b, c in found)


def coders(rows: Rows) -> str:
    """Of ecdq."""
    found = sorted({row["device"] for row in rows})
    return " and ".join({"cpu": "`rans`", "cuda": "`bitmap` (on a GPU)"}[one] for one in found)


def tables(rows: Rows) -> str:
    """A table for each optimizer, number of workers and of steps."""
    places = dict.fromkeys(tuple(row.get(key, False) for key in _PLACE) for row in rows)
    found = [
        [row for row in rows if tuple(row.get(key, False) for key in _PLACE) == p] for p in places
    ]
    return "\n\n".join(_table(own) for own in found)


def _table(rows: Rows) -> str:
    first = rows[0]
    name = _OPTIMIZERS[first["optimizer"]]
    tokens = ", tokens of two characters" if first.get("pairs") else ""
    title = f"{name}, {first['workers']} workers, {first['steps']:,} steps{tokens}:"
    lines = []
    for rate in sorted({row["rate"] for row in rows}):
        own = [row for row in rows if row["rate"] == rate]
        plain = {row["seed"]: row["loss"] for row in own if row["strategy"] == "plain"}
        for strategy in dict.fromkeys(row["strategy"] for row in own):
            cells = _cells([row for row in own if row["strategy"] == strategy], plain)
            named = strategy if len({row["rate"] for row in rows}) == 1 else f"{strategy}, {rate:g}"
            lines.append([named, *cells])
    return title + "\n\n" + markdown(f"| | {' | '.join(_HEADS)} |", lines)


def _cells(rows: Rows, plain: dict[int, float]) -> list[str]:
    less = [100 * (r["loss"] / plain[r["seed"]] - 1) for r in rows if r["seed"] in plain]
    coded = rows[0]["codec"] is not None
    return [
        f"{_spread([row['loss'] for row in rows], '.4f')[:-1]}; {len(rows)})",
        _spread(less, "+.2f") if coded and less else "",
        f"{_mean(rows, 'bits'):.2f}",
        f"{_mean(rows, 'clipped'):.0%}",
        _pair(rows, "early") if coded else "",
        _pair(rows, "late") if coded else "",
        _largest(rows) if coded else "",
    ]


def _spread(values: list[float], form: str) -> str:
    mean, least, most = statistics.mean(values), min(values), max(values)
    return f"{mean:{form}} ({least:{form}} to {most:{form}})"


def _mean(rows: Rows, key: str) -> float:
    """NaN where no run was long enough to measure it."""
    found = [row[key] for row in rows if row[key] is not None]
    return statistics.mean(found) if found else float("nan")


def _pair(rows: Rows, when: str) -> str:
    plain, units = _mean(rows, f"error_{when}"), _mean(rows, f"unit_error_{when}")
    shown = f"{units:.3g}" if units == units else "-"  # an optimizer that divides by zero
    return f"{plain:.3g} / {shown}" if plain == plain else ""


def _largest(rows: Rows) -> str:
    found = [row["largest_error"] for row in rows if row["largest_error"] is not None]
    return f"{max(found):.2g}" if found else ""
