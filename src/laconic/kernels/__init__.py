"""Kernels: the same functions in plain torch, Numba (CPU) and Triton (CUDA), byte for byte.

`backend(tensor)` picks by the tensor's device; `using("reference")` overrides it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import ModuleType

import torch

from laconic.errors import ConfigError
from laconic.kernels._layout import ScaleKind

__all__ = ["ScaleKind", "backend", "using"]

_MODULES = {"reference": "_reference", "numba": "_numba", "triton": "_triton"}
_BY_DEVICE = {"cpu": "numba", "cuda": "triton"}
_chosen: ContextVar[str | None] = ContextVar("laconic_kernels", default=None)


def backend(device: torch.device) -> ModuleType:
    """The module of kernels for a device; devices without their own use the torch reference."""
    name = _chosen.get() or _BY_DEVICE.get(device.type, "reference")
    return import_module(f"laconic.kernels.{_MODULES[name]}")


@contextmanager
def using(name: str) -> Iterator[None]:
    """Run the enclosed code on one named backend: reference, numba or triton."""
    if name not in _MODULES:
        raise ConfigError(f"no kernels are called {name!r}; there are {', '.join(_MODULES)}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)
