"""The tables of docs/benchmarks.md that say how well and how fast something was learnt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Rows = list[dict[str, Any]]


def time_to_accuracy(rows: Rows) -> str:
    """Seconds, steps and milliseconds a step, by strategy and rate."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    heads = " | ".join(f"{rate} Mbit/s | steps | ms a step" for rate in rates)
    lines = [f"| | {heads} |", "|---" * (3 * len(rates) + 1) + "|"]
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        cells = []
        for rate in rates:
            row = next(r for r in rows if (r["strategy"], r["rate"]) == (strategy, rate))
            spent = (
                f"{row['seconds']:.0f} s" if row["reached"] else f"not in {row['seconds']:.0f} s"
            )
            cells.append(f"{spent} | {row['steps']} | {row['step_ms']:.0f}")
        lines.append(f"| {strategy} | {' | '.join(cells)} |")
    return "\n".join(lines)


RULES = {
    "momentum": "`MomentumRule(share=1)`",
    "momentum-share-0.5": "`MomentumRule(share=0.5)`",
    "momentum-share-0": "`MomentumRule(share=0)`",
    "momentum-0.8": "`MomentumRule(momentum=0.8, share=1)`",
    "glu": "`GLU()`",
    "glu-alpha-4-beta-1": "`GLU(alpha=4, beta=1)`",
    "dcasgd": "`DCASGD()`",
    "plain": "`LocalSGDRule()`",
    "none": "`None`",
}


def rules(rows: Rows) -> str:
    """Test accuracy of ResNet-20 after SSD with each local rule, by period."""
    found = _of(rows, "resnet20", "accuracy")
    periods = (2, 4, 8, 16)
    lines = ["| | rate | " + " | ".join(f"k = {k}" for k in periods) + " |", "|---" * 6 + "|"]
    for rate in (0.8, 0.4):
        got = _spread(found[f"sync lr={rate}"], 100)
        lines.append(f"| synchronous | {rate} | {got} | | | |")
    for name, text in RULES.items():
        for rate in (0.8, 0.4, 0.2):
            settings = [f"ssd k={k} {name} lr={rate}" for k in periods]
            if any(one in found for one in settings):
                cells = [_spread(found[one], 100) if one in found else "" for one in settings]
                lines.append(f"| {text} | {rate} | {' | '.join(cells)} |")
    return "\n".join(lines)


ADAM_RULES = {
    "none": "`None`",
    "glu": "`GLU()`",
    "plain": "`LocalSGDRule()`",
    "adam": "`AdamRule(gain=1)`*",
    "adam-2g": "`AdamRule()`*",
}


def adam(rows: Rows) -> str:
    """Bits a character of a small transformer under AdamW."""
    found = _of(rows, "transformer", "bits_per_character")
    rates = (0.001, 0.002, 0.004)
    lines = ["| | " + " | ".join(f"rate {rate}" for rate in rates) + " |", "|---|---|---|---|"]
    names = [("synchronous", "sync")]
    for period in (1, 4):
        names += [
            (f"k = {period}, {text}", f"ssd k={period} {name}") for name, text in ADAM_RULES.items()
        ]
    for text, start in names:
        settings = [f"{start} lr={rate}" for rate in rates]
        if any(one in found for one in settings):
            cells = [_spread(found[one], 1) if one in found else "" for one in settings]
            lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(rows: Rows, task: str, value: str) -> dict[str, list[float]]:
    """Values of the final runs, by setting."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["stage"] == "final" and row["task"] == task:
            found.setdefault(row["setting"], []).append(row[value])
    return found


def _spread(values: Iterable[float], times: float) -> str:
    got = sorted(times * value for value in values)
    digits = 1 if times > 1 else 3
    mean = sum(got) / len(got)
    return f"{mean:.{digits}f} ({got[0]:.{digits}f} to {got[-1]:.{digits}f})"


FORMS = {
    "fp32": "fp32",
    "dqsg": "`dqsg:levels=3`",
    "nested": "nested, `tolerance=0.1`",
    "loose": "nested, `tolerance=1`",
    "own": "`side=own`",
    "previous": "`side=previous`",
    "fixed": "the paper's: ρ = 3 always",
}


def nested(rows: Rows) -> str:
    """Bits out, accuracy against dqsg and failures; total batch 200, over 2 to 16 workers."""
    heads = "bits out | accuracy | less dqsg's | failures"
    lines = [f"| | scales | LeNet: {heads} | FC: {heads} |", "|---" * 10 + "|"]
    for form, text in FORMS.items():
        for block in (None, 512):
            cells = [_form(rows, model, form, block) for model in ("lenet", "fc")]
            if all(cells):
                scales = {None: "one a matrix", 512: "one for 512"}[block] if form != "fp32" else ""
                lines.append(f"| {text} | {scales} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _form(rows: Rows, model: str, form: str, block: int | None) -> str:
    def key(row: dict[str, Any]) -> tuple[int, int]:
        return row["workers"], row["seed"]

    def chosen(name: str, scales: int | None) -> Rows:
        wanted = (model, name, scales)
        found = [r for r in rows if (r["model"], r["form"], r["block"]) == wanted]
        return [r for r in found if r["batch"] == 200 // r["workers"]]

    found, base = chosen(form, block), {key(r): r["accuracy"] for r in chosen("dqsg", block)}
    if not found:
        return ""
    bits = sum(r["bits_out"] for r in found) / len(found)
    right = sum(r["accuracy"] for r in found) / len(found)
    less = sum(r["accuracy"] - base[key(r)] for r in found) / len(found)
    wrong = [r["failures"] for r in found if r.get("failures") is not None]
    share = f"{sum(wrong) / len(wrong):.1e}" if wrong and sum(wrong) else "0"
    return f"{bits:.2f} | {100 * right:.2f} | {100 * less:+.2f} | {share}"
