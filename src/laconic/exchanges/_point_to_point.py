"""A message to one rank and one from another, on any backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.exchanges._base import Call


@dataclass(frozen=True)
class Flight:
    """Bytes that leave and bytes that arrive; neither buffer may be touched before `wait`."""

    works: Iterable[Any]
    arriving: Tensor
    staged: Tensor | None = None  # on the host, where the backend cannot write to the device

    def wait(self, call: Call) -> Tensor:
        """What arrived. On CUDA only the stream waits, except for Gloo."""
        with call.traffic.sending(0):
            for work in self.works:
                work.wait()
        if self.staged is not None:
            self.arriving.copy_(self.staged)
        return self.arriving


def fly(send: Tensor, to: int, arriving: Tensor, source: int, name: str, call: Call) -> Flight:
    """Start sending to a rank of the group and receiving from another; empty means nothing.

    Gloo's point-to-point calls read host memory only: CUDA tensors go through buffers there.
    `name` tells flights that are in the air at once apart.
    """
    staged = None
    target = arriving
    if send.is_cuda and dist.get_backend(call.group) == "gloo":
        host, size = torch.device("cpu"), send.numel()
        send = call.scratch.take(f"leaving {name}", size, host, torch.uint8).copy_(send)
        target = staged = call.scratch.take(f"staged {name}", arriving.numel(), host, torch.uint8)
    moves = []
    if send.numel():
        peer = dist.get_global_rank(call.group, to)
        moves.append(dist.P2POp(dist.isend, send, peer, group=call.group))
    if target.numel():
        peer = dist.get_global_rank(call.group, source)
        moves.append(dist.P2POp(dist.irecv, target, peer, group=call.group))
    with call.traffic.sending(send.numel()):
        works = dist.batch_isend_irecv(moves) if moves else ()
    return Flight(works, arriving, staged)
