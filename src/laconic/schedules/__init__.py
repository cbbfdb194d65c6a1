"""Schedules: when to talk."""

from __future__ import annotations

from laconic.schedules._async import AsyncSGD, AsyncStats
from laconic.schedules._local import LocalSGD, LocalStats
from laconic.schedules._outer import HeavyBall, Nesterov, Outer
from laconic.schedules._rules import (
    DCASGD,
    GLU,
    AdamRule,
    LocalRule,
    LocalSGDRule,
    Moment,
    MomentumRule,
)
from laconic.schedules._ssd import SSD, SSDStats
from laconic.schedules._svrg import QSVRG, SVRGStats

__all__ = [
    "DCASGD",
    "GLU",
    "QSVRG",
    "SSD",
    "AdamRule",
    "AsyncSGD",
    "AsyncStats",
    "HeavyBall",
    "LocalRule",
    "LocalSGD",
    "LocalSGDRule",
    "LocalStats",
    "Moment",
    "MomentumRule",
    "Nesterov",
    "Outer",
    "SSDStats",
    "SVRGStats",
]
