"""Loads, stores and bit casts that LLVM can vectorise.

Numba's own indexing wraps negative indices, which keeps loops scalar, and it has no half
precision on the CPU. Here bfloat16 arrays are seen as uint16 and float16 arrays as int16; the
type alone selects the conversion.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

kernel = njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)
reassociating = njit(
    nogil=True, cache=True, error_model="numpy", boundscheck=False, fastmath={"reassoc"}
)

i32, u8, u32, f32 = np.int32, np.uint8, np.uint32, np.float32

_WORD, _FLOAT, _HALF = ir.IntType(32), ir.FloatType(), ir.HalfType()


def array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as an array of a type that says which float it is."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.float16:
        return tensor.view(torch.int16).numpy()
    return tensor.numpy()


def _address(context: Any, builder: Any, kind: Any, value: Any, index: Any) -> Any:
    data = context.make_array(kind)(context, builder, value).data
    return builder.gep(data, [index], inbounds=True)


@intrinsic
def load(typing: Any, a: Any, i: Any) -> Any:
    """a[i] for 0 ≤ i < len(a)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], *args))

    return a.dtype(a, types.intp), generate


@intrinsic
def store(typing: Any, a: Any, i: Any, v: Any) -> Any:
    """a[i] = v for 0 ≤ i < len(a)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, signature.args[0], *args[:2]))
        return context.get_dummy_value()

    return types.void(a, types.intp, a.dtype), generate


@intrinsic
def load_word(typing: Any, a: Any, i: Any) -> Any:
    """The four bytes a[i:i+4] of a uint8 array, as uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = _address(context, builder, signature.args[0], *args)
        return builder.load(builder.bitcast(where, _WORD.as_pointer()), align=1)

    return types.uint32(a, types.intp), generate


@intrinsic
def store_word(typing: Any, a: Any, i: Any, v: Any) -> Any:
    """Write a uint32 to the four bytes a[i:i+4] of a uint8 array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = _address(context, builder, signature.args[0], *args[:2])
        builder.store(args[2], builder.bitcast(where, _WORD.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(a, types.intp, types.uint32), generate


@intrinsic
def bits_of(typing: Any, v: Any) -> Any:
    """The bits of a float32, as int32."""
    return types.int32(types.float32), lambda c, b, s, args: b.bitcast(args[0], _WORD)


@intrinsic
def float_of(typing: Any, v: Any) -> Any:
    """The float32 with these int32 bits."""
    return types.float32(types.int32), lambda c, b, s, args: b.bitcast(args[0], _FLOAT)


@intrinsic
def get(typing: Any, a: Any, i: Any) -> Any:
    """a[i] of a float array (float32, or a 16-bit float seen as above), as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0]
        value = builder.load(_address(context, builder, kind, *args))
        if kind.dtype == types.uint16:
            word = builder.shl(builder.zext(value, _WORD), ir.Constant(_WORD, 16))
            return builder.bitcast(word, _FLOAT)
        if kind.dtype == types.int16:
            return builder.fpext(builder.bitcast(value, _HALF), _FLOAT)
        return value

    return types.float32(a, types.intp), generate


@intrinsic
def put(typing: Any, a: Any, i: Any, v: Any) -> Any:
    """a[i] = v, rounded to a's float type (nearest, ties to even)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, value = signature.args[0], args[2]
        if kind.dtype == types.uint16:
            value = _to_bfloat16(builder, value)
        elif kind.dtype == types.int16:
            value = builder.bitcast(builder.fptrunc(value, _HALF), ir.IntType(16))
        builder.store(value, _address(context, builder, kind, *args[:2]))
        return context.get_dummy_value()

    return types.void(a, types.intp, types.float32), generate


def _to_bfloat16(builder: Any, value: Any) -> Any:
    word = builder.bitcast(value, _WORD)
    odd = builder.and_(builder.lshr(word, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
    rounded = builder.add(word, builder.add(odd, ir.Constant(_WORD, 0x7FFF)))
    high = builder.lshr(rounded, ir.Constant(_WORD, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(
        builder.select(is_nan, ir.Constant(_WORD, 0x7FC0), high), ir.IntType(16)
    )
