"""laconic race: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli._common import Force, Json, examples
from laconic.cli._names import STRATEGIES, complete_strategies

EPILOG = examples(
    "laconic race",
    "laconic race --rate 1gbit --strategies fp32,dqsg,ecdq:error=0.05,ssd+dqsg",
    "laconic race --data cifar10 --folder ~/data --save race.json",
    title="Stopped with --save, the same command goes on.",
)

_WHAT, _WHERE, _OUT = "What is learnt", "Where", "What comes out"


def race_command(
    strategies: Annotated[
        str,
        typer.Option(
            help="Commas between; also ssd+CODEC and any text of lc.compress.",
            autocompletion=complete_strategies,
        ),
    ] = ",".join(STRATEGIES),
    data: Annotated[
        str, typer.Option(help="digits, fashion-mnist or cifar10.", rich_help_panel=_WHAT)
    ] = "digits",
    folder: Annotated[
        Path | None,
        typer.Option(help="With the data's files, or torchvision's.", rich_help_panel=_WHAT),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Of each strategy; digits take 80.", rich_help_panel=_WHAT)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Pictures of a worker, a step.", rich_help_panel=_WHAT)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="The highest learning rate.", rich_help_panel=_WHAT)
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="The accuracy to race to; for digits 0.97.", rich_help_panel=_WHAT),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of weights, batches and draws.", rich_help_panel=_WHAT)
    ] = 0,
    workers: Annotated[
        int, typer.Option(help="Each a host of its own.", rich_help_panel=_WHERE)
    ] = 4,
    rate: Annotated[
        str,
        typer.Option(
            help="Of links: 100mbit, 1gbit, none; up/down; commas for one each.",
            rich_help_panel=_WHERE,
        ),
    ] = "100mbit",
    save: Annotated[
        Path | None,
        typer.Option(help="Keep results in this file, and resume from it.", rich_help_panel=_OUT),
    ] = None,
    report: Annotated[
        Path, typer.Option(help="Where the page of figures goes.", rich_help_panel=_OUT)
    ] = Path("report.html"),
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Write no page.", rich_help_panel=_OUT)
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train the same network with several strategies over thin links, and say which one paid.

    Real processes and real collectives, each worker a host with a shaped link, on this machine.
    Where links cannot be shaped, it says so, and shows bytes and predicted times instead.
    """
    from laconic.cli._race_run import Wishes, run

    run(
        Wishes(
            strategies=strategies,
            data=data,
            folder=folder,
            steps=steps,
            batch=batch,
            lr=lr,
            target=target,
            seed=seed,
            workers=workers,
            rate=rate,
            save=save,
            report=None if no_report else report,
            force=force,
            as_json=as_json,
        )
    )
