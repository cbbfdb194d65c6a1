"""The command line: `laconic`, or `python -m laconic`."""

from __future__ import annotations

from typing import Annotated

import typer

from laconic._version import __version__
from laconic.cli._lab import lab
from laconic.cli._plan import plan_command
from laconic.cli._probe import probe_command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Data-parallel PyTorch training over thin wires.",
    pretty_exceptions_enable=False,
)
app.add_typer(lab, name="lab")
app.command("probe")(probe_command)
app.command("plan")(plan_command)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Say which, and stop.")] = False,
) -> None:
    """Data-parallel PyTorch training over thin wires."""
    if show:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """The entry point."""
    app()
