"""Plain torch kernels: the definition that the fast ones must match byte for byte."""

# ruff: noqa: F401 - a backend is what `Kernels` lists, which a test compares
from laconic.kernels._reference.checksum import message_check, payload_check, words_check
from laconic.kernels._reference.coding import decode_integers, encode_integers
from laconic.kernels._reference.ecdq import ecdq_decode, ecdq_encode
from laconic.kernels._reference.ecdq_steps import ecdq_steps
from laconic.kernels._reference.exponential import (
    exponential_dequantize,
    exponential_quantize,
    exponential_reduce,
)
from laconic.kernels._reference.linear import accumulate, dequantize, quantize, scales
from laconic.kernels._reference.nested import nested_dequantize, nested_quantize
from laconic.kernels._reference.powers import row_exponents, times_powers
from laconic.kernels._reference.rotate import (
    dequantize_rotate,
    rotate_back,
    rotate_into,
    rotate_quantize,
)
from laconic.kernels._reference.sums import add_codes, read_sums
from laconic.kernels._reference.topk import topk
