"""Packing: round trip, and the layout as `kernels/_layout.py` writes it, byte by byte."""

from __future__ import annotations

import pytest
import torch

from laconic.kernels._layout import (
    GROUP,
    blocks,
    checks,
    code_offset,
    fixed_bits,
    fraction_bits,
    packed_bytes,
)
from laconic.kernels._reference.group import pack, unpack

PLANES = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1]}  # low bits first


def random_codes(bits: int, rows: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 1 << bits, (rows, GROUP), generator=generator)


@pytest.mark.parametrize("bits", range(2, 9))
def test_unpack_inverts_pack(bits: int) -> None:
    codes = random_codes(bits)
    data = pack(codes, bits)
    assert data.dtype == torch.uint8 and data.shape == (3, 16 * bits)
    assert torch.equal(unpack(data, bits).to(torch.int64), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_pack_inverts_unpack(bits: int) -> None:
    """Every byte pattern is a code word: no bit of a wire is wasted or ignored."""
    generator = torch.Generator().manual_seed(bits)
    data = torch.randint(0, 256, (3, 16 * bits), generator=generator).to(torch.uint8)
    assert torch.equal(pack(unpack(data, bits), bits), data)


@pytest.mark.parametrize("bits", range(2, 8))
def test_layout_is_as_documented(bits: int) -> None:
    """A plane of p bits holds element j in byte j mod 16p, at bit p·(j div 16p)."""
    codes = random_codes(bits)
    expected = torch.zeros(3, 16 * bits, dtype=torch.int64)
    for row in range(3):
        low = start = 0
        for p in PLANES[bits]:
            for j in range(GROUP):
                part = int(codes[row, j]) >> low & ((1 << p) - 1)
                expected[row, start + j % (16 * p)] |= part << p * (j // (16 * p))
            low += p
            start += 16 * p
    assert torch.equal(pack(codes, bits).to(torch.int64), expected)


def test_documented_examples() -> None:
    """The four formulas of the module's text, literally."""
    c = random_codes(8, rows=1)[0].tolist()
    b = pack(torch.tensor([c]), 8)[0]
    # an 8-bit code is q + 128, and its byte is q in two's complement: what int8 sums add
    assert b.view(torch.int8).tolist() == [code - 128 for code in c]
    c = random_codes(4, rows=1)[0].tolist()
    b = pack(torch.tensor([c]), 4)[0].tolist()
    assert b == [c[j] | c[j + 64] << 4 for j in range(64)]
    c = random_codes(2, rows=1)[0].tolist()
    b = pack(torch.tensor([c]), 2)[0].tolist()
    assert b == [c[j] | c[j + 32] << 2 | c[j + 64] << 4 | c[j + 96] << 6 for j in range(32)]
    c = random_codes(3, rows=1)[0].tolist()
    b = pack(torch.tensor([c]), 3)[0].tolist()
    assert b[32:] == [sum((c[j + 16 * k] >> 2) << k for k in range(8)) for j in range(16)]


@pytest.mark.parametrize("levels", range(1, 128))
def test_codes_of_all_levels_fit_their_width(levels: int) -> None:
    bits = fixed_bits(levels)
    offset = code_offset(levels, bits)
    assert 2 <= bits <= 8
    assert offset - levels >= 0 and offset + levels < 1 << bits
    assert 2 * levels >= 1 << (bits - 1)  # one bit fewer would not do


@pytest.mark.parametrize("levels", [1, 2, 3, 7, 31, 63, 64, 127, 128, 1000, 32767])
def test_fixed_point_fits_the_float_trick(levels: int) -> None:
    """levels·2^F ≤ 2^22, with as many bits as that allows, up to 16."""
    fraction = fraction_bits(levels)
    assert levels << fraction <= 1 << 22
    assert fraction == 16 or levels << (fraction + 1) > 1 << 21


@pytest.mark.parametrize(
    ("numel", "expected"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (512, 4), (513, 5)]
)
def test_sizes(numel: int, expected: int) -> None:
    for bits in range(2, 9):
        assert packed_bytes(numel, bits) == expected * 16 * bits
    assert checks(numel) == -(-expected // 4)
    assert blocks(numel, 100) == -(-numel // 100)
    assert blocks(numel, 0) == min(numel, 1)
