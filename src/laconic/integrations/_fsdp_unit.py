"""The sharded modules of a model: what each holds, and how often it has reduced."""

from __future__ import annotations

import time
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from laconic.codecs._memory import Scratch
from laconic.errors import ConfigError
from laconic.exchanges import Call, Traffic
from laconic.integrations._fsdp_layout import Piece, Plan, Slots, plan_for

_LANES = 1 << 20  # more than ranks: keys of different parameters differ


@dataclass
class Run:
    """What all sharded modules of a model share."""

    seed: int
    warmup_steps: int
    verify: str = "auto"
    scratch: Scratch = field(default_factory=Scratch)
    traffic: Traffic = field(default_factory=Traffic)
    known: set[Hashable] = field(default_factory=set)
    memory: dict[Hashable, Any] = field(default_factory=dict)  # of exchanges inside a shard group
    across: dict[Hashable, Any] = field(default_factory=dict)  # and between replicas
    plain_bytes: int = 0
    exchange_seconds: float = 0.0
    closed: bool = False

    @contextmanager
    def exchanging(self, plain_bytes: float) -> Iterator[None]:
        """Count what FSDP would have sent, and the time."""
        start = time.perf_counter()
        yield
        self.exchange_seconds += time.perf_counter() - start
        self.plain_bytes += round(plain_bytes)


@dataclass
class Unit:
    """A sharded module: torch's parameter group, what it holds, and how often it has reduced.

    `reductions` counts reduce-scatters and `means` all-reduces: each of them draws anew.
    """

    name: str
    group: Any  # FSDPParamGroup
    pieces: tuple[Piece, ...]
    run: Run
    shards: int = 1
    shard: int = 0
    replicas: int = 1
    replica: int = 0
    reductions: int = 0
    means: int = 0
    _plans: dict[Hashable, Plan | None] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of its mesh."""
        return tuple(self.group.mesh_info.mesh.mesh.flatten().tolist())

    def gradients(self, room: int) -> Plan:
        """The plan of a shard of gradients; all plain, with a warning, if it cannot be known."""
        trained = tuple(param.sharded_param.requires_grad for param in self.group.fsdp_params)
        key = (trained, room)
        if key not in self._plans:
            present = [piece for piece, is_in in zip(self.pieces, trained, strict=True) if is_in]
            self._plans[key] = plan_for(present, room)
            if self._plans[key] is None:
                warnings.warn(
                    f"FSDP reduces {room} values a rank for {self.name or 'the root module'}, and "
                    "their parameters cannot be told from that: they travel uncompressed. Some have"
                    " no gradient: set_reduce_scatter_unused_params(True), where torch has it, "
                    "gives them zeros",
                    stacklevel=2,
                )
        return self._plans[key] or Plan((), ())

    def weights(self, room: int) -> Plan:
        """The plan of a shard of parameters; all plain if FSDP gathers something else."""
        if room not in self._plans:
            whole = room == sum(piece.room for piece in self.pieces)
            self._plans[room] = Plan.of(self.pieces) if whole else None
        return self._plans[room] or Plan((), ())

    def call(self, group: dist.ProcessGroup, slots: Slots, step: int, lane: int) -> Call:
        """Keys by the first parameter (no other exchange of the step has it) and a lane.

        Lanes tell first encodings in each replica (whose errors must not be alike: they are
        averaged later), means of each shard between replicas, and weights apart.
        """
        run = self.run
        if run.closed:
            raise ConfigError("this handle was closed: close() comes after the last step")
        return Call(
            group=group,
            seed=run.seed,
            step=step,
            tensor=slots[0].piece.number * _LANES + lane,
            known=run.known,
            memory=run.memory,
            scratch=run.scratch,
            traffic=run.traffic,
            verify=run.verify,
        )


def groups_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """torch's parameter groups, each with the name of its (first) module."""
    from torch.distributed.fsdp import FSDPModule

    seen = set()
    for name, part in model.named_modules():
        if not isinstance(part, FSDPModule) or id(part._get_fsdp_state()) in seen:
            continue
        state: Any = part._get_fsdp_state()
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


def unit_of(name: str, group: Any, pieces: tuple[Piece, ...], run: Run) -> Unit:
    """A sharded module, on whatever mesh it is."""
    info = group.mesh_info
    return Unit(
        name=name,
        group=group,
        pieces=pieces,
        run=run,
        shards=getattr(info, "shard_mesh_size", 1),
        shard=getattr(info, "shard_mesh_rank", 0),
        replicas=getattr(info, "replicate_mesh_size", 1),
        replica=getattr(info, "replicate_mesh_rank", 0),
    )


def piece_of(param: Any, number: int, text: str | None) -> Piece:
    """An FSDPParam; its part of a shard is padded to that of the first rank."""
    return Piece(
        number=number,
        room=param.padded_sharded_param_size.numel(),
        total=param._orig_size.numel(),
        choice=text,
    )
