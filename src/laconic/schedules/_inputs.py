"""Checks of what schedules are given: module, optimizer, codecs, saved states."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adam, AdamW, Optimizer

from laconic._settings import whole
from laconic.codecs import Codec, codec
from laconic.comm._agreement import require_same_settings
from laconic.errors import ConfigError
from laconic.exchanges import ScatterReduce
from laconic.exchanges._preconditioner import BLOCKS, amplified, divides
from laconic.exchanges._side_information import check_nesting
from laconic.schedules._rules import AdamRule, LocalRule, MomentumRule
from laconic.sharding._fsdp_shards import fsdp_modules, is_dtensor, own_values
from laconic.sharding._shard import check_optimizer

_log = logging.getLogger("laconic")
_RULES: dict[type[Optimizer], LocalRule] = {
    SGD: MomentumRule(),
    Adam: AdamRule(),
    AdamW: AdamRule(),
}


def check_module(model: object, *, sharded: bool = False) -> None:
    """ConfigError, with what works, unless this is a plain module, or one of FSDP2 if `sharded`."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"give a torch.nn.Module, not {type(model).__name__}")
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: not used
    for part in model.modules():
        if isinstance(part, DistributedDataParallel):
            raise ConfigError(
                "give the module itself, not its DistributedDataParallel: the schedule exchanges "
                "by itself, and DDP would do it a second time"
            )
        if fsdp and isinstance(part, fsdp.FullyShardedDataParallel):
            raise ConfigError("this is FSDP1: call fully_shard (FSDP2) on the model instead")
        if fsdp and isinstance(part, fsdp.FSDPModule) and not sharded:
            raise ConfigError(
                "every rank needs a whole model of its own, which FSDP cuts: use lc.LocalSGD, "
                "between replicas of a model that is sharded on a 2-D mesh, or lc.compress"
            )
    _check_tensors(model, sharded and bool(fsdp_modules(model)))


def _check_tensors(model: nn.Module, sharded: bool) -> None:
    """ConfigError for tensors that a rank cannot send to another one as they are."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(f"{name} has no shape yet: run a batch through the lazy module first")
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the meta device: model.to_empty(..), then fill it")
        if is_dtensor(tensor) and not sharded:
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
    values = {name: own_values(tensor) for name, tensor in named.items()}
    forms = {name: f"{tuple(value.shape)} {value.dtype}" for name, value in values.items()}
    require_same_settings(forms, group, next(iter(values.values())).device)
    first = dist.get_global_rank(group, 0)
    for own in filter(Tensor.numel, values.values()):
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


def check_started() -> None:
    """ConfigError without a process group."""
    if not dist.is_initialized():
        raise ConfigError("start torch.distributed first: torchrun, then init_process_group()")


def chosen_codec(spec: str | Codec, name: str, *, rounds: bool = False) -> Codec:
    """The codec of a spec string; ConfigError if owners of chunks cannot decode it.

    `rounds`: a server decodes, which knows other workers' gradients of the same step.
    """
    if isinstance(spec, str) and "@" in spec:
        raise ConfigError(
            f"{name}={spec!r}: the schedule is an exchange itself; leave out what follows the @"
        )
    own = codec(spec)
    if own.nested is None:
        ScatterReduce().check(own)
    elif rounds:
        check_nesting(own.nested)
    else:
        raise ConfigError(
            f"{name}={own}: ndqsg needs a server that knows the other workers' gradients of the "
            'same step, lc.SSD(.., servers=1), or lc.compress(model, "ndqsg"); or use dqsg'
        )
    return own


def chosen_pull_codec(spec: str | Codec) -> Codec:
    """The same for weights."""
    own = chosen_codec(spec, "pull_codec")
    if own.residuals:
        raise ConfigError(
            "pull_codec sends differences to what all ranks have, which contain what was lost "
            "before: feedback would add it twice; use the codec inside, without feedback(...)"
        )
    return own


def chosen_rule(local: Any, optimizer: Optimizer) -> LocalRule | None:
    """The rule itself; "auto" is the one that follows this optimizer, if there is one."""
    kind = type(optimizer)
    rule = _RULES.get(kind) if isinstance(local, str) and local == "auto" else local
    if rule is None:
        return None
    if not isinstance(rule, LocalRule):
        raise ConfigError(
            'local must be "auto", MomentumRule(), AdamRule(), GLU(), DCASGD(), LocalSGDRule() or '
            f"None, not {rule!r}"
        )
    if rule.follows and kind not in rule.follows:
        names = " and ".join(one.__name__ for one in rule.follows)
        raise ConfigError(
            f"{type(rule).__name__} makes the steps of {names}, and the optimizer is "
            f'{kind.__name__}: local="auto" takes the rule that fits'
        )
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ConfigError("local rules go downhill: give -loss instead of maximize=True")
    return rule


def warn_of_amplifying(optimizer: Optimizer, pushed: Codec) -> None:
    """Warn that Adam amplifies the error of a codec with one step per parameter.

    Only owners of weights know second moments, so gradients cannot be encoded in their units.
    """
    if pushed.even_noise and divides(optimizer) and dist.get_rank() == 0:
        _log.warning(amplified(optimizer, pushed, BLOCKS))


def check_given(optimizer: object, model: object, seed: int, timeout_s: float) -> None:
    """ConfigError for what no schedule of master weights can work with."""
    check_optimizer(optimizer)
    check_module(model)
    check_started()
    whole("seed", seed, 0)
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")


def check_identity(
    here: Mapping[str, str],
    state: Mapping[str, Any],
    weights: str = "weights that were saved inside global_weights()",
) -> None:
    """ConfigError if a saved state is of another run, of other ranks, or no schedule's at all."""
    there = state.get("identity")
    if not isinstance(there, Mapping):
        raise ConfigError(
            "this is not what state_dict() of a schedule returned: give the state that the "
            "schedule itself saved on this rank; the optimizer's own is inside it"
        )
    differing = [name for name in here if there.get(name) != here[name]]
    if differing == ["rank"]:
        raise ConfigError(
            f"this is the state of rank {there['rank']}, loaded by rank {here['rank']}, and what a "
            'schedule has is each rank\'s own: lc.save({"optimizer": opt}, path), called on all '
            "ranks, writes the states of all into one file, and lc.load gives each rank its own "
            "(lc.PerRank in torch.distributed.checkpoint)"
        )
    if differing:
        wrong = [_difference(name, str(there.get(name)), here[name]) for name in differing]
        raise ConfigError(
            f"this state has {'; '.join(wrong)}. Load each rank's own state (lc.load, or "
            "lc.PerRank in torch.distributed.checkpoint), on as many ranks and with the same "
            f"settings. To continue with others, load {weights} into the model before making the "
            "schedule"
        )


def _difference(name: str, there: str, here: str) -> str:
    """Two values, unless they are long."""
    return f"other {name}" if "\n" in there + here else f"{name} {there}, not {here}"
