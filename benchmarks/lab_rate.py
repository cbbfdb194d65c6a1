"""How much of a shaped link's rate plain DDP reaches in the lab.

    python -m benchmarks.lab_rate [--rates 50,100,200,500] [--save]

Four hosts train an MLP (784-1024-1024-10) with DDP in fp32, as in benchmarks.network. The share is
what the kernel counted at the links over rate times the step's time less the computation that comes
before the first bucket is ready (forward and the last layers' backward: nothing can be sent yet).
The whole step's share is given, too.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks._network_worker import COMPUTE, FP32
from benchmarks._rows import command_line, keep
from benchmarks.network import launch, measure, ready


def rows_of(rates: list[str]) -> list[dict[str, Any]]:
    """One for each rate."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        net, run = launch(rates, Path(folder) / "start.pt", stack)
        assert net is not None
        for rate in rates:
            net.shape(float(rate))
            compute = measure(run, net, COMPUTE, 0)
            plain = measure(run, net, FP32, 0)
            possible = float(rate) * 1e6 / 8 * plain["ms"] / 1e3
            sending = possible * (1 - compute["ms"] / plain["ms"])
            rows.append(
                {
                    "rate_mbit": float(rate),
                    "ms": plain["ms"],
                    "compute_ms": compute["ms"],
                    "link_bytes": plain["link_bytes"],
                    "share_of_step": plain["link_bytes"] / possible,
                    "share": plain["link_bytes"] / sending,
                }
            )
    return rows


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--rates", default="50,100,200,500")
    options = parser.parse_args()
    ready()
    console, rows = Console(width=120), rows_of(options.rates.split(","))
    for row in rows:
        console.print({name: round(value, 3) for name, value in row.items()})
    keep("lab_rate", rows, options)


if __name__ == "__main__":
    main()
