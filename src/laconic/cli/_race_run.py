"""laconic race: what it does."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.text import Text

from laconic._files import Kind, check_target
from laconic.cli._common import FAILED, leave, print_json
from laconic.cli._race_view import View, table
from laconic.errors import ConfigError
from laconic.lab import missing
from laconic.lab._rootless import can_enter, enter
from laconic.race import COURSES, Race, Settings, Watcher, entries, race, seconds_to_target

_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The options as given; None is what the data set's course says."""

    strategies: str
    data: str
    folder: Path | None
    steps: int | None
    batch: int | None
    lr: float | None
    target: float | None
    seed: int
    workers: int
    rate: str
    save: Path | None
    report: Path | None
    force: bool
    as_json: bool

    def settings(self) -> Settings:
        """With the course's in all gaps."""
        course = COURSES.get(self.data)
        if course is None:
            raise ConfigError(f"--data is one of {', '.join(COURSES)}, not {self.data!r}")
        return Settings(
            data=self.data,
            workers=self.workers,
            rate=self.rate,
            steps=course.steps if self.steps is None else self.steps,
            batch=course.batch if self.batch is None else self.batch,
            lr=course.lr if self.lr is None else self.lr,
            seed=self.seed,
            target=course.target if self.target is None else self.target,
        )


def run(wishes: Wishes) -> None:
    """Race, show, report."""
    settings, chosen = wishes.settings(), entries(wishes.strategies)
    _check_files(wishes)
    lacking = missing()
    if lacking and can_enter():
        enter()
    if wishes.as_json:
        found = race(settings, chosen, folder=wishes.folder, save=wishes.save, force=wishes.force)
        print_json(asdict(found), indent=1)
        _report(found, wishes)
        _check_replicas(found)
        return
    console = Console()
    console.width = max(_WIDTH, console.width)
    if lacking:
        console.print(f"[yellow]Links cannot be shaped here:[/] {lacking}")
    with View(console, settings, chosen, shaped=lacking is None) as view:
        watcher = Watcher(
            note=view.note,
            planned=view.planned,
            started=view.started,
            moved=view.moved,
            ended=view.ended,
        )
        found = race(
            settings,
            chosen,
            folder=wishes.folder,
            save=wishes.save,
            watcher=watcher,
            force=wishes.force,
        )
    console.print(table(found, chosen))
    console.print(Text(found.verdict, style="bold green"))
    _say_next(console, found)
    _report(found, wishes)
    if wishes.report:
        console.print(f"Figures: {wishes.report}", highlight=False, markup=False, soft_wrap=True)
    _check_replicas(found)


def _check_files(wishes: Wishes) -> None:
    """Before anything is run."""
    paths = [path for path in (wishes.save, wishes.report) if path]
    if len(set(map(os.path.realpath, paths))) < len(paths):
        raise ConfigError(f"--save and --report are both {wishes.save}: give two names")
    if wishes.save:
        check_target(wishes.save, Kind.RACE, force=wishes.force)
    if wishes.report:
        check_target(wishes.report, Kind.PAGE, force=wishes.force)
    if wishes.report and find_spec("plotly") is None:
        raise ConfigError(
            "the report needs plotly: pip install 'laconic[race]', or give --no-report"
        )


def _report(found: Race, wishes: Wishes) -> None:
    if wishes.report:
        from laconic.report import write

        write(found, wishes.report, force=wishes.force)


def _say_next(console: Console, found: Race) -> None:
    """The line of the one that was first."""
    times = {lane.code: seconds_to_target(found, lane) for lane in found.lanes}
    arrived = {code: seconds for code, seconds in times.items() if seconds is not None}
    if arrived:
        code = min(arrived, key=lambda code: arrived[code])
        console.print(f"In your own script: {code}", highlight=False, markup=False, soft_wrap=True)


def _check_replicas(found: Race) -> None:
    odd = [lane.name for lane in found.lanes if not lane.same_bits]
    if odd:
        leave(f"replicas of {', '.join(odd)} ended with different weights: a bug", FAILED)
