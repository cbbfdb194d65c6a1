"""Plain torch kernels: the definition that the fast ones must match byte for byte."""

from laconic.kernels._reference.coding import decode_integers, encode_integers
from laconic.kernels._reference.ecdq import ecdq_decode, ecdq_encode
from laconic.kernels._reference.linear import accumulate, dequantize, quantize, scales
from laconic.kernels._reference.message import message_check, payload_check, words_check
from laconic.kernels._reference.natural import (
    natural_dequantize,
    natural_quantize,
    natural_reduce,
)
from laconic.kernels._reference.nested import nested_dequantize, nested_quantize
from laconic.kernels._reference.powers import row_exponents, times_powers
from laconic.kernels._reference.rotate import (
    dequantize_rotate,
    rotate_back,
    rotate_into,
    rotate_quantize,
)
from laconic.kernels._reference.select import largest_entries
from laconic.kernels._reference.steps import ecdq_steps
from laconic.kernels._reference.sums import add_codes, read_sums

__all__ = [
    "accumulate",
    "add_codes",
    "decode_integers",
    "dequantize",
    "dequantize_rotate",
    "ecdq_decode",
    "ecdq_encode",
    "ecdq_steps",
    "encode_integers",
    "largest_entries",
    "message_check",
    "natural_dequantize",
    "natural_quantize",
    "natural_reduce",
    "nested_dequantize",
    "nested_quantize",
    "payload_check",
    "quantize",
    "read_sums",
    "rotate_back",
    "rotate_into",
    "rotate_quantize",
    "row_exponents",
    "scales",
    "times_powers",
    "words_check",
]
