"""laconic bench: measure codecs on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from laconic._progress import part
from laconic._units import parse_count, seconds
from laconic.cli._common import (
    Json,
    Quiet,
    console,
    examples,
    print_json,
    progress,
    split_codecs,
    table,
)
from laconic.cli._names import NAMES, complete

if TYPE_CHECKING:
    from laconic.bench import Bench, Timing

EPILOG = examples(
    "laconic bench",
    "laconic bench --codecs dqsg:bits=4,ecdq:error=0.08,coder=rans --values 64m",
    "laconic bench --device cuda --dtype bf16 --json",
)
_WIDTH = 120


def bench_command(
    codecs: Annotated[
        str | None,
        typer.Option(
            help="Codecs to measure, separated by commas.",
            show_default="all, with their usual settings",
            autocompletion=complete("codecs", "wrappers", listed=True),
        ),
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(help="Size of the tensor: 16m.", show_default="16m; on a GPU 64m"),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help=f"Type of the tensor: {', '.join(NAMES['dtypes'])}.",
            autocompletion=complete("dtypes"),
        ),
    ] = "fp32",
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="both, if there is a GPU")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads.", show_default="as many as torch uses")
    ] = None,
    patience_s: Annotated[
        float, typer.Option("--seconds", help="Approximate duration per device.")
    ] = 20.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure the codecs on this machine, relative to a memory copy.

    Encoding makes the whole wire; decoding adds to a tensor, as in training. Every round measures
    each codec once. The table shows medians, with 10th and 90th percentiles.
    """
    import torch

    from laconic.bench import bench

    wanted = split_codecs(codecs) if codecs else None
    count = parse_count(values) if values else None
    devices = [device] if device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with progress(quiet=quiet) as watch:
        found = [
            bench(
                codecs=wanted,
                values=count,
                dtype=dtype,
                device=one,
                threads=threads,
                patience_s=patience_s,
                watch=part(watch, number / len(devices), (number + 1) / len(devices)),
            )
            for number, one in enumerate(devices)
        ]
    if as_json:
        print_json([asdict(one) for one in found])
        return
    for one in found:
        _show(one)


def _show(one: Bench) -> None:
    out = console(_WIDTH)
    threads = f", {one.threads} threads" if one.device == "cpu" else ""
    out.print(
        f"{one.machine}{threads}; {one.values:,} {one.dtype} values, {one.rounds} rounds. A copy: "
        f"{seconds(one.copy.median_s)}, {one.copy.gb_s:.3g} GB/s",
        highlight=False,
    )
    rows = table(None, "codec", "bits", "NMSE", "encode", "x copy", "decode-add", "x copy")
    for row in one.rows:
        cells = [cell for timing in (row.encode, row.decode) for cell in _cells(timing, one.copy)]
        rows.add_row(row.codec, f"{row.bits:.2f}", f"{row.error:.2g}", *cells)
    out.print(rows)
    for spec, why in one.skipped.items():
        out.print(f"skipped {spec}: {why}", highlight=False, markup=False)
    out.print(
        "GB/s count the tensor, not the wire; x copy: time relative to a copy. Medians (10th to "
        "90th percentile).",
        highlight=False,
    )


def _cells(one: Timing, copy: Timing) -> tuple[str, str]:
    low, high = one.p10_s / copy.median_s, one.p90_s / copy.median_s
    return f"{one.gb_s:.3g} GB/s", f"{one.copies:.2f} ({low:.2f}–{high:.2f})"
