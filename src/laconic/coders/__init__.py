"""Coders: integers to bytes and back to the same integers, losslessly.

    fixed    bit planes, each chunk as wide as its largest integer
    elias    QSGD's code: gaps, signs and levels in Elias omega, or every level, if that is shorter
    bitmap   which values are not zero, then signs, then levels in unary, plane by plane
    rans     an entropy coder, given each group's spread and the dither

All work in independent chunks with an offset table and a check sum each (docs/wire.md).
"""

from __future__ import annotations

from laconic.coders._coder import Coder, coder, coders

__all__ = ["Coder", "coder", "coders"]
