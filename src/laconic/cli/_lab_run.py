"""laconic lab: what it does."""

from __future__ import annotations

import math
import threading
import time

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from laconic.cli._common import FAILED, INTERRUPTED, UNREAD, leave, print_json
from laconic.errors import ConfigError
from laconic.lab import Counters, Lab, RankError, missing
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
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"--timeout-s is above 0, not {timeout_s}")
    rates = parse_rates(rate, hosts)
    if missing() and can_enter():
        enter()
    start, echo = time.monotonic(), _Echo(hosts * ranks_per_host, stderr=as_json)
    try:
        with Lab(hosts=hosts) as net:
            net.shape(rates, burst_kb)
            before = net.counters()
            started = net.start(command, ranks_per_host=ranks_per_host, echo=echo)
            started.wait(timeout_s=timeout_s)
            grown = [a - b for a, b in zip(net.counters(), before, strict=True)]
    except RankError as error:
        if echo.unread:  # then ranks cannot write, and fail
            raise typer.Exit(UNREAD) from error
        leave(str(error).split(";")[0], error.status if error.status > 0 else 128 - error.status)
    except KeyboardInterrupt:
        leave("interrupted; everything was ended", INTERRUPTED)
    _report(grown, time.monotonic() - start, as_json)


class _Echo:
    """Shows ranks' lines as they come, which ranks' threads hand over."""

    def __init__(self, ranks: int, *, stderr: bool) -> None:
        self.unread = False  # whoever read our output has left
        self._console = Console(soft_wrap=True, stderr=stderr)
        self._lock, self._width = threading.Lock(), len(str(ranks - 1))

    def __call__(self, rank: int, line: str) -> None:
        front = Text(f"{rank:>{self._width}} │ ", style=_COLOURS[rank % len(_COLOURS)])
        with self._lock:  # lines of ranks do not mix
            try:
                self._console.print(front.append(line, style="none"))
            except SystemExit:  # rich's answer to a closed pipe
                self.unread = True
                raise


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
