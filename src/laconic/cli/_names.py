"""Names for help and completion, which must not wait for torch; a test compares them."""

from __future__ import annotations

CODECS = (
    "none",
    "fp16",
    "bf16",
    "qsgd",
    "dqsg",
    "ndqsg",
    "global",
    "global-exp",
    "qsgd-topk",
    "ecdq",
)
WRAPPERS = ("feedback", "rotate")
CODERS = ("fixed", "elias", "elias-sparse", "elias-dense", "bitmap", "rans")
EXCHANGES = (
    "allreduce",
    "scatter-reduce",
    "allgather",
    "tree",
    "ring",
    "sparse",
    "hierarchical",
    "nested",
)
MACHINES = (
    "p5.48xlarge",
    "p4de.24xlarge",
    "p4d.24xlarge",
    "p3.16xlarge",
    "g5.12xlarge",
    "g5.48xlarge",
    "g6.12xlarge",
    "g4dn.12xlarge",
    "dgx-h100",
    "dgx-a100",
    "a3-highgpu-8g",
    "a3-megagpu-8g",
    "a3-ultragpu-8g",
    "a2-highgpu-8g",
    "nd96asr-v4",
    "workstation-4090",
    "home",
    "cpu-server",
)
DEVICES = (
    "b200",
    "h200",
    "h100",
    "a100-80gb",
    "a100-40gb",
    "v100",
    "rtx4090",
    "rtx3090",
    "rtx3060",
    "l40s",
    "a10g",
    "t4",
    "l4",
    "cpu",
)
STRATEGIES = ("fp32", "fp16", "qsgd", "dqsg", "global", "ecdq", "ssd+ecdq", "auto")
DTYPES = ("fp32", "fp16", "bf16")


def complete_codecs(incomplete: str) -> list[str]:
    """Codecs, behind a comma too."""
    return _in_list(incomplete, (*CODECS, *(f"{name}(" for name in WRAPPERS)))


def complete_anything(incomplete: str) -> list[str]:
    """Codecs, wrappers, coders and exchanges."""
    return _starting((*CODECS, *WRAPPERS, *CODERS, *EXCHANGES), incomplete)


def complete_machine(incomplete: str) -> list[str]:
    """Machines that there are figures for."""
    return _starting(MACHINES, incomplete)


def complete_device(incomplete: str) -> list[str]:
    """Devices that there are figures for."""
    return _starting(DEVICES, incomplete)


def complete_strategies(incomplete: str) -> list[str]:
    """Strategies of a race, behind a comma too."""
    return _in_list(incomplete, STRATEGIES)


def complete_dtype(incomplete: str) -> list[str]:
    """Types of gradients."""
    return _starting(DTYPES, incomplete)


def _starting(names: tuple[str, ...], start: str) -> list[str]:
    return [name for name in names if name.startswith(start)]


def _in_list(incomplete: str, names: tuple[str, ...]) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _starting(names, last)]
