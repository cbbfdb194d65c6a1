"""Schedules: when to communicate."""

from __future__ import annotations

import warnings

from laconic.comm._frame import Call
from laconic.comm._statistics import CompressionStats
from laconic.schedules._async import AsyncSGD, AsyncStats
from laconic.schedules._costs import Scenario, ScheduleCost, register_schedule
from laconic.schedules._local import LocalSGD, LocalStats
from laconic.schedules._outer import HeavyBall, Nesterov, Outer
from laconic.schedules._rules import (
    DCASGD,
    GLU,
    AdamRule,
    LocalRule,
    LocalSGDRule,
    LocalStep,
    MomentumRule,
)
from laconic.schedules._schedule import Schedule, ScheduleStats
from laconic.schedules._ssd import SSD, SSDStats
from laconic.schedules._svrg import QSVRG, SVRGStats
from laconic.sharding._flat_parameters import FlatParameters

__all__ = [
    "DCASGD",
    "GLU",
    "QSVRG",
    "SSD",
    "AdamRule",
    "AsyncSGD",
    "AsyncStats",
    "Call",
    "CompressionStats",
    "FlatParameters",
    "HeavyBall",
    "LocalRule",
    "LocalSGD",
    "LocalSGDRule",
    "LocalStats",
    "LocalStep",
    "MomentumRule",
    "Nesterov",
    "Outer",
    "SSDStats",
    "SVRGStats",
    "Scenario",
    "Schedule",
    "ScheduleCost",
    "ScheduleStats",
    "register_schedule",
]

for _kind in (SSD, LocalSGD, AsyncSGD):
    register_schedule(_kind)


def __getattr__(name: str) -> type:
    if name != "Moment":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "laconic.schedules.Moment is now laconic.schedules.LocalStep; the old name goes with the "
        "next minor version",
        DeprecationWarning,
        stacklevel=2,
    )
    return LocalStep
