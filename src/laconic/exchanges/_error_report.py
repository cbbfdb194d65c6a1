"""The error that codecs with a budget have made, as exchanges know it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from laconic.comm._context import ExchangeMemory
from laconic.exchanges._budget import ledger_of


@dataclass(frozen=True, kw_only=True)
class ParameterBudget:
    """Expected relative squared error of one parameter's mean, over the steps so far."""

    parameter: int
    budget: float
    mean: float
    largest: float
    steps: int
    fallbacks: int  # steps in which its exact mean was sent, because the budget was broken


@dataclass(frozen=True, kw_only=True)
class BudgetReport:
    """The error that the mean gradient really had, as exchanges know it: E‖x̂ - mean‖²/‖mean‖².

    Means are over parameters and steps. Where several budgets are in use, `budget` is the largest.
    """

    budget: float
    mean: float
    largest: float
    parameters: tuple[ParameterBudget, ...]
    fallbacks: int


def budget_report(memory: ExchangeMemory) -> BudgetReport | None:
    """What codecs with a budget have spent; None if there was none."""
    if ExchangeMemory.BUDGET not in memory.kept:
        return None
    used = [_parameter(number, row) for number, row in ledger_of(memory).rows() if row["steps"]]
    if not used:
        return None
    steps = sum(row.steps for row in used)
    return BudgetReport(
        budget=max(row.budget for row in used),
        mean=sum(row.mean * row.steps for row in used) / steps,
        largest=max(row.largest for row in used),
        parameters=tuple(used),
        fallbacks=sum(row.fallbacks for row in used),
    )


def kappa_of(memory: ExchangeMemory) -> float | None:
    """κ, mean over parameters as last observed; None if no codec had a budget."""
    if ExchangeMemory.BUDGET not in memory.kept:
        return None
    found = [row["kappa"] for _, row in ledger_of(memory).rows() if row["kappa"] > 0]
    return float(np.mean(found)) if found else None


def error_stats(memory: ExchangeMemory) -> dict[str, Any]:
    """The fields of statistics about the error that was made, from what exchanges remember."""
    report = budget_report(memory)
    if report is None:
        return {}
    return {
        "error_budget": report.budget,
        "error_mean": report.mean,
        "error_largest": report.largest,
        "exact_means": report.fallbacks,
        "kappa": kappa_of(memory),
    }


def _parameter(number: int, row: dict[str, float]) -> ParameterBudget:
    steps = int(row["steps"])
    return ParameterBudget(
        parameter=number,
        budget=row["budget"],
        mean=row["total"] / steps if steps else math.nan,
        largest=row["largest"],
        steps=steps,
        fallbacks=int(row["fallbacks"]),
    )
