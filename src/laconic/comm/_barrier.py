"""A barrier that names the ranks that do something else.

On Gloo a message may be shorter than the receive that was posted for it; a longer one ends the
process. So a rank that begins a call which all must make together sends a frame of 16 bytes to all
others, and has room for the largest message that they could be sending instead. A rank that is in a
step finds the frame where it awaited a wire (`_frame.py`); both know what the other one does. Steps
themselves do nothing for this.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs import Codec
from laconic.comm._context import ExchangeContext, segments_of
from laconic.comm._frame import FRAME_BYTES, STEPS, Call, call_frame, called
from laconic.comm._transport import peer_errors
from laconic.errors import LostError, WireError

_PATIENCE_S = 30.0  # once something is wrong, for what else is on its way
_AROUND = 1 << 20  # headers, tables and frames


def most_bytes(codec: Codec, numel: int, context: ExchangeContext) -> int:
    """More than any message of so many values that a step sends: encoded, or as they are."""
    wire = codec.nbytes(numel, torch.float32, segments_of(context.inside(0, numel)))
    return wire + 8 * numel + _AROUND


def barrier(call: Call, context: ExchangeContext, most: int) -> None:
    """Return when all ranks have come to this call after the same step; WireError on all if not.

    `most` bytes of room for each rank's message: memory that nothing is written to costs nothing.
    On backends other than Gloo it returns at once, and what follows waits for the others.
    """
    if context.size == 1 or dist.get_backend(context.group) != "gloo":
        return
    n, rank, group = context.size, context.rank, context.group
    arriving: dict[int, Tensor] = {}
    works: dict[int, Any] = {}
    with _during(call):
        for i in ((rank - k) % n for k in range(1, n)):
            arriving[i] = torch.empty(max(most, FRAME_BYTES), dtype=torch.uint8)
            arriving[i][:FRAME_BYTES].zero_()  # what was here before is no frame of anybody's
            with peer_errors(context, i):
                works[i] = group.recv([arriving[i]], i, 0)
        frame, left = call_frame(call, context), []
        for i in arriving:
            with peer_errors(context, i):
                left.append((i, group.send([frame], i, 0)))
        while works:
            i = next(iter(works))
            with peer_errors(context, i):
                works.pop(i).wait()
            if not _same(call, arriving[i], i, context):
                _give_up([*works.values(), *(work for _, work in left)])
                raise WireError(_said(call, arriving, context))
        for i, work in left:
            with peer_errors(context, i):
                work.wait()


def _same(call: Call, data: Tensor, sender: int, context: ExchangeContext) -> bool:
    return called(data, sender, context) == (call, context.step & STEPS)


def _give_up(works: list[Any]) -> None:
    """What is under way may end: others would not learn what is wrong if it were broken off."""
    end = time.monotonic() + _PATIENCE_S
    for work in works:
        with suppress(RuntimeError):
            work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))


def _said(call: Call, arriving: dict[int, Tensor], context: ExchangeContext) -> str:
    doing: dict[str, list[int]] = {}
    for i in sorted(arriving):
        if arriving[i][:FRAME_BYTES].any() and not _same(call, arriving[i], i, context):
            found = called(arriving[i], i, context)
            what = (
                f"came to {found[0].said} after {found[1]} steps" if found else "went on training"
            )
            doing.setdefault(what, []).append(i)
    others = "; ".join(
        f"{', '.join(context.name_of(i) for i in ranks)} {what}" for what, ranks in doing.items()
    )
    return (
        f"this rank, {context.name_of(context.rank)}, came to {call.said} after {context.step} "
        f"steps; {others} instead: {call.advice}"
    )


@contextmanager
def _during(call: Call) -> Iterator[None]:
    """Where a rank is lost or late here, it may have had no part in the call."""
    try:
        yield
    except LostError as error:
        raise LostError(
            f"{error}. This rank came to {call.said}, and waited for the others: {call.advice}"
        ) from error
