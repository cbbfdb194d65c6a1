"""A sentence on each figure, from the numbers of the race."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from laconic.race._result import Quantized
from laconic.report import _words as words
from laconic.report._view import Row, View


def time(view: View) -> str:
    """Which strategy reaches the target first."""
    found = _first(view, lambda row: row.reached_s)
    if not view.shaped:
        unknown = [row.name for row in view.rows if row.lane.predicted_step_s is None]
        if len(unknown) == len(view.rows):
            return "There are neither measured nor predicted times at this rate."
        tail = f" There is no prediction for {words.listed(unknown)}." if unknown else ""
    else:
        tail = ""
    if found is None:
        return _unreached(view) + tail
    best, value, others = found
    lead = "" if view.shaped else "By prediction, "
    sentence = f"{lead}{best.name} reaches {words.goal(view.target)} first, "
    sentence += f"after {words.seconds(value)}"
    return (
        sentence + _than(view, best, value, others, words.seconds, "faster") + _missed(view) + tail
    )


def sent(view: View) -> str:
    """Which strategy sends the fewest bytes until the target."""
    found = _first(view, lambda row: row.reached.sent_bytes if row.reached else None)
    if found is None:
        return _unreached(view)
    best, value, others = found
    sentence = f"To reach {words.goal(view.target)}, a worker sends the least with {best.name}: "
    sentence += _megabytes(value)
    return sentence + _than(view, best, value, others, _megabytes, "less") + _missed(view)


def parts(view: View) -> str:
    """What the baseline and the shortest step spend their time on."""
    short = min(view.rows, key=lambda row: row.lane.step_s)
    lead = "" if view.shaped else "Measured without a set link rate: "
    base = view.baseline or (short if len(view.rows) == 1 else None)
    clauses = []
    if base:
        step = f"{words.milliseconds(base.lane.step_s)}\u00a0ms"
        clauses.append(
            f"{'of' if lead else 'Of'} its {step} per step, {base.name} spends {_share(base)}"
        )
        if base is short and len(view.rows) > 1:
            clauses[0] += ", and none is shorter"
    if base is not short:
        step = f"{words.milliseconds(short.lane.step_s)}\u00a0ms"
        clauses.append(f"{short.name}, the shortest with {step}, spends {_share(short)}")
    return lead + "; ".join(clauses) + "."


def codecs(points: Sequence[Quantized]) -> str:
    """Which codec needs the fewest bits, at the error that most codecs can have."""
    drawn = by_codec(points)
    if not drawn:
        return "No codec with an error was measured."
    # training tolerates an error of about 0.1; the nearest one that most codecs cover
    errors = sorted({point.error for line in drawn.values() for point in line})
    at = max(
        errors,
        key=lambda error: (
            sum(_bits(line, error) is not None for line in drawn.values()),
            -abs(math.log10(error) + 1),
        ),
    )
    found = {name: bits for name, line in drawn.items() if (bits := _bits(line, at)) is not None}
    (best, fewest), *others = sorted(found.items(), key=lambda item: item[1])
    sentence = f"At an error of {words.number(at, 2)}, {best} needs "
    sentence += f"{words.number(fewest, 2)} bits per value"
    if len(others) > 3:
        name, bits = others[0]
        sentence += f", the fewest; {name} is next with {words.number(bits, 2)}"
    elif others:
        each = (f"{name} {words.number(bits, 2)}" for name, bits in others)
        sentence += f", the fewest; {words.listed(each)}"
    return sentence + "."


def predictions(view: View) -> str:
    """How accurate they were."""
    if not view.shaped:
        rate = view.race.settings.rate
        return (
            f"Predictions are for links of {rate}; the links of this race had no set rate, so "
            "there are no measurements to compare them with."
        )
    off = {row: abs(error) for row in view.rows if (error := off_by(row)) is not None}
    if not off:
        return "No step time was predicted before this race."
    worst = max(off, key=lambda row: off[row])
    if len(off) == 1:
        return f"The measured step of {worst.name} is {_off(worst)} its prediction."
    return (
        f"Half of the predictions are within {words.percent(median(off.values()))} of the measured "
        f"step; the largest deviation is that of {worst.name}, measured {_off(worst)} its "
        "prediction."
    )


def off_by(row: Row) -> float | None:
    """Measured over predicted, less one."""
    predicted, measured = row.lane.predicted_step_s, row.lane.step_s
    if not predicted or not math.isfinite(predicted) or not math.isfinite(measured):
        return None
    return measured / predicted - 1 if measured > 0 else None


def by_codec(points: Sequence[Quantized]) -> dict[str, list[Quantized]]:
    """The points that a logarithmic axis can show, one line per codec, by bits."""
    lines: dict[str, list[Quantized]] = {}
    for point in sorted(points, key=lambda point: point.bits):
        if all(math.isfinite(value) and value > 0 for value in (point.bits, point.error)):
            lines.setdefault(point.codec, []).append(point)
    return lines


def exact(points: Sequence[Quantized]) -> list[str]:
    """The lossless codecs, which a logarithmic axis cannot show."""
    return list(dict.fromkeys(point.codec for point in points if point.error == 0))


def _first(
    view: View, value: Callable[[Row], float | None]
) -> tuple[Row, float, list[tuple[Row, float]]] | None:
    """The row with the least value, its value, and the others with theirs; least first."""
    found = [(row, have) for row in view.rows if (have := value(row)) is not None]
    if not found:
        return None
    (best, least), *others = sorted(found, key=lambda item: item[1])
    return best, least, others


def _than(
    view: View,
    best: Row,
    value: float,
    others: list[tuple[Row, float]],
    text: Callable[[float], str],
    word: str,
) -> str:
    """How much better the best is: than the baseline, or than the last where there is none."""
    if not others:
        return "."
    if view.baseline is best:
        row, have = others[0]
        return f"; {row.name} is next with {text(have)}."
    row, have = next((item for item in others if item[0] is view.baseline), others[-1])
    if not value:
        return f"; {row.name}: {text(have)}."
    return f", {words.number(have / value, 2)} times {word} than {row.name} ({text(have)})."


def _unreached(view: View) -> str:
    ended = [row for row in view.rows if row.last and math.isfinite(row.last.accuracy)]
    if not ended:
        return "No strategy has been tested yet."
    best = max(ended, key=lambda row: row.lane.accuracy)
    target = words.goal(view.target)
    if len(view.rows) == 1:
        return f"{best.name} does not reach {target}: it ends at {_end(best)}."
    return f"No strategy reaches {target}; {best.name} comes closest, with {_end(best)} at the end."


def _missed(view: View) -> str:
    missed = [row.name for row in view.rows if row.reached is None]
    if not missed:
        return ""
    if len(missed) > 3:
        return f" {len(missed)} strategies do not reach it."
    return f" {words.listed(missed)} {'does' if len(missed) == 1 else 'do'} not reach it."


def _share(row: Row) -> str:
    """92.0% in communication and 4.0% in its codec."""
    parts = row.lane.parts
    total = parts.compute_s + parts.codec_s + parts.wire_s
    wire, codec = (part / total if total > 0 else 0.0 for part in (parts.wire_s, parts.codec_s))
    share = f"{words.percent(wire)} in communication"
    return share + (f" and {words.percent(codec)} in its codec" if codec > 0 else "")


def _bits(line: list[Quantized], error: float) -> float | None:
    """Bits at an error, interpolated between a codec's points on logarithmic axes."""
    for left, right in pairwise(line):
        low, high = sorted((left.error, right.error))
        if low <= error <= high and low < high:
            part = math.log(error / left.error) / math.log(right.error / left.error)
            return left.bits * (right.bits / left.bits) ** part
    return next((point.bits for point in line if point.error == error), None)


def _megabytes(value: float) -> str:
    return f"{words.megabytes(value)}\u00a0MB"


def _end(row: Row) -> str:
    return words.percent(row.lane.accuracy)


def _off(row: Row) -> str:
    error = off_by(row) or 0.0
    return f"{words.percent(abs(error))} {'above' if error >= 0 else 'below'}"
