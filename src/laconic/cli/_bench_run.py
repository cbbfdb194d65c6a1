"""laconic bench: what it does."""

from __future__ import annotations

from dataclasses import asdict

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from laconic._units import parse_count, seconds
from laconic.bench import Bench, Timing, bench
from laconic.cli._common import print_json
from laconic.cli._probe_run import split_codecs

_WIDTH = 120  # narrower terminals wrap lines


def run(
    *,
    codecs: str | None,
    values: str | None,
    dtype: str,
    device: str | None,
    threads: int | None,
    patience_s: float,
    as_json: bool,
) -> None:
    """Measure, on every device that was asked for."""
    wanted = split_codecs(codecs) if codecs else None
    count = parse_count(values) if values else None
    devices = [device] if device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found = [
        bench(
            codecs=wanted,
            values=count,
            dtype=dtype,
            device=one,
            threads=threads,
            patience_s=patience_s,
        )
        for one in devices
    ]
    if as_json:
        print_json([asdict(one) for one in found])
        return
    console = Console()
    console.width = max(_WIDTH, console.width)
    for one in found:
        _show(one, console)


def _show(one: Bench, console: Console) -> None:
    threads = f", {one.threads} threads" if one.device == "cpu" else ""
    console.print(
        f"{one.machine}{threads}; {one.values:,} {one.dtype} values, {one.rounds} rounds. A copy: "
        f"{seconds(one.copy.median_s)}, {one.copy.gb_s:.3g} GB/s",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = "codec", "bits", "NMSE", "encode", "x copy", "decode-add", "x copy"
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in one.rows:
        cells = [cell for timing in (row.encode, row.decode) for cell in _cells(timing, one.copy)]
        table.add_row(row.codec, f"{row.bits:.2f}", f"{row.error:.2g}", *cells)
    console.print(table)
    for spec, why in one.skipped.items():
        console.print(f"{spec} was left out: {why}", highlight=False, markup=False)
    console.print(
        "GB/s of the tensor, not of the wire; x copy: time over that of a copy. Medians, and the "
        "10th and 90th percentile.",
        highlight=False,
    )


def _cells(one: Timing, copy: Timing) -> tuple[str, str]:
    low, high = one.p10_s / copy.median_s, one.p90_s / copy.median_s
    return f"{one.gb_s:.3g} GB/s", f"{one.copies:.2f} ({low:.2f}–{high:.2f})"
