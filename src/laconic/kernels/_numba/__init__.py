"""CPU kernels: serial, vectorised by LLVM, without the GIL; `_pool` spreads them over cores."""

from laconic.kernels._numba.linear import accumulate, dequantize, quantize, scales
from laconic.kernels._numba.natural import natural_dequantize, natural_quantize, natural_reduce
from laconic.kernels._numba.nested import nested_dequantize, nested_quantize
from laconic.kernels._numba.select import largest_entries

__all__ = [
    "accumulate",
    "dequantize",
    "largest_entries",
    "natural_dequantize",
    "natural_quantize",
    "natural_reduce",
    "nested_dequantize",
    "nested_quantize",
    "quantize",
    "scales",
]
