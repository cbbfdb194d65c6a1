"""The norms of Global-QSGD: ‖x‖_{q,p} = (Σ_i ‖x_i‖_q^p)^(1/p) over workers i."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from laconic.codecs._base import flat_input
from laconic.errors import ConfigError
from laconic.kernels import ScaleKind, backend

_NAMED = {"max": (math.inf, math.inf), "l2": (2.0, 2.0)}


class HasNorm(Protocol):
    """A codec whose wires share a scale."""

    name: ClassVar[str]

    def local_norm(self, x: Tensor) -> Tensor: ...


def parse_norm(name: str, text: str) -> tuple[float, float]:
    """(q, p) of "max", "l2" or "q/p", each from 1 to inf."""
    if text in _NAMED:
        return _NAMED[text]
    try:
        inner, outer = (float(part) for part in str(text).split("/"))
    except ValueError:
        inner = outer = math.nan
    if not (inner >= 1 and outer >= 1):
        raise ConfigError(
            f"{name}: norm must be max, l2 or q/p with q and p from 1 to inf (such as 2/inf), "
            f"not {text!r}"
        )
    return inner, outer


def local_norm(x: Tensor, q: float) -> Tensor:
    """‖x‖_q as one fp32 value on x's device, never below max|x|; not finite if x is not."""
    flat = flat_input(x)
    norm = torch.zeros(1, device=flat.device)
    if not flat.numel():
        return norm
    kind = ScaleKind.L2 if q == 2 else ScaleKind.MAX
    backend(flat.device).scales(flat, norm, block=0, kind=kind)
    if q == 2 or math.isinf(q):
        return norm
    power = _finite(torch.linalg.vector_norm(flat, q, dtype=torch.float64))
    return torch.where(torch.isfinite(norm), torch.maximum(power, norm), norm)


def global_norm(norms: Tensor, p: float) -> Tensor:
    """‖·‖_p of the workers' local norms, as one fp32 value; NaN if any is not finite."""
    largest = norms.amax().to(torch.float32)
    norm = largest
    if not math.isinf(p):
        norm = torch.linalg.vector_norm(norms, p, dtype=torch.float64)
        norm = torch.maximum(_finite(norm), largest)
    return torch.where(torch.isfinite(norms).all(), norm, torch.nan).view(1)


def as_scale(norm: Tensor | float, device: torch.device) -> Tensor:
    """A shared scale as one fp32 value on the device; no wait if it is there or a number."""
    if isinstance(norm, Tensor):
        if norm.numel() != 1:
            raise ValueError(f"norm must be one number, not {norm.numel()}")
        return norm.detach().to(device=device, dtype=torch.float32).view(1)
    if norm < 0:
        raise ValueError(f"norm must not be negative: {norm}")
    return torch.full((1,), norm, dtype=torch.float32, device=device)


def shared_scale(codec: HasNorm, x: Tensor, workers: int, norm: Tensor | float | None) -> Tensor:
    """The scale to encode with: the shared one, or for a lone worker its own."""
    if norm is not None:
        return as_scale(norm, x.device)
    if workers > 1:
        raise TypeError(
            f"{codec.name}: wires of {workers} workers add up only under one scale: give norm=, "
            "made by global_norm(...) from every worker's local_norm(x)"
        )
    return codec.local_norm(x)


def _finite(norm: Tensor) -> Tensor:
    """fp64 to fp32; what only fp64 can hold becomes the largest fp32, which is scale enough."""
    return norm.clamp(max=torch.finfo(torch.float32).max).to(torch.float32)
