"""laconic bench: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from laconic.cli._common import Json, examples
from laconic.cli._names import complete_codecs, complete_dtype

EPILOG = examples(
    "laconic bench",
    "laconic bench --codecs dqsg:bits=4,ecdq:error=0.08,coder=rans --values 64m",
    "laconic bench --device cuda --dtype bf16 --json",
)


def bench_command(
    codecs: Annotated[
        str | None,
        typer.Option(
            help="To measure, with commas between them.",
            show_default="all, at the usual settings",
            autocompletion=complete_codecs,
        ),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(help="Of the tensor: 16m.", show_default="16m; on a GPU 64m"),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="fp32, bf16 or fp16.", autocompletion=complete_dtype)
    ] = "fp32",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="both, if there is a GPU")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="On the CPU.", show_default="as many as torch uses")
    ] = None,
    patience_s: Annotated[
        float, typer.Option("--seconds", help="About how long, for each device.")
    ] = 20.0,
    as_json: Json = False,
) -> None:
    """Measure codecs on this machine, beside a memory copy.

    Encoding makes the whole wire; decoding adds onto a tensor, as training does. Rounds in turns,
    each codec once in every round: medians, and the range from the 10th to the 90th percentile.
    """
    from laconic.cli._bench_run import run

    run(
        codecs=codecs,
        values=values,
        dtype=dtype,
        device=device,
        threads=threads,
        patience_s=patience_s,
        as_json=as_json,
    )
