"""A model that FSDP2 has cut: a rank's own values, and the ranks that hold the same shard."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.comm._agreement import require_same_settings
from laconic.errors import ConfigError


def own_values(tensor: Tensor) -> Tensor:
    """A rank's own part of a DTensor, in the same memory; any other tensor as it is. Detached."""
    own: Any = tensor.detach()
    return own.to_local() if is_dtensor(own) else own


def is_dtensor(value: object) -> Any:
    """Whether it is cut among ranks."""
    cut = sys.modules.get("torch.distributed.tensor")  # not imported: not used
    return cut is not None and isinstance(value, cut.DTensor)


def like(values: Tensor, parameter: Tensor) -> Tensor:
    """A rank's own values as a DTensor that is cut as the parameter is."""
    cut = sys.modules["torch.distributed.tensor"]
    cut_as: Any = parameter
    return cut.DTensor.from_local(
        values,
        cut_as.device_mesh,
        cut_as.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def fsdp_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules that fully_shard was called on, with their names."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: not used
    parts = model.named_modules() if fsdp is not None else ()
    return [(name, part) for name, part in parts if fsdp and isinstance(part, fsdp.FSDPModule)]


def groups_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """torch's parameter groups, each with the name of its (first) module."""
    seen = set()
    for name, part in fsdp_modules(model):
        state = part._get_fsdp_state()
        if id(state) in seen:
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # one of them, in older torch
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        if len(groups) > 1:
            raise ConfigError(
                f"{name or 'the root module'} is sharded on several meshes (shard_placement_fn), "
                "where FSDP's collectives cannot be replaced: give each mesh a module of its own"
            )
        yield from ((name, group) for group in groups)


class Done(dist.Work):
    """Of a collective that is over when its call returns."""

    def wait(self, timeout: Any = None) -> bool:
        del timeout
        return True


class InPlaceOfReplicas(dist.ProcessGroup):
    """What FSDP is given for the group between replicas, to do something else than all-reduce.

    FSDP's all-reduce hook runs after its own all-reduce and cannot replace it; its process group
    can. What FSDP does around it (partial sums without all-reduce, factors, streams) stays.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self.group = group

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """That of the group inside."""
        return dist.get_backend(self.group)


class OwnReplica(InPlaceOfReplicas):
    """Each replica averages gradients among its own shards only."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group, 0, 1)

    def allreduce(  # pyright: ignore[reportIncompatibleMethodOverride] (one of its three forms)
        self, tensors: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        """What dist.all_reduce calls: the sum over one replica, and its mean."""
        del tensors, opts
        return Done()


class ShardedReplica:
    """A replica of a model that FSDP2 has cut among `shards`; `replicas` hold this rank's shard.

    On a 2-D mesh FSDP's all-reduce between replicas is turned off until `close`. On a 1-D mesh it
    knows of one replica only, and `group` names the ranks that hold the same shard.
    """

    def __init__(
        self, model: nn.Module, trained: Sequence[Tensor], group: dist.ProcessGroup | None
    ) -> None:
        self._groups = [one for _, one in groups_of(model)]
        self.shards, replicas = self._meshes()
        self.replicas = _chosen(self.shards, replicas, group)
        sharded = {id(p.sharded_param) for one in self._groups for p in one.fsdp_params}
        names = {id(p): name for name, p in model.named_parameters()}
        whole = [names.get(id(p), "one") for p in trained if id(p) not in sharded]
        if whole:
            raise ConfigError(
                f"{whole[0]} is not sharded (ignored_params), so that FSDP does not average its "
                "gradients: shard it, or freeze it with requires_grad_(False)"
            )
        if not any(own_values(p).numel() for p in trained):
            raise ConfigError(
                f"this rank's shard, number {self.shards.rank()}, has no values to train: shard "
                "the model among fewer ranks"
            )

    def _meshes(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
        """The groups of ranks that all modules are cut among, and copied to."""
        infos: list[Any] = [one.mesh_info for one in self._groups]
        shards = [getattr(info, "shard_process_group", None) for info in infos]
        replicas = [_inside(_replicas(one)) for one in self._groups]
        for groups in (shards, replicas):
            members = {one and tuple(dist.get_process_group_ranks(one)) for one in groups}
            if len(members) > 1 or None in shards:
                raise ConfigError(
                    "the model's modules are sharded on different meshes: use one mesh for all of "
                    f"them (here are groups of ranks {sorted(map(str, members))})"
                )
        assert shards[0] is not None
        return shards[0], replicas[0]

    def part(self) -> None:
        """Turn FSDP's all-reduce between replicas off."""
        for one in self._groups:
            group = _replicas(one)
            if group is not None and not isinstance(group, OwnReplica):
                _set_replicas(one, OwnReplica(group))

    def close(self) -> None:
        """FSDP averages gradients between replicas again."""
        for one in self._groups:
            group = _replicas(one)
            if isinstance(group, OwnReplica):
                _set_replicas(one, group.group)

    def describe(self) -> str:
        """Which part of the model this rank holds."""
        return f"{self.shards.rank()} of {self.shards.size()}"

    def all_shards(self, fine: bool) -> bool:
        """Whether it is fine on every rank of this replica, which must all ask."""
        device = self._groups[0].device
        least = torch.tensor([int(fine)], dtype=torch.int32, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.shards)
        return bool(least.item())


def require_same_in_mesh(
    settings: dict[str, str],
    shards: dist.ProcessGroup | None,
    replicas: dist.ProcessGroup | None,
    device: torch.device,
    of_shard: Mapping[str, str] | None = None,
) -> None:
    """Compare inside shard groups, then between replicas, which report each other's problems.

    So all ranks of a mesh raise if any differ. In groups that there are: one more group for this
    alone would be one more communicator, and a group's name cannot be used again after destroying
    it. `of_shard` is compared between replicas only.
    """
    problem = None
    try:
        if shards is not None:
            require_same_settings(settings, shards, device)
    except ConfigError as found:
        problem = found
    if replicas is not None:
        news = {"shard group": str(problem or "agrees")}
        require_same_settings({**settings, **(of_shard or {}), **news}, replicas, device)
    if problem is not None:
        raise problem


def own_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of an optimizer's state_dict and of all tensors in it, a rank's own part of each."""

    def own(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: own(one) for name, one in value.items()}
        return own_values(value).clone() if isinstance(value, Tensor) else copy.deepcopy(value)

    return own(dict(state))


def cut_state(optimizer: torch.optim.Optimizer) -> None:
    """After loading `own_state`: values of a sharded parameter's shape are DTensors again."""
    for parameter, state in optimizer.state.items():
        if is_dtensor(parameter):
            shape = own_values(parameter).shape
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == shape and not is_dtensor(value):
                    state[name] = like(value, parameter)


def _replicas(group: Any) -> Any:
    """What FSDP takes for the group between replicas; None on a 1-D mesh."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def _set_replicas(group: Any, replicas: Any) -> None:
    group.mesh_info = copy.copy(group.mesh_info)  # torch may share it
    group.mesh_info.replicate_process_group = replicas


def _inside(group: Any) -> Any:
    """The group between replicas, also where an earlier schedule has left `OwnReplica`."""
    if isinstance(group, OwnReplica):
        return group.group
    if isinstance(group, InPlaceOfReplicas):
        raise ConfigError(
            "lc.compress encodes gradients between the replicas of this model, which train alone "
            'between two exchanges of this schedule: leave lc.compress out, or give it between="'
            'shards"'
        )
    return group


def _chosen(
    shards: dist.ProcessGroup, replicas: dist.ProcessGroup | None, group: dist.ProcessGroup | None
) -> dist.ProcessGroup:
    """The ranks that hold this rank's shard: the mesh's, or those that were given."""
    if group is None and replicas is None:
        raise ConfigError(
            "the model is sharded on a 1-D mesh, which knows of one replica only: shard it on a "
            '2-D mesh, (replicate, shard), or give group=mesh["replicate"].get_group()'
        )
    if group is None:
        assert replicas is not None
        return replicas
    own, given = dist.get_rank(), dist.get_process_group_ranks(group)
    common = set(given) & set(dist.get_process_group_ranks(shards))
    expected = given if replicas is None else dist.get_process_group_ranks(replicas)
    if common != {own} or sorted(given) != sorted(expected):
        raise ConfigError(
            f"group= has ranks {given}, and must have those that hold the same shard as rank {own}"
            + (f", {expected}" if replicas is not None else "")
            + ': mesh["replicate"].get_group(), or leave it out on a 2-D mesh'
        )
    return group
