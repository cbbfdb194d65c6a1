"""Wires that were cut, lengthened, altered or meant for another codec raise WireError."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import assert_same_bits, decode, gaussian
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import laconic as lc
from laconic._wire import DTYPES, HEADER_BYTES, PAYLOAD_DTYPES, Header

KEY = lc.Key(seed=5, rank=2)
SPECS = (
    *lc.codecs(),
    "qsgd:block=100",
    "dqsg:bits=7",
    "ndqsg:block=64",
    "global:bits=4",
    "ecdq:step=0.1",
    "ecdq:step=0.1,block=512",
    "qsgd:coder=bitmap",
)
COUNT = 300
BITS = [1 << bit for bit in range(8)]
fast = settings(max_examples=200, deadline=None, derandomize=True)


def parse(
    data: Tensor, shape: Sequence[int] = (COUNT,), dtype: torch.dtype = torch.float32
) -> lc.Wire:
    return lc.Wire.parse(data, key=KEY, shape=shape, dtype=dtype)


def wire_of(spec: str, x: Tensor | None = None) -> tuple[lc.Codec, lc.Wire, Tensor]:
    codec = lc.codec(spec)
    x = gaussian(COUNT) if x is None else x
    return codec, codec.encode(x, KEY), x


@pytest.mark.parametrize("spec", SPECS)
def test_a_trusted_wire_decodes_without_its_header(spec: str) -> None:
    """Lengths are still looked at."""
    codec, wire, x = wire_of(spec)
    data = wire.data.clone()
    data[:HEADER_BYTES] = 0
    trusted = codec.trust(data, key=KEY, shape=x.shape, dtype=x.dtype)
    assert_same_bits(decode(codec, trusted, x), decode(codec, wire, x))
    for wrong in (data[: HEADER_BYTES - 1], torch.cat([data, data[:16]])):
        if wire.header.coder and wrong.numel() > data.numel():
            continue  # its own table says how long it is
        with pytest.raises(lc.WireError, match="should have"):
            codec.trust(wrong, key=KEY, shape=x.shape, dtype=x.dtype)


def test_every_value_of_every_header_byte_raises() -> None:
    """64 positions × 255 wrong values, for one wire."""
    _, wire, _ = wire_of("qsgd")
    for place, change in itertools.product(range(HEADER_BYTES), range(1, 256)):
        data = wire.data.clone()
        data[place] ^= change
        with pytest.raises(lc.WireError):
            parse(data)


@pytest.mark.parametrize("spec", SPECS)
def test_wrong_shape_or_dtype_raises(spec: str) -> None:
    _, wire, _ = wire_of(spec)
    for shape in ((COUNT - 1,), (COUNT + 1,), (2, COUNT), (0,), ()):
        with pytest.raises(lc.WireError, match="the wire holds 300 values"):
            parse(wire.data, shape)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        with pytest.raises(lc.WireError, match="the wire holds torch.float32"):
            parse(wire.data, dtype=dtype)


def test_data_that_is_no_byte_vector_raises() -> None:
    _, wire, _ = wire_of("qsgd")
    for data in (
        wire.data.to(torch.int32),
        wire.data.view(torch.int8),
        wire.data.view(4, -1),
        wire.data.repeat_interleave(2)[::2],
    ):
        with pytest.raises(lc.WireError, match="contiguous uint8"):
            parse(data)


@pytest.mark.parametrize("spec", SPECS)
def test_a_wire_inside_a_larger_buffer_decodes_or_raises(spec: str) -> None:
    """Aligned to 16 bytes it decodes; elsewhere it decodes right or raises WireError."""
    codec, wire, x = wire_of(spec)
    buffer = torch.zeros(wire.nbytes + 64, dtype=torch.uint8)
    for offset in (16, 8, 4, 2, 1):
        start = -buffer.data_ptr() % 16 + offset
        inside = buffer[start : start + wire.nbytes].copy_(wire.data)
        try:
            y = decode(codec, parse(inside), x)
        except lc.WireError:
            assert offset % 16
        else:
            assert_same_bits(y, decode(codec, wire, x))


OTHERS = (
    *SPECS,
    "qsgd:bits=3",
    "qsgd:norm=l2",
    "qsgd:block=tensor",
    "qsgd:levels=5",
    "dqsg:block=256",
    "dqsg:levels=5",
    "ndqsg:levels=4",
    "ndqsg:ratio=5",
    "ndqsg:alpha=0.5",
    "global:bits=32",
    "global:levels=5",
    "global:norm=l2",
    "global:norm=2/inf",
    "global-exp:bits=5",
)


@pytest.mark.parametrize("spec", OTHERS)
def test_another_codec_or_other_settings_raise(spec: str) -> None:
    _, wire, x = wire_of(spec)
    for other in OTHERS:
        codec = lc.codec(other)
        if codec == lc.codec(spec) or codec.name == lc.codec(spec).name == "ecdq":
            continue  # ecdq's wires carry their steps: any ecdq with the same coder reads them
        with pytest.raises(lc.WireError, match="was not written by"):
            decode(codec, wire, x)
        with pytest.raises(lc.WireError, match="was not written by"):
            decode(codec, parse(wire.data), x)


@pytest.mark.parametrize("workers", [2, 8, 127, 200, 100_000])
def test_a_wire_for_many_workers_raises_in_codecs_that_cannot_serve_them(workers: int) -> None:
    """They answer that the wire is not theirs, not that their own settings are bad."""
    x = gaussian(COUNT)
    for sender in ("fp16", "global:bits=32"):
        norm = 9.0 if sender.startswith("global") else None
        wire = lc.codec(sender).encode(x, KEY, norm=norm, workers=min(workers, 65_535))
        for name in ("global:bits=4", "global:bits=8", "global-exp:bits=3", "qsgd"):
            with pytest.raises(lc.WireError, match="was not written by"):
                decode(lc.codec(name), wire, x)


@given(data=st.binary(max_size=400))
@fast
def test_random_bytes_raise(data: bytes) -> None:
    with pytest.raises(lc.WireError):
        parse(torch.tensor(list(data), dtype=torch.uint8))


@given(tail=st.binary(min_size=60, max_size=400))
@fast
def test_random_bytes_behind_the_magic_raise(tail: bytes) -> None:
    with pytest.raises(lc.WireError):
        parse(torch.tensor(list(b"LCNC\x01" + tail), dtype=torch.uint8))


@given(
    spec=st.sampled_from(SPECS),
    edits=st.lists(st.tuples(st.integers(0, 63), st.integers(1, 255)), min_size=1, max_size=8),
)
@fast
def test_several_altered_header_bytes_raise(spec: str, edits: list[tuple[int, int]]) -> None:
    _, wire, _ = wire_of(spec)
    data = wire.data.clone()
    for place, change in edits:
        data[place] ^= change
    if torch.equal(data, wire.data):  # two edits may cancel
        return
    with pytest.raises(lc.WireError):
        parse(data)


headers = st.builds(
    Header,
    codec=st.integers(0, 255),
    dtype=st.sampled_from(DTYPES),
    numel=st.just(COUNT),
    body_bytes=st.integers(0, 4000),
    payload_dtype=st.sampled_from(PAYLOAD_DTYPES),
    bits=st.integers(0, 255),
    block=st.integers(0, 2000),
    levels=st.integers(0, 200),
    workers=st.integers(0, 300),
    norm=st.integers(0, 255),
    ratio=st.integers(0, 65_535),
    alpha=st.floats(),
    inner=st.floats(width=32),
    outer=st.floats(width=32),
)


@given(header=headers, spec=st.sampled_from(SPECS))
@fast
def test_a_well_formed_header_of_no_encoder_raises(header: Header, spec: str) -> None:
    """The check sum is right, the contents are nonsense: an attacker, or a future version."""
    codec = lc.codec(spec)
    body = torch.zeros(header.body_bytes, dtype=torch.uint8)
    data = torch.cat([torch.tensor(list(header.pack()), dtype=torch.uint8), body])
    with pytest.raises(lc.WireError):
        decode(codec, parse(data, dtype=header.dtype), gaussian(COUNT))


FIELDS = ("bits", "block", "levels", "workers", "norm", "ratio", "alpha", "inner", "outer", "run")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("spec", SPECS)
def test_every_field_is_checked_at_decode(spec: str, field: str) -> None:
    """One field altered, and the check sum made right again. No wire is for 0 workers."""
    codec, wire, x = wire_of(spec)
    fields = vars(wire.header)
    values = (0, 512, 1024) if field == "run" else (0, 1, 5, 64)
    for value in set(values) - {fields[field]}:
        altered: dict[str, Any] = {**fields, field: value}
        header = Header(**altered)
        data = torch.cat([torch.tensor(list(header.pack()), dtype=torch.uint8), wire.data[64:]])
        try:
            y = decode(codec, parse(data), x)
        except lc.WireError:
            continue
        # global and the casts serve any number of workers, at the same length
        assert field == "workers" and value != 0 and y.shape == x.shape


def test_layout_of_the_header() -> None:
    """Frozen: the bytes as documented, little-endian, with zlib's CRC-32 at the end."""
    header = Header(
        codec=3,
        dtype=torch.bfloat16,
        numel=0x01020304,
        body_bytes=0x0708,
        payload_dtype=torch.int8,
        bits=4,
        block=512,
        levels=7,
        workers=9,
        norm=1,
        ratio=259,
        alpha=0.5,
        inner=2.0,
        outer=float("inf"),
        run=0x0A0B0C00,
    )
    head = header.pack()
    assert len(head) == 64
    assert head[:8] == b"LCNC\x01\x03\x02\x04"
    assert struct.unpack_from("<IIIII", head, 8) == (0x01020304, 0x0A0B0C00, 512, 7, 9)
    assert struct.unpack_from("<BBH", head, 28) == (1, 4, 259)
    assert struct.unpack_from("<dffQ", head, 32) == (0.5, 2.0, float("inf"), 0x0708)
    assert head[56:60] == bytes(4)
    assert struct.unpack_from("<I", head, 60) == (zlib.crc32(head[:60]),)
    assert Header.unpack(head) == header


def test_another_version_says_so() -> None:
    _, wire, _ = wire_of("qsgd")
    data = wire.data.clone()
    data[4] = 2
    with pytest.raises(lc.WireError, match="wire format 2 came, this laconic reads 1"):
        parse(data)


@pytest.mark.parametrize("spec", SPECS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_an_altered_body_never_crashes(spec: str, seed: int) -> None:
    """Whatever a body holds, decode returns a tensor of the right size; coded ones are refused."""
    codec, wire, x = wire_of(spec)
    generator = torch.Generator().manual_seed(seed)
    body = torch.randint(0, 256, (wire.nbytes - 64,), generator=generator).to(torch.uint8)
    data = torch.cat([wire.data[:64], body])
    if wire.header.coder:
        with pytest.raises(lc.WireError):
            decode(codec, parse(data), x)
    else:
        assert decode(codec, parse(data), x).shape == x.shape


@pytest.mark.parametrize("spec", [*lc.codecs(), "feedback(dqsg)"])
def test_a_wire_made_by_hand_with_too_few_bytes_raises(spec: str) -> None:
    """`Wire` is a public class: its bytes may be fewer than its header says."""
    codec, x = lc.codec(spec), gaussian(COUNT)
    wire = codec.encode(x, lc.Key())
    short = replace(wire, buffer=wire.data[:-1])
    with pytest.raises(lc.WireError, match="chunk 0" if wire.header.coder else "should have"):
        decode(codec, short, x)


def test_reduce_refuses_short_wires_and_buffers() -> None:
    codec = lc.GlobalExp()
    a, b = (codec.encode(gaussian(300), lc.Key(rank=i), norm=9.0, workers=2) for i in range(2))
    with pytest.raises(lc.WireError, match="should have"):
        codec.reduce(a, replace(b, buffer=b.data[:-1]), lc.Key(phase=1))
    with pytest.raises(ValueError, match="out must"):
        codec.reduce(a, b, lc.Key(phase=1), out=torch.empty(100, dtype=torch.uint8))
