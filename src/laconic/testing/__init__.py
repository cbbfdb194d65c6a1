"""Testing: whether codecs, exchanges and schedules of your own keep what users rely on."""

from __future__ import annotations

from laconic.testing._check_codec import check_codec
from laconic.testing._check_exchange import check_exchange
from laconic.testing._check_schedule import check_schedule

__all__ = ["check_codec", "check_exchange", "check_schedule"]
