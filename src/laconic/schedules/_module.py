"""The module that a schedule trains: whole, exchanged by nobody else, the same at the start."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from laconic.errors import ConfigError
from laconic.exchanges._agree import agree


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
    _check_tensors(model)


def _check_tensors(model: nn.Module) -> None:
    """ConfigError for tensors that a rank cannot send to another one as they are."""
    cut = sys.modules.get("torch.distributed.tensor")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(f"{name} has no shape yet: run a batch through the lazy module first")
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the meta device: model.to_empty(..), then fill it")
        if cut and isinstance(tensor, cut.DTensor):
            raise ConfigError(
                f"{name} is cut among ranks (a DTensor), and a schedule needs all of the model on "
                "every rank: use lc.compress"
            )
        if tensor.layout != torch.strided:
            raise ConfigError(
                f"{name} is a {tensor.layout} tensor, and ranks start from the first one's: use a "
                "dense one, or keep it outside the module's parameters and buffers"
            )


def same_start(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Every rank gets the parameters and buffers of the group's first, as under DDP.

    As bytes: Gloo does not take all dtypes.
    """
    named = dict((*model.named_parameters(), *model.named_buffers()))
    forms = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named.items()}
    agree(forms, group, next(iter(named.values())).device)
    first = dist.get_global_rank(group, 0)
    for tensor in filter(Tensor.numel, named.values()):
        own = tensor.detach()
        whole = own.resolve_conj().resolve_neg().contiguous()
        dist.broadcast(whole.view(-1).view(torch.uint8), first, group=group)
        own.copy_(whole)


def own_buffers(model: nn.Module, also: Sequence[str] = ()) -> dict[str, Tensor]:
    """Copies of the buffers that a model saves, and of others: each rank has its own."""
    found = {name: model.get_buffer(name) for name in (*_saved_buffers(model), *also)}
    return {name: buffer.detach().clone() for name, buffer in found.items()}


def load_buffers(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The model's buffers become those of a state."""
    own = dict(model.named_buffers(remove_duplicate=False))
    for name in {*_saved_buffers(model), *state}:
        forms = [tuple(some[name].shape) if name in some else "missing" for some in (state, own)]
        if forms[0] != forms[1]:
            raise ConfigError(
                f"buffer {name} is {forms[0]} in this state and {forms[1]} in the model: the "
                "state is of another model"
            )
        own[name].detach().copy_(state[name])


def _saved_buffers(model: nn.Module) -> list[str]:
    """Without those that are not persistent, such as caches: these may have any shape."""
    return [
        f"{path}.{name}" if path else name
        for path, part in model.named_modules()
        for name, _ in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    ]


def whole(name: str, value: object, least: int) -> int:
    """value, if it is an integer from `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer from {least}, not {value!r}")
    return value
