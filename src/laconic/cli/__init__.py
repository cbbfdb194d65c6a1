"""The command line: `laconic`, or `python -m laconic`.

Each command is one file. It imports torch, rich and the packages that do the work inside functions,
so that `--help` and completion are fast.
Exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted, 141 output closed by its reader.
"""

from __future__ import annotations

import sys
from typing import Any

_NEEDED = ("typer", "rich", "click")  # the extra `cli`


def main() -> None:
    """The entry point."""
    try:
        from laconic.cli._app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _NEEDED:
            raise
        sys.exit(f"laconic: {error.name} is not installed: pip install 'laconic[cli]'")
    app(prog_name="laconic")


def __getattr__(name: str) -> Any:
    """`app`, imported on first use: it needs typer."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from laconic.cli._app import app

    return app
