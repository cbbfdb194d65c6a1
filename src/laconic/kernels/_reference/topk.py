"""The largest entries of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def topk(x: Tensor, count: int) -> Tensor:
    """See `Kernels`.

    One integer orders by magnitude, then by index: the same entries on every device.
    """
    magnitude = x.to(torch.float32).view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    order = (magnitude << 32) - torch.arange(x.numel(), device=x.device)
    return -torch.topk(order, count).values & 0xFFFFFFFF
