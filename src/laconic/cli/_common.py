"""What all commands share."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer


def leave(sentence: str, status: int) -> NoReturn:
    """Say why, and end: with 2 where the input is to blame."""
    print(f"laconic: {sentence}", file=sys.stderr)
    raise typer.Exit(status)
