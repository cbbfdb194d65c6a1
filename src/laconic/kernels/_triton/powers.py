"""Powers of two on the GPU. The definitions are in `_reference/powers.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels._triton.group import narrowed

_SPAN = 4096  # values of a program


def times_powers(source: Tensor, exponents: Tensor, out: Tensor, *, inverse: bool) -> None:
    """See `Kernels`."""
    n = out.numel()
    if n:
        _times[(triton.cdiv(n, _SPAN),)](
            source, exponents, out, n, INVERSE=inverse, SPAN=_SPAN, num_warps=8
        )


@triton.jit
def _times(source, exponents, out, n, INVERSE: tl.constexpr, SPAN: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    e = tl.load(exponents + i, mask=i < n, other=0).to(tl.int32)
    factor = ((127 - e if INVERSE else 127 + e) << 23).to(tl.float32, bitcast=True)
    v = tl.load(source + i, mask=i < n, other=0.0).to(tl.float32) * factor
    tl.store(out + i, narrowed(v, out.dtype.element_ty), mask=i < n)
