"""The draws of `laconic._key`. One 32-bit mix; the caller splits it between two elements."""

from __future__ import annotations

import numpy as np

from laconic.kernels._numba.memory import kernel, u32


@kernel
def mix(p: np.uint32, k0: np.uint32, k1: np.uint32) -> np.uint32:
    """Draw p of stream (k0, k1)."""
    h = u32(u32(p * u32(0x9E3779B1)) + k0)
    h = u32(h ^ (h >> u32(16)))
    h = u32(h * u32(0x7FEB352D))
    h = u32(h ^ (h >> u32(15)))
    h = u32(h ^ k1)
    h = u32(h * u32(0x846CA68B))
    return u32(h ^ (h >> u32(16)))
