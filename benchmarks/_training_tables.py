"""The tables of docs/benchmarks.md that say how well and how fast something was learnt."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks._rows import markdown

Rows = list[dict[str, Any]]
Found = dict[str, dict[int, list[float]]]  # by setting and seed


def time_to_accuracy(rows: Rows) -> str:
    """Seconds, steps and milliseconds per step, by strategy and rate."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    heads = " | ".join(f"{rate} Mbit/s | steps | ms per step" for rate in rates)
    lines = []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        cells = []
        for rate in rates:
            row = next(r for r in rows if (r["strategy"], r["rate"]) == (strategy, rate))
            spent = (
                f"{row['seconds']:.0f} s" if row["reached"] else f"not in {row['seconds']:.0f} s"
            )
            cells.append(f"{spent} | {row['steps']} | {row['step_ms']:.0f}")
        lines.append([strategy, *cells])
    return markdown(f"| | {heads} |", lines)


CODED = " codec=ecdq:error=0.08"
RULES = {
    "ssd k={k} momentum-share-0.5 lr={lr}": "`MomentumRule()`, that is `share=0.5`",
    "ssd k={k} momentum lr={lr}": "`MomentumRule(share=1)`",
    "ssd k={k} momentum-share-0 lr={lr}": "`MomentumRule(share=0)`",
    "ssd k={k} momentum-0.8-share-0.5 lr={lr}": "`MomentumRule(momentum=0.8)`",
    "ssd k={k} momentum-0.8 lr={lr}": "`MomentumRule(momentum=0.8, share=1)`",
    "ssd k={k} glu lr={lr}": "`GLU()`",
    "ssd k={k} glu-alpha-4-beta-1 lr={lr}": "`GLU(alpha=4, beta=1)`",
    "ssd k={k} dcasgd lr={lr}": "`DCASGD()`",
    "ssd k={k} plain lr={lr}": "`LocalSGDRule()`",
    "ssd k={k} none lr={lr}": "`None`",
    "ssd k={k} momentum-share-0.5 lr={lr}" + CODED: "`MomentumRule()`, `codec=ecdq:error=0.08`",
    "ssd k={k} glu lr={lr}" + CODED: "`GLU()`, `codec=ecdq:error=0.08`",
    "local H={k} lr={lr}": "`LocalSGD(period=k)`",
    "local H={k} Nesterov(lr=0.7, momentum=0.9) lr={lr}": "the same, `outer=Nesterov()`",
}


def rules(rows: Rows) -> str:
    """Test accuracy of ResNet-20 after SSD with each local rule, by period."""
    found = _of(rows, "resnet20", "accuracy", 100)
    return _by_period(found, 1, RULES, (2, 4, 8, 16), (0.8, 0.4, 0.2))


ADAM_RULES = {
    "ssd k={k} adam-gain-2 lr={lr}": "`AdamRule()`, that is `gain=2`",
    "ssd k={k} adam-gain-1.5 lr={lr}": "`AdamRule(gain=1.5)`",
    "ssd k={k} adam-gain-1 lr={lr}": "`AdamRule(gain=1)`",
    "ssd k={k} adam-gain-2-share-0.5 lr={lr}": "`AdamRule(share=0.5)`",
    "ssd k={k} glu lr={lr}": "`GLU()`",
    "ssd k={k} plain lr={lr}": "`LocalSGDRule()`",
    "ssd k={k} none lr={lr}": "`None`",
    "local H={k} lr={lr}": "`LocalSGD(period=k)`",
}


def adam(rows: Rows) -> str:
    """Bits a character of a small transformer under AdamW, by period."""
    found = _of(rows, "transformer", "bits_per_character")
    return _by_period(found, 3, ADAM_RULES, (1, 2, 4, 8), (0.002, 0.004, 0.001))


def _by_period(
    found: Found,
    digits: int,
    forms: dict[str, str],
    periods: tuple[int, ...],
    rates: tuple[float, ...],
) -> str:
    head, lines = f"| | rate | {' | '.join(f'k = {k}' for k in periods)} |", []
    for form, text in {"sync lr={lr}": "synchronous", **forms}.items():
        for lr in rates:
            settings = dict.fromkeys(form.format(k=k, lr=lr) for k in periods)
            cells = [_spread(found.get(one, {}), digits) for one in settings]
            if any(cells):
                cells += [""] * (len(periods) - len(cells))  # synchronous: one for all
                lines.append([text, lr, *cells])
    return markdown(head, lines)


def _of(rows: Rows, task: str, value: str, times: float = 1) -> Found:
    """Values by setting and seed; not of the screening, which has one seed."""
    found: Found = {}
    for row in rows:
        if row["stage"] != "screen" and row["task"] == task:
            seeds = found.setdefault(row["setting"], {})
            seeds.setdefault(row["seed"], []).append(times * row[value])
    return found


def _spread(seeds: dict[int, list[float]], digits: int) -> str:
    """Mean of seeds, least and most of all runs (some seeds ran twice), number of seeds."""
    if not seeds:
        return ""
    got = sorted(value for values in seeds.values() for value in values)
    mean = statistics.mean(statistics.mean(values) for values in seeds.values())
    return f"{mean:.{digits}f} ({got[0]:.{digits}f} to {got[-1]:.{digits}f}; {len(seeds)})"


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
    lines = []
    for form, text in FORMS.items():
        for block in (None, 512):
            cells = [_form(rows, model, form, block) for model in ("lenet", "fc")]
            if all(cells):
                names = {None: "one per matrix", 512: "one per 512"}
                scales = names[block] if form != "fp32" else ""
                lines.append([text, scales, *cells])
    return markdown(f"| | scales | LeNet: {heads} | FC: {heads} |", lines)


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
