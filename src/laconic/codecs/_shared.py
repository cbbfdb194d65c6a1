"""What workers share whose wires are added: one scale, and one dither.

The scale is the norm of Global-QSGD, ‖x‖_{q,p} = (Σ_i ‖x_i‖_q^p)^(1/p) over workers i. The dither
is one draw for all, each worker in a stratum of its own: DQSG under a shared scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic._key import Key, _mix64
from laconic._settings import described, refused
from laconic.codecs._base import Codec, flat_input
from laconic.kernels import ScaleKind, backend, scratch_device
from laconic.kernels._layout import fraction_bits

_NAMED = {"max": (math.inf, math.inf), "l2": (2.0, 2.0)}
NORM = described("max, l2 or q/p with q and p from 1 to inf (such as 2/inf)")


def parse_norm(codec: Any) -> tuple[float, float]:
    """(q, p) of `norm`: "max", "l2" or "q/p", each from 1 to inf."""
    if codec.norm in _NAMED:
        return _NAMED[codec.norm]
    try:
        inner, outer = (float(part) for part in str(codec.norm).split("/"))
    except ValueError:
        inner = outer = math.nan
    if not (inner >= 1 and outer >= 1):
        raise refused(codec, "norm")
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
    power = _exact_norm(flat, q)
    return torch.where(torch.isfinite(norm), torch.maximum(power, norm), norm)


def global_norm(norms: Tensor, p: float) -> Tensor:
    """‖·‖_p of the workers' local norms, as one fp32 value; NaN if any is not finite."""
    largest = norms.amax().to(torch.float32)
    norm = largest
    if not math.isinf(p):
        norm = torch.maximum(_exact_norm(norms, p), largest)
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


def shared_scale(codec: Codec, x: Tensor, workers: int, norm: Tensor | float | None) -> Tensor:
    """The scale to encode with: the shared one, or for a lone worker its own."""
    if norm is not None:
        return as_scale(norm, x.device)
    if workers > 1:
        raise TypeError(
            f"{codec.name}: wires of {workers} workers add up only under one scale: give norm=, "
            "made by global_norm(...) from every worker's local_norm(x)"
        )
    return codec.local_norm(x)


def _exact_norm(x: Tensor, p: float) -> Tensor:
    """‖x‖_p, found in fp64; what only that can hold becomes the largest fp32, which is enough."""
    there = x.to(scratch_device(x.device))
    norm = torch.linalg.vector_norm(there, p, dtype=torch.float64)
    return norm.clamp(max=torch.finfo(torch.float32).max).to(torch.float32).to(x.device)


class Draw(NamedTuple):
    """Whose draws an encoding takes, and by how much they are moved, in 2^-F of a level."""

    key: Key
    shift: int = 0


def stratum(key: Key, workers: int, levels: int) -> Draw:
    """The draws of one of n workers whose wires will be added.

    All share the draws of rank n, which no worker has. Places change with every key: the ranks are
    in the order of a hash (a bijection, so there are no ties).
    """
    if key.rank >= workers:
        raise ValueError(
            f"{workers} workers are added: their ranks are 0 to {workers - 1}, "
            f"not {key.rank}; give every key its place in the sum as rank="
        )
    shared = replace(key, rank=workers)
    k0, k1 = shared.stream()
    order = [_mix64((k1 << 32 | k0) ^ rank) for rank in range(workers)]
    place = sum(other < order[key.rank] for other in order)
    return Draw(shared, (place << fraction_bits(levels)) // workers)


def shared_key(keys: Sequence[Key]) -> Key:
    """The key of the draws that the workers with these keys share."""
    workers = len(keys)
    if workers == 1:
        return keys[0]
    calls = {(key.seed, key.step, key.tensor, key.phase) for key in keys}
    if len(calls) > 1 or sorted(key.rank for key in keys) != list(range(workers)):
        raise ValueError(
            f"the dithers of {workers} workers are subtracted together: give the keys they encoded "
            f"with, which differ in rank= only, from 0 to {workers - 1}"
        )
    return replace(keys[0], rank=workers)
