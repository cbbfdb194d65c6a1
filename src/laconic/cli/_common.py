"""What all commands share: how they end, and how their help is written.

0 fine, 1 something failed while running, 2 the input is to blame, 130 interrupted; but for 0, one
sentence on stderr says why and what to do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from laconic.errors import ConfigError, LaconicError

FAILED, INPUT, INTERRUPTED = 1, 2, 130

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]


def examples(*lines: str, title: str = "") -> str:
    """An epilog: a line for each example, and then what is to be said beside them."""
    shown = [line.replace("[", "\\[") for line in lines]  # brackets are rich's markup
    return "\n".join(["[bold]Examples[/]", *shown, *(["", title] if title else [])])


def leave(sentence: str, status: int) -> NoReturn:
    """Say why, and end."""
    print(f"laconic: {_line(sentence)}", file=sys.stderr)
    raise typer.Exit(status)


class Commands(TyperGroup):
    """A group of commands that end with one sentence, not with a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Ctrl-C is answered, too: later it would be a number only."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            leave("interrupted", INTERRUPTED)

    def main(
        self,
        args: Sequence[str] | None = None,
        *others: Any,
        standalone_mode: bool = True,
        **options: Any,
    ) -> Any:
        """Run, and exit; with `--debug` in front of the command, errors are raised."""
        run = super().main
        if not standalone_mode:
            return run(args, *others, standalone_mode=False, **options)
        words = sys.argv[1:] if args is None else args
        debug = "--debug" in takewhile(lambda word: word.startswith("-"), words)
        try:
            status = run(args, *others, standalone_mode=False, **options)
        except typer.Abort:
            status = _told("interrupted", INTERRUPTED)
        except Exception as error:
            if debug and not _is_usage(error):
                raise
            status = _told(*_blame(error))
        sys.exit(status)


def _told(sentence: str, status: int) -> int:
    print(f"laconic: {_line(sentence)}", file=sys.stderr)
    return status


def _blame(error: Any) -> tuple[str, int]:
    """Sentence and exit code of whatever ended a command."""
    if _is_usage(error):
        message = _line(error.format_message()).rstrip(".").replace(". Did you", "; did you")
        message = re.sub(r" \(Possible options: (.*)\)", r"; did you mean \1?", message)
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "laconic"
        link = " " if message.endswith("?") else "; "
        return f"{message[:1].lower()}{message[1:]}{link}{path} --help lists what there is", INPUT
    if isinstance(error, ConfigError):
        return str(error), INPUT
    if isinstance(error, LaconicError):
        return str(error), FAILED
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror, FAILED
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install {error.name}", FAILED
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return (
        f"{what}; nobody expected this, so it may be a bug: run it again as laconic --debug ... "
        "to see where",
        FAILED,
    )


def _is_usage(error: Any) -> bool:
    """Click's own complaint about options: typer brings a click of its own, or the usual one."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _line(text: str) -> str:
    return " ".join(str(text).split())
