"""Checks of what is installed: versions, backends, frameworks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from laconic.doctor._facts import FRAMEWORKS, Facts
from laconic.doctor._finding import Finding, fine, named, odd_ones, problem

# what the tests run with: constraints.txt, which a test compares
TESTED = {"lightning": "2.6", "accelerate": "1.15", "transformers": "5.22", "peft": "0.21"}


def check_versions(rows: Sequence[Facts]) -> Iterator[Finding]:
    """Equal on all ranks."""
    usual = {}
    for name in dict.fromkeys(name for row in rows for name in row.versions):
        usual[name], odd = odd_ones({row.rank: row.versions.get(name, "missing") for row in rows})
        for version, ranks in odd.items():
            yield problem(
                "versions",
                f"{name} is {version} on {named(ranks)}, {usual[name]} on the others",
                "install the same versions on every host",
                ranks,
            )
    told = ", ".join(f"{name} {version}" for name, version in usual.items())
    if "numba" not in usual:
        yield problem("versions", f"{told}; no numba", "pip install numba")
    else:
        yield fine("versions", told)


def check_backends(rows: Sequence[Facts]) -> Iterator[Finding]:
    """Backends of torch.distributed, and whether they suit the devices."""
    usual, odd = odd_ones({row.rank: ", ".join(row.backends) for row in rows if row.backends})
    for backends, ranks in odd.items():
        yield problem(
            "backends",
            f"torch on {named(ranks)} has {backends}, on the others {usual}",
            "install the same build of torch on every host",
            ranks,
        )
    bare = [row.rank for row in rows if not row.backends]
    slow = [row.rank for row in rows if row.gpus and "nccl" not in row.backends]
    if bare:
        yield problem(
            "backends",
            f"torch on {named(bare)} has no backend",
            "install a build of torch with torch.distributed",
            bare,
        )
    elif slow:
        yield problem(
            "backends",
            f"{named(slow)}: GPUs, but torch has no nccl",
            "install torch for CUDA or ROCm",
            slow,
        )
    else:
        yield fine("backends", usual)


def check_frameworks(rows: Sequence[Facts]) -> Iterator[Finding]:
    """Those that are installed, and whether we test with them."""
    told = []
    for name in FRAMEWORKS:
        usual, odd = odd_ones({row.rank: row.frameworks.get(name, "missing") for row in rows})
        for version, ranks in odd.items():
            yield problem(
                "frameworks",
                f"{name} is {version} on {named(ranks)}, {usual} on the others",
                "install the same versions on every host",
                ranks,
            )
        if usual != "missing":
            tested = ".".join(usual.split(".")[:2]) == TESTED[name]
            told.append(f"{name} {usual} ({'' if tested else 'not '}tested)")
    untested = any("not tested" in one for one in told)
    advice = ", ".join(f"{name} {version}" for name, version in TESTED.items())
    yield fine(
        "frameworks", ", ".join(told) or "none found", f"tested: {advice}" if untested else ""
    )
