"""Figures for clusters on paper: machines as their makers describe them, codecs as measured.

Public figures are upper ends; of a NIC's rate 0.85 is assumed to be reached (headers, and what NCCL
loses). Latencies are assumptions: the time of a collective's message from one process to another,
library included. A probe is better than all of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from laconic.errors import ConfigError

REACHED = 0.85  # of a NIC's rate

_US, _GB, _GBIT = 1e-6, 1e9, 1e9

# Memory bandwidths of devices, bytes/s: NVIDIA's data sheets. "cpu" has none: its codecs' speeds
# were measured (two cores of an AMD EPYC), and stay as they are.
MEMORY: Mapping[str, float | None] = {
    "b200": 8000 * _GB,
    "h200": 4800 * _GB,
    "h100": 3350 * _GB,
    "a100-80gb": 2039 * _GB,
    "a100-40gb": 1555 * _GB,
    "v100": 900 * _GB,
    "rtx4090": 1008 * _GB,
    "rtx3090": 936 * _GB,
    "rtx3060": 360 * _GB,
    "l40s": 864 * _GB,
    "a10g": 600 * _GB,
    "t4": 320 * _GB,
    "l4": 300 * _GB,
    "cpu": None,
}

# NVLink between the GPUs of a node, one direction, bytes/s: half of what the same sheets say
NVLINK: Mapping[str, float] = {
    "b200": 900 * _GB,
    "h200": 450 * _GB,
    "h100": 450 * _GB,
    "a100-80gb": 300 * _GB,
    "a100-40gb": 300 * _GB,
    "v100": 150 * _GB,
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node: its devices, the NIC (or NICs together) they share, and what connects them inside."""

    device: str
    per_node: int
    link_bit_s: float
    latency_s: float
    inside_byte_s: float = 10 * _GB  # of one device, one direction
    inside_latency_s: float = 6 * _US


_NVLINK_S = 3 * _US  # through NVSwitch; 6 µs through PCIe
_RDMA, _EFA, _TCP = 10 * _US, 20 * _US, 50 * _US


def node(device: str, per_node: int, link_bit_s: float, latency_s: float) -> Machine:
    """A node with `per_node` devices, and NVLink between them if the device has it."""
    own = Machine(device=device, per_node=per_node, link_bit_s=link_bit_s, latency_s=latency_s)
    if device not in NVLINK:
        return own
    return replace(own, inside_byte_s=NVLINK[device], inside_latency_s=_NVLINK_S)


MACHINES: Mapping[str, Machine] = {
    # AWS: the network rates of the instances' pages
    "p5.48xlarge": node("h100", 8, 3200 * _GBIT, _EFA),
    "p4de.24xlarge": node("a100-80gb", 8, 400 * _GBIT, _EFA),
    "p4d.24xlarge": node("a100-40gb", 8, 400 * _GBIT, _EFA),
    "p3.16xlarge": node("v100", 8, 25 * _GBIT, _TCP),
    # no NVLink; PCIe 4 by way of the host's memory, 10 GB/s assumed (PCIe 3 on g4dn: 6)
    "g5.12xlarge": node("a10g", 4, 40 * _GBIT, _TCP),
    "g5.48xlarge": node("a10g", 8, 100 * _GBIT, _EFA),
    "g6.12xlarge": node("l4", 4, 40 * _GBIT, _TCP),
    "g4dn.12xlarge": replace(node("t4", 4, 50 * _GBIT, _TCP), inside_byte_s=6 * _GB),
    # NVIDIA's data sheets: 8 ports of InfiniBand for the GPUs, 400 Gbit/s (H100), 200 (A100)
    "dgx-h100": node("h100", 8, 3200 * _GBIT, _RDMA),
    "dgx-a100": node("a100-80gb", 8, 1600 * _GBIT, _RDMA),
    # Google Cloud, "Networking and GPU machines": the NICs for GPUs alone, without the host's
    "a3-highgpu-8g": node("h100", 8, 800 * _GBIT, _TCP),
    "a3-megagpu-8g": node("h100", 8, 1600 * _GBIT, _TCP),
    "a3-ultragpu-8g": node("h200", 8, 3200 * _GBIT, _RDMA),
    "a2-highgpu-8g": node("a100-40gb", 8, 100 * _GBIT, _TCP),
    # Azure's page of the series: 8 ports of InfiniBand of 200 Gbit/s
    "nd96asr-v4": node("a100-40gb", 8, 1600 * _GBIT, _RDMA),
    # Desks: two cards that may not talk to each other directly share a board's PCIe 4 lanes (8
    # each, 10 GB/s assumed); switched Ethernet; a home has an Internet line, 10 ms to the others
    "workstation-4090": node("rtx4090", 2, 10 * _GBIT, _TCP),
    "home": node("rtx3060", 1, 0.1 * _GBIT, 10_000 * _US),
    "cpu-server": node("cpu", 1, 1 * _GBIT, _TCP),
}


def machine(name: str) -> Machine:
    """By name; ConfigError with all names."""
    found = MACHINES.get(name.lower())
    if found is None:
        raise ConfigError(f"there are no figures for {name!r}; there are {', '.join(MACHINES)}")
    return found


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A codec as measured: (encode, decode-add) each.

    `bits` and `error` are the transformer's in "Codecs on real gradients" (docs/benchmarks.md).
    `gpu_ms` is 2^26 fp32 values on an H200 ("GPU", "ecdq with the bitmap coder", "Rotation"),
    `cpu_gb_s` GB/s of fp32 input on two cores (the first table again). Starts, in microseconds,
    are the host's, per call (benchmarks.codec_starts).
    """

    spec: str
    bits: float
    error: float
    gpu_ms: tuple[float, float] | None = None  # None: there is no kernel
    gpu_us: tuple[float, float] = (0.0, 0.0)
    cpu_gb_s: tuple[float, float]
    cpu_us: tuple[float, float]


MEASURED_VALUES = 1 << 26  # of gpu_ms and of the copies
GPU_COPY_MS = 0.1271  # on an H200
CPU_COPY_MS = 15.68  # on two cores
GPU_NORM_US, GPU_REDUCE_US, COPY_US = 38.0, 115.0, 10.0  # the last is assumed
CPU_NORM_US, CPU_REDUCE_US = 55.0, 184.0
CPU_NORM_PER_S, CPU_REDUCE_PER_S = 4.7e9, 3.4e9  # values

# fp16 and bf16 move 6 bytes per value on a GPU where a copy moves 8. ecdq at 0.08 spends 0.04 on
# each way: of the rows at 0.083 and 0.01 the slower is taken, and for 0.02 as well.
CODECS: tuple[Figures, ...] = (
    Figures(
        spec="fp16",
        bits=16.008,
        error=4.45e-8,
        gpu_ms=(0.0953, 0.0953),
        gpu_us=(32, 24),
        cpu_gb_s=(19.1, 11.6),
        cpu_us=(30, 42),
    ),
    Figures(
        spec="bf16",
        bits=16.008,
        error=2.70e-6,
        gpu_ms=(0.0953, 0.0953),
        gpu_us=(33, 22),
        cpu_gb_s=(24.7, 18.4),
        cpu_us=(28, 40),
    ),
    Figures(
        spec="qsgd:bits=4",
        bits=4.071,
        error=0.0626,
        gpu_ms=(0.0708, 0.1380),
        gpu_us=(75, 56),
        cpu_gb_s=(25.2, 21.9),
        cpu_us=(103, 81),
    ),
    Figures(
        spec="dqsg:bits=4",
        bits=4.071,
        error=0.0335,
        gpu_ms=(0.0708, 0.1403),
        gpu_us=(68, 54),
        cpu_gb_s=(23.7, 21.7),
        cpu_us=(183, 150),
    ),
    Figures(
        spec="dqsg:bits=8",
        bits=8.071,
        error=1.02e-4,
        gpu_ms=(0.0782, 0.1485),
        gpu_us=(122, 88),
        cpu_gb_s=(14.9, 16.8),
        cpu_us=(124, 97),
    ),
    Figures(
        spec="rotate(dqsg:bits=4)",
        bits=4.079,
        error=0.0188,
        gpu_ms=(0.0914, 0.1378),
        gpu_us=(113, 76),
        cpu_gb_s=(9.28, 7.16),
        cpu_us=(141, 152),
    ),
    Figures(
        spec="global:bits=8",
        bits=8.009,
        error=1.505e-3,  # with all 127 levels
        gpu_ms=(0.0814, 0.1470),
        gpu_us=(90, 36),
        cpu_gb_s=(16.0, 25.1),
        cpu_us=(205, 75),
    ),
    Figures(
        spec="global-exp:bits=8",
        bits=8.009,
        error=0.0775,
        gpu_ms=(0.1053, 0.1463),
        gpu_us=(97, 53),
        cpu_gb_s=(11.4, 17.2),
        cpu_us=(163, 105),
    ),
    Figures(
        spec="ecdq:error=0.02",
        bits=3.249,
        error=0.0199,
        gpu_ms=(0.308, 0.212),
        gpu_us=(240, 77),
        cpu_gb_s=(3.72, 4.67),
        cpu_us=(266, 244),
    ),
    Figures(
        spec="ecdq:error=0.08",
        bits=2.332,
        error=0.0786,
        gpu_ms=(0.308, 0.212),
        gpu_us=(240, 77),
        cpu_gb_s=(3.47, 4.61),
        cpu_us=(266, 244),
    ),
    Figures(
        spec="ecdq:error=0.3",
        bits=1.777,
        error=0.294,
        gpu_ms=(0.243, 0.171),
        gpu_us=(240, 77),
        cpu_gb_s=(3.53, 5.05),
        cpu_us=(266, 244),
    ),
    Figures(
        spec="ecdq:error=0.02,coder=rans",
        bits=2.917,
        error=0.0199,
        cpu_gb_s=(2.11, 2.48),
        cpu_us=(567, 250),
    ),
    Figures(
        spec="ecdq:error=0.08,coder=rans",
        bits=1.989,
        error=0.0786,
        cpu_gb_s=(1.71, 1.98),
        cpu_us=(567, 250),
    ),
    Figures(
        spec="ecdq:error=0.3,coder=rans",
        bits=1.241,
        error=0.294,
        cpu_gb_s=(1.65, 1.91),
        cpu_us=(567, 250),
    ),
)
