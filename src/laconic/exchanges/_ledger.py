"""What past exchanges tell of each parameter: how much an encoding may lose, how much was lost."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

BUDGET = "budget"  # its key in Call.memory
MOST = 16.0  # n·κ above this would save little more
LEAST = 2.0**-12  # steps 64 times as fine: six bits more per value
_DEVIATIONS = 1.5  # of ln(n·κ), below its mean
_FIRST_VARIANCE = 0.25  # of ln(n·κ), after one observation
_WEIGHT = 0.25  # of the newest observation
_SMALL = 1024  # values: fewer have a κ that varies more, and bits of few values cost little
_FIELDS = (
    "seen", "step", "log", "variance", "kappa",
    "steps", "total", "largest", "fallbacks", "budget", "last",
)  # fmt: skip
_SEEN, _STEP, _LOG, _VARIANCE, _KAPPA = range(5)
_STEPS, _TOTAL, _LARGEST, _FALLBACKS, _BUDGET, _LAST = range(5, 11)
_TAKING = threading.Lock()

Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What one exchange found out about some parameters, an entry for each."""

    budget: float
    demand: Numbers  # n·κ as observed; NaN where nothing was lost, or not all is finite
    kappa: Numbers
    error: Numbers  # expected relative squared error of the mean; 0 where it is exact
    broken: NDArray[np.bool_]  # more than the budget: the exact mean was sent


class Ledger:
    """A row for each parameter: n·κ lately, and the errors made so far.

    With ln(n·κ) of mean μ and variance σ² over the last steps (exponentially weighted), the next
    step counts on

        n·κ = exp(μ - 1.5·σ)/(1 + 1024/d)        from 2^-12 to 16

    for a parameter of d values. κ of the last step counts as evidence, that of an earlier one, or
    one before a fallback or values that are not finite, may only make it less than 1/(1 + 1024/d).
    Lanes of communication use it at the same time, for different parameters.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[int, int] = {}
        self._table = np.zeros((0, len(_FIELDS)))

    def factors(self, parameters: Sequence[int], numels: Sequence[int], step: int) -> Numbers:
        """n·κ to count on, for each parameter."""
        with self._lock:
            places = self._rows(parameters)
            rows = self._table[places]
        small = 1 + _SMALL / np.asarray(numels, dtype=np.float64)
        known = np.exp(rows[:, _LOG] - _DEVIATIONS * np.sqrt(rows[:, _VARIANCE]))
        known[rows[:, _SEEN] == 0] = 1
        fresh = (rows[:, _SEEN] > 0) & (rows[:, _STEP] == step - 1)
        return np.clip(np.where(fresh, known, np.minimum(known, 1)) / small, LEAST, MOST)

    def record(self, parameters: Sequence[int], step: int, found: Spending) -> None:
        """Remember an exchange."""
        with self._lock:
            places = self._rows(parameters)
            rows = self._table[places]
            _observe(rows, step, found)
            _count(rows, found)
            self._table[places] = rows

    def latest(self, parameters: Sequence[int]) -> tuple[Numbers, Numbers]:
        """The errors of these parameters' last means, and κ."""
        with self._lock:
            places = self._rows(parameters)  # makes a larger table for new ones
            rows = self._table[places]
        return rows[:, _LAST], rows[:, _KAPPA]

    def kappa(self) -> float | None:
        """Mean over parameters, as last observed."""
        found = self._table[self._table[:, _KAPPA] > 0, _KAPPA]
        return float(found.mean()) if len(found) else None

    def report(self) -> BudgetReport | None:
        """What was spent so far."""
        with self._lock:
            items, table = sorted(self._places.items()), self._table.copy()
        rows = tuple(_row(parameter, table[place]) for parameter, place in items)
        used = [row for row in rows if row.steps]
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

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to resume bit for bit."""
        with self._lock:
            return {
                "parameters": list(self._places),
                "fields": list(_FIELDS),
                "rows": torch.from_numpy(self._table.copy()),
            }

    @staticmethod
    def of(state: Mapping[str, Any]) -> Ledger:
        """From a state_dict."""
        made = Ledger()
        made._places = {int(number): i for i, number in enumerate(state["parameters"])}
        rows = state["rows"].numpy()
        made._table = np.zeros((len(rows), len(_FIELDS)))
        made._table[:, : rows.shape[1]] = rows  # older states have fewer fields
        return made

    def _rows(self, parameters: Sequence[int]) -> list[int]:
        """Their places in the table, which grows."""
        for parameter in parameters:
            self._places.setdefault(parameter, len(self._places))
        missing = len(self._places) - len(self._table)
        if missing:
            self._table = np.concatenate([self._table, np.zeros((missing, len(_FIELDS)))])
        return [self._places[parameter] for parameter in parameters]


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


def ledger_of(memory: MutableMapping[Hashable, Any]) -> Ledger:
    """The ledger in a memory of exchanges; made if need be."""
    with _TAKING:
        found = memory.get(BUDGET)
        if isinstance(found, Mapping):  # of a state_dict
            found = Ledger.of(found)
        memory[BUDGET] = found = found or Ledger()
        return found


def budget_report(memory: MutableMapping[Hashable, Any]) -> BudgetReport | None:
    """What codecs with a budget have spent; None if there was none."""
    return ledger_of(memory).report() if BUDGET in memory else None


def saved_budget(memory: MutableMapping[Hashable, Any]) -> dict[str, Any] | None:
    """The ledger's state. Any rank may load it: it is a hint, the same on all ranks but for lanes
    of nodes, and what ranks decide together does not depend on it."""
    return ledger_of(memory).state_dict() if BUDGET in memory else None


def load_budget(memory: MutableMapping[Hashable, Any], state: Mapping[str, Any] | None) -> None:
    """Resume from such a state; from none, with nothing known."""
    memory.pop(BUDGET, None)
    if state is not None:
        memory[BUDGET] = state


def kappa_of(memory: MutableMapping[Hashable, Any]) -> float | None:
    """κ, mean over parameters; None if no codec had a budget."""
    return ledger_of(memory).kappa() if BUDGET in memory else None


def error_stats(memory: MutableMapping[Hashable, Any]) -> dict[str, Any]:
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


def _observe(rows: Numbers, step: int, found: Spending) -> None:
    """Move mean and variance of ln(n·κ); begin anew where the last evidence is gone."""
    seen = found.demand == found.demand
    log = np.log(np.clip(np.where(seen, found.demand, 1), LEAST / 2, 2 * MOST))
    fresh = seen & ((rows[:, _SEEN] == 0) | (rows[:, _STEP] != step - 1) | found.broken)
    log = np.where(found.broken, np.minimum(log, 0), log)
    weight = np.maximum(_WEIGHT, 1 / (rows[:, _SEEN] + 1))
    off = log - rows[:, _LOG]
    mean = np.where(fresh, log, rows[:, _LOG] + weight * off)
    moved = (1 - weight) * (rows[:, _VARIANCE] + weight * off * off)
    variance = np.where(fresh, _FIRST_VARIANCE, moved)
    rows[:, _LOG] = np.where(seen, mean, rows[:, _LOG])
    rows[:, _VARIANCE] = np.where(seen, variance, rows[:, _VARIANCE])
    rows[:, _SEEN] = np.where(fresh, 1, rows[:, _SEEN] + seen)
    rows[:, _STEP] = np.where(seen, step, rows[:, _STEP])
    rows[:, _KAPPA] = np.where(seen, found.kappa, rows[:, _KAPPA])


def _count(rows: Numbers, found: Spending) -> None:
    """Statistics of errors made."""
    told = np.isfinite(found.error)
    error = np.where(told, found.error, 0)
    rows[:, _STEPS] += told
    rows[:, _TOTAL] += error
    rows[:, _LARGEST] = np.maximum(rows[:, _LARGEST], error)
    rows[:, _LAST] = found.error
    rows[:, _FALLBACKS] += found.broken
    rows[:, _BUDGET] = found.budget


def _row(parameter: int, row: Numbers) -> ParameterBudget:
    steps = int(row[_STEPS])
    mean = float(row[_TOTAL]) / steps if steps else math.nan
    return ParameterBudget(
        parameter=parameter,
        budget=float(row[_BUDGET]),
        mean=mean,
        largest=float(row[_LARGEST]),
        steps=steps,
        fallbacks=int(row[_FALLBACKS]),
    )
