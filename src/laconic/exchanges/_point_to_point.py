"""A message to one rank and one from another, on any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.exchanges._base import Call
from laconic.exchanges._device_frame import opened_on_device, seal_on_device
from laconic.exchanges._frame import FRAME_BYTES, Kind, Name, opened, seal
from laconic.exchanges._lost import talking


@dataclass(frozen=True)
class Flight:
    """Bytes that leave and bytes that arrive; neither buffer may be touched before `wait`."""

    works: Sequence[tuple[int, Any]]  # and with whom
    arriving: Tensor
    name: Name
    staged: Tensor | None = None  # on the host, where the backend cannot write to the device

    def wait(self, call: Call) -> Tensor:
        """What arrived behind the frame, checked. On CUDA only the stream waits, but for Gloo's."""
        with call.traffic.sending(0):
            for peer, work in reversed(self.works):  # what arrives first: see `one_after_another`
                with talking(call, peer):
                    work.wait()
        if not self.arriving.numel():
            return self.arriving
        if self.staged is not None:
            opened(self.staged, call, self.name)
            self.arriving.copy_(self.staged)
        elif self.arriving.is_cuda:
            opened_on_device([(self.arriving, self.name)], call)
        else:
            opened(self.arriving, call, self.name)
        return self.arriving[FRAME_BYTES:]


def fly(
    send: Tensor,
    to: int,
    arriving: Tensor,
    source: int,
    name: str,
    call: Call,
    *,
    number: int = 0,
) -> Flight:
    """Start sending to a rank of the group and receiving from another; empty means nothing.

    The first 16 bytes of both are room for a frame. `number` names the message among those of an
    exchange, on both sides. Gloo's point-to-point calls read host memory only: CUDA tensors go
    through buffers there. `name` tells flights that are in the air at once apart.
    """
    staged = None
    target = arriving
    if send.is_cuda and dist.get_backend(call.group) == "gloo":
        host, size = torch.device("cpu"), send.numel()
        send = call.scratch.take(f"leaving {name}", size, host, torch.uint8).copy_(send)
        target = staged = call.scratch.take(f"staged {name}", arriving.numel(), host, torch.uint8)
    moves, peers = [], []
    if send.numel():
        _seal(send, call, Name(Kind.HOP, call.rank, number))
        peers.append(to)
        peer = dist.get_global_rank(call.group, to)
        moves.append(dist.P2POp(dist.isend, send, peer, group=call.group))
    if target.numel():
        if not target.is_cuda:
            target[:FRAME_BYTES].zero_()  # what was here before is no frame of anybody's
        peers.append(source)
        peer = dist.get_global_rank(call.group, source)
        moves.append(dist.P2POp(dist.irecv, target, peer, group=call.group))
    with call.traffic.sending(send.numel()), talking(call, to):
        works = dist.batch_isend_irecv(moves) if moves else []
    if len(works) != len(peers):  # NCCL: one work for all
        peers = [source] * len(works)
    pairs = list(zip(peers, works, strict=True))
    return Flight(pairs, arriving, Name(Kind.HOP, source, number), staged)


def _seal(data: Tensor, call: Call, name: Name) -> None:
    if data.is_cuda:
        seal_on_device([(data, name)], call)
    else:
        seal(data, call, name)
