"""Packing of one group, four bytes at a time (layout in `kernels/_layout.py`)."""

from __future__ import annotations

from laconic.kernels._numba.memory import Pointer, i32, kernel, load_word, shl, shr, store_word, u32


@kernel
def pack(codes: Pointer, out: Pointer, start: int, bits: int) -> None:
    """128 code bytes to 16·bits bytes at out[start]."""
    if bits == 8:
        for j in range(0, 128, 4):
            store_word(out, start + j, u32(load_word(codes, j) ^ u32(0x80808080)))
        return
    low = u32(0)
    if bits & 4:
        mask = u32(0x0F0F0F0F)
        for j in range(0, 64, 4):
            w = load_word(codes, j) & mask
            w |= u32((load_word(codes, j + 64) & mask) << u32(4))
            store_word(out, start + j, u32(w))
        start += 64
        low = u32(4)
    if bits & 2:
        mask = u32(0x03030303)
        for j in range(0, 32, 4):
            w = shr(load_word(codes, j), low) & mask
            w |= u32((shr(load_word(codes, j + 32), low) & mask) << u32(2))
            w |= u32((shr(load_word(codes, j + 64), low) & mask) << u32(4))
            w |= u32((shr(load_word(codes, j + 96), low) & mask) << u32(6))
            store_word(out, start + j, u32(w))
        start += 32
        low = u32(low + u32(2))
    if bits & 1:
        mask = u32(0x01010101)
        for j in range(0, 16, 4):
            w = u32(0)
            for k in range(8):
                w |= u32((shr(load_word(codes, j + 16 * k), low) & mask) << u32(k))
            store_word(out, start + j, u32(w))


@kernel
def unpack(data: Pointer, start: int, codes: Pointer, bits: int) -> None:
    """16·bits bytes at data[start] to 128 code bytes."""
    if bits == 8:
        for j in range(0, 128, 4):
            store_word(codes, j, u32(load_word(data, start + j) ^ u32(0x80808080)))
        return
    low = u32(0)
    if bits & 4:
        mask = u32(0x0F0F0F0F)
        for j in range(0, 64, 4):
            w = load_word(data, start + j)
            store_word(codes, j, u32(w & mask))
            store_word(codes, j + 64, u32(u32(w >> u32(4)) & mask))
        start += 64
        low = u32(4)
    else:
        for j in range(0, 128, 4):
            store_word(codes, j, u32(0))
    if bits & 2:
        mask = u32(0x03030303)
        for j in range(0, 32, 4):
            w = load_word(data, start + j)
            for k in range(4):
                part = u32(shl(i32(u32(w >> u32(2 * k)) & mask), i32(low)))
                store_word(codes, j + 32 * k, u32(load_word(codes, j + 32 * k) | part))
        start += 32
        low = u32(low + u32(2))
    if bits & 1:
        mask = u32(0x01010101)
        for j in range(0, 16, 4):
            w = load_word(data, start + j)
            for k in range(8):
                part = u32(shl(i32(u32(w >> u32(k)) & mask), i32(low)))
                store_word(codes, j + 16 * k, u32(load_word(codes, j + 16 * k) | part))
