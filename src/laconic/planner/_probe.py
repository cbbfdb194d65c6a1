"""Probe: measure a cluster, the codecs on its devices, and a model; on all ranks at once."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch
import torch.distributed as dist

from laconic._cost import Cluster, Links, Workload
from laconic._files import Kind, read_json, write_made
from laconic._progress import Watch, announced, part, unwatched
from laconic._records import numbers, record
from laconic._version import __version__
from laconic.comm._threads import device_of, lane_count
from laconic.errors import ConfigError
from laconic.exchanges._hierarchical import _team, agreed_nodes
from laconic.planner._probe_cluster import Clock, probe_device, probe_links
from laconic.planner._probe_codecs import Sample, probe_codec
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
_FORMAT = 2
_RENAMED = {  # since format 1
    "cluster.device": {
        "room": "slots",
        "drain": "wire_cpu_share",
        "pace": "overlap_bandwidth",
        "start_pace": "overlap_starts",
    },
    **{
        f"cluster.{links}": {"swap": "all_to_all", "hop": "sendrecv"}
        for links in ("flat", "inside", "between")
    },
}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was measured, where; saved as JSON."""

    cluster: Cluster
    workload: Workload | None
    machine: str
    laconic: str = __version__
    format: int = _FORMAT

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write it, whole or not at all; `load` reads it again, on any machine.

        With `force` it replaces a file that is no probe.
        """
        write_made(path, json.dumps(asdict(self), indent=1) + "\n", Kind.PROBE, force=force)

    @staticmethod
    def load(path: str | Path) -> Probe:
        """ConfigError if the file is no probe."""
        try:
            return Probe.parse(read_json(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is no probe: {error}; make one with laconic probe"
            ) from error

    @staticmethod
    def parse(found: dict[str, Any]) -> Probe:
        """From JSON; ValueError names the value that is not allowed."""
        if isinstance(found, dict) and found.get("format", _FORMAT) not in (1, _FORMAT):
            other = shortened(found["format"])
            raise ConfigError(f"a probe of format {other}, not 1 or {_FORMAT}: probe anew")
        made: Probe = replace(record(Probe, _renamed(found)), format=_FORMAT)
        for where, number in numbers(made):
            # a codec may lose all there is, such as fp16 of values that it cannot hold
            if not 0 <= number < math.inf and not (number == math.inf and ".error" in where):
                raise ValueError(f"{where} is {number}, not a number from 0 up")
        levels = made.cluster.flat, made.cluster.inside, made.cluster.between
        for links in filter(None, levels):
            if links.ranks < 2 or not links.allreduce:
                raise ValueError("links have two ranks or more, and lines of an all-reduce")
        if made.cluster.lanes < 1:
            raise ValueError(f"cluster.lanes is {made.cluster.lanes}, not 1 or more")
        if made.workload is not None and not made.workload.buckets:
            raise ValueError("workload.buckets is empty")
        return made


def _renamed(found: Any, where: str = "") -> Any:
    """With the present names of fields."""
    if not isinstance(found, dict):
        return found
    names = _RENAMED.get(where, {})
    return {
        names.get(key, key): _renamed(value, f"{where}.{key}".lstrip("."))
        for key, value in found.items()
    }


def probe(
    setup: Setup | None = None,
    *,
    codecs: Sequence[str] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    patience_s: float = 30.0,
    watch: Watch = unwatched,
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
    watch("links", 0.0)
    flat = probe_links(clock, patience_s / 4)
    watch("links inside and between nodes", 0.25)
    per_node, inside, between = _levels(clock, patience_s / 4)
    watch("the device", 0.4)
    shared = probe_device(clock, flat, patience_s / 8)
    workload, sample = None, Sample.gaussian(place, every.size())
    if setup is not None:
        watch("the model", 0.45)
        workload, sample = probe_model(setup, clock, patience_s / 8)
    each = patience_s / 2 / max(1, len(codecs))
    cluster = Cluster(
        workers=every.size(),
        per_node=per_node,
        flat=flat,
        inside=inside,
        between=between,
        device=shared,
        codecs=tuple(
            probe_codec(spec, sample, clock, each)
            for spec in announced(codecs, part(watch, 0.55, 1.0))
        ),
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
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads per rank"
