"""All trainable parameters as one flat fp32 vector, group behind group, cut among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from laconic._wire import DTYPES
from laconic.codecs import Place
from laconic.errors import ConfigError
from laconic.exchanges._wires import chunk_edges

_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class Flat:
    """Which value of a flat vector is which parameter's, group's and rank's.

    One vector for all groups: one message a step to each rank, however many groups there are, and
    chunks of equal size. The order is that of the optimizer's groups.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], model: nn.Module, ranks: int) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        trained = [[p for p in group["params"] if p.requires_grad] for group in groups]
        self.parameters: list[nn.Parameter] = [p for group in trained for p in group]
        for p in self.parameters:
            _check(p, self.parameters[0], names.get(id(p)))
        if not self.parameters:
            raise ConfigError("the optimizer has no parameter that needs a gradient")
        self.names = [names[id(p)] for p in self.parameters]
        self.device = self.parameters[0].device
        self.starts = list(accumulate((p.numel() for p in self.parameters), initial=0))
        self.numel = self.starts[-1]
        sizes = [sum(p.numel() for p in group) for group in trained]
        self.groups = list(pairwise(accumulate(sizes, initial=0)))
        self.edges = chunk_edges(self.numel, ranks)
        self.places = tuple(
            Place(parameter=number, start=0, numel=p.numel(), total=p.numel())
            for number, p in enumerate(self.parameters)
            if p.numel()
        )

    def lines(self) -> list[str]:
        """The parameters, in words."""
        return [
            f"{name} {tuple(p.shape)} {p.dtype}"
            for name, p in zip(self.names, self.parameters, strict=True)
        ]

    def empty(self) -> Tensor:
        """A vector."""
        return torch.empty(self.numel, dtype=torch.float32, device=self.device)

    def ring_bytes(self, ranks: int) -> int:
        """What a rank sends when these many add up a vector of fp32 values in a ring."""
        return round(2 * (ranks - 1) / ranks * 4 * self.numel)

    def chunks(self, x: Tensor) -> list[Tensor]:
        """What each rank owns of a vector, as views."""
        return [x[first:last] for first, last in pairwise(self.edges)]

    def parts(self, rank: int) -> list[tuple[int, int]]:
        """Where each group lies inside a rank's chunk; (0, 0) if it has nothing of it."""
        first, last = self.edges[rank], self.edges[rank + 1]
        cut = [(max(a, first) - first, min(b, last) - first) for a, b in self.groups]
        return [(a, b) if a < b else (0, 0) for a, b in cut]

    def read(self, x: Tensor) -> None:
        """x = the parameters."""
        _copy_all(self._views(x), [p.detach() for p in self.parameters])

    def write(self, x: Tensor) -> None:
        """The parameters = x, rounded to their dtype."""
        _copy_all([p.detach() for p in self.parameters], self._views(x))

    def read_gradients(self, x: Tensor) -> None:
        """x = the gradients; ConfigError where there is none."""
        gradients = []
        for name, p in zip(self.names, self.parameters, strict=True):
            if p.grad is None:
                raise ConfigError(
                    f"{name} has no gradient: every trainable parameter must take part in every "
                    "loss (freeze it with requires_grad_(False) before making the schedule, or "
                    "add 0 * its sum to the loss)"
                )
            if p.grad.is_sparse:
                raise ConfigError(f"{name} has a sparse gradient; use nn.Embedding(sparse=False)")
            gradients.append(p.grad.detach())
        _copy_all(self._views(x), gradients)

    def _views(self, x: Tensor) -> list[Tensor]:
        return [
            x[first:last].view(p.shape)
            for p, (first, last) in zip(self.parameters, pairwise(self.starts), strict=True)
        ]


def _check(p: Tensor, first: Tensor, name: str | None) -> None:
    """ConfigError unless a flat fp32 vector can hold the parameter."""
    if name is None:
        raise ConfigError(
            "the optimizer has a parameter that the model has not: give the model that it trains"
        )
    if p.dtype not in DTYPES:
        raise ConfigError(
            f"{name} is {p.dtype}: master weights are fp32, for fp32, bf16 and fp16 models"
        )
    if p.device != first.device:
        raise ConfigError(f"{name} is on {p.device}, not {first.device}: use one device a rank")
