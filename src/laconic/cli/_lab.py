"""laconic lab: run a command on emulated hosts with shaped links."""

from __future__ import annotations

import math
import threading
import time
from typing import Annotated

import typer

from laconic.cli._common import (
    FAILED,
    INTERRUPTED,
    UNREAD,
    Json,
    examples,
    exit_with,
    print_json,
    table,
)
from laconic.errors import ConfigError

lab = typer.Typer(
    invoke_without_command=True,
    epilog=examples(
        "laconic lab check",
        "laconic lab run --hosts 4 --rate 100mbit -- python train.py",
    ),
)
_A_DAY_S = 86400.0
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")


@lab.callback()
def lab_command(context: typer.Context) -> None:
    """Emulate several hosts with shaped links on this machine."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@lab.command("check", epilog=examples("laconic lab check", "laconic lab check --json"))
def lab_check(as_json: Json = False) -> None:
    """Check whether a lab can run here, and say what is missing; exit code 1 if it cannot."""
    from laconic.lab import missing
    from laconic.lab._requirements import can_enter

    lacking = missing()
    rootless = lacking is not None and can_enter()
    ready = lacking is None or rootless
    if as_json:
        print_json({"ready": ready, "user_namespace": rootless, "missing": lacking})
    elif rootless:
        print("A lab can run here without root: laconic lab run makes a user namespace for it.")
    else:
        print(lacking or "A lab can run here.")
    if not ready:
        raise typer.Exit(FAILED)


@lab.command(
    "run",
    context_settings={"allow_interspersed_args": False},  # options after the command are its own
    epilog=examples(
        "laconic lab run -- python train.py",
        "laconic lab run --hosts 4 --rate 20mbit/100mbit -- python train.py --epochs 3",
        "laconic lab run --hosts 2 --rate 1gbit,100mbit --ranks-per-host 2 -- python train.py",
    ),
)
def lab_run(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The command that every rank runs.", show_default=False),
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    rate: Annotated[
        str,
        typer.Option(
            help="Rate of the links: 100mbit, 1gbit or none; up/down; or one per host, separated "
            "by commas."
        ),
    ] = "100mbit",
    ranks_per_host: Annotated[int, typer.Option(help="Processes per host.")] = 1,
    burst_kb: Annotated[
        float | None,
        typer.Option(
            help="What an idle link passes at full speed.", show_default="2.5 ms of the rate"
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Stop all ranks after so long.")] = _A_DAY_S,
    as_json: Json = False,
) -> None:
    """Run a command on every host, as torchrun would.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like. The ranks' output is shown as it
    comes, prefixed with the rank (with --json on stderr). If a rank fails, all are stopped, the
    lab is removed, and the exit code is that of the rank that failed.
    """
    from laconic.lab import Lab, RankError
    from laconic.lab._rates import parse_rates
    from laconic.lab._requirements import missing_or_enter

    if not command:
        raise ConfigError("give a command after --: laconic lab run -- python train.py")
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"--timeout-s must be above 0, not {timeout_s}")
    rates = parse_rates(rate, hosts)
    missing_or_enter()
    start, echo = time.monotonic(), _Echo(hosts * ranks_per_host, stderr=as_json)
    try:
        with Lab(hosts=hosts) as net:
            net.shape(rates, burst_kb)
            before = net.counters()
            net.start(command, ranks_per_host=ranks_per_host, echo=echo).wait(timeout_s=timeout_s)
            links = [
                {
                    "sent_bytes": now.sent_bytes - then.sent_bytes,
                    "received_bytes": now.received_bytes - then.received_bytes,
                }
                for now, then in zip(net.counters(), before, strict=True)
            ]
    except RankError as error:
        if echo.unread:  # the ranks could not write, and failed
            raise typer.Exit(UNREAD) from error
        status = error.status if error.status > 0 else 128 - error.status
        exit_with(str(error).split(";")[0], status)
    except KeyboardInterrupt:
        exit_with("interrupted; all ranks were stopped", INTERRUPTED)
    _show(links, time.monotonic() - start, as_json)


class _Echo:
    """Shows lines of the ranks as they come, from the threads that read them."""

    def __init__(self, ranks: int, *, stderr: bool) -> None:
        from rich.console import Console

        self.unread = False  # the reader of our output has closed it
        self._console = Console(soft_wrap=True, stderr=stderr)
        self._lock, self._width = threading.Lock(), len(str(ranks - 1))

    def __call__(self, rank: int, line: str) -> None:
        from rich.text import Text

        prefix = Text(f"{rank:>{self._width}} │ ", style=_COLOURS[rank % len(_COLOURS)])
        with self._lock:  # lines of ranks do not mix
            try:
                self._console.print(prefix.append(line, style="none"))
            except SystemExit:  # rich's answer to a closed pipe
                self.unread = True
                raise


def _show(links: list[dict[str, int]], seconds: float, as_json: bool) -> None:
    if as_json:
        print_json({"seconds": seconds, "links": links})
        return
    from rich.console import Console

    rows = table(f"{seconds:.1f} s; traffic of the links", "host", "MB sent", "MB received")
    for host, link in enumerate(links):
        rows.add_row(str(host), *(f"{nbytes / 1e6:.2f}" for nbytes in link.values()))
    Console(stderr=True).print(rows)
