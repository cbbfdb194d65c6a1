"""Loads, stores and bit casts that LLVM can vectorise.

Numba's own indexing wraps negative indices, which keeps loops scalar, and counts references to
arrays at every call; so kernels work on plain pointers. Numba has no half precision on the CPU:
bfloat16 arrays are seen as uint16 and float16 arrays as int16, and the type alone selects the
conversion.
"""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import alloca_once
from numba.extending import intrinsic

from laconic.kernels._layout import GROUP

_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}


def _sources() -> int:
    """A check sum of everything that is compiled into kernels."""
    folder = Path(__file__).parent.parent
    files = [
        file
        for part in ("_*.py", "_numba/*.py", "_reference/*.py")
        for file in sorted(folder.glob(part))
    ]
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


_STAMP = _sources()


def _compiled(function: Any, **options: Any) -> Any:
    """Compile on first use, and keep the result between processes.

    Numba looks for changes only in the file of the outermost function; a change in a file that is
    compiled into it would go unseen, and ranks would disagree. So the stamp covers all of them.
    """
    result = njit(cache=True, **_OPTIONS, **options)(function)
    try:
        result._cache._cache_file._source_stamp = _STAMP
        if function.__closure__:  # Numba's key of functions inside differs from process to process
            result._cache._index_key = lambda sig, codegen: (sig, codegen.magic_tuple())
    except AttributeError:  # another Numba keeps it elsewhere: rather compile every time
        result = njit(**_OPTIONS, **options)(function)
    return result


kernel = _compiled
reassociating = partial(_compiled, fastmath={"reassoc"})
inlined = partial(_compiled, forceinline=True)  # else a bundle travels over the stack, every call

i16, i32, u8, u32, u64, f32 = np.int16, np.int32, np.uint8, np.uint32, np.uint64, np.float32

Pointer = Any  # to the data of a tensor or of a scratch

_WORD, _FLOAT, _HALF = ir.IntType(32), ir.FloatType(), ir.HalfType()


def array(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as an array of a type that says which float it is."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype == torch.float16:
        return tensor.view(torch.int16).numpy()
    return tensor.numpy()


@intrinsic
def pointer(typing: Any, a: Any) -> Any:
    """Where an array's data start. Helpers take pointers: arrays would be counted at each call."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return types.CPointer(a.dtype)(a), generate


@intrinsic
def code_scratch(typing: Any) -> Any:
    """128 bytes on the stack, where no other pointer can reach."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _stack(builder, ir.IntType(8))

    return types.CPointer(types.uint8)(), generate


@intrinsic
def float_scratch(typing: Any) -> Any:
    """128 float32 on the stack."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _stack(builder, _FLOAT)

    return types.CPointer(types.float32)(), generate


@intrinsic
def word_scratch(typing: Any) -> Any:
    """128 int32 on the stack."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _stack(builder, _WORD)

    return types.CPointer(types.int32)(), generate


@intrinsic
def load(typing: Any, a: Any, i: Any) -> Any:
    """a[i]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, *args))

    return a.dtype(a, types.intp), generate


@intrinsic
def store(typing: Any, a: Any, i: Any, v: Any) -> Any:
    """a[i] = v."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _at(builder, *args[:2]))
        return context.get_dummy_value()

    return types.void(a, types.intp, a.dtype), generate


@intrinsic
def load_word(typing: Any, a: Any, i: Any) -> Any:
    """The four bytes from a + i, as uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.bitcast(_at(builder, *args), _WORD.as_pointer()), align=1)

    return types.uint32(a, types.intp), generate


@intrinsic
def store_word(typing: Any, a: Any, i: Any, v: Any) -> Any:
    """Write a uint32 to the four bytes from a + i."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = builder.bitcast(_at(builder, *args[:2]), _WORD.as_pointer())
        builder.store(args[2], where, align=1)
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
def shl(typing: Any, v: Any, by: Any) -> Any:
    """v << by in 32 bits. (Numba's own shifts widen to 64, and so do half the vectors.)"""
    return types.int32(types.int32, types.int32), lambda c, b, s, args: b.shl(*args)


@intrinsic
def sar(typing: Any, v: Any, by: Any) -> Any:
    """v >> by of an int32: the sign moves in."""
    return types.int32(types.int32, types.int32), lambda c, b, s, args: b.ashr(*args)


@intrinsic
def shr(typing: Any, v: Any, by: Any) -> Any:
    """v >> by of a uint32: zeros move in."""
    return types.uint32(types.uint32, types.uint32), lambda c, b, s, args: b.lshr(*args)


@intrinsic
def nearest(typing: Any, v: Any) -> Any:
    """floor(v + ½) of a float32 within the range of int32, as int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = "llvm.floor.f32"
        floor = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(_FLOAT, [_FLOAT]), name
        )
        raised = builder.fadd(args[0], ir.Constant(_FLOAT, 0.5))
        return builder.fptosi(builder.call(floor, [raised]), _WORD)

    return types.int32(types.float32), generate


@intrinsic
def ones(typing: Any, v: Any) -> Any:
    """How many bits of a uint32 are set."""
    return types.uint32(types.uint32), lambda c, b, s, args: b.ctpop(args[0])


@intrinsic
def trailing(typing: Any, v: Any) -> Any:
    """The place of the lowest set bit of a uint32 that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint32(types.uint32), generate


@intrinsic
def get(typing: Any, a: Any, i: Any) -> Any:
    """a[i] of a float32, or of a 16-bit float seen as above, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[0].dtype
        value = builder.load(_at(builder, *args))
        if kind == types.uint16:
            word = builder.shl(builder.zext(value, _WORD), ir.Constant(_WORD, 16))
            return builder.bitcast(word, _FLOAT)
        if kind == types.int16:
            return builder.fpext(builder.bitcast(value, _HALF), _FLOAT)
        return value

    return types.float32(a, types.intp), generate


@intrinsic
def put(typing: Any, a: Any, i: Any, v: Any) -> Any:
    """a[i] = v, rounded to a's float type (nearest, ties to even)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, value = signature.args[0].dtype, args[2]
        if kind == types.uint16:
            value = _to_bfloat16(builder, value)
        elif kind == types.int16:
            value = builder.bitcast(builder.fptrunc(value, _HALF), ir.IntType(16))
        builder.store(value, _at(builder, *args[:2]))
        return context.get_dummy_value()

    return types.void(a, types.intp, types.float32), generate


def _stack(builder: Any, kind: Any) -> Any:
    place = alloca_once(builder, ir.ArrayType(kind, GROUP))
    place.align = 64
    return builder.bitcast(place, kind.as_pointer())


def _at(builder: Any, base: Any, index: Any) -> Any:
    return builder.gep(base, [index], inbounds=True)


def _to_bfloat16(builder: Any, value: Any) -> Any:
    word = builder.bitcast(value, _WORD)
    odd = builder.and_(builder.lshr(word, ir.Constant(_WORD, 16)), ir.Constant(_WORD, 1))
    rounded = builder.add(word, builder.add(odd, ir.Constant(_WORD, 0x7FFF)))
    high = builder.lshr(rounded, ir.Constant(_WORD, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, ir.Constant(_WORD, 0x7FC0), high), ir.IntType(16))
