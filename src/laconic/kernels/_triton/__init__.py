"""GPU kernels. A tile is ROWS × W lanes; a lane owns 2, 4 or 8 values of one group of 128.

They are RUN apart, RUN = 64, 32 or 16: the values whose codes share a byte of the narrowest
plane. So packing needs no exchange between threads, and runs of RUN values keep loads wide. A
kernel walks through the lane's values in pairs 64 apart, which share a draw.
`TRITON_INTERPRET=1` runs the same kernels on CPU tensors.
"""

from laconic.kernels._triton.linear import dequantize, quantize, scales
from laconic.kernels._triton.natural import natural_dequantize, natural_quantize, natural_reduce
from laconic.kernels._triton.nested import nested_dequantize, nested_quantize

__all__ = [
    "dequantize",
    "natural_dequantize",
    "natural_quantize",
    "natural_reduce",
    "nested_dequantize",
    "nested_quantize",
    "quantize",
    "scales",
]
