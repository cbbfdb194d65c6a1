"""What all kernels agree on: groups, code widths, and the fixed point they round in.

Codes are packed in groups of 128, each group into 16·bits bytes, so that a group starts on a
16-byte boundary whatever the width. A width is cut into planes of 8, 4, 2 or 1 bits (7 = 4+2+1,
low bits first); a plane of p bits holds element j in byte j mod 16p, at bit p·(j div 16p):

    8 bits: byte j              = code[j]                     (two's complement)
    4 bits: byte j, j < 64      = code[j] | code[j+64] << 4
    2 bits: byte j, j < 32      = code[j] | code[j+32] << 2 | code[j+64] << 4 | code[j+96] << 6
    1 bit:  byte j, j < 16      = Σ_k code[j+16k] << k

Neighbours stay neighbours, so a vector register packs without shuffling.

Rounding happens in fixed point with F fraction bits: one float multiply, then integers, so that
no compiler's fused multiply-add can change a byte:

    t = rint(x · inv),  inv = the float just below M·2^F / scale     (so |t| ≤ M·2^F)
    q = (t + r) >> F,   r uniform in 0 .. 2^F - 1                    (so |q| ≤ M)

E[q] = t / 2^F exactly; t itself is within half a unit of x·M·2^F/scale, a bias of at most
2^-(F+1) of a level. Adding 1.5·2^23 to a float of magnitude up to 2^22 leaves rint of it in the
low bits; this needs M·2^F ≤ 2^22, which sets F.

The subtracted dither is u = (r + ½)/2^F - ½, symmetric about zero. In units of 2^-(F+1):

    W = 2^(F+1)·q - (2r + 1) + 2^F,    x̂ = W · scale / (2^(F+1)·M)

With m = (t + r) mod 2^F, uniform whatever t is: W - 2t = 2^F - 1 - 2m. So the error is uniform
on a symmetric grid, independent of x, with variance (1 - 4^-F)/12 of a squared level.

n workers whose codes are added may share the draw r, each in a stratum of its own, o_p =
floor(p·2^F/n) for p = 0 .. n-1: r_p = (r + o_p) mod 2^F is uniform whatever n is. Exactly
floor(n·r/2^F) of the r + o_p reach 2^F, and Σ o_p = ((n-1)·(2^F - 1) + g - 1)/2 with
g = gcd(n, 2^F), so that (Hermite's identity, in integers)

    Σ_p (2·r_p + 1 - 2^F) = 2·(n·r mod 2^F) - 2^F + g

and one draw decodes the sum: W = 2^(F+1)·Σq - 2·(n·r mod 2^F) + 2^F - g.
"""

from __future__ import annotations

import math
from enum import IntEnum

GROUP = 128
MAX_LEVELS = 32767
TINY = 2.0**-60  # blocks whose scale is smaller are lifted by LIFT first: 1/scale would overflow
MOST_EXPONENT = 100  # of factors 2^e: they, and nearly all products with them, are normal numbers
LOG2_ROUND = 0x004AFB0D  # 2^23 less the mantissa of √2: (bits + this) >> 23 rounds log2 to nearest
LIFT = 2.0**64
CHECK_GROUPS = 4  # groups that share one check byte in nested quantization
SIDE_LIMIT = 1 << 22  # side information 64 fine steps away cannot be near x: it is cut there


class ScaleKind(IntEnum):
    """How a block's scale is found."""

    GIVEN = 0
    MAX = 1
    L2 = 2


def fraction_bits(levels: int) -> int:
    """F: as many fraction bits, up to 16, as keep levels·2^F within 2^22."""
    return min(16, 22 - levels.bit_length())


def fixed_bits(levels: int) -> int:
    """Smallest width whose codes hold -levels .. levels."""
    return (2 * levels).bit_length()


def code_offset(levels: int, bits: int) -> int:
    """What is added to q to make a code: two's complement at 8 bits, else offset binary."""
    return 128 if bits == 8 else levels


def dither_centre(workers: int, fraction: int) -> int:
    """2^F - gcd(n, 2^F): what makes n added dithers symmetric about zero."""
    return (1 << fraction) - math.gcd(workers, 1 << fraction)


def groups(numel: int) -> int:
    """Number of packing groups."""
    return -(-numel // GROUP)


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of packed codes."""
    return groups(numel) * 16 * bits


def blocks(numel: int, block: int) -> int:
    """Number of scales; block 0 means one for all."""
    return -(-numel // block) if block else min(numel, 1)


def checks(numel: int) -> int:
    """Number of check bytes in nested quantization."""
    return -(-groups(numel) // CHECK_GROUPS)
