"""What LocalSGD accepts, and the sentences for what it does not."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import ConfigError
from laconic.schedules._outer import Outer


def check(optimizer: object, model: nn.Module, outer: object) -> None:
    """ConfigError, with what works, for what LocalSGD cannot wrap."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: not used
    sharded = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp is not None else ()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"LocalSGD takes the module after the optimizer, not {model!r:.60}")
    for part in model.modules():
        if isinstance(part, DistributedDataParallel):
            raise ConfigError(
                "LocalSGD exchanges by itself: give it the module without DistributedDataParallel"
            )
        if isinstance(part, sharded):
            raise ConfigError(
                "LocalSGD needs whole weights on every rank, and FSDP shards them: give it a plain "
                "module, or use lc.compress with FSDP2"
            )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "LocalSGD wraps a torch optimizer, such as SGD or AdamW, not "
            f"{type(optimizer).__name__}"
        )
    if outer is not None and not isinstance(outer, Outer):
        raise ConfigError(
            f"outer must be None (plain averaging), lc.Nesterov() or lc.HeavyBall(), not {outer!r}"
        )


def whole(name: str, value: object, least: int) -> int:
    """value, if it is an integer from `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer from {least}, not {value!r}")
    return value


def delay_of(overlap: bool, steps: int | None, period: int) -> int:
    """Steps between an exchange's begin and its use; 0 without overlap."""
    if steps is None:
        return period if overlap else 0
    if not overlap:
        raise ConfigError("overlap_steps= goes with overlap=True")
    if whole("overlap_steps", steps, 1) > period:
        raise ConfigError(f"overlap_steps must be from 1 to period={period}, not {steps}")
    return steps
