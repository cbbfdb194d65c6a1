"""Messages to all other ranks over Gloo, one after another: who is gone is known by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.exchanges._base import Call
from laconic.exchanges._frame import FRAME_BYTES
from laconic.exchanges._lost import talking

_PATIENCE_S = 30.0  # for a peer that has stopped for a moment
_SLOWEST = 1e4  # bytes per second


def takes_turns(call: Call, device: torch.device) -> bool:
    """Whether messages go one after another.

    Gloo's own sends to all ranks at once: n - 1 senders meet at every receiver, whose link then
    loses packets. One after another, the next rank first, a link has about one sender at a time,
    loses few, and more of its rate is used.
    """
    return device.type == "cpu" and dist.get_backend(call.group) == "gloo"


def one_after_another(arriving: Sequence[Tensor], leaving: Sequence[Tensor], call: Call) -> None:
    """leaving[j] to rank j, arriving[i] from rank i.

    A rank begins its next message when that of the rank before it has come: all ranks take the same
    turns, so the one that it sent has then mostly gone, too. Messages that leave are waited for
    last: Gloo does not tell of a message that was on its way when the peer went, before a time-out,
    and does tell of one that was awaited. That time-out may be short for a peer whose own message
    has come: it has made room for ours before, so nothing but the wire is waited for.
    """
    n, rank, group = call.size, call.rank, call.group
    arriving[rank].copy_(leaving[rank])
    before, behind = ([(rank + way * k) % n for k in range(1, n)] for way in (-1, 1))
    awaited, left = {}, []
    for i in before:
        if arriving[i].numel():
            arriving[i][:FRAME_BYTES].zero_()  # what was here before is no frame of anybody's
            with talking(call, i):
                awaited[i] = group.recv([arriving[i]], i, 0)
    for i, j in zip(before, behind, strict=True):
        if leaving[j].numel():
            with talking(call, j):
                left.append((j, group.send([leaving[j]], j, 0)))
        if i in awaited:
            with talking(call, i):
                awaited[i].wait()
    limited = _takes_limits(group)
    for j, work in left:
        with talking(call, j):
            if limited and j in awaited:
                work.wait(timedelta(seconds=_PATIENCE_S + leaving[j].numel() / _SLOWEST))
            else:
                work.wait()


def _takes_limits(group: Any) -> bool:
    """Whether its works can be waited for with a time-out: torch's own can, others' need not."""
    with suppress(RuntimeError):
        return isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    return False
