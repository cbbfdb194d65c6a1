"""All trainable parameters as one flat fp32 vector, group behind group, cut among ranks."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from laconic.codecs import Place
from laconic.errors import ConfigError
from laconic.exchanges._wires import chunk_edges
from laconic.server._parameters import Trained, sparse

_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class Flat:
    """Which value of a flat vector is which parameter's, group's and rank's.

    One vector for all groups: one message a step to each rank, however many groups there are, and
    chunks of equal size. The order is that of the optimizer's groups.
    """

    def __init__(self, trained: Trained, ranks: int) -> None:
        self.parameters: list[nn.Parameter] = [p for _, p in trained.named]
        self.names = [name for name, _ in trained.named]
        self.device = self.parameters[0].device
        self.starts = list(accumulate((p.numel() for p in self.parameters), initial=0))
        self.numel = self.starts[-1]
        sizes = [sum(p.numel() for _, p in group) for group in trained.groups]
        self.groups = list(pairwise(accumulate(sizes, initial=0)))
        self.edges = chunk_edges(self.numel, ranks)
        self.places = tuple(
            Place(parameter=number, start=0, numel=p.numel(), total=p.numel())
            for number, p in enumerate(self.parameters)
            if p.numel()
        )
        self._shown = self._versions()

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
        self._shown = self._versions()

    def check_shown(self, x: Tensor) -> None:
        """ConfigError if somebody has changed the parameters since x was written.

        torch counts what is done to a tensor; values are compared only where it counted something.
        """
        shown = self._versions()
        if shown == self._shown:
            return
        for name, p, part in zip(self.names, self.parameters, self._views(x), strict=True):
            if not same_values(p.detach(), part):
                raise ConfigError(
                    f"{name} was changed since the schedule last wrote it, which the weights that "
                    "ranks share would not notice: load weights before making the schedule; its "
                    "own state_dict() has this rank's"
                )
        self._shown = shown

    def _versions(self) -> list[int]:
        return [p._version for p in self.parameters]

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
                raise ConfigError(sparse(name, "the schedule"))
            gradients.append(p.grad.detach())
        _copy_all(self._views(x), gradients)

    def _views(self, x: Tensor) -> list[Tensor]:
        return [
            x[first:last].view(p.shape)
            for p, (first, last) in zip(self.parameters, pairwise(self.starts), strict=True)
        ]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether a is b, in the precision and on the device of a; NaN is NaN."""
    return torch.equal(a.nan_to_num(), b.to(a).nan_to_num())
