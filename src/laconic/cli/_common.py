"""What all commands share: options, tables, and how they end.

0 success, 1 failure, 2 usage error, 130 interrupted: one sentence on stderr says why and what to
do. 141 (128 + SIGPIPE), silently: the reader of the output has closed it.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import ENOSPC
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer
from typer.core import TyperGroup

from laconic._progress import Watch, unwatched
from laconic.errors import ConfigError, LaconicError

if TYPE_CHECKING:  # imported when something is shown
    from rich.console import Console
    from rich.table import Table

FAILED, USAGE, INTERRUPTED, UNREAD = 1, 2, 130, 141

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that laconic did not write.")]

_SPELLED = "laconic-spelled"
# characters that neither Unicode's names nor its compatibility forms spell as we want
_ASCII = {
    **{"µ": "u", "×": "x", "±": "+-", "–": "-", "·": "*", "Δ": "delta", "Σ": "sum", "√": "sqrt"},
    **{"‖": "|", "│": "|", "─": "-", "≤": "<=", "≥": ">=", "←": "<-", "→": "->", "…": "..."},
}


def examples(*lines: str, note: str = "") -> str:
    """An epilog of a command: one line per example, then a note."""
    shown = [line.replace("[", "\\[") for line in lines]  # brackets are rich's markup
    return "\n".join(["[bold]Examples[/]", *shown, *(["", note] if note else [])])


def console(width: int, *, stderr: bool = False) -> Console:
    """At least `width` columns wide: narrower terminals wrap lines."""
    from rich.console import Console

    made = Console(stderr=stderr)
    made.width = max(width, made.width)
    return made


def table(title: str | None, *columns: str, numbers: bool = True) -> Table:
    """An empty table; with `numbers`, every column but the first is aligned right."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index and numbers else "left", no_wrap=numbers)
    return made


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Watch]:
    """A line on stderr: what is being done, the part that is done, and the time that is left.

    Nothing is shown if stderr is no terminal, and the line is removed at the end.
    """
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield unwatched
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    shown = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=Console(stderr=True),
        transient=True,
    )
    with shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda what, done: shown.update(task, description=what, completed=done)


def split_codecs(text: str) -> tuple[str, ...]:
    """Spec strings of codecs, separated by commas; each is checked."""
    from laconic.codecs import codec
    from laconic.codecs._register import split

    found = split(text)
    for spec in found:
        codec(spec)
    return found


def exit_with(sentence: str, status: int) -> NoReturn:
    """Print the sentence to stderr and exit."""
    raise typer.Exit(_report(sentence, status))


def print_json(value: object, indent: int | None = None) -> None:
    """To stdout; JSON has no NaN and no infinity, which become null."""
    print(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


class Commands(TyperGroup):
    """A group of commands whose errors are one sentence, not a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Ctrl-C is handled here: click would report it by a number alone."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            exit_with("interrupted", INTERRUPTED)

    def main(
        self,
        args: Sequence[str] | None = None,
        *others: Any,
        standalone_mode: bool = True,
        **options: Any,
    ) -> Any:
        """Run and exit; with `--debug` before the command's name, errors are raised."""
        run = super().main
        if not standalone_mode:
            return run(args, *others, standalone_mode=False, **options)
        words = sys.argv[1:] if args is None else args
        debug = "--debug" in takewhile(lambda word: word.startswith("-"), words)
        spell_in_ascii(sys.stdout, sys.stderr)
        sys.exit(_status(partial(run, args, *others, standalone_mode=False, **options), debug))


def _status(run: Callable[[], Any], debug: bool) -> Any:
    """The exit code. Output that stdout refuses is dropped: the interpreter would retry it."""
    try:
        status = run()
        _flush()
        return status
    except typer.Abort:
        return _report("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        return UNREAD
    except SystemExit as end:  # click's and rich's answer to a closed pipe
        if isinstance(end.__context__, BrokenPipeError):
            _drop_output()
            return UNREAD
        return end.code
    except Exception as error:
        try:
            _flush()
        except OSError:
            _drop_output()
        if debug and not _is_usage(error):
            raise
        return _report(*_explain(error))


def _flush() -> None:
    """An error of writing is better known now than when the interpreter exits."""
    if sys.stdout is None:  # closed before we started
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error


def _drop_output() -> None:
    """Discard what is still buffered."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _report(sentence: str, status: int) -> int:
    with suppress(OSError):  # stderr is closed, too
        print(f"laconic: {_line(sentence)}", file=sys.stderr, flush=True)
    return status


def _explain(error: Any) -> tuple[str, int]:
    """Sentence and exit code of whatever ended a command."""
    if _is_usage(error):
        message = _line(error.format_message()).rstrip(".").replace(". Did you", "; did you")
        message = re.sub(r" \(Possible options: (.*)\)", r"; did you mean \1?", message)
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "laconic"
        link = " " if message.endswith("?") else "; "
        return f"{message[:1].lower()}{message[1:]}{link}see {path} --help", USAGE
    if isinstance(error, ConfigError):
        return str(error), USAGE
    if isinstance(error, LaconicError):
        return str(error), FAILED
    if isinstance(error, OSError) and error.strerror:
        where = error.filename or ("stdout, or a temporary file" if error.errno == ENOSPC else "")
        return f"{error.strerror}: {where}" if where else error.strerror, FAILED
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install {error.name}", FAILED
    if isinstance(error, MemoryError):
        return "out of memory", FAILED
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return (
        f"{what}; unexpected error, probably a bug in laconic: run it again as laconic --debug ... "
        "to see where",
        FAILED,
    )


def _is_usage(error: Any) -> bool:
    """An error of click's about options: typer has a click of its own, or uses the usual one."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _line(text: str) -> str:
    return " ".join(str(text).split())


def spell_in_ascii(*streams: TextIO | None) -> None:
    """From now on, characters that a stream's encoding lacks are spelled in ASCII."""
    codecs.register_error(_SPELLED, _spelled)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_SPELLED)


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end]
    return "".join(map(_spell, part)), error.end


def _spell(one: str) -> str:
    """µ as u, κ as kappa, ² as ^2; others as "?"."""
    if one in _ASCII:
        return _ASCII[one]
    alphabet, _, letter = unicodedata.name(one, "").partition(" SMALL LETTER ")
    if alphabet == "GREEK":
        return letter.lower()
    power = unicodedata.decomposition(one).startswith("<super>")
    return f"^{unicodedata.normalize('NFKD', one)}" if power else "?"
