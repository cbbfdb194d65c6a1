"""Weights as differences to what the receiver has (`schedules._push_pull` says why)."""

from __future__ import annotations

import torch
from torch import Tensor


def projection(found: Tensor, wanted: Tensor) -> Tensor:
    """⟨Q, c⟩/⟨Q, Q⟩; 1 where Q is zero, or NaN (which stays NaN)."""
    square = torch.dot(found, found)
    return torch.where(square > 0, torch.dot(found, wanted) / square, 1.0)


def take_over(found: Tensor, factor: Tensor, before: Tensor, *, out: Tensor) -> None:
    """out = before + λ·found; the same bits wherever it is computed."""
    found.mul_(factor)
    torch.add(found, before, out=out)
