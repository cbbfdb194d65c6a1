"""What "auto" costs where nothing is to be won, and how near it comes where much is.

    python -m benchmarks.auto [--rates loopback,100] [--rounds 6] [--save]

The training of benchmarks.network. On the loopback interface plain DDP and auto take turns, each
time a new model; auto's steps count from its decision on. Over shaped links every fixed strategy
that auto may choose is measured, plain first and last; then the fastest and auto take turns.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks._network_worker import FP32, UNTIL_KAPPA
from benchmarks._rows import command_line, keep, quantiles
from benchmarks.network import LOOPBACK, ask, launch, measure, parsed, per_step, ready

AUTO = "auto"
FIXED = (
    FP32,
    "fp16",
    "ecdq:error=0.08",
    "dqsg:bits=4",
    "dqsg:bits=8",
    "global:bits=8",
    FP32,
)
_DECIDED = 40  # steps: auto's first trial is over, even one that was in doubt
_TURN = 40  # steps of a turn
_TURNS = 2  # of auto and the best fixed strategy, over a shaped link


def decided(run: Any) -> dict[str, Any]:
    """A new model with auto, and the steps until it has chosen; rank 0's report."""
    ask(run, {"prepare": AUTO})
    ask(run, {"steps": _DECIDED - UNTIL_KAPPA})
    return ask(run, {"report": True})[0]


def turns(run: Any, rounds: int, console: Console) -> list[dict[str, Any]]:
    """Plain and auto alternately; which is first alternates, too."""
    seconds: dict[str, list[float]] = {FP32: [], AUTO: []}
    ratios, reports = [], []
    for number in range(rounds):
        took = {}
        for strategy in (FP32, AUTO) if number % 2 else (AUTO, FP32):
            if strategy == AUTO:
                reports.append(decided(run))
            else:
                ask(run, {"prepare": FP32})
            found = per_step(ask(run, {"steps": _TURN}))
            seconds[strategy] += found
            took[strategy] = statistics.median(found)
        ratios.append(took[FP32] / took[AUTO])
        console.print(f"{ratios[-1]:.3f} of plain's speed  {reports[-1]['line']}")
    whole = statistics.median(seconds[FP32]) / statistics.median(seconds[AUTO])
    console.print(f"loopback: {whole:.3f} of plain's speed; rounds {sorted(ratios)}")
    choices = {"choices": [report["choice"] for report in reports]}
    return [
        {"rate": LOOPBACK, "strategy": FP32} | quantiles(seconds[FP32]),
        {"rate": LOOPBACK, "strategy": AUTO, "of_plain": whole, "rounds": ratios, **choices}
        | quantiles(seconds[AUTO]),
    ]


def beside_fixed(run: Any, net: Any, rate: str, console: Console) -> list[dict[str, Any]]:
    """Every strategy, then auto and the fastest of them."""
    report: dict[str, Any] = {}
    rows = [measure(run, net, strategy, 0) for strategy in FIXED]
    best = min(rows, key=lambda row: row["ms"])["strategy"]
    seconds: dict[str, list[float]] = {best: [], AUTO: []}
    for _ in range(_TURNS):
        ask(run, {"prepare": best})
        seconds[best] += per_step(ask(run, {"steps": _TURN}))
        report = decided(run)
        seconds[AUTO] += per_step(ask(run, {"steps": _TURN}))
    again: dict[str, Any] = {"strategy": f"{best} in turns"} | quantiles(seconds[best])
    mine: dict[str, Any] = {"strategy": AUTO} | quantiles(seconds[AUTO])
    mine |= {"of_best": again["ms"] / mine["ms"], "best": best} | report
    rows += [again, mine]
    for row in rows:
        console.print(f"{rate} Mbit/s  {row['strategy']:26} {row['ms']:8.1f} ms per step")
    console.print(f"{report['line']}; from step {report['step']}")
    console.print(f"{mine['of_best']:.3f} of the speed of {best}")
    return [
        {"rate": rate} | {name: value for name, value in row.items() if name != "seconds"}
        for row in rows
    ]


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument("--rates", type=parsed, default="loopback,100")
    parser.add_argument("--rounds", type=int, default=6, help="turns on the loopback interface")
    options = parser.parse_args()
    ready(options.rates)
    console, rows = Console(width=140), []
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.pt"
        for rate in options.rates:
            with ExitStack() as stack:
                net, run = launch([rate], start, stack)
                if net is None:
                    rows += turns(run, options.rounds, console)
                else:
                    net.shape(float(rate))
                    rows += beside_fixed(run, net, rate, console)
    keep("auto", rows, options)


if __name__ == "__main__":
    main()
