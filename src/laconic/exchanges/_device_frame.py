"""Frames of messages that lie on a device: written and compared there, so that no host waits.

What came is copied to the host behind the message, and its WireError comes at a later message of
the group, when that copy has arrived. With `verify="sum"` a message that is wrong is also filled
with ones at once, which every wire decodes to NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.exchanges import _frame
from laconic.exchanges._base import Call
from laconic.exchanges._frame import (
    FRAME_BYTES,
    STEPS,
    Name,
    check_of,
    judge,
    salt_of,
    words_of,
    write,
)
from laconic.kernels import backend

_MASK = 0xFFFFFFFF
_ONES = 0xFF
_FIELDS = FRAME_BYTES // 4


@dataclass(frozen=True)
class _Seen:
    """Frames that came; `ready` is the event after which the host can read them."""

    rows: Tensor  # a frame's words and the check of what came, int64
    ready: Any
    device: torch.device
    call: Call  # without its group, which this must not keep alive
    names: tuple[Name, ...]
    sizes: tuple[int, ...]

    def judge(self, group: dist.ProcessGroup) -> None:
        """WireError if one is not what was awaited."""
        call = replace(self.call, group=group)
        for row, name, size in zip(self.rows.tolist(), self.names, self.sizes, strict=True):
            good = row[3] == row[4]
            if not call.sums(self.device):  # of the frame alone, and known without the device
                good = row[3] == check_of(_sealed(row[:3], call, name), call, name)
            judge(row[:3], good, size, call, name)


_SEEN: WeakKeyDictionary[dist.ProcessGroup, deque[_Seen]] = WeakKeyDictionary()

Named = Sequence[tuple[Tensor, Name]]


def seal_on_device(messages: Named, call: Call) -> None:
    """Write every message's frame; what follows is there already."""
    frames = _expected(messages, call)
    for frame, (data, name) in zip(frames.split(FRAME_BYTES), messages, strict=True):
        data[:FRAME_BYTES].copy_(frame)
        if call.sums(data.device):
            check = backend(data.device).message_check(data, salt_of(call, name))
            data[12:FRAME_BYTES].view(torch.int32).copy_(check)


def opened_on_device(messages: Named, call: Call) -> list[Tensor]:
    """What follows every frame; WireError for an earlier message that is now known to be wrong."""
    raise_what_is_known(call.group)
    for data, name in messages:
        _frame.arrived(data, name.sender, call)
    got = _words(torch.cat([data[:FRAME_BYTES] for data, _ in messages]))
    found = got[:, 3:]
    if call.sums(got.device):
        check = backend(got.device).message_check
        sums = [check(data, salt_of(call, name)) for data, name in messages]
        found = torch.stack(sums).view(-1, 1)
        want = _words(_expected(messages, call))
        differ = got[:, :3] ^ want[:, :3]
        differ[:, 1] &= STEPS  # of passes the host judges
        wrong = differ.any(1) | (got[:, 3:] != found).any(1)
        for bad, (data, _) in zip(wrong.unbind(), messages, strict=True):
            data[FRAME_BYTES:].masked_fill_(bad, _ONES)
    _remember(torch.cat([got, found], dim=1), call, messages)
    return [data[FRAME_BYTES:] for data, _ in messages]


def raise_what_is_known(group: dist.ProcessGroup) -> None:
    """WireError if what has come to be known of earlier messages is wrong; waits for nothing."""
    seen = _SEEN.setdefault(group, deque())
    while seen and seen[0].ready.query():
        seen.popleft().judge(group)


def announce_on_device(
    lengths: Sequence[int | Tensor], out: Tensor, call: Call, names: Sequence[Name]
) -> None:
    """Frames of lengths that a device may know alone: the host waits for it."""
    unknown = [length for length in lengths if isinstance(length, Tensor)]
    read = iter(torch.cat(unknown).tolist() if unknown else ())
    found = [next(read) if isinstance(length, Tensor) else length for length in lengths]
    frames = [
        _sealed(words_of(nbytes, call, name), call, name)
        for nbytes, name in zip(found, names, strict=True)
    ]
    out.copy_(torch.cat(frames))


def _expected(messages: Named, call: Call) -> Tensor:
    """The frames of these messages with checks of the frames alone, on their device."""
    frames = torch.cat(
        [
            _sealed(words_of(data.numel() - FRAME_BYTES, call, name), call, name)
            for data, name in messages
        ]
    )
    device = messages[0][0].device
    if device.type != "cuda":
        return frames.to(device)
    return frames.pin_memory().to(device, non_blocking=True)


def _sealed(words: Sequence[int], call: Call, name: Name) -> Tensor:
    """On the host, with the check of the frame alone."""
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
    write(frame, words, 0)
    write(frame, words, check_of(frame, call, name))
    return frame


def _words(frames: Tensor) -> Tensor:
    return (frames.view(torch.int32).to(torch.int64) & _MASK).view(-1, _FIELDS)


def _remember(rows: Tensor, call: Call, messages: Named) -> None:
    """Copy to the host behind what the device has to do."""
    cuda = rows.device.type == "cuda"
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=cuda)
    host.copy_(rows, non_blocking=True)
    ready: Any = torch.cuda.Event() if cuda else _AtOnce()
    ready.record()
    names = tuple(name for _, name in messages)
    sizes = tuple(data.numel() - FRAME_BYTES for data, _ in messages)
    _SEEN.setdefault(call.group, deque()).append(
        _Seen(host, ready, rows.device, call, names, sizes)
    )


class _AtOnce:
    """An event of a device that is the host."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True
