"""A race on a terminal: a table that fills while the workers train."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from laconic.race import PLAIN, Entry, Lane, Point, Race, Settings, Watcher, seconds_to_target

_BAR = 16


class View:
    """Progress and results so far; without a terminal, one line per strategy."""

    def __init__(
        self, console: Console, settings: Settings, entries: Sequence[Entry], *, shaped: bool
    ) -> None:
        self.console, self.settings, self.entries = console, settings, entries
        self._links = "" if shaped else "the loopback interface; times are predicted for "
        self._words, self._race = "", None
        self._running: Entry | None = None
        self._point: Point | None = None
        self._expected: dict[str, float | None] = {}
        self._since = time.monotonic()
        self._live = Live(console=console, get_renderable=self._show, transient=True)

    def __enter__(self) -> View:
        """Print the task."""
        one = self.settings
        self.console.print(
            f"{one.workers} workers train on {one.data} for {one.steps} steps, {one.batch} "
            f"examples per worker, over {self._links}links of {one.rate}.",
            highlight=False,
        )
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the live table; the caller prints the last one."""
        self._live.stop()

    def watcher(self) -> Watcher:
        """What the race calls."""
        return Watcher(
            note=self._note,
            planned=self._planned,
            started=self._started,
            moved=self._moved,
            ended=self._ended,
        )

    def _note(self, text: str) -> None:
        self._words = text

    def _planned(self, seconds: dict[str, float | None]) -> None:
        self._expected = seconds

    def _started(self, one: Entry) -> None:
        self._running, self._point, self._words = one, None, f"training with {one.strategy}"
        self._since = time.monotonic()

    def _moved(self, one: Entry, point: Point) -> None:
        self._point = point

    def _ended(self, race: Race) -> None:
        self._race, self._running = race, None
        if not self.console.is_terminal:
            lane = race.lanes[-1]
            self.console.print(
                f"{lane.name}: {lane.accuracy:.1%}, {1e3 * lane.step_s:.1f} ms and "
                f"{lane.sent_bytes / 1e3:.1f} KB per step",
                highlight=False,
            )

    def _show(self) -> RenderableType:
        lanes = {lane.name: lane for lane in self._race.lanes} if self._race else {}
        view = _columns(self.settings.target, live=True)
        for one in self.entries:
            if one.name in lanes and self._race:
                name, *others = _row(self._race, lanes[one.name])
                view.add_row(name, "", *others)
            elif self._running and one.name == self._running.name:
                view.add_row(*self._progress(one))
            else:
                view.add_row(Text(one.name, style="dim"))
        return Group(view, Text(f"{self._words}{self._left()}", style="dim"))

    def _progress(self, one: Entry) -> list[RenderableType]:
        done = self._point.step if self._point else 0
        bar = ProgressBar(total=self.settings.steps, completed=done, width=_BAR)
        if self._point is None:
            return [Text(one.name, style="bold"), bar]
        point = self._point
        sent = Text(f"{point.sent_bytes / 1e6:.2f}", style="dim")
        pace = Text(f"{1e3 * point.seconds / point.step:.1f}", style="dim")
        return [Text(one.name, style="bold"), bar, f"{point.accuracy:.1%}", "", "", pace, sent]

    def _left(self) -> str:
        """Time left: of this strategy by its speed so far, of the others as predicted."""
        if self._running is None or not self._expected:
            return ""
        names = list(self._expected)
        known = [seconds for seconds in self._expected.values() if seconds]
        usual = sum(known) / len(known) if known else 0.0
        now = names.index(self._running.name)
        later = sum(self._expected[name] or usual for name in names[now + 1 :])
        mine = self._expected[self._running.name] or usual
        if self._point and self._point.step:
            spent = time.monotonic() - self._since
            mine = spent * (self.settings.steps / self._point.step - 1)
        return f", about {mine + later:.0f} s left"


def results(race: Race, entries: Sequence[Entry]) -> Table:
    """All results, in the order of `entries`."""
    lanes = {lane.name: lane for lane in race.lanes}
    view = _columns(race.settings.target, predicted=not race.machine.shaped)
    for one in entries:
        if one.name in lanes:
            view.add_row(*_row(race, lanes[one.name]))
    return view


def _columns(target: float, *, predicted: bool = False, live: bool = False) -> Table:
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    view.add_column("strategy", no_wrap=True)
    if live:
        view.add_column("", min_width=_BAR)
    goal = f"s to {100 * target:g}%"
    step = "ms per\nstep"
    for heading in (
        "accuracy",
        f"{goal},\npredicted" if predicted else goal,
        "speedup",
        f"{step},\npredicted" if predicted else step,
        "MB\nsent",
        "fewer\nbytes",
    ):
        view.add_column(heading, justify="right")
    return view


def _row(race: Race, lane: Lane) -> list[RenderableType]:
    seconds = seconds_to_target(race, lane)
    plain = next((one for one in race.lanes if one.name == PLAIN), None)
    base = seconds_to_target(race, plain) if plain else None
    step = lane.step_s if race.machine.shaped else lane.predicted_step_s
    sent, most = lane.points[-1].sent_bytes, plain.points[-1].sent_bytes if plain else None
    return [
        Text(f"{lane.name}: {lane.choice}" if lane.choice else lane.name),
        f"{lane.accuracy:.1%}",
        "-" if seconds is None else f"{seconds:.1f}",
        f"{base / seconds:.1f}" if base and seconds else "",
        "" if step is None else f"{1e3 * step:.1f}",
        f"{sent / 1e6:.2f}",
        f"{most / sent:.1f}" if most and sent else "",
    ]
