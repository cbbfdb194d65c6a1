"""GPU kernels. A tile is ROWS × W lanes; a lane owns two values of a group, 64 apart.

They share a draw, and their codes share a byte of the planes of four bits and more. Bytes of
narrower planes hold the codes of two or four lanes of one warp, which add them up in registers.
`TRITON_INTERPRET=1` runs the same kernels on CPU tensors.
"""

# ruff: noqa: F401 - a backend is what `Kernels` lists, which a test compares
from laconic.kernels._reference.checksum import message_check, payload_check, words_check
from laconic.kernels._reference.powers import row_exponents
from laconic.kernels._reference.topk import topk
from laconic.kernels._triton.coding import decode_integers, encode_integers
from laconic.kernels._triton.ecdq import ecdq_decode, ecdq_encode
from laconic.kernels._triton.ecdq_steps import ecdq_steps
from laconic.kernels._triton.exponential import (
    exponential_dequantize,
    exponential_quantize,
    exponential_reduce,
)
from laconic.kernels._triton.linear import accumulate, dequantize, quantize, scales
from laconic.kernels._triton.nested import nested_dequantize, nested_quantize
from laconic.kernels._triton.powers import times_powers
from laconic.kernels._triton.rotate import (
    dequantize_rotate,
    rotate_back,
    rotate_into,
    rotate_quantize,
)
from laconic.kernels._triton.sums import add_codes, read_sums
