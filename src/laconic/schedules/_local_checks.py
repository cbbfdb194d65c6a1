"""What LocalSGD accepts, and the sentences for what it does not."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from laconic.errors import ConfigError
from laconic.schedules._module import check_module, whole
from laconic.schedules._outer import Outer


def check(optimizer: object, model: nn.Module, outer: object) -> None:
    """ConfigError, with what works, for what LocalSGD cannot wrap."""
    check_module(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "LocalSGD wraps a torch optimizer, such as SGD or AdamW, not "
            f"{type(optimizer).__name__}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates its closure several times in a step, which "
            "LocalSGD does once: use an optimizer whose step() needs none, such as SGD or AdamW"
        )
    if outer is not None and not isinstance(outer, Outer):
        raise ConfigError(
            f"outer must be None (plain averaging), lc.Nesterov() or lc.HeavyBall(), not {outer!r}"
        )


def delay_of(overlap: bool, steps: int | None, period: int) -> int:
    """Steps between an exchange's begin and its use; 0 without overlap."""
    if steps is None:
        return period if overlap else 0
    if not overlap:
        raise ConfigError("overlap_steps= goes with overlap=True")
    if whole("overlap_steps", steps, 1) > period:
        raise ConfigError(f"overlap_steps must be from 1 to period={period}, not {steps}")
    return steps
