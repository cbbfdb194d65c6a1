"""How long until it has learnt? Seconds to 88% on Fashion-MNIST over shaped links.

    python -m benchmarks.time_to_accuracy [--rates 100,1000] [--goal 0.88] [--save]

Four hosts in the lab, as in benchmarks.network: an MLP (784-1024-1024-10), batches of 64 each,
SGD with momentum 0.9, the rate 0.1 after 20 steps and falling to 0 over 700; every strategy from
the same random weights. The test part is looked at every 20 steps; looking is not timed, but for
SSD what is under way is waited for before it, and that is.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import _fashion
from benchmarks._network_worker import FP16, FP32
from benchmarks._rows import command_line, save, view
from benchmarks.network import HOSTS, ask, launch
from laconic import lab

EVERY, MOST = 20, 700
STRATEGIES = (
    "ssd k=4 ecdq:error=0.08",
    "ecdq:error=0.08",
    FP32,
    FP16,
    "ssd k=4",
)


def reach(run: lab.Run, strategy: str, goal: float, seconds: float) -> dict[str, Any]:
    """One strategy at the present rate."""
    job = {"reach": goal, "strategy": strategy, "every": EVERY, "most": MOST, "seconds": seconds}
    answers = ask(run, job, seconds + 300)
    steps, spent, accuracy = answers[0]["seen"][-1]
    return {
        "strategy": strategy,
        "reached": answers[0]["reached"],
        "steps": steps,
        "seconds": spent,
        "accuracy": accuracy,
        "step_ms": 1e3 * spent / steps,
    }


def main() -> None:
    """Run all, print and keep."""
    parser = command_line(__doc__)
    parser.add_argument("--rates", default="100,1000")
    parser.add_argument("--goal", type=float, default=0.88)
    parser.add_argument("--seconds", type=float, default=600.0, help="the most for a strategy")
    options = parser.parse_args()
    _fashion.check()
    console, rows = Console(), []
    rates = options.rates.split(",")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        net, run = launch(rates, Path(folder) / "start.pt", stack)
        assert net is not None
        for rate in rates:
            net.shape(*map(float, rate.split("/")))
            found = []
            for strategy in STRATEGIES:
                row = reach(run, strategy, options.goal, options.seconds)
                found.append({"rate": rate, "goal": options.goal, **row})
                console.print(found[-1])
            rows += found
            console.print(table(rate, found))
            if options.save:
                save("time_to_accuracy", rows)  # what is there, should the rest be cut


def table(rate: str, rows: list[dict[str, Any]]) -> Table:
    """One rate's rows for a terminal."""
    heads = ("strategy", "seconds", "steps", "ms per step", "accuracy")
    found = view(f"{HOSTS} hosts, {rate} Mbit/s", heads)
    for row in rows:
        spent = f"{row['seconds']:.1f}" if row["reached"] else f"not in {row['seconds']:.0f}"
        ms, right = f"{row['step_ms']:.0f}", f"{row['accuracy']:.4f}"
        found.add_row(row["strategy"], spent, str(row["steps"]), ms, right)
    return found


if __name__ == "__main__":
    main()
