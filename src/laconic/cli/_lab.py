"""laconic lab: run a command on hosts with shaped links."""

from __future__ import annotations

from typing import Annotated

import typer

from laconic.cli._common import Json, examples

_A_DAY_S = 86400.0

lab = typer.Typer(
    invoke_without_command=True,
    epilog=examples(
        "laconic lab check",
        "laconic lab run --hosts 4 --rate 100mbit -- python train.py",
    ),
)


@lab.callback()
def lab_command(context: typer.Context) -> None:
    """Several hosts with shaped links, on this machine."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@lab.command("check", epilog=examples("laconic lab check", "laconic lab check --json"))
def lab_check(as_json: Json = False) -> None:
    """Say what this machine lacks for a lab, if anything: the exit code is 1 if it does."""
    from laconic.cli._lab_run import check

    check(as_json)


@lab.command(
    "run",
    context_settings={"allow_interspersed_args": False},  # what follows the command is its own
    epilog=examples(
        "laconic lab run -- python train.py",
        "laconic lab run --hosts 4 --rate 20mbit/100mbit -- python train.py --epochs 3",
        "laconic lab run --hosts 2 --rate 1gbit,100mbit --ranks-per-host 2 -- python train.py",
    ),
)
def lab_run(
    command: Annotated[
        list[str] | None, typer.Argument(help="What every rank runs.", show_default=False)
    ] = None,
    hosts: Annotated[int, typer.Option(help="How many.")] = 4,
    rate: Annotated[
        str,
        typer.Option(help="Of links: 100mbit, 1gbit, none; up/down; commas for one each."),
    ] = "100mbit",
    ranks_per_host: Annotated[int, typer.Option(help="Processes on each host.")] = 1,
    burst_kb: Annotated[
        float | None,
        typer.Option(
            help="What an idle link lets through at once.", show_default="2.5 ms of the rate"
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="End everything after so long.")] = _A_DAY_S,
    as_json: Json = False,
) -> None:
    """Run a command on every host, as torchrun would.

    Ranks get RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like. Their output is shown as it
    comes, with their number in front (with --json on stderr). If one fails, all are ended, and so
    is the lab, whatever happens; the exit code is that of the rank that failed.
    """
    from laconic.cli._lab_run import run

    run(
        command or [],
        hosts=hosts,
        rate=rate,
        ranks_per_host=ranks_per_host,
        burst_kb=burst_kb,
        timeout_s=timeout_s,
        as_json=as_json,
    )
