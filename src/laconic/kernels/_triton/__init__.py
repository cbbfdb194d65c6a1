"""GPU kernels. A tile is ROWS × W lanes; each lane owns 8 values, 16 apart, of one group.

Eight values 16 apart are what one byte of the narrowest plane holds, so packing needs no
exchange between threads, and runs of 16 values keep loads wide. `TRITON_INTERPRET=1` runs the
same kernels on CPU tensors.
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
