"""Whether `error=` is kept: the mean's error over shapes of gradients and numbers of ranks.

    python -m benchmarks.budget [--save] [--steps 12]

Every exchange runs as it is, on ranks that are threads of one process (`_ranks.py`), step after
step, with what it remembers. The error of a step is ‖result - mean‖²/‖mean‖² against the exact mean
in fp64; `mean` and `largest` are over steps, in units of the budget. Bits are what a rank sends per
value, both ways together, over 2(n-1)/n of the values.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks._gradients import KINDS, gradients
from benchmarks._ranks import World
from benchmarks._rows import command_line, keep
from laconic.exchanges._error_report import budget_report

RANKS = (2, 3, 5, 8)
SPECS = ("ecdq:error=0.08", "ecdq:error=0.08,coder=rans", "ecdq:error=0.08@allgather")
WORDS = "embedding 50,000 x 128"  # 16 rows of each rank have gradients


def words(ranks: int, step: int) -> list[Tensor]:
    """Gradients of a large embedding."""
    found = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.zeros(50_000, 128)
        rows = torch.randint(50_000, (16,), generator=generator)
        x[rows] = torch.randn(16, 128, generator=generator)
        found.append(x)
    return found


def row(kind: str, ranks: int, spec: str, steps: int) -> dict[str, Any]:
    """Some steps of one run."""
    errors, values = [], 0
    with World(spec, ranks) as world:
        for step in range(steps):
            given = words(ranks, step) if kind == WORDS else gradients(kind, ranks, step)
            xs = [x.flatten() for x in given]
            exact = torch.stack([x.double() for x in xs]).mean(0)
            values += exact.numel()
            found = world.mean(xs, [exact.numel()], step).double()
            errors.append(float((found - exact).square().sum() / exact.square().sum()))
    report, budget = budget_report(world.memories[0]), world.codec.budget or 0.0
    sent = sum(own.sent_bytes for own in world.traffic) / ranks
    return {
        "kind": kind,
        "ranks": ranks,
        "spec": spec,
        "budget": budget,
        "mean": sum(errors) / len(errors) / budget,
        "largest": max(errors) / budget,
        "exact_means": report.fallbacks if report else 0,
        "bits": 8 * sent / values / (2 * (ranks - 1) / ranks),
        "steps": steps,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    table = Table("gradients", "ranks", "codec", "mean/E", "largest/E", "exact", "bits per value")
    rows = []
    for kind in (*KINDS, WORDS):
        for ranks in RANKS:
            for spec in SPECS if kind != WORDS else SPECS[:1]:
                rows.append(row(kind, ranks, spec, options.steps))
                one = rows[-1]
                said = (f"{one['mean']:.2f}", f"{one['largest']:.2f}", str(one["exact_means"]))
                table.add_row(kind, str(ranks), spec, *said, f"{one['bits']:.2f}")
    Console().print(table)
    keep("budget", rows, options)


if __name__ == "__main__":
    main()
