"""The error of the mean that all ranks end with, from the error of one encoding.

e and e' are E‖Q(x) - x‖²/‖x‖² of a worker's gradient and of the mean, κ = ‖mean‖²/(average
‖x_i‖²): 1 for equal gradients, 1/n for independent ones, less for such that cancel. Draws of ranks
are independent, so Σ_i e·‖x_i‖²/n² = e/(n·κ)·‖mean‖². NMSE of the mean:

    allreduce, ring, allgather, sparse    e/(n·κ)          for allreduce e is at the levels of n
    scatter-reduce, nested                (n-1)/n·e/(n·κ) + e'      the owner's own is exact
    tree                                  ((1 + e)^(log2 n + 1) - 1) at κ = 1/n, e at κ = 1, linear
                                          in 1/(n·κ) between: every addition rounds again, but
                                          adding equal values is exact
    hierarchical                          inner's, with K nodes for n ranks and κ' for κ

Gradients with a common part of power share φ and independent rests have κ = φ + (1-φ)/n; means of
nodes of m then have κ' = κ/(φ + (1-φ)/m).
"""

from __future__ import annotations

import math

LEAST_KAPPA = 2.0**-20  # an error that is a million times too large is large enough


def mean_error(
    exchange: str,
    error: float,
    error_back: float,
    workers: int,
    kappa: float | None = None,
    *,
    per_node: int = 1,
    inner: str = "scatter-reduce",
) -> float:
    """NMSE of the mean; κ = 1/n, as of independent gradients, where it is not known."""
    kappa = 1 / workers if kappa is None else min(max(kappa, LEAST_KAPPA), 1.0)
    if exchange == "hierarchical":
        nodes = workers // per_node
        common = max(0.0, workers * kappa - 1) / (workers - 1) if workers > 1 else 1.0
        between = kappa / (common + (1 - common) / per_node)
        return mean_error(inner, error, error_back, nodes, between) if nodes > 1 else 0.0
    shrunk = error / (workers * kappa)
    if exchange in ("scatter-reduce", "nested"):
        return (workers - 1) / workers * shrunk + error_back
    if exchange == "tree":
        apart = (1 + error) ** (math.log2(workers) + 1) - 1
        return error + (apart - error) * (1 / kappa - 1) / (workers - 1)
    return shrunk
