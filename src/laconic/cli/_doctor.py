"""laconic doctor: what is wrong with this host, or with a cluster, before training finds out."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.cli._common import FAILED, Json, Quiet, console, examples, print_json, progress

if TYPE_CHECKING:
    from laconic.doctor import Report

EPILOG = examples(
    "laconic doctor",
    "torchrun --nproc-per-node 2 -m laconic doctor",
    "torchrun --nnodes 4 --nproc-per-node 8 ... -m laconic doctor --json",
    note="Exit code 0 if there are no problems, 1 otherwise.",
)
_WIDTH = 100


def doctor_command(
    timeout_s: Annotated[float, typer.Option(help="How long to wait for other ranks.")] = 30.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check versions, network, links, kernels, clocks and memory, alone or on all ranks.

    One line per check says what is wrong, and what to do. Under torchrun, rank 0 prints for all.
    """
    from laconic.doctor import doctor

    silent = quiet or os.environ.get("RANK", "0") != "0"
    with progress(quiet=silent) as watch:
        found = doctor(timeout_s=timeout_s, watch=watch)
    if found.findings:
        if as_json and not found.rank:
            print_json(asdict(found) | {"ok": found.ok})
        else:
            _show(found)
    if found.stuck:  # the interpreter would wait for a thread that hangs in torch
        sys.stdout.flush()
        os._exit(0 if found.ok else FAILED)
    if not found.ok:
        raise typer.Exit(FAILED)


def _show(found: Report) -> None:
    from rich.text import Text

    out = console(_WIDTH, stderr=found.rank > 0)
    width = max(len(one.check) for one in found.findings)
    for one in sorted(found.findings, key=lambda one: one.ok, reverse=True):
        state = Text("ok      ", "green") if one.ok else Text("problem ", "bold red")
        out.print(state.append(f"{one.check:<{width}}  {one.text}", "none"), soft_wrap=True)
        if one.advice:
            out.print(
                Text(f"{'':{8 + width}}  {one.advice}", "dim" if one.ok else "none"), soft_wrap=True
            )
    problems = sum(not one.ok for one in found.findings)
    told = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problems"
    if not found.rank:
        out.print(f"{found.ranks} rank{'s' * (found.ranks != 1)}: {told}", highlight=False)
