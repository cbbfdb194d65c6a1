"""Testing: does a codec of your own keep the contract? Plain Python, for any test runner."""

from __future__ import annotations

from laconic.testing._check_codec import check_codec

__all__ = ["check_codec"]
