"""Probe: measure a cluster, the codecs on its devices, and a model; on all ranks at once."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic._version import __version__
from laconic.errors import ConfigError
from laconic.exchanges._hierarchical import _team
from laconic.exchanges._lane import lane_count
from laconic.exchanges._nodes import agreed_nodes, device_of
from laconic.planner._clock import Clock
from laconic.planner._cluster import Bucket, Cluster, CodecCost, Device, Links, Workload
from laconic.planner._line import Line
from laconic.planner._probe_codecs import Sample, probe_codec
from laconic.planner._probe_device import probe_device
from laconic.planner._probe_links import probe_links
from laconic.planner._probe_model import Setup, probe_model

CODECS = (
    "fp16",
    "bf16",
    "qsgd:bits=4",
    "dqsg:bits=4",
    "dqsg:bits=8",
    "rotate(dqsg:bits=4)",
    "global:bits=8",
    "global-exp:bits=8",
    "ecdq:error=0.08",
    "ecdq:error=0.08,coder=rans",
)
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was measured, where; saved as JSON."""

    cluster: Cluster
    workload: Workload | None
    machine: str
    laconic: str = __version__
    format: int = _FORMAT

    def save(self, path: str | Path) -> None:
        """Write it; `load` reads it again, on any machine."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Probe:
        """ConfigError if the file is none of ours."""
        try:
            return Probe.parse(json.loads(Path(path).read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no probe: {error}; make one with laconic probe"
            ) from error

    @staticmethod
    def parse(found: dict[str, Any]) -> Probe:
        """From what JSON holds."""
        if found["format"] != _FORMAT:
            raise ConfigError(f"a probe of format {found['format']}, not {_FORMAT}: probe anew")
        workload = found["workload"] and _workload(found["workload"])
        return Probe(**{**found, "cluster": _cluster(found["cluster"]), "workload": workload})


def probe(
    setup: Setup | None = None,
    *,
    codecs: Sequence[str] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    patience_s: float = 30.0,
) -> Probe:
    """Measure: links, device, codecs, and the model if one is given. Call it on all ranks.

    Takes about `patience_s`, on slow links longer. Without a model codecs are given Gaussian
    values. Every rank returns the same numbers: means over ranks.
    """
    if not dist.is_initialized():
        raise ConfigError("start torch.distributed first: torchrun, then init_process_group()")
    every = group or dist.group.WORLD
    assert isinstance(every, dist.ProcessGroup)
    if every.size() < 2:
        raise ConfigError("a probe needs two ranks or more: torchrun --nproc-per-node 2")
    place = device or device_of(every)
    codecs = codecs_for(place) if codecs is None else codecs
    clock = Clock(every, place)
    flat = probe_links(clock, patience_s / 4)
    per_node, inside, between = _levels(clock, patience_s / 4)
    shared = probe_device(clock, flat, patience_s / 8)
    workload, sample = None, Sample.gaussian(place, every.size())
    if setup is not None:
        workload, sample = probe_model(setup, clock, patience_s / 8)
    each = patience_s / 2 / max(1, len(codecs))
    cluster = Cluster(
        workers=every.size(),
        per_node=per_node,
        flat=flat,
        inside=inside,
        between=between,
        device=shared,
        codecs=tuple(probe_codec(spec, sample, clock, each) for spec in codecs),
        lanes=lane_count(every, place),
        backend=str(dist.get_backend(every)),
    )
    return Probe(cluster=cluster, workload=workload, machine=_machine(place))


def codecs_for(device: torch.device) -> tuple[str, ...]:
    """CODECS that run there: rans does not on a GPU."""
    return tuple(spec for spec in CODECS if device.type == "cpu" or "coder=rans" not in spec)


def _levels(clock: Clock, patience_s: float) -> tuple[int, Links | None, Links | None]:
    """Ranks of a node, and links inside and between nodes where there are both."""
    group = clock.group
    nodes = agreed_nodes(None, group)
    sizes = set(map(len, nodes))
    if len(nodes) in (1, group.size()) or len(sizes) > 1:
        return (group.size() if len(nodes) == 1 else 1), None, None
    team = _team(nodes, group)
    inside = probe_links(clock, patience_s / 2, team.node)
    return sizes.pop(), inside, probe_links(clock, patience_s / 2, team.across)


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads a rank"


def _line(one: dict[str, Any]) -> Line:
    return Line(**one)


def _links(one: dict[str, Any] | None) -> Links | None:
    if one is None:
        return None
    return Links(
        ranks=one["ranks"],
        allreduce=tuple(map(_line, one["allreduce"])),
        swap=_line(one["swap"]),
        hop=_line(one["hop"]),
    )


def _codec(one: dict[str, Any]) -> CodecCost:
    lines = {name: _line(one[name]) for name in ("encode", "decode", "norm", "reduce")}
    return CodecCost(**{**one, **lines})


def _cluster(one: dict[str, Any]) -> Cluster:
    parts = {name: _links(one[name]) for name in ("flat", "inside", "between")}
    device = Device(**{**one["device"], "copy": _line(one["device"]["copy"])})
    codecs = tuple(map(_codec, one["codecs"]))
    return Cluster(**{**one, **parts, "device": device, "codecs": codecs})


def _workload(one: dict[str, Any]) -> Workload:
    known = {item.name for item in fields(Bucket)}
    buckets = tuple(Bucket(**{name: bucket[name] for name in known}) for bucket in one["buckets"])
    return Workload(**{**one, "buckets": buckets})
