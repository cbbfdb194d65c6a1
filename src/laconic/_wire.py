"""Wire format 1: a 64-byte header and a body, in one uint8 tensor (docs/wire.md)."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from laconic._key import Key
from laconic.errors import WireError
from laconic.kernels._coding import BLOCK, table
from laconic.kernels._layout import packed_bytes

MAGIC = b"LCNC"
VERSION = 1
HEADER_BYTES = 64
ALIGN = 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAYLOAD_DTYPES = (None, *DTYPES, torch.int8, torch.uint8, torch.int32)

# magic, version, codec, dtype, bits | count, and run in its upper half | block, levels, workers |
# norm, payload dtype, ratio | alpha | inner and outer norm | body bytes | coder, form, segments,
# crc of all before
_LAYOUT = struct.Struct("<4sBBBBQIIIBBHdffQBBH")
_CRC = struct.Struct("<I")
assert _LAYOUT.size + _CRC.size == HEADER_BYTES


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header's fields; those that a codec does not use are zero.

    With a coder the wire's length varies: `body_bytes` counts the body up to its chunks, the last
    entry of `ends` gives the rest. Of `segments` (lengths, known to both sides) only the number
    travels; none means one segment. `run` cuts each into parts of that many values, with a
    step each; 0 cuts nothing.
    """

    codec: int
    dtype: torch.dtype
    numel: int
    body_bytes: int
    payload_dtype: torch.dtype | None = None
    bits: int = 0
    block: int = 0
    levels: int = 0
    workers: int = 1
    norm: int = 0
    ratio: int = 0
    alpha: float = 0.0
    inner: float = 0.0
    outer: float = 0.0
    coder: int = 0
    form: int = 0
    run: int = 0
    segments: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Length of the whole wire; of the part before the chunks, if it has a coder."""
        return HEADER_BYTES + self.body_bytes

    @property
    def parts(self) -> tuple[int, ...]:
        """Lengths of the segments, or of the runs that they are cut into."""
        whole = self.segments or ((self.numel,) if self.numel else ())
        return cut(whole, self.run) if self.run else whole

    def pack(self) -> bytes:
        """The 64 bytes."""
        head = _LAYOUT.pack(
            MAGIC,
            VERSION,
            self.codec,
            DTYPES.index(self.dtype),
            self.bits,
            self.numel | self.run << 32,
            self.block,
            self.levels,
            self.workers,
            self.norm,
            PAYLOAD_DTYPES.index(self.payload_dtype),
            self.ratio,
            self.alpha,
            self.inner,
            self.outer,
            self.body_bytes,
            self.coder,
            self.form,
            len(self.segments),
        )
        return head + _CRC.pack(zlib.crc32(head))

    @staticmethod
    def unpack(head: bytes, segments: tuple[int, ...] = ()) -> Header:
        """Read 64 bytes; WireError unless they are a header of this version, unaltered."""
        if len(head) < HEADER_BYTES:
            raise WireError(f"a wire has a header of {HEADER_BYTES} bytes; {len(head)} bytes came")
        if head[:4] != MAGIC:
            raise WireError(f"these bytes are not a laconic wire: they start with {head[:4]!r}")
        if head[4] != VERSION:
            raise WireError(
                f"wire format {head[4]} came, this laconic reads {VERSION}: "
                "install the same version on every rank"
            )
        if zlib.crc32(head[: _LAYOUT.size]) != _CRC.unpack_from(head, _LAYOUT.size)[0]:
            raise WireError("the wire's header is damaged (its check sum does not match)")
        part = _LAYOUT.unpack_from(head)
        if part[3] >= len(DTYPES) or part[10] >= len(PAYLOAD_DTYPES):
            raise WireError("the wire's header names a dtype that this laconic does not know")
        if part[8] < 1:
            raise WireError("the wire's header counts no workers")
        if part[18] != len(segments):
            raise WireError(
                f"the wire has {part[18] or 'no'} segments, {len(segments) or 'none'} were expected"
            )
        numel, run = part[5] & 0xFFFFFFFF, part[5] >> 32
        if run % BLOCK:
            raise WireError(f"the wire's header has runs of {run} values, no multiple of {BLOCK}")
        return Header(
            codec=part[2],
            dtype=DTYPES[part[3]],
            bits=part[4],
            numel=numel,
            block=part[6],
            levels=part[7],
            workers=part[8],
            norm=part[9],
            payload_dtype=PAYLOAD_DTYPES[part[10]],
            ratio=part[11],
            alpha=part[12],
            inner=part[13],
            outer=part[14],
            body_bytes=part[15],
            coder=part[16],
            form=part[17],
            run=run,
            segments=segments,
        )


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One encoded tensor: `data` is what travels, the rest both sides know.

    `buffer` starts with the data; where the length varies it may be longer.
    """

    buffer: Tensor = field(repr=False)
    key: Key
    shape: torch.Size
    dtype: torch.dtype
    header: Header = field(repr=False)

    @staticmethod
    def parse(
        data: Tensor,
        *,
        key: Key,
        shape: Sequence[int],
        dtype: torch.dtype,
        segments: Sequence[int] | None = None,
    ) -> Wire:
        """Check received bytes and wrap them.

        Reads the header on the host: on a CUDA tensor this waits for the device. Bytes that do
        not start on a 16-byte boundary are copied.
        """
        if data.dtype != torch.uint8 or data.dim() != 1 or not data.is_contiguous():
            raise WireError("a wire is a contiguous uint8 tensor of one dimension")
        parts = tuple(segments or ())
        header = Header.unpack(bytes(data[:HEADER_BYTES].tolist()), parts)
        if header.numel != math.prod(shape) or (parts and sum(parts) != header.numel):
            raise WireError(f"the wire holds {header.numel} values; shape {tuple(shape)} does not")
        if header.dtype != dtype:
            raise WireError(f"the wire holds {header.dtype}, not {dtype}")
        if data.numel() < header.nbytes:
            raise WireError(f"the wire should have {header.nbytes} bytes, but has {data.numel()}")
        if data.data_ptr() % ALIGN or data.storage_offset() % ALIGN:
            data = data.clone()
        wire = Wire(buffer=data, key=key, shape=torch.Size(shape), dtype=dtype, header=header)
        if data.numel() != wire.nbytes:
            raise WireError(f"the wire should have {wire.nbytes} bytes, but has {data.numel()}")
        return wire

    @cached_property
    def nbytes(self) -> int:
        """Bytes that travel, header included; on CUDA this waits where the length varies."""
        if not self.header.coder or not self.header.numel:
            return self.header.nbytes
        return self.header.nbytes + 4 * (int(self._words()) & 0xFFFFFFFF)

    def length(self) -> Tensor:
        """`nbytes` as an int64 tensor of one value on the wire's device, without waiting for it."""
        if not self.header.coder or not self.header.numel:
            return torch.full((1,), self.header.nbytes, device=self.buffer.device)
        return (self._words().to(torch.int64) & 0xFFFFFFFF) * 4 + self.header.nbytes

    def _words(self) -> Tensor:
        """Words after the tables: the last entry of ends, which checks follow."""
        last = self.header.nbytes - 4 * table(self.header.parts).chunks - 4
        if last < HEADER_BYTES or last % 4:
            raise WireError(
                f"the wire's header says {self.header.body_bytes} bytes before its chunks, where "
                "no whole table of its chunks fits"
            )
        return self.buffer[last : last + 4].view(torch.int32)

    @cached_property
    def data(self) -> Tensor:
        """The bytes that travel."""
        return self.buffer[: self.nbytes]

    @property
    def payload(self) -> Tensor:
        """The part of `data` that a collective may add up, with its type."""
        dtype = self.header.payload_dtype
        if dtype is None:
            raise TypeError(
                "this codec's wires cannot be summed; use none, fp16, bf16 or global, "
                "or exchange and decode each wire"
            )
        size = self.header.numel * dtype.itemsize
        if dtype == torch.uint8:  # several codes to a byte
            size = packed_bytes(self.header.numel, self.header.bits)
        return self.buffer[HEADER_BYTES : HEADER_BYTES + size].view(dtype)


@lru_cache(maxsize=256)
def cut(segments: tuple[int, ...], run: int) -> tuple[int, ...]:
    """Cut each segment into parts of `run` values; its last may be shorter.

    >>> cut((5, 3, 1), 3)
    (3, 2, 3, 1)
    """
    return tuple(min(run, size - start) for size in segments for start in range(0, size, run))


@lru_cache(maxsize=4096)
def header_tensor(head: bytes, device: torch.device) -> Tensor:
    """The header as a tensor on the device, made once: writing it later is a device copy."""
    return torch.frombuffer(bytearray(head), dtype=torch.uint8).to(device)
