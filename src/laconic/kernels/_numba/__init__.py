"""CPU kernels: serial, vectorised by LLVM, without the GIL; `_pool` spreads them over cores."""

# ruff: noqa: F401 - a backend is what `Kernels` lists, which a test compares
from laconic.kernels._numba.checksum import message_check, payload_check, words_check
from laconic.kernels._numba.coding import decode_integers, encode_integers
from laconic.kernels._numba.ecdq import ecdq_decode, ecdq_encode
from laconic.kernels._numba.ecdq_steps import ecdq_steps
from laconic.kernels._numba.exponential import (
    exponential_dequantize,
    exponential_quantize,
    exponential_reduce,
)
from laconic.kernels._numba.linear import accumulate, dequantize, quantize, scales
from laconic.kernels._numba.nested import nested_dequantize, nested_quantize
from laconic.kernels._numba.powers import row_exponents, times_powers
from laconic.kernels._numba.rotate import (
    dequantize_rotate,
    rotate_back,
    rotate_into,
    rotate_quantize,
)
from laconic.kernels._numba.sums import add_codes, read_sums
from laconic.kernels._numba.topk import topk
