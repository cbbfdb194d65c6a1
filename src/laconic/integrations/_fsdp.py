"""`lc.compress` for FSDP2: gradients, and optionally weights, travel encoded."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from laconic._key import seed_of
from laconic._settings import whole
from laconic._version import __version__
from laconic.codecs import Codec, codec
from laconic.errors import ConfigError
from laconic.exchanges import Exchange, ScatterReduce
from laconic.exchanges._error_report import error_stats
from laconic.exchanges._policy import Chooser, policy_for
from laconic.exchanges._preconditioner import BLOCKS
from laconic.integrations._fsdp_accumulation import check_exchanged, without_exchange
from laconic.integrations._fsdp_comms import AllGather, ReduceScatter, Replicas
from laconic.integrations._fsdp_units import Run, Unit, sharded_parameter, unit_of
from laconic.integrations._handle import (
    CodecPairs,
    Stats,
    check_own,
    check_ranks,
    described,
    own_rank,
)
from laconic.integrations._monitor import (
    LateParameters,
    listen_to_steps,
    parameters_of,
    warn_of_noise,
)
from laconic.sharding._fsdp_shards import (
    OwnReplica,
    fsdp_modules,
    groups_of,
    require_same_in_mesh,
)

_BETWEEN = ("shards", "replicas", "both")


def is_fsdp(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on the model or a part of it."""
    return bool(fsdp_modules(model))


class FSDPHandle:
    """The state of a sharded model's collectives; `lc.compress` makes one.

    Before the first step, and after the last `fully_shard`. `weights` names a codec for gathered
    parameters, too. `between` says, on a 2-D mesh (HSDP), which gradients are encoded: between
    "replicas" (the default: nodes, usually), "shards" or "both". An exchange is chosen between
    replicas only. Messages travel in FSDP's own process groups, whose time-out counts.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: str | Codec,
        *,
        exchange: str | Exchange | None = None,
        policy: Chooser | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        verify: str = "auto",
        weights: str | Codec | None = None,
        between: str | None = None,
    ) -> None:
        _check_torch(model)
        whole("warmup_steps", warmup_steps, 0)
        self._pairs = CodecPairs(spec, exchange)
        self.codec, self.exchange = self._pairs[""]
        self.weights = None if weights is None else _weights_codec(weights)
        self.seed, self._run = seed, Run.of(seed, warmup_steps, verify)
        self._run.handle = self
        self._model = weakref.ref(model)
        self._lines: list[str] = []
        self._units = list(self._found(model, policy_for(policy, model.named_parameters())))
        self._run.inside.seed = self._run.across.seed = seed_of(seed, "\n".join(self._lines))
        self.between = self._stages(between)
        share = 0.5 if self.between == "both" else 1.0
        self._inside = {text: own.at_share(share) for text, (own, _) in self._pairs.items()}
        self._across = {
            spec: (own.at_share(share), way) for spec, (own, way) in self._pairs.items()
        }
        self._agree()
        for unit in self._units:
            self._install(unit)
        self._has_stepped = False  # of a step of its optimizer
        self._late = LateParameters(model, model.parameters(), "fully_shard(model)")
        listen_to_steps(self)

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Gradient accumulation: backwards inside add up, and the last one exchanges the sum.

        One exchange per step of the optimizer, with the loss of a micro-batch divided by their
        number as usual:

            for i, batch in enumerate(batches):
                with handle.accumulate(last=i == len(batches) - 1):
                    (loss(batch) / len(batches)).backward()
            optimizer.step()

        Between replicas the sum is one shard, in the reduce dtype: shards still reduce-scatter at
        every backward. Where reduce-scatters are encoded themselves, each rank keeps a whole
        gradient, as with `set_requires_gradient_sync(False)`.
        """
        return nullcontext() if last else without_exchange(self._units, self.between)

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step: of this model, or of another one."""
        self._late.check(optimizer)
        check_exchanged(self._units, parameters_of(optimizer))
        model = None if self._has_stepped else self._model()
        own = set() if model is None else {id(one) for one in model.parameters()}
        if any(id(one) in own for one in parameters_of(optimizer)):
            self._has_stepped = True
            warn_of_noise(optimizer, self.codec, BLOCKS)

    def stats(self) -> Stats:
        """Bytes and times so far, of what is encoded: gradients, and weights with `weights=`."""
        return Stats(
            steps=max((max(unit.reductions, unit.means) for unit in self._units), default=0),
            sent_bytes=self._run.inside.traffic.sent_bytes,
            plain_bytes=self._run.plain_bytes,
            exchange_seconds=self._run.exchange_seconds,
            wire_seconds=self._run.inside.traffic.wire_seconds,
            **(error_stats(self._run.inside.memory) or error_stats(self._run.across.memory)),
        )

    def close(self) -> None:
        """Nothing is encoded any more; after the last step. The process groups are FSDP's."""
        self._run.closed = True

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to resume exactly: counters, and codecs' memories."""
        return {
            "rank": own_rank(),
            "ranks": dist.get_world_size(),
            "codec": str(self.codec),
            "steps": {unit.name: [unit.reductions, unit.means] for unit in self._units},
            "shards": self._run.inside.memory.state_dict(),
            "replicas": self._run.across.memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict. Unknown modules start at a step whose keys were not used."""
        if state["codec"] != str(self.codec):
            raise ConfigError(f"this state is of {state['codec']}, not of {self.codec}")
        check_own(state)
        check_ranks(state, dist.get_world_size())
        steps = state["steps"]
        latest = [max((pair[i] for pair in steps.values()), default=0) for i in range(2)]
        for unit in self._units:
            unit.reductions, unit.means = map(int, steps.get(unit.name, latest))
        found = state if "shards" in state else _newer(state)
        self._run.inside.memory.load_state_dict(found["shards"])
        self._run.across.memory.load_state_dict(found["replicas"])

    def _found(self, model: nn.Module, policy: Chooser) -> Iterator[Unit]:
        """The sharded modules, and what the policy says about their parameters."""
        names = {id(part): name for name, part in model.named_modules()}
        every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        number = {name: i for i, name in enumerate(every)}
        for name, group in groups_of(model):
            _check_new(group)
            parameters = []
            for param in group.fsdp_params:
                info = param._module_info
                path = ".".join(filter(None, (names[id(info.module)], info.param_name)))
                spec = self._pairs.spec(policy(path, param.sharded_param))
                parameters.append(sharded_parameter(param, number[path], spec))
                of = f"{path} of {name or 'root'}"
                self._lines.append(described(of, param.sharded_param, spec))
            yield unit_of(name, group, tuple(parameters), self._run)

    def _stages(self, between: str | None) -> str:
        """Which gradients are encoded."""
        hybrid = any(unit.replicas > 1 for unit in self._units)
        if between not in (None, *_BETWEEN):
            raise ConfigError(f"between= is one of {', '.join(_BETWEEN)}, not {between!r}")
        if between in ("replicas", "both") and not hybrid:
            raise ConfigError(
                f"between={between!r} needs replicas: shard on a 2-D mesh, (replicate, shard)"
            )
        stages = between or ("replicas" if hybrid else "shards")
        if stages != "replicas":
            for own, _ in self._pairs.values():
                ScatterReduce().check(own)
        if stages == "shards" and self._pairs.exchange_named:
            raise ConfigError(
                "FSDP reduce-scatters gradients, so there is no exchange to choose: leave exchange="
                " and the text after @ out; they count between replicas (HSDP) only"
            )
        return stages

    def _agree(self) -> None:
        """Compare settings in every mesh of the model."""
        settings = {
            "laconic": __version__,
            "codec": str(self.codec),
            "exchange": str(self.exchange),
            "weights": str(self.weights),
            "between": self.between,
            "warmup_steps": str(self._run.warmup_steps),
            "verify": self._run.inside.verify,
            "seed": str(self.seed),
            "parameters": "\n".join(self._lines),
        }
        meshes = {unit.ranks: unit.group for unit in self._units}
        for group in meshes.values():
            info = group.mesh_info
            shards = getattr(info, "shard_process_group", None)
            replicas = getattr(info, "replicate_process_group", None)
            require_same_in_mesh(settings, shards, replicas, group.device)

    def _install(self, unit: Unit) -> None:
        """Replace the collectives of one module."""
        group, module = unit.group, unit.group.modules[0]
        if unit.replicas > 1 and self.between != "shards":
            info = copy.copy(group.mesh_info)  # torch may share it
            own = info.replicate_process_group
            for carried, way in self._across.values():
                way.prepare(own)
                way.check_group(carried, own)
            info.replicate_process_group = Replicas(unit, self._across, own)
            group.mesh_info = info
        if unit.shards == 1:
            return
        if self.between != "replicas" or unit.replicas == 1:
            plain = group._reduce_scatter_comm
            module.set_custom_reduce_scatter(ReduceScatter(unit, self._inside, plain))
        if self.weights is not None:
            plain = group._all_gather_comm
            module.set_custom_all_gather(AllGather(unit, self.weights, plain))


def _newer(state: Mapping[str, Any]) -> dict[str, Any]:
    """What either direction remembers, from a state saved when codecs kept their residuals."""
    budgets = zip(("shards", "replicas"), state.get("budget") or (None, None), strict=True)
    kept = state["memory"].items()
    return {
        name: {"memory": {k: v for k, v in kept if k.startswith(name)}, "budget": budget}
        for name, budget in budgets
    }


def _check_torch(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule  # half a second that DDP need not pay

    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise ConfigError(
            "FSDP2's collectives can be replaced from torch 2.9 on; this is torch "
            f"{torch.__version__}: update it, or use DistributedDataParallel"
        )
    if not is_fsdp(model):
        raise ConfigError(
            f"nothing in this {type(model).__name__} is sharded: call fully_shard on its blocks "
            "and on itself first (torch.distributed.fsdp)"
        )


def _check_new(group: Any) -> None:
    between = getattr(group.mesh_info, "replicate_process_group", None)
    if isinstance(between, OwnReplica):
        raise ConfigError(
            "lc.LocalSGD exchanges weights between the replicas of this model: to encode gradients "
            'between shards, too, call lc.compress(.., between="shards") before making it'
        )
    if isinstance(group._reduce_scatter_comm, ReduceScatter) or isinstance(between, Replicas):
        raise ConfigError("this model is compressed already: call compress once")


def _weights_codec(spec: str | Codec) -> Codec:
    own = codec(spec)
    ScatterReduce().check(own)
    if own.residuals:
        raise ConfigError(
            f"weights= takes a codec without memory, not {own}: what is lost of a weight is not "
            "lost, because the exact one stays with its owner"
        )
    return own
