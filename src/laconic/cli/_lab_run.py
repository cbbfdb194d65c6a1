"""laconic lab: what it does."""

from __future__ import annotations

import threading
import time

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from laconic.cli._common import FAILED, INTERRUPTED, leave, print_json
from laconic.errors import ConfigError
from laconic.lab import Counters, Lab, Network, RankError, missing
from laconic.lab._rates import parse_rates
from laconic.lab._rootless import can_enter, enter

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


def check(as_json: bool) -> None:
    """Say whether a lab can run here, and how."""
    lacking = missing()
    rootless = lacking is not None and can_enter()
    ready = lacking is None or rootless
    if as_json:
        print_json({"ready": ready, "user_namespace": rootless, "missing": lacking})
    elif rootless:
        print("A lab can run here without root, in a user namespace: laconic lab run does it.")
    else:
        print(lacking or "A lab can run here.")
    if not ready:
        raise typer.Exit(FAILED)


def run(
    command: list[str],
    *,
    hosts: int,
    rate: str,
    ranks_per_host: int,
    burst_kb: float | None,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Until all ranks have ended; the exit code is that of the first that fails."""
    if not command:
        raise ConfigError("give a command behind --: laconic lab run -- python train.py")
    rates = parse_rates(rate, hosts)
    if missing() and can_enter():
        enter()
    start = time.monotonic()
    try:
        with Lab(hosts=hosts) as net:
            net.shape(rates, burst_kb)
            before = net.counters()
            _run(net, command, ranks_per_host, timeout_s, Console(soft_wrap=True, stderr=as_json))
            grown = [a - b for a, b in zip(net.counters(), before, strict=True)]
    except RankError as error:
        leave(str(error).split(";")[0], error.status if error.status > 0 else 128 - error.status)
    except KeyboardInterrupt:
        leave("interrupted; everything was ended", INTERRUPTED)
    _report(grown, time.monotonic() - start, as_json)


def _run(
    net: Network, command: list[str], ranks_per_host: int, timeout_s: float, console: Console
) -> None:
    lock = threading.Lock()
    width = len(str(len(net.hosts) * ranks_per_host - 1))

    def echo(rank: int, line: str) -> None:
        front = Text(f"{rank:>{width}} │ ", style=_COLOURS[rank % len(_COLOURS)])
        with lock:  # lines of ranks do not mix
            console.print(front.append(line, style="none"))

    net.start(command, ranks_per_host=ranks_per_host, echo=echo).wait(timeout_s=timeout_s)


def _report(grown: list[Counters], seconds: float, as_json: bool) -> None:
    if as_json:
        links = [{"sent_bytes": g.sent_bytes, "received_bytes": g.received_bytes} for g in grown]
        print_json({"seconds": seconds, "links": links})
        return
    table = Table(title=f"{seconds:.1f} s, and at the links")
    for name in ("host", "MB sent", "MB received"):
        table.add_column(name, justify="right")
    for host, one in enumerate(grown):
        table.add_row(str(host), f"{one.sent_bytes / 1e6:.2f}", f"{one.received_bytes / 1e6:.2f}")
    Console(stderr=True).print(table)
