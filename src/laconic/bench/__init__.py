"""Bench: codecs on this machine, beside a memory copy. `laconic bench` on the command line."""

from __future__ import annotations

from laconic.bench._bench import CODECS, DTYPES, Bench, Row, Timing, bench

__all__ = ["CODECS", "DTYPES", "Bench", "Row", "Timing", "bench"]
