"""Units for Muon, as an experiment: gradients in the bases of their momentum's singular vectors.

Muon moves a matrix by O = M(MᵀM)^(-1/2), which is UVᵀ for a momentum M = U·diag(σ)·Vᵀ. An error N
of M, seen in these bases as A = UᵀNV, changes O there by

    δO_ij = (A_ij - A_ji)/(σ_i + σ_j)        (to first order; A_ij/σ_i beside the square part)

so what training notices is Σ A_ij²/(σ_i + σ_j)², and the error of A_ij may grow with (σ_i + σ_j)².
Ranks encode y = UᵀGV/w and decode U(w·y)Vᵀ, with w = σ_i + σ_j of momentum that all of them hold,
and a floor on w as in `exchanges/_preconditioner.py`. Here ranks are threads that share one
decomposition: on machines of their own rotations would have to be the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_EVERY, _GROWTH = 16, 8  # as in the product
_WORST = 10.0


class Bases(NamedTuple):
    """Of one matrix: singular vectors of its momentum, and w."""

    u: Tensor
    vt: Tensor
    w: Tensor


class Spectral:
    """What `Encoded` asks of units."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], error: float) -> None:
        self._optimizers, self._floor = optimizers, math.sqrt(error / (_WORST - error))
        self._bases: dict[int, Bases] = {}
        self._next = 0

    @property
    def cold(self) -> bool:
        """Whether there is no momentum yet."""
        return not self._bases

    def due(self, t: int) -> bool:
        return t >= self._next

    def refresh(self, t: int, parameters: Mapping[int, Tensor]) -> None:
        self._next = t + max(1, min(_EVERY, t // _GROWTH))
        states = {p: state for one in self._optimizers for p, state in one.state.items()}
        for number, p in parameters.items():
            if p in states:
                self._bases[number] = self._of(states[p]["momentum_buffer"])

    def into(self, x: Tensor, number: int, out: Tensor) -> None:
        u, vt, w = self._bases[number]
        out.copy_((u.T @ x.view(w.shape) @ vt.T).div_(w).flatten())

    def back(self, y: Tensor, number: int, out: Tensor) -> None:
        u, vt, w = self._bases[number]
        out.copy_((u @ (y.view(w.shape) * w) @ vt).flatten())

    def _of(self, momentum: Tensor) -> Bases:
        u, values, vt = torch.linalg.svd(momentum)
        rows, columns = (values.new_zeros(size) for size in momentum.shape)
        rows[: len(values)] = columns[: len(values)] = values
        w = rows[:, None] + columns
        return Bases(u, vt, w.clamp(min=float(self._floor * w.square().mean().sqrt())))
