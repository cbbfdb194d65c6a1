"""What stands in front of every message between ranks, and is checked before its bytes are used.

A frame of 16 bytes, four little-endian words, so that what follows keeps its 16-byte alignment:

    words of 4 bytes that follow | step mod 2^28, passes | tensor mod 2^16, sender mod 2^12, kind
    | check

Passes are those of backward that the sender has made since an optimizer last stepped its model, 14
at most; 15 where it does not know. A rank that runs backward once more than others sends the same
steps as they do, and is found by these.

The check is `message_check` (`kernels/_reference/message.py`) over all other words of the message,
or with `verify="none"` over those of the frame alone. Its salt comes from the seed, the kind, the
sender and the place of the message in its exchange: a message that is not the awaited one fails.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from torch import Tensor

from laconic._key import Key
from laconic.errors import WireError
from laconic.exchanges._base import Call
from laconic.kernels import backend

FRAME_BYTES = 16
WORD = 4
_FRAME, _CHECK = struct.Struct("<IIII"), struct.Struct("<I")
_MASK, _TENSORS, _SENDERS = 0xFFFFFFFF, 0xFFFF, 0xFFF  # of a word, and of the third word's parts
STEPS = 0xFFFFFFF  # of the second word
_UNKNOWN = 15


class Kind(IntEnum):
    """What a message is for."""

    SIZES = 1  # how long the wire is that follows in another message: a frame alone
    SWAP = 2  # one for every rank
    SHARE = 3  # the same to all
    HOP = 4  # one rank to one other
    PART = 5  # of a sum, to the rank that adds it up
    SUM = 6  # from that rank to all
    NUMBERS = 7  # lengths, and what encodings spent of a budget, to all


@dataclass(frozen=True)
class Name:
    """Which message of an exchange this is: of its kind, from whom, and a number."""

    kind: Kind
    sender: int
    number: int = 0


Words = tuple[int, int, int]  # the first three


def arrived(data: Tensor, sender: int, call: Call) -> None:
    """Every message that came from another rank passes here before it is checked.

    So does what a backend's all-reduce has made, with this rank itself as the sender. Does nothing:
    tests and fault injectors put their own in its place, to change bytes.
    """


def seal(data: Tensor, call: Call, name: Name) -> None:
    """Write the frame of a message into its first 16 bytes; what follows is there already."""
    write(data, words_of(data.numel() - FRAME_BYTES, call, name), 0)
    _finish(data, data if call.sums(data.device) else data[:FRAME_BYTES], call, name)


def opened(data: Tensor, call: Call, name: Name) -> Tensor:
    """What follows the frame; WireError unless exactly the message of this name has come."""
    arrived(data, name.sender, call)
    *words, check = _read(data)
    claimed = FRAME_BYTES + WORD * words[0]
    covered = min(claimed, data.numel()) if call.sums(data.device) else FRAME_BYTES
    good = covered % FRAME_BYTES == 0 and check == check_of(data[:covered], call, name)
    judge(words, good, data.numel() - FRAME_BYTES, call, name)
    return data[FRAME_BYTES:]


def announce(nbytes: int, frame: Tensor, call: Call, name: Name) -> None:
    """A frame alone, which says how long a wire will be."""
    write(frame, words_of(nbytes, call, name), 0)
    _finish(frame, frame, call, name)


def announced(frame: Tensor, call: Call, name: Name) -> int:
    """The length that such a frame announces; WireError unless it is of this name."""
    arrived(frame, name.sender, call)
    *words, check = _read(frame)
    judge(words, check == check_of(frame, call, name), WORD * words[0], call, name)
    return WORD * words[0]


def words_of(nbytes: int, call: Call, name: Name) -> Words:
    """The first three words of the frame in front of so many bytes."""
    if nbytes > WORD * _MASK or nbytes % WORD:
        raise ValueError(
            f"a message holds whole words of {WORD} bytes, {WORD * _MASK} bytes at most, not "
            f"{nbytes}: split the tensor"
        )
    third = (call.tensor & _TENSORS) | (name.sender & _SENDERS) << 16 | name.kind << 28
    passes = _UNKNOWN if call.passes is None else min(call.passes, _UNKNOWN - 1)
    return nbytes // WORD, (call.step & STEPS) | passes << 28, third


def judge(words: Sequence[int], good: bool, nbytes: int, call: Call, name: Name) -> None:
    """WireError unless these came, with a good check, in front of so many bytes."""
    who, step, sent = call.name_of(name.sender), call.step & STEPS, words[1] & STEPS
    want = words_of(nbytes, call, name)
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


def check_of(data: Tensor, call: Call, name: Name) -> int:
    """The check of these bytes; waits for their device."""
    return int(backend(data.device).message_check(data, salt_of(call, name)))


def salt_of(call: Call, name: Name) -> int:
    """What the check of a message starts from."""
    return _salt(call.seed, call.tensor >> 16, call.first_chunk, name)


@lru_cache(maxsize=4096)
def _salt(seed: int, tensor: int, chunk: int, name: Name) -> int:
    phase = name.kind << 32 | name.number
    key = Key(seed=seed, step=chunk, tensor=tensor, rank=name.sender, phase=phase)
    return key.stream().k0


def write(data: Tensor, words: Sequence[int], check: int) -> None:
    """A frame into the first 16 bytes, on the host."""
    _FRAME.pack_into(_view(data), 0, *words, check)


def _finish(data: Tensor, covered: Tensor, call: Call, name: Name) -> None:
    _CHECK.pack_into(_view(data), 12, check_of(covered, call, name))


def _read(data: Tensor) -> tuple[int, ...]:
    return _FRAME.unpack_from(_view(data))


def _view(data: Tensor) -> memoryview:
    return data[:FRAME_BYTES].numpy().data


def _times(passes: int) -> str:
    """How often backward has run, that of the message included."""
    return "once" if not passes else f"{passes + 1} times"


def _described(third: int) -> str:
    kinds = {kind.value: kind.name.lower() for kind in Kind}
    return (
        f"a {kinds.get(third >> 28, 'strange')} message of tensor {third & _TENSORS} from the "
        f"group's rank {third >> 16 & _SENDERS}"
    )
