"""How much of a gradient all ranks have in common, measured now and then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.exchanges._scatter_reduce import kappa

_EVERY = 16  # steps between two measurements: two more reads of the tensor each
_LOOK, _USE = 2, 10  # of every sixteen: DDP's buckets are as they stay, and 8 steps later


@dataclass
class _Pending:
    """Norms of x and of the decoded mean, on their way to the host."""

    norms: Tensor
    error: float  # of the mean, as it was asked for
    arrived: Any  # a CUDA event, or None


class Kappa:
    """κ_i = ‖mean‖²/‖x_i‖² of every tensor, by this rank alone.

        κ_i = ‖m̂‖² / ((1 + E)·‖x_i‖²)

    m̂ is the mean as decoded, whose error adds E·‖mean‖² to its norm. A value measured at step s
    counts from step s + 8 on: by then it has reached the host, and no device is waited for. So a
    resumed run uses the same values.
    """

    def __init__(self) -> None:
        self._values: dict[int, float] = {}
        self._pending: dict[int, _Pending] = {}

    def of(self, tensor: int, step: int) -> float:
        """The value to use at a step; 0 if there is none."""
        if step % _EVERY == _USE and tensor in self._pending:
            self._values[tensor] = _value(self._pending.pop(tensor))
        return self._values.get(tensor, 0.0)

    def mean(self) -> float | None:
        """Over tensors, for statistics."""
        values = list(self._values.values())
        return sum(values) / len(values) if values else None

    @contextmanager
    def measuring(self, x: Tensor, tensor: int, step: int, error: float) -> Iterator[None]:
        """Around an exchange that replaces x by its mean; looks at every sixteenth step."""
        if step % _EVERY != _LOOK:
            yield
            return
        norms = torch.empty(2, dtype=torch.float32, device=x.device)
        torch.linalg.vector_norm(x, dtype=torch.float32, out=norms[0])
        yield
        torch.linalg.vector_norm(x, dtype=torch.float32, out=norms[1])
        self._pending[tensor] = _to_host(norms, error)

    def state_dict(self) -> dict[str, Any]:
        """Values in use, and measured ones that are not yet."""
        waiting = {tensor: _value(pending) for tensor, pending in self._pending.items()}
        return {"used": dict(self._values), "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        self._values = {int(tensor): float(value) for tensor, value in state["used"].items()}
        self._pending = {
            int(tensor): _Pending(torch.tensor([1.0, float(value) ** 0.5]), 0.0, None)
            for tensor, value in state["waiting"].items()
        }


def _to_host(norms: Tensor, error: float) -> _Pending:
    if norms.device.type != "cuda":
        return _Pending(norms, error, None)
    host = torch.empty(2, dtype=torch.float32, pin_memory=True)
    host.copy_(norms, non_blocking=True)
    return _Pending(host, error, torch.cuda.current_stream(norms.device).record_event())


def _value(pending: _Pending) -> float:
    if pending.arrived is not None:
        pending.arrived.synchronize()
    own, mean = pending.norms.tolist()
    return kappa(own, mean, pending.error)
