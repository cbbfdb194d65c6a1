"""What the linear codecs share: checking settings, and the sections of a wire.

codes | scales, or with a coder scales | table of chunks | chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import Header, Wire
from laconic.codecs._base import Into
from laconic.codecs._coded import PLAIN, read_codes, scratch, table_bytes, write_codes
from laconic.errors import ConfigError
from laconic.kernels import ScaleKind, backend
from laconic.kernels._layout import blocks, code_offset, fixed_bits, packed_bytes

MAX_BLOCK = (1 << 32) - 1
_DEFAULT_BITS = 4
UNSET: Any = None  # default of a setting that __post_init__ fills in


def set_width(codec: Any) -> None:
    """Fill in whichever of bits= and levels= was not given; with neither, 4 bits."""
    bits, levels = codec.bits, codec.levels
    for name, value in (("bits", bits), ("levels", levels)):
        if value is not None and not is_integer(value):
            raise ConfigError(f"{codec.name}: {name} must be an integer, not {value!r}")
    if bits is not None and not 2 <= bits <= 8:
        raise ConfigError(
            f"{codec.name}: bits must be from 2 to 8, not {bits}; one bit would be a sign "
            "without a magnitude (s = 0 levels)"
        )
    if levels is None:
        levels = (1 << ((bits or _DEFAULT_BITS) - 1)) - 1
    if not 1 <= levels <= 127:
        raise ConfigError(f"{codec.name}: levels must be from 1 to 127, not {levels}")
    if bits not in (None, fixed_bits(levels)):
        raise ConfigError(
            f"{codec.name}: {levels} levels take {fixed_bits(levels)} bits, not {bits}; "
            "give one of bits= and levels="
        )
    object.__setattr__(codec, "bits", fixed_bits(levels))
    object.__setattr__(codec, "levels", levels)


def is_integer(value: object) -> bool:
    """True for integers; bool is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_block(name: str, block: int | None) -> None:
    """A block is a positive integer, or None for the whole tensor."""
    if block is None:
        return
    if not is_integer(block) or not 1 <= block <= MAX_BLOCK:
        raise ConfigError(
            f"{name}: block must be a positive integer, or tensor for one scale; not {block!r}"
        )


def check_choice(name: str, setting: str, value: object, allowed: tuple[str, ...]) -> None:
    """A setting with named values."""
    if value not in allowed:
        raise ConfigError(f"{name}: {setting} must be one of {', '.join(allowed)}; not {value!r}")


def no_norm(name: str, norm: object) -> None:
    """Codecs with scales of their own refuse a shared one."""
    if norm is not None:
        raise TypeError(f"{name} finds its own scales; norm= is for global and global-exp")


def body_bytes(numel: int, block: int, bits: int, coder: str = PLAIN) -> int:
    """Length of codes and scales; of scales and table, with a coder."""
    codes = _code_bytes(numel, bits) if coder == PLAIN else table_bytes(numel)
    return codes + 4 * blocks(numel, block)


def _code_bytes(numel: int, bits: int) -> int:
    """Length of codes: packed in groups, or an int32 each."""
    return 4 * numel if bits == 32 else packed_bytes(numel, bits)


def sections(body: Tensor, header: Header) -> tuple[Tensor, Tensor]:
    """Scales (fp32) and codes (bytes, or int32 at 32 bits) as views of the body."""
    if header.coder:
        return body[: 4 * blocks(header.numel, header.block)].view(torch.float32), body[:0]
    size = _code_bytes(header.numel, header.bits)
    codes = body[:size]
    scales = body[size : size + 4 * blocks(header.numel, header.block)]
    return scales.view(torch.float32), codes.view(torch.int32) if header.bits == 32 else codes


def write(
    x: Tensor, key: Key, body: Tensor, header: Header, kind: ScaleKind, shift: int = 0
) -> None:
    """Quantize x into the body's two sections, with draws that are moved by `shift`."""
    scales, codes = sections(body, header)
    if header.coder:
        codes = scratch(header.numel, x.device)
    backend(x.device).quantize(
        x,
        scales,
        codes,
        stream=key.stream(),
        block=header.block,
        levels=header.levels,
        bits=8 if header.coder else header.bits,
        kind=kind,
        shift=shift,
    )
    if header.coder:
        write_codes(codes, body, header, key.stream())


def read(body: Tensor, wire: Wire, into: Into, *, subtract: bool, shift: int = 0) -> None:
    """Decode the body's two sections; with `subtract`, take the dither off, moved by `shift`."""
    header, stream = wire.header, wire.key.stream()
    scales, codes = sections(body, header)
    bits = header.bits
    if header.coder:
        codes, scales = read_codes(body, header, stream, header.levels, scales)
        bits = 8
    backend(body.device).dequantize(
        codes,
        scales,
        into.out,
        stream=stream if subtract else None,
        block=header.block,
        levels=header.levels,
        bits=bits,
        offset=code_offset(header.levels, bits),
        weight=into.weight,
        add=into.add,
        shift=shift,
    )
