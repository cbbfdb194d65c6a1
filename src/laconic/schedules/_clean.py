"""Gradients that are not finite never leave a rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.server._shard import finite_everywhere


def clean(optimizer: Optimizer, g: Tensor) -> Tensor:
    """Undo GradScaler's scale; 1 if the gradient is not finite, which then becomes zero."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is not None:
        g.mul_(1 / scale)
    spoilt = ~finite_everywhere(g)
    if found is not None:
        spoilt |= found.to(g.device).view(1) > 0
    g.masked_fill_(spoilt, 0.0)
    return spoilt.to(torch.float32)
