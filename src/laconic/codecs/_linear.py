"""What codecs of integers share: settings, the sections of a wire, entropy coding (`coder=`).

The body is  codes | scales,  or with a coder  scales | (checks) | table of chunks | chunks, where
the integers, a byte each, went through a lossless coder (docs/wire.md).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic._key import Key, Stream
from laconic._scratch import Scratch
from laconic._settings import between, check_settings, described, one_of, refused
from laconic._wire import Header, Wire
from laconic.codecs._base import Codec, DecodeTarget, no_norm
from laconic.coders import Coder, coder, coders
from laconic.errors import ConfigError
from laconic.kernels import Dither, Lattice, ScaleKind, backend
from laconic.kernels._coding import Kind, Section, most_words, table
from laconic.kernels._layout import blocks, fixed_bits, packed_bytes
from laconic.kernels._reference.group import draws

PLAIN = "fixed"  # codes of a fixed width, packed: no coder
CODER = one_of(*coders())
MAX_BLOCK = (1 << 32) - 1
_DEFAULT_BITS = 4
BITS, LEVELS = between(2, 8), between(1, 127)  # one bit would be a sign without a magnitude
BLOCK = described("a positive integer, or tensor for one scale")
UNSET: Any = None  # default of a setting that __post_init__ fills in


class BlockQuantizer(Codec):
    """Integers under a scale for each block: qsgd and dqsg, which add their settings. Abstract."""

    subtracts: ClassVar[bool]  # receivers take the dither off again

    bits: int
    levels: int
    block: int | None
    coder: str

    def __post_init__(self) -> None:
        check_settings(self)
        set_width(self)
        check_block(self)

    @property
    def _scale_kind(self) -> ScaleKind:
        """How scales are found."""
        return ScaleKind.MAX

    @property
    def even_noise(self) -> bool:
        return self.block is None

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            bits=self.bits,
            levels=self.levels,
            block=self.block or 0,
            norm=self._scale_kind,
            body_bytes=body_bytes(numel, self.block or 0, self.bits, self.coder),
            **header_fields(self.coder),
        )

    def _room(self, header: Header) -> int:
        return coded_room(header, self.levels)

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        no_norm(self.name, norm)
        write(x, key, body, header, self._scale_kind)

    def _read(self, wire: Wire, body: Tensor, into: DecodeTarget) -> None:
        read(body, wire, into, subtract=self.subtracts)


def set_width(codec: Any) -> None:
    """Fill in whichever of bits= and levels= was not given; with neither, 4 bits."""
    bits, levels = codec.bits, codec.levels
    if levels is None:
        levels = (1 << ((bits or _DEFAULT_BITS) - 1)) - 1
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


def check_block(codec: Any) -> None:
    """A block is a positive integer, or None for the whole tensor."""
    if codec.block is not None and not (is_integer(codec.block) and 1 <= codec.block <= MAX_BLOCK):
        raise refused(codec, "block")


def body_bytes(numel: int, block: int, bits: int, coder: str = PLAIN) -> int:
    """Length of codes and scales; of scales and table, with a coder."""
    codes = _code_bytes(numel, bits) if coder == PLAIN else table_bytes(numel)
    return codes + 4 * blocks(numel, block)


def _code_bytes(numel: int, bits: int) -> int:
    """Length of codes: packed in groups, or an int32 each."""
    return 4 * numel if bits == 32 else packed_bytes(numel, bits)


def lattice_of(header: Header) -> Lattice:
    """How codes are made; those that a coder gets have 8 bits."""
    return Lattice(header.block, header.levels, 8 if header.coder else header.bits)


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
        lattice_of(header),
        dither=Dither(key.stream(), shift),
        kind=kind,
    )
    if header.coder:
        write_codes(codes, body, header, key.stream())


def read(body: Tensor, wire: Wire, into: DecodeTarget, *, subtract: bool, shift: int = 0) -> None:
    """Decode the body's two sections; with `subtract`, take the dither off, moved by `shift`."""
    header, stream = wire.header, wire.key.stream()
    scales, codes = sections(body, header)
    lattice = lattice_of(header)
    if header.coder:
        codes, scales = read_codes(body, header, stream, header.levels, scales)
    backend(body.device).dequantize(
        codes,
        scales,
        into.output,
        lattice,
        dither=Dither(stream, shift) if subtract else None,
        offset=lattice.offset,
    )


def header_fields(name: str, dithered: bool = True) -> dict[str, Any]:
    """What a header says of a codec's coder; nothing for codes of fixed width.

    Not `dithered`: the integers were not made with the key's dither.
    """
    own = coder(name) if dithered else coder(name).undithered()
    return {} if name == PLAIN else {"coder": own.id, "form": own.form}


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
    where that would mean a wait, it makes the scales NaN.
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
    """Room for a byte per value, in whole groups; valid until this thread takes it again."""
    return _kept.take("codes", packed_bytes(numel, 8), device, torch.uint8)


def uniform(key: Key, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Draws on [0, 1) that a key names, one for each value: the same wherever they are made.

    24 bits each, in fp32; in plain torch, so on any device.
    """
    return (draws(key.stream(), numel, torch.device(device)) >> 8).float() * 2.0**-24
