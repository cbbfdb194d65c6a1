"""`coder=` under a codec: its integers, a byte each, go through a lossless coder.

The body of such a wire is  scales | (checks) | table of chunks | chunks  (docs/wire.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic._key import Stream
from laconic._wire import Header
from laconic.codecs._memory import Scratch
from laconic.coders import Coder, coder
from laconic.errors import ConfigError
from laconic.kernels._coding import Kind, Section, most_words, table
from laconic.kernels._layout import packed_bytes

PLAIN = "fixed"  # codes of a fixed width, packed: no coder


def header_fields(name: str, dithered: bool = True) -> dict[str, Any]:
    """What a header says of a codec's coder; nothing for codes of fixed width.

    Not `dithered`: the key's dither tells nothing about the integers.
    """
    own = coder(name) if dithered else coder(name).undithered()
    return {} if name == PLAIN else {"coder": own.id, "form": own.form}


def check_coder(codec: str, name: str) -> None:
    """ConfigError unless there is such a coder."""
    try:
        coder(name)
    except ConfigError as error:
        raise ConfigError(f"{codec}: {error}") from None


def coder_of(header: Header) -> Coder:
    """The coder that a header names."""
    kind = Kind(header.coder - 1)
    return Coder(kind.name.lower(), kind, header.form)


def table_bytes(numel: int) -> int:
    """Length of the table of chunks."""
    return 8 * table((numel,) if numel else ()).chunks


def coded_room(header: Header, largest: int) -> int:
    """Bytes that the body may need, with codes of magnitudes up to `largest`."""
    if not header.coder:
        return header.body_bytes
    return header.body_bytes + 4 * most_words(header.parts, largest.bit_length())


def write_codes(codes: Tensor, body: Tensor, header: Header, stream: Stream) -> None:
    """Code a byte for each value into the end of the body."""
    coder_of(header).write(codes[: header.numel].view(torch.int8), _section(body, header), stream)


def read_codes(
    body: Tensor, header: Header, stream: Stream, largest: int, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """The bytes back, and the scales that go with them.

    A chunk that is damaged, or a code whose magnitude exceeds `largest`, raises WireError; on CUDA,
    where nobody waits, it makes the scales NaN.
    """
    codes = scratch(header.numel, body.device)
    values = codes[: header.numel].view(torch.int8)
    good = coder_of(header).read(_section(body, header), values, stream, largest)
    return codes, scales if good is None else scales * good


def _section(body: Tensor, header: Header) -> Section:
    size = table_bytes(header.numel)
    return Section.of(body[header.body_bytes - size :], size // 8)


_kept = Scratch()


def scratch(numel: int, device: torch.device) -> Tensor:
    """Room for a byte a value, in whole groups; this thread's, until it is asked for again."""
    return _kept.take("codes", packed_bytes(numel, 8), device, torch.uint8)
