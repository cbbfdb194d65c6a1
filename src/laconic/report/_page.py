"""The page: template, style and script of this folder, plotly's script, and the race's numbers."""

from __future__ import annotations

import gzip
import json
import shlex
from base64 import b64encode
from collections.abc import Sequence
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
from laconic.report import _words as words
from laconic.report._figures import Figure, Table, figures
from laconic.report._palette import css
from laconic.report._view import Row, View, view

_DOCUMENTS = (
    ("docs/codecs.md", "what each codec does, and its error"),
    ("docs/exchanges.md", "how encoded gradients are averaged"),
    ("docs/ddp.md", "lc.compress with DDP, and auto"),
    ("docs/planner.md", "how step times are predicted"),
    ("docs/lab.md", "how links are shaped on one machine"),
)


def write(race: Race, path: str | Path, *, force: bool = False) -> None:
    """The report of a race, finished or not, as one file; whole or not at all.

    With `force` it replaces a file that is no page of laconic's.
    """
    write_made(path, html(race), Kind.PAGE, force=force)


def html(race: Race) -> str:
    """The page, about 2 MB, nearly all of it plotly's script. It loads nothing from the network."""
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
        table=_strategies(seen) if seen.rows else "<p>No strategy has run yet.</p>",
        legend="".join(map(_button, seen.rows)),
        figures="".join(map(_figure, drawn)),
        settings=_pairs(_settings(race)),
        machine=_pairs(_machine(race)),
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
        f"{task.training:,} training and {task.testing:,} test examples. Every "
        f"strategy: {settings.steps:,} steps of {settings.batch:,} examples per worker, and the "
        "same seed."
    )


def _notices(view: View) -> str:
    notices = []
    if not view.shaped:
        why = view.race.machine.why_unshaped or "no reason was given"
        notices.append(
            f"Links could not be shaped ({why}). Accuracy and bytes are measured; times to the "
            f"target are predicted for {view.race.settings.rate}: the predicted step times the "
            "number of steps."
        )
    if not view.finished:
        notices.append("This race is not finished: results may change.")
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
        table = _data_table(figure.table, figure.title)
        if figure.more:
            table += _data_table(figure.more, f"{figure.title}: per step")
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


def _data_table(table: Table, caption: str) -> str:
    """In a box that scrolls, for keyboards too."""
    head = "".join(
        f'<th scope="col"{_kind(table, column)}>{text(name)}</th>'
        for column, name in enumerate(table.head)
    )
    body = "".join(f"<tr>{_cells(table, row)}</tr>" for row in table.rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="Data: {text(caption)}">'
        f"<table><caption>{text(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(table: Table, row: tuple[str, ...]) -> str:
    first, *others = row
    return f'<th scope="row">{text(first)}</th>' + "".join(
        f"<td{_kind(table, column)}>{text(cell)}</td>" for column, cell in enumerate(others, 1)
    )


def _kind(table: Table, column: int) -> str:
    return "" if column < table.text_columns else ' class="number"'


def _strategies(view: View) -> str:
    """The main table. On a narrow page its rows become cards: roles keep it a table even so."""
    step = "ms per step" if view.shaped else "ms per step, no set rate"
    target = f"to {words.goal(view.target)}"
    base = view.baseline.name if view.baseline else "fp32"
    head = (
        "Strategy",
        "Accuracy",
        f"Time {target}" if view.shaped else f"Predicted time {target}",
        f"Speedup over {base}",
        "MB sent",
        f"Fewer bytes than {base}",
        step[0].upper() + step[1:],
        "Predicted ms",
        "Error (budget)",
        "Line of code",
    )
    columns = "".join(
        f'<th scope="col" role="columnheader"{_wide(column, len(head))}>{text(name)}</th>'
        for column, name in enumerate(head)
    )
    rows = "".join(_strategy(row, head) for row in view.rows)
    return (
        '<table class="strategies" role="table"><caption class="unseen">Strategies: accuracy, '
        'times and bytes</caption><thead role="rowgroup">'
        f'<tr role="row">{columns}</tr></thead><tbody role="rowgroup">{rows}</tbody></table>'
    )


def _wide(column: int, columns: int) -> str:
    return ' class="number"' if 0 < column < columns - 1 else ""


def _strategy(row: Row, head: tuple[str, ...]) -> str:
    lane = row.lane
    numbers = (
        words.percent(row.last.accuracy if row.last else None),
        words.seconds(row.reached_s),
        words.times(row.speedup),
        words.megabytes(row.last.sent_bytes if row.last else None),
        words.times(row.reduction),
        words.milliseconds(lane.step_s),
        words.milliseconds(lane.predicted_step_s),
        words.against(lane.error, lane.error_budget),
    )
    cells = "".join(
        f'<td role="cell" class="number" data-label="{text(name)}">{text(value)}</td>'
        for name, value in zip(head[1:-1], numbers, strict=True)
    )
    notes = "".join(f'<span class="note">{text(note)}</span> ' for note in row.notes)
    return (
        f'<tr role="row"><th scope="row" role="rowheader">{row.look.swatch} '
        f'<span class="name">{text(row.name)}</span> {notes}</th>{cells}'
        f'<td role="cell" class="code" data-label="{text(head[-1])}"><code>{text(lane.code)}</code>'
        "</td></tr>"
    )


def _pairs(items: Sequence[tuple[str, str]]) -> str:
    """Names and values as a list of descriptions."""
    return "<dl>" + "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in items
    ) + "</dl>"  # fmt: skip
