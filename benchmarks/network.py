"""Steps of training over links of several rates: time, and bytes at the link.

    python -m benchmarks.network [--rates 100,1000] [--steps N] [--schedules | --units] [--save]

Four hosts in the lab, each link shaped in both directions; "loopback" is four processes without
hosts. An MLP (784-1024-1024-10) learns Fashion-MNIST in batches of 64 per worker; every strategy
starts from the same weights, those after 200 plain steps. fp32 is measured first and last, and the
others are compared with both together. Time is a step's mean over ranks. Bytes are those that a
host sent through its link, counted by the kernel, and those that the hook says it sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import _fashion
from benchmarks._network_worker import ADAMW, COMPUTE, COUNTED, FP16, FP32, SSD, UNITS
from benchmarks._rows import command_line, keep, quantiles, view
from laconic import lab

HOSTS = 4
LOOPBACK = "loopback"
SPECS = (
    "qsgd:bits=4",
    "dqsg:bits=4",
    "global:bits=8",
    "ecdq:error=0.08",
    "ecdq:error=0.08,coder=rans",
)
ORDER = (FP32, COMPUTE, FP16, *SPECS, FP32)
SCHEDULES = (
    FP32,
    COMPUTE,
    "ecdq:error=0.08",
    *(f"ssd k={k}" for k in (1, 2, 4, 8)),
    "ssd k=4 dqsg:bits=4",
    "ssd k=4 ecdq:error=0.08",
    FP32,
)
_ECDQ = "ecdq:error=0.08"
IN_UNITS = (  # in turns: what is compared differs by less than the machine's hours do
    ADAMW + FP32,
    *4 * (ADAMW + _ECDQ, ADAMW + UNITS + _ECDQ),
    ADAMW + FP32,
)
_MOST, _FEWEST, _SECONDS = 40, 12, 3.0  # steps of a strategy: as many as last so long
_PATIENCE_S = 400.0


def ask(run: lab.Run, job: dict[str, Any], patience_s: float = _PATIENCE_S) -> list[dict[str, Any]]:
    """Every rank's answer."""
    run.send(json.dumps(job))
    return [json.loads(line) for line in run.receive(timeout_s=patience_s)]


def measure(run: lab.Run, net: lab.Network | None, strategy: str, steps: int) -> dict[str, Any]:
    """One strategy at the present rate; all per step."""
    seconds = per_step(ask(run, {"prepare": strategy}))
    steps = steps or max(_FEWEST, min(_MOST, round(_SECONDS / seconds[-1])))
    if strategy.startswith(SSD):
        steps = -(-steps // 8) * 8  # whole periods
    if ADAMW in strategy:
        steps = -(-steps // 16) * 16  # whole periods of a snapshot
    before = net.counters() if net else ()
    answers = ask(run, {"steps": steps})
    grown = [a - b for a, b in zip(net.counters() if net else (), before, strict=True)]
    seconds = per_step(answers)
    row: dict[str, Any] = {"strategy": strategy, "steps": steps, "seconds": seconds}
    row |= quantiles(seconds)
    row["mean_ms"] = 1e3 * statistics.mean(seconds)
    if grown:
        row["link_bytes"] = statistics.mean(one.sent_bytes for one in grown) / steps
    if all(name in answers[0] for name in COUNTED):
        sent, exchange, wire = (
            statistics.mean(answer[name] for answer in answers) / steps for name in COUNTED
        )
        row |= {"sent_bytes": sent, "exchange_ms": 1e3 * exchange, "wire_ms": 1e3 * wire}
    return row


def per_step(answers: list[dict[str, Any]]) -> list[float]:
    """Seconds of every step, as a mean over ranks."""
    return [statistics.mean(step) for step in zip(*(a["seconds"] for a in answers), strict=True)]


def compared(rate: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their rate and their speed relative to fp32, first and last together."""
    plain = [s for row in rows if row["strategy"].endswith(FP32) for s in row["seconds"]]
    middle = 1e3 * statistics.median(plain)
    return [
        {"rate": rate, "times_faster": middle / row["ms"]}
        | {name: value for name, value in row.items() if name != "seconds"}
        for row in rows
    ]


def measure_all(
    rates: list[str], order: tuple[str, ...], steps: int, console: Console
) -> list[dict[str, Any]]:
    """Rows of all strategies at all rates; the workers of the lab stay up from rate to rate."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.pt"
        for group in ([r for r in rates if r != LOOPBACK], [r for r in rates if r == LOOPBACK]):
            with ExitStack() as stack:
                net, run = launch(group, start, stack)
                for rate in group:
                    if net:
                        net.shape(*map(float, rate.split("/")))
                    found = [measure(run, net, strategy, steps) for strategy in order]
                    rows += compared(rate, found)
                    console.print(table(rate, rows[-len(order) :]))
    return rows


def launch(group: list[str], start: Path, stack: ExitStack) -> tuple[lab.Network | None, Any]:
    """Workers that are ready, in a lab without a limit yet or on the loopback interface."""
    if not group:
        return None, None
    net: Any = stack.enter_context(
        lab.Loopback(hosts=HOSTS) if LOOPBACK in group else lab.Lab(hosts=HOSTS)
    )
    command = [sys.executable, "-m", "benchmarks._network_worker", str(start)]
    run = net.start(command, talk=True)
    run.receive(timeout_s=_PATIENCE_S)
    return (None if LOOPBACK in group else net), run


def table(rate: str, rows: list[dict[str, Any]]) -> Table:
    """One rate's rows for a terminal."""
    mbit, _, burst = rate.partition("/")
    title = f"{mbit} Mbit/s" + (f", bursts of {burst} KB" if burst else "")
    if rate == LOOPBACK:
        title = "loopback, unshaped"
    heads = ("strategy", "ms", "quartiles", "mean", "times\nfaster", "KB at\nthe link")
    heads += ("KB by\nstats()", "exchange\nms", "of it\nwire ms", "steps")
    found = view(f"{HOSTS} hosts, {title}; all a step", heads)
    for row in rows:
        found.add_row(
            row["strategy"],
            f"{row['ms']:.1f}",
            f"{row['ms_q1']:.1f}-{row['ms_q3']:.1f}",
            f"{row['mean_ms']:.1f}",
            f"{row['times_faster']:.2f}",
            *(
                f"{row[name] / scale:.{digits}f}" if name in row else ""
                for name, scale, digits in (
                    ("link_bytes", 1e3, 1),
                    ("sent_bytes", 1e3, 1),
                    ("exchange_ms", 1, 1),
                    ("wire_ms", 1, 1),
                )
            ),
            str(row["steps"]),
        )
    return found


def parsed(text: str) -> list[str]:
    """Rates as given on the command line."""
    rates = [one.strip() for one in text.split(",")]
    for rate in rates:
        if rate != LOOPBACK:
            [float(part) for part in rate.split("/")]
    if len(set(rates)) < len(rates):
        raise argparse.ArgumentTypeError("a rate is named twice")
    return rates


def ready(rates: list[str] | None = None) -> None:
    """Data and a lab are there (or rates need none), and one thread as on the workers: rows say."""
    _fashion.check()
    if (lacking := lab.missing()) and set(rates or ()) != {LOOPBACK}:
        sys.exit(f"{lacking} Without a lab there is still --rates loopback." if rates else lacking)
    torch.set_num_threads(1)


def main() -> None:
    """Measure, print, and save if asked."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--rates",
        type=parsed,
        default="100,1000",
        help="Mbit/s, or with the link's burst in KB as in 100/256, or loopback",
    )
    parser.add_argument("--steps", type=int, default=0, help="of each strategy; 0: by their length")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--schedules", action="store_true", help="SSD-SGD instead of codecs")
    kinds.add_argument("--units", action="store_true", help="ecdq with and without optimizer=")
    options = parser.parse_args()
    ready(options.rates)
    console = Console(width=120)
    order = SCHEDULES if options.schedules else IN_UNITS if options.units else ORDER
    rows = measure_all(options.rates, order, options.steps, console)
    keep({SCHEDULES: "schedules", IN_UNITS: "network_units"}.get(order, "network"), rows, options)


if __name__ == "__main__":
    main()
