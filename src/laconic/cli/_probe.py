"""laconic probe: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laconic.cli._common import Force, Json, examples
from laconic.cli._names import complete_codecs

EPILOG = examples(
    "torchrun --nnodes 4 --nproc-per-node 8 ... -m laconic probe --out probe.json",
    "torchrun --nproc-per-node 2 -m laconic probe --model train:setup --out probe.json",
    "laconic lab run --hosts 4 --rate 100mbit -- laconic probe --out probe.json",
    title="Then: laconic plan --probe probe.json",
)


def probe_command(
    model: Annotated[
        str | None,
        typer.Option(help="module:function that returns (model, loss) or (.., optimizer)."),
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            help="To measure, with commas between them.",
            show_default="ten of the usual ones",
            autocompletion=complete_codecs,
        ),
    ] = None,
    patience_s: Annotated[
        float, typer.Option("--seconds", help="About how long; slow links take longer.")
    ] = 30.0,
    out: Annotated[Path | None, typer.Option(help="A file for laconic plan --probe.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure links, devices, codecs and a model, on all ranks at once.

    A model's function returns the model and a function of it that computes the loss of a new
    batch.
    """
    from laconic.cli._probe_run import run

    run(
        model=model,
        codecs=codecs,
        patience_s=patience_s,
        out=out,
        force=force,
        as_json=as_json,
    )
