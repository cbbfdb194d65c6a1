"""The page: template, style and script of this folder, plotly's script, and the race's numbers."""

from __future__ import annotations

import gzip
import json
import shlex
from base64 import b64encode
from functools import cache
from hashlib import sha256
from html import escape as text
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from laconic._files import Kind, write_made
from laconic.errors import ConfigError
from laconic.race._result import Race
from laconic.report import _tables as tables
from laconic.report import _words as words
from laconic.report._figure import Figure
from laconic.report._figures import figures
from laconic.report._palette import css
from laconic.report._view import Row, View, view

_DOCUMENTS = (
    ("docs/codecs.md", "what each codec does, with its error"),
    ("docs/exchanges.md", "how bytes travel and add up"),
    ("docs/ddp.md", "the line of code, and auto"),
    ("docs/planner.md", "how step times are predicted"),
    ("docs/lab.md", "how links get their rate on one machine"),
)


def write(race: Race, path: str | Path, *, force: bool = False) -> None:
    """The report of a race, finished or not, as one file; whole or not at all.

    With `force` it replaces a file that is no page of laconic's.
    """
    write_made(path, html(race), Kind.PAGE, force=force)


def html(race: Race) -> str:
    """The page, about 2 MB, nearly all of them plotly's script. It asks no network for anything."""
    seen = view(race)
    drawn = figures(seen)
    script, (plotly, plotly_hash) = _resource("report.js"), _plotly()
    settings = race.settings
    return Template(_resource("template.html")).substitute(
        title=text(f"laconic race: {settings.data}, {settings.workers} workers, {settings.rate}"),
        hashes=f"{_hash(script)} {plotly_hash}",
        style=css() + _resource("style.css"),
        heading=text(_heading(race)),
        verdict=text(race.verdict or "No verdict yet."),
        summary=text(_summary(race)),
        notices=_notices(seen),
        links="".join(f'<li><a href="#{one.id}">{text(one.short)}</a></li>' for one in drawn),
        table=tables.strategies(seen) if seen.rows else "<p>No strategy has been raced yet.</p>",
        legend="".join(map(_button, seen.rows)),
        figures="".join(map(_figure, drawn)),
        settings=tables.pairs(_settings(race)),
        machine=tables.pairs(_machine(race)),
        command=_command(race),
        documents="".join(
            f"<li><code>{text(name)}</code>: {text(what)}</li>" for name, what in _DOCUMENTS
        ),
        version=text(race.laconic),
        data=_json(_data(seen, drawn)),
        plotly=plotly,
        script=script,
    )


def _heading(race: Race) -> str:
    settings = race.settings
    links = "without a limit" if settings.rate == "none" else f"of {settings.rate}"
    return f"{settings.data}: {settings.workers} workers, links {links}"


def _summary(race: Race) -> str:
    settings, task = race.settings, race.task
    return (
        f"{task.network[:1].upper()}{task.network[1:]}, {task.parameters:,} parameters, "
        f"{task.training:,} examples to learn from and {task.testing:,} to test on. Every "
        f"strategy: {settings.steps:,} steps of {settings.batch:,} examples a worker, and the "
        "same seed."
    )


def _notices(view: View) -> str:
    notices = []
    if not view.shaped:
        why = view.race.machine.why_unshaped or "no reason was given"
        notices.append(
            f"The links had no set rate ({why}). Accuracy and bytes are measured; times to the "
            f"target are predicted for {view.race.settings.rate}: the predicted step times the "
            "number of steps."
        )
    if not view.finished:
        notices.append("This race is not finished: numbers may change.")
    differ = [row.name for row in view.rows if not row.lane.same_bits]
    if differ:
        notices.append(f"Workers ended with different weights: {words.listed(differ)}.")
    return "".join(f'<p class="notice" role="note">{text(notice)}</p>' for notice in notices)


def _button(row: Row) -> str:
    return (
        f'<button type="button" aria-pressed="true" data-lane="{row.index}">{row.look.swatch}'
        f'<span class="name">{text(row.name)}</span></button>'
    )


def _figure(figure: Figure) -> str:
    key = "".join(f"<li>{picture} {text(what)}</li>" for picture, what in figure.key)
    tools = picture = data = ""
    if figure.traces:
        scale = '<button type="button" class="scale" aria-pressed="true">Logarithmic axis</button>'
        save = '<button type="button" class="save">Save as SVG</button>'
        tools = f'<div class="tools">{scale if figure.scale else ""}{save}</div>'
        picture = (
            (f'<ul class="key">{key}</ul>' if key else "")
            + f'<div class="plot" role="img" aria-label="{text(figure.title)}. '
            f'{text(figure.sentence)}"></div>'
        )
    if figure.table.rows:
        table = tables.plain(figure.table, figure.title)
        if figure.more:
            table += tables.plain(figure.more, f"{figure.title}: a step")
        data = f"<details><summary>The same as a table</summary>{table}</details>"
    return (
        f'<section class="card figure" id="{figure.id}" aria-labelledby="{figure.id}-title">'
        f'<div class="head"><h2 id="{figure.id}-title">{text(figure.title)}</h2>{tools}</div>'
        f"<p>{text(figure.sentence)}</p>{picture}{data}</section>"
    )


def _settings(race: Race) -> list[tuple[str, str]]:
    one = race.settings
    return [
        ("Data", one.data),
        ("Workers", str(one.workers)),
        ("Rate of every link", one.rate),
        ("Steps", f"{one.steps:,}"),
        ("Batch of a worker", f"{one.batch:,}"),
        ("Learning rate", f"{one.lr:g}"),
        ("Seed", str(one.seed)),
        ("Target", words.goal(one.target)),
        ("Network", race.task.network),
        ("Parameters", f"{race.task.parameters:,}"),
    ]


def _machine(race: Race) -> list[tuple[str, str]]:
    one = race.machine
    return [
        ("System", one.system),
        ("Processor", one.processor),
        ("Cores", str(one.cores)),
        ("Python", one.python),
        ("PyTorch", one.torch),
        ("laconic", race.laconic),
        ("Links", "shaped to the rate" if one.shaped else "not shaped"),
    ]


def _command(race: Race) -> str:
    one = race.settings
    options = {
        "data": one.data,
        "workers": one.workers,
        "rate": one.rate,
        "steps": one.steps,
        "batch": one.batch,
        "lr": f"{one.lr:g}",
        "seed": one.seed,
        "target": f"{one.target:g}",
    }
    if race.lanes:
        options["strategies"] = ",".join(lane.name for lane in race.lanes)
    # a line does not end inside the name of an option
    return "laconic race " + " ".join(
        f"<span>--{name}</span> {text(shlex.quote(str(value)))}" for name, value in options.items()
    )


def _data(view: View, drawn: list[Figure]) -> dict[str, Any]:
    return {
        "lanes": len(view.rows),
        "figures": {
            one.id: {"traces": one.traces, "layout": one.layout, "bars": one.bars}
            for one in drawn
            if one.traces
        },
    }


def _json(value: object) -> str:
    """For inside a script element: without `<`, no name can end it."""
    dumped = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return files("laconic.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """The script that comes with the Python package, packed to two fifths, and its hash."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError("a report needs plotly: pip install 'laconic[race]'") from error
    script = get_plotlyjs()
    packed = gzip.compress(script.encode(), compresslevel=9, mtime=0)
    return b64encode(packed).decode(), _hash(script)


def _hash(script: str) -> str:
    """What a content security policy names a script by: no other script runs on the page."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
