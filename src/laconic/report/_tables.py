"""Tables as HTML. Everything that comes from the race passes through `text`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape as text

from laconic.report import _words as words
from laconic.report._view import Row, View


@dataclass(frozen=True, kw_only=True)
class Table:
    """Plain text, the first column naming each row; `texts` counts the columns without numbers."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    texts: int = 1


def plain(table: Table, caption: str) -> str:
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
    return "" if column < table.texts else ' class="number"'


def strategies(view: View) -> str:
    """The main table. On a narrow page its rows become cards: roles keep it a table even so."""
    step = "ms a step" if view.shaped else "ms a step, no set rate"
    target = f"to {words.goal(view.target)}"
    base = view.baseline.name if view.baseline else "fp32"
    head = (
        "Strategy",
        "Accuracy",
        f"Time {target}" if view.shaped else f"Predicted time {target}",
        f"Sooner than {base}",
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
        words.times(row.sooner),
        words.megabytes(row.last.sent_bytes if row.last else None),
        words.times(row.fewer),
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


def pairs(items: Sequence[tuple[str, str]]) -> str:
    """Names and values as a list of descriptions."""
    return "<dl>" + "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in items
    ) + "</dl>"  # fmt: skip
