"""The module that a schedule trains: whole, exchanged by nobody else, the same at the start."""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import ConfigError


def check_module(model: object) -> None:
    """ConfigError, with what works, unless this is a plain module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"give a torch.nn.Module, not {type(model).__name__}")
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: not used
    for part in model.modules():
        if isinstance(part, DistributedDataParallel):
            raise ConfigError(
                "give the module itself, not its DistributedDataParallel: the schedule exchanges "
                "by itself, and DDP would do it a second time"
            )
        if fsdp and isinstance(part, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)):
            raise ConfigError(
                "every rank needs a whole model of its own, which FSDP cuts: use lc.compress for it"
            )


def same_start(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Every rank gets the parameters and buffers of the group's first, as under DDP."""
    first = dist.get_global_rank(group, 0)
    for tensor in (*model.parameters(), *model.buffers()):
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, first, group=group)
        tensor.detach().copy_(whole)


def whole(name: str, value: object, least: int) -> int:
    """value, if it is an integer from `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer from {least}, not {value!r}")
    return value
