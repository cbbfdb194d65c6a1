"""Kernels for devices that have none, where torch is faster than copies to the CPU.

Coders are staged all the same: their reference is plain Python.
"""

# ruff: noqa: F401 - a backend is what `Kernels` lists, which a test compares
from laconic.kernels._reference import (
    accumulate,
    add_codes,
    dequantize,
    dequantize_rotate,
    exponential_dequantize,
    exponential_quantize,
    exponential_reduce,
    message_check,
    nested_dequantize,
    nested_quantize,
    payload_check,
    quantize,
    read_sums,
    rotate_back,
    rotate_into,
    rotate_quantize,
    row_exponents,
    scales,
    times_powers,
    topk,
    words_check,
)
from laconic.kernels._staged import (
    decode_integers,
    ecdq_decode,
    ecdq_encode,
    ecdq_steps,
    encode_integers,
)
