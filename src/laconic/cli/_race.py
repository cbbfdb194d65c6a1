"""laconic race: train with several strategies, and compare."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic._files import Kind, check_target
from laconic.cli._common import FAILED, Force, Json, console, examples, exit_with, print_json
from laconic.cli._names import NAMES, complete
from laconic.errors import ConfigError

if TYPE_CHECKING:
    from laconic.race import Race, Settings

EPILOG = examples(
    "laconic race",
    "laconic race --rate 1gbit --strategies fp32,dqsg,ecdq:error=0.05,ssd+dqsg",
    "laconic race --data cifar10 --folder ~/data --save race.json",
    note="A race with --save that was interrupted resumes when the same command runs again.",
)
_TASK, _CLUSTER, _OUTPUT = "Task", "Cluster", "Output"
_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class RaceOptions:
    """The options of a task as given; None takes the value of the data set."""

    data: str
    workers: int
    rate: str
    seed: int
    steps: int | None
    batch: int | None
    lr: float | None
    target: float | None

    def settings(self) -> Settings:
        """With the data set's values in place of None."""
        from laconic.race import COURSES, Settings

        if self.data not in COURSES:
            raise ConfigError(f"--data is one of {', '.join(COURSES)}, not {self.data!r}")
        usual = COURSES[self.data]
        given = {name: value for name, value in asdict(self).items() if value is not None}
        defaults = {name: getattr(usual, name) for name in ("steps", "batch", "lr", "target")}
        return Settings(**{**defaults, **given})


def race_command(
    strategies: Annotated[
        str,
        typer.Option(
            help="Separated by commas; also ssd+CODEC and every spec that lc.compress takes.",
            autocompletion=complete("strategies", listed=True),
        ),
    ] = ",".join(NAMES["strategies"]),
    data: Annotated[
        str,
        typer.Option(
            help=f"Data set: {', '.join(NAMES['data'])}.",
            rich_help_panel=_TASK,
            autocompletion=complete("data"),
        ),
    ] = "digits",
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder with the data set's files.", rich_help_panel=_TASK),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of every strategy; 80 for digits.", rich_help_panel=_TASK),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Images per worker and step.", rich_help_panel=_TASK)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate.", rich_help_panel=_TASK)
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Accuracy to reach; 0.97 for digits.", rich_help_panel=_TASK),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(help="Seed of weights, batches and quantization.", rich_help_panel=_TASK),
    ] = 0,
    workers: Annotated[
        int, typer.Option(help="Workers, each on its own host.", rich_help_panel=_CLUSTER)
    ] = 4,
    rate: Annotated[
        str,
        typer.Option(
            help="Rate of the links: 100mbit, 1gbit or none; up/down; or one per host, separated "
            "by commas.",
            rich_help_panel=_CLUSTER,
        ),
    ] = "100mbit",
    save: Annotated[
        Path | None,
        typer.Option(
            help="Store results in this file, and resume from it.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    report: Annotated[
        Path, typer.Option(help="HTML page with figures.", rich_help_panel=_OUTPUT)
    ] = Path("report.html"),
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Do not write the page.", rich_help_panel=_OUTPUT)
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train the same network with several strategies over slow links, and compare.

    Runs real processes and real collectives on this machine; each worker is a host with a shaped
    link. Where links cannot be shaped, bytes are measured and step times are predicted.
    """
    from laconic.lab._requirements import missing_or_enter
    from laconic.race import entries, race

    options = RaceOptions(
        data=data,
        workers=workers,
        rate=rate,
        seed=seed,
        steps=steps,
        batch=batch,
        lr=lr,
        target=target,
    )
    settings, chosen = options.settings(), entries(strategies)
    page = None if no_report else report
    _check_files(save, page, force)
    lacking = missing_or_enter()
    if as_json:
        found = race(settings, chosen, folder=folder, save=save, force=force)
        print_json(asdict(found), indent=1)
        _write_page(found, page, force)
        _check_replicas(found)
        return
    from rich.text import Text

    from laconic.cli._race_view import View, results

    out = console(_WIDTH)
    if lacking:
        out.print(f"[yellow]Links cannot be shaped here:[/] {lacking}")
    with View(out, settings, chosen, shaped=lacking is None) as view:
        watcher = view.watcher()
        found = race(settings, chosen, folder=folder, save=save, watcher=watcher, force=force)
    out.print(results(found, chosen))
    out.print(Text(found.verdict, style="bold green"))
    if code := _fastest(found):
        out.print(f"In your own script: {code}", highlight=False, markup=False, soft_wrap=True)
    _write_page(found, page, force)
    if page:
        out.print(f"Figures: {page}", highlight=False, markup=False, soft_wrap=True)
    _check_replicas(found)


def _check_files(save: Path | None, page: Path | None, force: bool) -> None:
    """Before anything runs."""
    paths = [path for path in (save, page) if path]
    if len(set(map(os.path.realpath, paths))) < len(paths):
        raise ConfigError(f"--save and --report are both {save}: give two names")
    if save:
        check_target(save, Kind.RACE, force=force)
    if page:
        check_target(page, Kind.PAGE, force=force)
    if page and find_spec("plotly") is None:
        raise ConfigError(
            "the report needs plotly: pip install 'laconic[race]', or give --no-report"
        )


def _write_page(found: Race, page: Path | None, force: bool) -> None:
    if page:
        from laconic.report import write

        write(found, page, force=force)


def _fastest(found: Race) -> str | None:
    """The line of code of the first strategy to reach the target, if one did."""
    from laconic.race import seconds_to_target

    times = {run.code: seconds_to_target(found, run) for run in found.lanes}
    reached = {code: seconds for code, seconds in times.items() if seconds is not None}
    return min(reached, key=lambda code: reached[code], default=None)


def _check_replicas(found: Race) -> None:
    odd = [run.name for run in found.lanes if not run.same_bits]
    if odd:
        exit_with(f"replicas of {', '.join(odd)} ended with different weights: a bug", FAILED)
