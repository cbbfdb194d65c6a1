"""Plain torch kernels: the definition that the fast ones must match byte for byte."""

from laconic.kernels._reference.linear import accumulate, dequantize, quantize, scales
from laconic.kernels._reference.natural import (
    natural_dequantize,
    natural_quantize,
    natural_reduce,
)
from laconic.kernels._reference.nested import nested_dequantize, nested_quantize
from laconic.kernels._reference.select import largest_entries

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
