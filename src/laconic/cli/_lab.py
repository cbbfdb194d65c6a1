"""laconic lab: run a command on hosts with shaped links."""

from __future__ import annotations

import json
import threading
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from laconic.cli._common import leave
from laconic.errors import LaconicError
from laconic.lab import Counters, Lab, Network, RankError, missing
from laconic.lab._rates import parse_rates
from laconic.lab._rootless import can_enter, enter

lab = typer.Typer(no_args_is_help=True, help="Several hosts with shaped links, on this machine.")

_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")
_A_DAY_S = 86400.0


@lab.command("check")
def lab_check() -> None:
    """Say what this machine lacks for a lab, if anything."""
    lacking = missing()
    if lacking and can_enter():
        print("A lab can run here without root, in a user namespace: laconic lab run does it.")
    elif lacking:
        print(lacking)
        raise typer.Exit(1)
    else:
        print("A lab can run here.")


@lab.command("run", context_settings=_WORDS)
def lab_run(
    context: typer.Context,
    hosts: Annotated[int, typer.Option(help="How many.")] = 4,
    rate: Annotated[
        str,
        typer.Option(help="Of links: 100mbit, 1gbit, none; up/down; commas for one each."),
    ] = "100mbit",
    ranks_per_host: Annotated[int, typer.Option(help="Processes on each host.")] = 1,
    burst_kb: Annotated[
        float | None, typer.Option(help="What an idle link lets through at once.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="End everything after so long.")] = _A_DAY_S,
    as_json: Annotated[bool, typer.Option("--json", help="End with a line of JSON.")] = False,
) -> None:
    """Run a command on every host, as torchrun would: laconic lab run -- python train.py

    Ranks get RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like. Their output is shown as it
    comes, with their number in front. If one fails, all are ended, and so is the lab, whatever
    happens; the exit status is that of the rank that failed.
    """
    command = context.args[1:] if context.args[:1] == ["--"] else context.args
    if not command:
        leave("give a command behind --: laconic lab run -- python train.py", 2)
    if missing() and can_enter():
        enter()
    start, grown = time.monotonic(), []
    try:
        rates = parse_rates(rate, hosts)
        with Lab(hosts=hosts) as net:
            net.shape(rates, burst_kb)
            before = net.counters()
            _run(net, command, ranks_per_host, timeout_s)
            grown = [a - b for a, b in zip(net.counters(), before, strict=True)]
    except RankError as error:
        leave(str(error).split(";")[0], error.status if error.status > 0 else 128 - error.status)
    except KeyboardInterrupt:
        leave("interrupted; everything was ended", 130)
    except (LaconicError, OSError) as error:
        leave(str(error), 1)
    _report(grown, time.monotonic() - start, as_json)


def _run(net: Network, command: list[str], ranks_per_host: int, timeout_s: float) -> None:
    """Until all ranks have ended well."""
    console, lock = Console(soft_wrap=True), threading.Lock()
    width = len(str(len(net.hosts) * ranks_per_host - 1))

    def echo(rank: int, line: str) -> None:
        front = Text(f"{rank:>{width}} │ ", style=_COLOURS[rank % len(_COLOURS)])
        with lock:  # lines of ranks do not mix
            console.print(front.append(line, style="none"))

    net.start(command, ranks_per_host=ranks_per_host, echo=echo).wait(timeout_s=timeout_s)


def _report(grown: list[Counters], seconds: float, as_json: bool) -> None:
    if as_json:
        links = [{"sent_bytes": g.sent_bytes, "received_bytes": g.received_bytes} for g in grown]
        print(json.dumps({"seconds": seconds, "links": links}))
        return
    table = Table(title=f"{seconds:.1f} s, and at the links")
    for name in ("host", "MB sent", "MB received"):
        table.add_column(name, justify="right")
    for host, one in enumerate(grown):
        table.add_row(str(host), f"{one.sent_bytes / 1e6:.2f}", f"{one.received_bytes / 1e6:.2f}")
    Console(stderr=True).print(table)
