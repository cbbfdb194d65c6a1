"""A message to one rank and one from another, on any backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm._context import ExchangeContext
from laconic.comm._frame import FRAME_BYTES, Kind, Name, open_all, seal_all
from laconic.comm._transport import peer_errors


@dataclass(frozen=True)
class SendRecvWork:
    """Bytes that leave and bytes that arrive; neither buffer may be touched before `wait`."""

    works: Sequence[tuple[int, Any]]  # and with whom
    arriving: Tensor
    name: Name
    staged: Tensor | None = None  # on the host, where the backend cannot write to the device

    def wait(self, context: ExchangeContext) -> Tensor:
        """What follows the frame, checked. On CUDA only the stream waits, except with Gloo."""
        with context.traffic.sending(0):
            for peer, work in reversed(self.works):  # what arrives first: see `one_after_another`
                with peer_errors(context, peer):
                    work.wait()
        if not self.arriving.numel():
            return self.arriving
        open_all([(self.arriving if self.staged is None else self.staged, self.name)], context)
        if self.staged is not None:
            self.arriving.copy_(self.staged)
        return self.arriving[FRAME_BYTES:]


def sendrecv(
    send: Tensor,
    to: int,
    arriving: Tensor,
    source: int,
    name: str,
    context: ExchangeContext,
    *,
    number: int = 0,
) -> SendRecvWork:
    """Start sending to a rank of the group and receiving from another; empty means nothing.

    The first 16 bytes of both are room for a frame. `number` names the message among those of an
    exchange, on both sides. Gloo's point-to-point calls read host memory only: CUDA tensors go
    through buffers there. `name` distinguishes messages in flight at once.
    """
    staged = None
    target = arriving
    if send.is_cuda and dist.get_backend(context.group) == "gloo":
        host, size = torch.device("cpu"), send.numel()
        send = context.scratch.take(f"leaving {name}", size, host, torch.uint8).copy_(send)
        target = staged = context.scratch.take(
            f"staged {name}", arriving.numel(), host, torch.uint8
        )
    moves, peers = [], []
    if send.numel():
        seal_all([(send, Name(Kind.SENDRECV, context.rank, number))], context)
        peers.append(to)
        peer = dist.get_global_rank(context.group, to)
        moves.append(dist.P2POp(dist.isend, send, peer, group=context.group))
    if target.numel():
        if not target.is_cuda:
            target[:FRAME_BYTES].zero_()  # no old frame may pass for a new one
        peers.append(source)
        peer = dist.get_global_rank(context.group, source)
        moves.append(dist.P2POp(dist.irecv, target, peer, group=context.group))
    with context.traffic.sending(send.numel()), peer_errors(context, to):
        works = dist.batch_isend_irecv(moves) if moves else []
    if len(works) != len(peers):  # NCCL: one work for all
        peers = [source] * len(works)
    pairs = list(zip(peers, works, strict=True))
    return SendRecvWork(pairs, arriving, Name(Kind.SENDRECV, source, number), staged)
