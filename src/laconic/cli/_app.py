"""All commands, under one name."""

from __future__ import annotations

from typing import Annotated

import typer

from laconic._version import __version__
from laconic.cli._bench import EPILOG as BENCH
from laconic.cli._bench import bench_command
from laconic.cli._codecs import EPILOG as CODECS
from laconic.cli._codecs import codecs_command
from laconic.cli._common import Commands, examples
from laconic.cli._doctor import EPILOG as DOCTOR
from laconic.cli._doctor import doctor_command
from laconic.cli._lab import lab
from laconic.cli._plan import EPILOG as PLAN
from laconic.cli._plan import plan_command
from laconic.cli._probe import EPILOG as PROBE
from laconic.cli._probe import probe_command
from laconic.cli._race import EPILOG as RACE
from laconic.cli._race import race_command

_EPILOG = examples(
    "laconic race",
    "laconic plan --link 1gbit --workers 8 --params 125m --compute 300ms",
    "laconic lab run --hosts 4 --rate 100mbit -- python train.py",
    "laconic doctor",
    "laconic codecs ecdq",
    note="Exit codes: 0 success, 1 failure, 2 usage error, 130 interrupted, 141 output closed.",
)

app = typer.Typer(
    cls=Commands,
    invoke_without_command=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog=_EPILOG,
)
app.command("race", epilog=RACE)(race_command)
app.command("doctor", epilog=DOCTOR)(doctor_command)
app.command("probe", epilog=PROBE)(probe_command)
app.command("plan", epilog=PLAN)(plan_command)
app.add_typer(lab, name="lab")
app.command("bench", epilog=BENCH)(bench_command)
app.command("codecs", epilog=CODECS)(codecs_command)


@app.callback()
def laconic(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback after an error.")
    ] = False,
) -> None:
    """Communication-efficient data-parallel training in PyTorch."""
    del debug  # Commands.main looks for it
    if version:
        print(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
