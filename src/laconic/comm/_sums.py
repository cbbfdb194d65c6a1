"""Sums over ranks of values that travel as they are, and of integers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._wire import ALIGN
from laconic.comm import _frame
from laconic.comm._context import ExchangeContext, Sizes, chunks_of
from laconic.comm._frame import FRAME_BYTES, Kind
from laconic.comm._transport import (
    Message,
    all_gather,
    all_to_all,
    no_values,
    peer_errors,
)

_AT_ONCE = 1 << 14  # bytes of all ranks' values together, which go to all in one message
_MOST_CHECKED = 1 << 20  # bytes of a sum of plain values that our own messages carry


def sum_in_place(payload: Tensor, context: ExchangeContext) -> None:
    """The sum over ranks, in payload's own type.

    Plain values on the host travel in checked messages up to 1 MiB; else, and for integers, it is
    the backend's all-reduce, which nothing can check from outside. Its bytes count as a ring's.
    """
    floats = payload.dtype.is_floating_point and payload.numel() * payload.element_size()
    if floats and floats <= _MOST_CHECKED and _checks_sums(payload, context):
        _checked_sum(payload.view(-1), context)
        return
    ring = 2 * (context.size - 1) / context.size
    with (
        context.traffic.sending(ring * payload.numel() * payload.element_size()),
        peer_errors(context),
    ):
        dist.all_reduce(payload, group=context.group)
    _frame.arrived(_bytes(payload), context.rank, context)


def plain_mean(x: Tensor | None, context: ExchangeContext) -> None:
    """x becomes its mean by the backend's all-reduce, in its own dtype; None stays.

    As DDP does it: divided first, so that halves overflow only where their mean does.
    """
    if x is not None and x.numel():
        x.mul_(1 / context.size)
        sum_in_place(x, context)


def gather_numbers(
    value: Tensor, context: ExchangeContext, uncompressed: Tensor | None = None
) -> Tensor:
    """One fp32 number of every rank, in order; `uncompressed` becomes its mean in the same message.

    Every rank puts its number into a slot of its own among zeros, and all are added: x + 0 is x,
    and NaN arrives as NaN (a MAX of Gloo's loses it).
    """
    count = 0 if uncompressed is None else uncompressed.numel()
    joint = context.scratch.take("numbers", count + context.size, value.device, torch.float32)
    plain, numbers = joint[:count], joint[count:]
    if uncompressed is not None:
        torch.mul(uncompressed, 1 / context.size, out=plain)
    numbers.zero_()
    numbers[context.rank : context.rank + 1].copy_(value.view(1))
    if _checks_sums(joint, context):
        _checked_sum(joint, context)
    else:
        sum_in_place(joint, context)
    if uncompressed is not None:
        uncompressed.copy_(plain)
    return numbers


def _checks_sums(x: Tensor, context: ExchangeContext) -> bool:
    """Whether our own messages carry a sum: where each can be checked on the host."""
    return (
        x.device.type == "cpu" and context.sums(x.device) and context.size > 1 and x.is_contiguous()
    )


def _checked_sum(x: Tensor, context: ExchangeContext) -> None:
    """x becomes its sum: whole to all, or if that is long in parts that each rank adds up.

    All ranks hold the same bits, because each part is added once, or by all in one order.
    """
    n, rank, grain = context.size, context.rank, ALIGN // x.element_size()
    if sums_at_once(x.numel() * x.element_size(), n):
        sizes = Sizes((_bytes(x).numel(),) * n, known=True)
        every = all_gather(Message(_bytes(x), no_values(x)), context, sizes, [0] * n, Kind.SUM)
        x.copy_(every[0].wire.view(x.dtype))
        for one in every[1:]:
            x.add_(one.wire.view(x.dtype))
        return
    parts = chunks_of(x, n, grain)
    lengths = [_bytes(part).numel() for part in parts]
    none = no_values(x)
    away = [Message(_bytes(part if j != rank else part[:0]), none) for j, part in enumerate(parts)]
    sizes = Sizes(tuple(lengths[rank] if i != rank else 0 for i in range(n)), known=True)
    arrived = all_to_all(away, context, sizes, [0] * n, Kind.PART)
    own = parts[rank]
    for i, one in enumerate(arrived):
        if i != rank:
            own.add_(one.wire.view(x.dtype))
    sizes = Sizes(tuple(lengths), known=True)
    for j, one in enumerate(
        all_gather(Message(_bytes(own), none), context, sizes, [0] * n, Kind.SUM)
    ):
        if j != rank:
            parts[j].copy_(one.wire.view(x.dtype))


def checked_sum_bytes(nbytes: float, ranks: int) -> float:
    """What a rank sends, on average, for a sum of `nbytes` in our own messages."""
    others = ranks - 1
    if sums_at_once(nbytes, ranks):
        return others * (FRAME_BYTES + nbytes)
    return others * 2 * (FRAME_BYTES + nbytes / ranks)


def sums_at_once(nbytes: float, ranks: int) -> bool:
    """Whether sums are so short that every rank sends all of them to all."""
    return nbytes * ranks <= _AT_ONCE


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
