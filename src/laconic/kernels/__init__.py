"""Kernels: the same functions in plain torch, Numba (CPU) and Triton (CUDA), byte for byte.

`Kernels` lists them. `backend(device)` picks a backend; `using("reference")` overrides that. Other
devices run them in torch, or staged through the CPU: `choice(device)` says which, and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from laconic.errors import ConfigError
from laconic.kernels._choice import FORMS, STAGED, Choice, choice, load
from laconic.kernels._layout import ScaleKind
from laconic.kernels._protocol import (
    Coding,
    Dither,
    Kernels,
    Lattice,
    Modulo,
    Output,
    Rotation,
    StepRule,
)
from laconic.kernels._staging import CPU

__all__ = [
    "Choice",
    "Coding",
    "Dither",
    "Kernels",
    "Lattice",
    "Modulo",
    "Output",
    "Rotation",
    "ScaleKind",
    "StepRule",
    "backend",
    "choice",
    "scratch_device",
    "using",
]

_chosen: ContextVar[str | None] = ContextVar("laconic_kernels", default=None)


def backend(device: torch.device) -> Kernels:
    """The kernels for a device; `_choice.py` says which those are where there are none of ours."""
    return load(_chosen.get() or choice(device).form)


def scratch_device(device: torch.device) -> torch.device:
    """Where codecs put what only kernels read, float64 among it: devices may not have that."""
    return CPU if (_chosen.get() or choice(device).form) in STAGED else device


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run the enclosed code on one named backend: reference, numba, triton, staged or torch."""
    if name not in FORMS:
        raise ConfigError(f"no kernels are called {name!r}; there are {', '.join(FORMS)}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)
