"""What all commands share: how they end, and how their help is written.

0 success, 1 a failure while running, 2 a usage error, 130 interrupted: one sentence on stderr says
why and what to do. 141 (128 + SIGPIPE), without a word: whoever read the output has left.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import ENOSPC
from functools import partial
from itertools import takewhile
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from laconic.cli._spelling import respell
from laconic.errors import ConfigError, LaconicError

FAILED, INPUT, INTERRUPTED, UNREAD = 1, 2, 130, 141

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else.")]
Force = Annotated[
    bool, typer.Option("--force", help="Replace files even if laconic did not write them.")
]


def examples(*lines: str, title: str = "") -> str:
    """An epilog: a line for each example, and then what is to be said beside them."""
    shown = [line.replace("[", "\\[") for line in lines]  # brackets are rich's markup
    return "\n".join(["[bold]Examples[/]", *shown, *(["", title] if title else [])])


def leave(sentence: str, status: int) -> NoReturn:
    """Say why, and end."""
    raise typer.Exit(_told(sentence, status))


def print_json(value: object, indent: int | None = None) -> None:
    """On stdout; JSON has no NaN and no infinity, which become null."""
    print(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


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
        respell(sys.stdout, sys.stderr)
        sys.exit(_status(partial(run, args, *others, standalone_mode=False, **options), debug))


def _status(run: Callable[[], Any], debug: bool) -> Any:
    """The exit code. What stdout cannot take is forgotten: the interpreter would try it again."""
    try:
        status = run()
        _flush()
        return status
    except typer.Abort:
        return _told("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _forget_output()
        return UNREAD
    except SystemExit as end:  # click's and rich's answer to a reader that has left
        if isinstance(end.__context__, BrokenPipeError):
            _forget_output()
            return UNREAD
        return end.code
    except Exception as error:
        try:
            _flush()
        except OSError:
            _forget_output()
        if debug and not _is_usage(error):
            raise
        return _told(*_blame(error))


def _flush() -> None:
    """What cannot be written is better known now than when the interpreter ends."""
    if sys.stdout is None:  # closed before we came
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error


def _forget_output() -> None:
    """What is still in buffers goes nowhere."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _told(sentence: str, status: int) -> int:
    with suppress(OSError):  # nobody reads that, either
        print(f"laconic: {_line(sentence)}", file=sys.stderr, flush=True)
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
        where = error.filename or ("stdout, or a temporary file" if error.errno == ENOSPC else "")
        return f"{error.strerror}: {where}" if where else error.strerror, FAILED
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install {error.name}", FAILED
    if isinstance(error, MemoryError):
        return "there is not enough memory", FAILED
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return (
        f"{what}; unexpected error, probably a bug in laconic: run it again as laconic --debug ... "
        "to see where",
        FAILED,
    )


def _is_usage(error: Any) -> bool:
    """Click's own complaint about options: typer brings a click of its own, or the usual one."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _line(text: str) -> str:
    return " ".join(str(text).split())
