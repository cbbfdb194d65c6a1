"""laconic codecs: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from laconic.cli._common import Json, examples
from laconic.cli._names import complete_anything

EPILOG = examples(
    "laconic codecs",
    "laconic codecs ecdq",
    "laconic codecs 'rotate(dqsg:bits=2)' --json",
)


def codecs_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One of them, or a codec's text, such as dqsg:bits=4.",
            show_default="all, one line each",
            autocompletion=complete_anything,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List codecs, wrappers, coders and exchanges; or explain one."""
    from laconic.cli._codecs_run import run

    run(name, as_json)
