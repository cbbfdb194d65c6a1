"""The frame in front of every message between ranks, checked before the message is used.

A frame of 16 bytes, four little-endian words, so that what follows keeps its 16-byte alignment:

    words of 4 bytes that follow | step mod 2^28, passes | tensor mod 2^16, sender mod 2^12, kind
    | check

Passes are those of backward that the sender has made since an optimizer last stepped its model, 14
at most; 15 where it does not know. A rank that runs backward once more than others sends the same
steps as they do, and is found by these.

The check is `message_check` (`kernels/_reference/checksum.py`) over all other words of the message,
or with `verify="none"` over those of the frame alone. Its salt comes from the seed, the kind, the
sender and the place of the message in its exchange: a message that is not the awaited one fails.

Messages in host memory are checked before anything is done with them. Frames of messages that lie
on a device are written and compared there, so that no host waits: what came is copied to the host
after the message, and its WireError comes at a later message of the group, when that copy has
arrived. With `verify="sum"` a message that is wrong is also filled with ones immediately, which
every wire decodes to NaN.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._key import Key
from laconic.comm._context import ExchangeContext
from laconic.errors import WireError
from laconic.kernels import backend

FRAME_BYTES = 16
WORD = 4
_FRAME, _CHECK = struct.Struct("<IIII"), struct.Struct("<I")
_MASK, _TENSORS, _SENDERS = 0xFFFFFFFF, 0xFFFF, 0xFFF  # of a word, and of the third word's parts
STEPS = 0xFFFFFFF  # of the second word
_UNKNOWN = 15
_ONES = 0xFF


class Kind(IntEnum):
    """What a message is for."""

    SIZES = 1  # how long the wire is that follows in another message: a frame alone
    ALL_TO_ALL = 2  # one for every rank
    ALL_GATHER = 3  # the same to all
    SENDRECV = 4  # one rank to one other
    PART = 5  # of a sum, to the rank that adds it up
    SUM = 6  # from that rank to all
    NUMBERS = 7  # lengths, and what encodings spent of a budget, to all
    CALL = 8  # a call that all ranks must make together begins (`_barrier.py`): a frame alone


class Call(IntEnum):
    """What all ranks of a schedule must do together, after the same step."""

    BARRIER = 0
    FIRST_STEP = 1  # of a schedule that was made or loaded
    GLOBAL_WEIGHTS = 2
    SAVE = 3

    @property
    def said(self) -> str:
        """As errors call it."""
        return ("barrier()", "its first exchange", "global_weights()", "lc.save() (lc.AllRanks)")[
            self
        ]

    @property
    def advice(self) -> str:
        """What to write instead."""
        return (
            "call it on all ranks, after the same step",
            "make the schedule on all ranks at once, and load one checkpoint on all of them",
            "enter it on all ranks, after the same step; to evaluate on one rank alone there is "
            "latest_weights()",
            "call it on all ranks, after the same step: it writes on rank 0 only, so it does not "
            'belong under "if rank == 0"',
        )[self]


@dataclass(frozen=True)
class Name:
    """Which message of an exchange this is: of its kind, from whom, and a number."""

    kind: Kind
    sender: int
    number: int = 0


Words = tuple[int, int, int]  # the first three
Named = Sequence[tuple[Tensor, Name]]  # messages of one device


def arrived(data: Tensor, sender: int, context: ExchangeContext) -> None:
    """Every message that came from another rank passes here before it is checked.

    So does what a backend's all-reduce has made, with this rank itself as the sender. Does nothing:
    tests and fault injectors put their own in its place, to change bytes.
    """


def seal_all(messages: Named, context: ExchangeContext) -> None:
    """Write the frames of messages, wherever these lie; none where a message is empty."""
    some = [(data, name) for data, name in messages if data.numel()]
    if some and some[0][0].is_cuda:
        seal_on_device(some, context)
        return
    for data, name in some:
        seal(data, context, name)


def open_all(messages: Named, context: ExchangeContext) -> None:
    """WireError unless exactly these messages arrived; on a device, at a later message."""
    some = [(data, name) for data, name in messages if data.numel()]
    if some and some[0][0].is_cuda:
        opened_on_device(some, context)
        return
    for data, name in some:
        opened(data, context, name)


def announce_all(
    lengths: Sequence[int | Tensor], out: Tensor, context: ExchangeContext, names: Sequence[Name]
) -> None:
    """Frames that announce lengths, one after another; waits where only a device knows these."""
    if out.is_cuda:
        announce_on_device(lengths, out, context, names)
        return
    for length, frame, name in zip(lengths, out.split(FRAME_BYTES), names, strict=True):
        announce(int(length), frame, context, name)


def seal(data: Tensor, context: ExchangeContext, name: Name) -> None:
    """Write the frame of a message into its first 16 bytes; what follows is there already."""
    write(data, words_of(data.numel() - FRAME_BYTES, context, name), 0)
    _finish(data, data if context.sums(data.device) else data[:FRAME_BYTES], context, name)


def opened(data: Tensor, context: ExchangeContext, name: Name) -> Tensor:
    """What follows the frame; WireError unless exactly the message of this name arrived."""
    arrived(data, name.sender, context)
    *words, check = _read(data)
    _refuse_call(data, words, context, name)
    claimed = FRAME_BYTES + WORD * words[0]
    covered = min(claimed, data.numel()) if context.sums(data.device) else FRAME_BYTES
    good = covered % FRAME_BYTES == 0 and check == check_of(data[:covered], context, name)
    judge(words, good, data.numel() - FRAME_BYTES, context, name)
    return data[FRAME_BYTES:]


def announce(nbytes: int, frame: Tensor, context: ExchangeContext, name: Name) -> None:
    """A frame alone, which says how long a wire will be."""
    write(frame, words_of(nbytes, context, name), 0)
    _finish(frame, frame, context, name)


def announced(frame: Tensor, context: ExchangeContext, name: Name) -> int:
    """The length that such a frame announces; WireError unless it is of this name."""
    arrived(frame, name.sender, context)
    *words, check = _read(frame)
    _refuse_call(frame, words, context, name)
    judge(words, check == check_of(frame, context, name), WORD * words[0], context, name)
    return WORD * words[0]


def call_frame(call: Call, context: ExchangeContext) -> Tensor:
    """What a rank sends to all others when it begins a call; `called` reads it."""
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
    announce(0, frame, _of_call(call, context), Name(Kind.CALL, context.rank))
    return frame


def called(data: Tensor, sender: int, context: ExchangeContext) -> tuple[Call, int] | None:
    """The call that a message begins, and its step; None if it is any other message."""
    *words, check = _read(data)
    number = words[2] & _TENSORS
    if words[2] >> 28 != Kind.CALL or number not in list(Call):
        return None
    call, frame = Call(number), data[:FRAME_BYTES]
    if check != check_of(frame, _of_call(call, context), Name(Kind.CALL, sender)):
        return None
    return call, words[1] & STEPS


def _of_call(call: Call, context: ExchangeContext) -> ExchangeContext:
    """What is the same for ranks that are about to do different things."""
    return replace(context, tensor=int(call), first_chunk=0, passes=None)


def _refuse_call(data: Tensor, words: Sequence[int], context: ExchangeContext, name: Name) -> None:
    """WireError if its sender has begun a call, and this rank has not."""
    found = called(data, name.sender, context) if words[2] >> 28 == Kind.CALL else None
    if found is not None:
        call, step = found
        raise WireError(
            f"{context.name_of(name.sender)} came to {call.said} after {step} steps; this rank, "
            f"{context.name_of(context.rank)}, went on training instead: {call.advice}"
        )


def words_of(nbytes: int, context: ExchangeContext, name: Name) -> Words:
    """The first three words of the frame in front of `nbytes` bytes."""
    if nbytes > WORD * _MASK or nbytes % WORD:
        raise ValueError(
            f"a message holds whole words of {WORD} bytes, {WORD * _MASK} bytes at most, not "
            f"{nbytes}: split the tensor"
        )
    third = (context.tensor & _TENSORS) | (name.sender & _SENDERS) << 16 | name.kind << 28
    passes = _UNKNOWN if context.passes is None else min(context.passes, _UNKNOWN - 1)
    return nbytes // WORD, (context.step & STEPS) | passes << 28, third


def judge(
    words: Sequence[int], good: bool, nbytes: int, context: ExchangeContext, name: Name
) -> None:
    """WireError unless these are the right words, with a good check, in front of `nbytes`."""
    who, step, sent = context.name_of(name.sender), context.step & STEPS, words[1] & STEPS
    want = words_of(nbytes, context, name)
    if not good:
        raise WireError(
            f"{who}'s message at step {step} is damaged, and was not used: its check sum does not "
            f"match the {FRAME_BYTES + nbytes} bytes that came; if this happens again, look for a "
            "faulty link, switch or memory"
        )
    if sent != step:
        raise WireError(
            f"{who} sent step {sent}, this rank is at step {step}: every rank must make the "
            "same steps (did one skip a step, or resume from another file?)"
        )
    theirs, own = words[1] >> 28, want[1] >> 28
    if theirs != own and _UNKNOWN not in (theirs, own):
        raise WireError(
            f"{who} has run backward {_times(theirs)} since its optimizer's last step, and this "
            f"rank {_times(own)}, when they came to exchange step {step}: all ranks must run "
            "backward, and step their optimizers, equally often; put what must not be exchanged "
            "into model.no_sync()"
        )
    if words[2] != want[2]:
        raise WireError(
            f"{who} sent {_described(words[2])} at step {step}, where {_described(want[2])} was "
            "next: all ranks must exchange the same tensors in the same order"
        )
    if words[0] != want[0]:
        raise WireError(
            f"{who} sent {WORD * words[0]} bytes at step {step}, where {nbytes} were awaited: are "
            "all ranks running the same settings?"
        )


def check_of(data: Tensor, context: ExchangeContext, name: Name) -> int:
    """The check of these bytes; waits for their device."""
    return int(backend(data.device).message_check(data, salt_of(context, name)))


def salt_of(context: ExchangeContext, name: Name) -> int:
    """What the check of a message starts from."""
    return _salt(context.seed, context.tensor >> 16, context.first_chunk, name)


@lru_cache(maxsize=4096)
def _salt(seed: int, tensor: int, chunk: int, name: Name) -> int:
    phase = name.kind << 32 | name.number
    key = Key(seed=seed, step=chunk, tensor=tensor, rank=name.sender, phase=phase)
    return key.stream().k0


def write(data: Tensor, words: Sequence[int], check: int) -> None:
    """A frame into the first 16 bytes, on the host."""
    _FRAME.pack_into(_view(data), 0, *words, check)


def _finish(data: Tensor, covered: Tensor, context: ExchangeContext, name: Name) -> None:
    _CHECK.pack_into(_view(data), 12, check_of(covered, context, name))


def _read(data: Tensor) -> tuple[int, ...]:
    return _FRAME.unpack_from(_view(data))


def _view(data: Tensor) -> memoryview:
    return data[:FRAME_BYTES].numpy().data


def _times(passes: int) -> str:
    """How often backward has run, including the pass of the message."""
    return "once" if not passes else f"{passes + 1} times"


def _described(third: int) -> str:
    kinds = {kind.value: kind.name.lower() for kind in Kind}
    return (
        f"a {kinds.get(third >> 28, 'strange')} message of tensor {third & _TENSORS} from the "
        f"group's rank {third >> 16 & _SENDERS}"
    )


@dataclass(frozen=True)
class _Pending:
    """Frames that came; `ready` is the event after which the host can read them."""

    rows: Tensor  # a frame's words and the check of what came, int64
    ready: Any
    device: torch.device
    context: ExchangeContext  # without its group, which this must not keep alive
    names: tuple[Name, ...]
    sizes: tuple[int, ...]

    def judge(self, group: dist.ProcessGroup) -> None:
        """WireError if one is not what was awaited."""
        context = replace(self.context, group=group)
        for row, name, size in zip(self.rows.tolist(), self.names, self.sizes, strict=True):
            good = row[3] == row[4]
            if not context.sums(self.device):  # of the frame alone, and known without the device
                good = row[3] == check_of(_sealed(row[:3], context, name), context, name)
            judge(row[:3], good, size, context, name)


_PENDING: WeakKeyDictionary[dist.ProcessGroup, deque[_Pending]] = WeakKeyDictionary()


def seal_on_device(messages: Named, context: ExchangeContext) -> None:
    """Write every message's frame; what follows is there already."""
    frames = _expected(messages, context)
    for frame, (data, name) in zip(frames.split(FRAME_BYTES), messages, strict=True):
        data[:FRAME_BYTES].copy_(frame)
        if context.sums(data.device):
            check = backend(data.device).message_check(data, salt_of(context, name))
            data[12:FRAME_BYTES].view(torch.int32).copy_(check)


def opened_on_device(messages: Named, context: ExchangeContext) -> list[Tensor]:
    """What follows every frame; WireError for an earlier message that is now known to be wrong."""
    raise_what_is_known(context.group)
    for data, name in messages:
        arrived(data, name.sender, context)
    got = _words(torch.cat([data[:FRAME_BYTES] for data, _ in messages]))
    found = got[:, 3:]
    if context.sums(got.device):
        check = backend(got.device).message_check
        sums = [check(data, salt_of(context, name)) for data, name in messages]
        found = torch.stack(sums).view(-1, 1)
        want = _words(_expected(messages, context))
        differ = got[:, :3] ^ want[:, :3]
        differ[:, 1] &= STEPS  # of passes the host judges
        wrong = differ.any(1) | (got[:, 3:] != found).any(1)
        for bad, (data, _) in zip(wrong.unbind(), messages, strict=True):
            data[FRAME_BYTES:].masked_fill_(bad, _ONES)
    _remember(torch.cat([got, found], dim=1), context, messages)
    return [data[FRAME_BYTES:] for data, _ in messages]


def raise_what_is_known(group: dist.ProcessGroup) -> None:
    """WireError if an earlier message has turned out to be wrong; waits for nothing."""
    pending = _PENDING.setdefault(group, deque())
    while pending and pending[0].ready.query():
        pending.popleft().judge(group)


def announce_on_device(
    lengths: Sequence[int | Tensor], out: Tensor, context: ExchangeContext, names: Sequence[Name]
) -> None:
    """Frames of lengths that a device may know alone: the host waits for it."""
    unknown = [length for length in lengths if isinstance(length, Tensor)]
    read = iter(torch.cat(unknown).tolist() if unknown else ())
    found = [next(read) if isinstance(length, Tensor) else length for length in lengths]
    frames = [
        _sealed(words_of(nbytes, context, name), context, name)
        for nbytes, name in zip(found, names, strict=True)
    ]
    out.copy_(torch.cat(frames))


def _expected(messages: Named, context: ExchangeContext) -> Tensor:
    """The frames of these messages with checks of the frames alone, on their device."""
    frames = torch.cat(
        [
            _sealed(words_of(data.numel() - FRAME_BYTES, context, name), context, name)
            for data, name in messages
        ]
    )
    device = messages[0][0].device
    if device.type != "cuda":
        return frames.to(device)
    return frames.pin_memory().to(device, non_blocking=True)


def _sealed(words: Sequence[int], context: ExchangeContext, name: Name) -> Tensor:
    """On the host, with the check of the frame alone."""
    frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
    write(frame, words, 0)
    write(frame, words, check_of(frame, context, name))
    return frame


def _words(frames: Tensor) -> Tensor:
    return (frames.view(torch.int32).to(torch.int64) & _MASK).view(-1, FRAME_BYTES // WORD)


def _remember(rows: Tensor, context: ExchangeContext, messages: Named) -> None:
    """Copy to the host, after what the device has still to do."""
    cuda = rows.device.type == "cuda"
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=cuda)
    host.copy_(rows, non_blocking=True)
    ready: Any = torch.cuda.Event() if cuda else _AtOnce()
    ready.record()
    names = tuple(name for _, name in messages)
    sizes = tuple(data.numel() - FRAME_BYTES for data, _ in messages)
    _PENDING.setdefault(context.group, deque()).append(
        _Pending(host, ready, rows.device, context, names, sizes)
    )


class _AtOnce:
    """An event of a device that is the host."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True
