"""The error of `global`, whose workers share the levels that an integer has.

n workers have s(n) = ⌊127/n⌋ levels each (8 bits), Δ = N/s apart, N the largest value of all. A
value is rounded up or down at random; with y = Δ/σ, for Gaussian values, E‖Q(x) - x‖²/‖x‖² is

    y²/6          while Δ is small:  E[f·(1 - f)]·Δ², f uniform
    0.8·y - 1     from y = 2.2 on:   almost all lie below the first level, E|x|·Δ - E x²

All-reduce adds with s(n), hierarchical with s(K) of K nodes, a ring, whose sums widen, with s(1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from laconic.codecs import codec
from laconic.errors import ConfigError
from laconic.planner._cluster import CodecCost

_COARSE = 2.2


def rounding_error(y: float) -> float:
    """Of one encoding with levels y standard deviations apart."""
    return y * y / 6 if y < _COARSE else 0.8 * y - 1


def level_distance(error: float) -> float:
    """y that has this error: the other way round."""
    fine = (6 * error) ** 0.5
    return fine if fine < _COARSE else max(_COARSE, (error + 1) / 0.8)


def with_levels(cost: CodecCost, measured: int, adding: int) -> CodecCost:
    """A codec's cost when `adding` workers share its levels, from that of `measured` workers.

    ConfigError where the integers hold no such sum; codecs without shared levels stay as they are.
    """
    own: Any = codec(cost.spec)
    if own.name != "global" or not own.summable:
        return cost
    levels = own.levels_for(adding)
    if levels == (known := shared_levels(own, measured)):
        return cost
    error = rounding_error(level_distance(cost.error) * known / levels)
    return replace(cost, error=error, error_back=error)


def shared_levels(own: Any, workers: int) -> float:
    """s; a part of one where not even one is left, so that paper has a figure to start from."""
    try:
        return own.levels_for(workers)
    except ConfigError:
        return own.levels_for(1) / workers
