"""laconic plan: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli._common import Force, Json, examples
from laconic.cli._names import (
    DEVICES,
    MACHINES,
    complete_device,
    complete_dtype,
    complete_machine,
)

EPILOG = examples(
    "laconic plan --probe probe.json",
    "laconic plan --probe probe.json --params 125m --compute 300ms --plot plan.html",
    "laconic plan --machine p4d.24xlarge --workers 64 --params 7b --compute 400ms --dtype bf16",
    "laconic plan --link 25gbit --latency 30us --gpus-per-node 8 --params 7b --compute 400ms",
)
_MODEL, _PAPER, _OUTPUT = "The model", "A cluster on paper", "What is shown"


def plan_command(
    probe: Annotated[
        Path | None, typer.Option(help="What laconic probe wrote: nothing of a cluster on paper.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="How many, 2 to 4096.", show_default="those of the probe; two nodes on paper"
        ),
    ] = None,
    error: Annotated[float, typer.Option(help="NMSE of the mean that you allow.")] = 0.1,
    params: Annotated[
        str | None,
        typer.Option(help="Of the model: 125m, 7b.", rich_help_panel=_MODEL),
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="A step alone: 400ms.", rich_help_panel=_MODEL)
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of gradients: fp32, bf16, fp16.",
            rich_help_panel=_MODEL,
            autocompletion=complete_dtype,
        ),
    ] = "fp32",
    machine: Annotated[
        str | None,
        typer.Option(
            help=f"Of these: {', '.join(MACHINES)}.",
            rich_help_panel=_PAPER,
            autocompletion=complete_machine,
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            "--link", "--rate", help="A node's NIC: 100mbit, 25gbit.", rich_help_panel=_PAPER
        ),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(help="Between nodes: 30us, 10ms.", rich_help_panel=_PAPER)
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Workers that share a NIC.", rich_help_panel=_PAPER)
    ] = None,
    inside: Annotated[
        str | None,
        typer.Option(
            help="Between workers of a node, one direction: 2400gbit.", rich_help_panel=_PAPER
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help=f"Of these: {', '.join(DEVICES)}.",
            show_default="the machine's, or h100",
            rich_help_panel=_PAPER,
            autocompletion=complete_device,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write step times over rates, HTML.", rich_help_panel=_OUTPUT),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All strategies.", rich_help_panel=_OUTPUT)
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict which strategies pay, and from which link rate on.

    From a probe with a model nothing else is needed. On paper, options change a machine's figures;
    without --machine give --link at least.
    """
    from laconic.cli._plan_run import Paperwork, run

    paper = Paperwork(
        machine=machine,
        device=device,
        link=link,
        latency=latency,
        gpus_per_node=gpus_per_node,
        inside=inside,
    )
    run(
        probe=probe,
        paper=paper,
        workers=workers,
        model=(params, compute, dtype),
        error=error,
        plot=plot,
        force=force,
        every=every,
        as_json=as_json,
    )
