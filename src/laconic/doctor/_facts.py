"""What a rank knows of itself, as it tells rank 0: JSON, no pickle."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from laconic._records import record
from laconic._version import __version__
from laconic.doctor._addresses import address_of_name, interfaces, route_to

FRAMEWORKS = ("lightning", "accelerate", "transformers", "peft")
_PACKAGES = ("torch", "numba", "triton")
_BACKENDS = ("gloo", "nccl", "xccl", "mpi", "ucc")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Of one rank. An address or a size that could not be found is None."""

    rank: int
    host: str
    node: str  # torchrun's number of the host, or ""
    versions: dict[str, str]
    frameworks: dict[str, str]
    backends: tuple[str, ...]
    gpus: int
    interfaces: dict[str, str]  # name to IPv4 address
    name_address: str | None  # of the host's own name
    route: str | None  # this host's address on the way to MASTER_ADDR
    gloo_interface: str
    nccl_interface: str
    cpus: int
    threads: int
    local_ranks: int
    memory_bytes: int | None

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Facts:
        """ValueError for anything else."""
        return record(Facts, json.loads(text))

    @property
    def place(self) -> tuple[str, str]:
        """The host, told from others of the same name if torchrun numbers them."""
        return self.host, self.node


def facts(rank: int, environ: Mapping[str, str] = os.environ) -> Facts:
    """Of this process."""
    master = environ.get("MASTER_ADDR", "")
    return Facts(
        rank=rank,
        host=socket.gethostname(),
        node=environ.get("GROUP_RANK", ""),
        versions={
            "Python": platform.python_version(),
            **installed(_PACKAGES),
            "laconic": __version__,
        },
        frameworks=installed(FRAMEWORKS),
        backends=tuple(name for name in _BACKENDS if _has(name)),
        gpus=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        interfaces=interfaces(),
        name_address=address_of_name(),
        route=route_to(master) if master else None,
        gloo_interface=environ.get("GLOO_SOCKET_IFNAME", ""),
        nccl_interface=environ.get("NCCL_SOCKET_IFNAME", ""),
        cpus=cpus(),
        threads=torch.get_num_threads(),
        local_ranks=_local_ranks(environ),
        memory_bytes=free_memory(),
    )


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Their versions, without importing them; those that are missing are left out."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpus(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use: its affinity, or a container's quota if that is less."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        count = os.cpu_count() or 1
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return count


def free_memory(file: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that the host could give to programs now."""
    try:
        lines = dict(line.split(":", 1) for line in file.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _has(backend: str) -> bool:
    return dist.is_available() and dist.is_backend_available(backend)


def _local_ranks(environ: Mapping[str, str]) -> int:
    text = environ.get("LOCAL_WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1
