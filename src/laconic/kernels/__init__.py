"""Kernels: the same functions in plain torch, Numba (CPU) and Triton (CUDA), byte for byte.

`Kernels` lists them. `backend(device)` picks a backend; `using("reference")` overrides that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from typing import cast

import torch

from laconic.errors import ConfigError
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

__all__ = [
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
    "using",
]

_BACKENDS = ("reference", "numba", "triton")
_BY_DEVICE = {"cpu": "numba", "cuda": "triton"}
_chosen: ContextVar[str | None] = ContextVar("laconic_kernels", default=None)


def backend(device: torch.device) -> Kernels:
    """The kernels for a device; devices without their own use the torch reference."""
    return _loaded(_chosen.get() or _BY_DEVICE.get(device.type, "reference"))


@lru_cache
def _loaded(name: str) -> Kernels:
    """The module, looked up once: every encode and decode asks for it."""
    return cast(Kernels, import_module(f"laconic.kernels._{name}"))


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run the enclosed code on one named backend: reference, numba or triton."""
    if name not in _BACKENDS:
        raise ConfigError(f"no kernels are called {name!r}; there are {', '.join(_BACKENDS)}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)
