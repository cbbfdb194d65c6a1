"""All trainable parameters as one flat fp32 vector, group after group, cut among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from laconic._scratch import copy_all
from laconic.codecs import Place
from laconic.comm._context import chunk_edges
from laconic.errors import ConfigError
from laconic.sharding._fsdp_shards import own_values
from laconic.sharding._trained import Named, sparse


class FlatParameters:
    """Which value of a flat vector is which parameter's, group's and rank's.

        x = (p_0, p_1, ..)    group i: x[a_i:b_i], (a_i, b_i) = groups[i]
                              rank j owns x[e_j:e_{j+1}], e = edges

    One vector for all groups: one message per step to each rank, however many groups there are, and
    chunks of equal size. `owner` is what errors call the schedule that these belong to. Of a
    parameter that is cut among ranks (a DTensor) these are a rank's own values.
    """

    def __init__(
        self, groups: Sequence[Sequence[Named]], ranks: int = 1, owner: str = "the schedule"
    ) -> None:
        self._owner = owner
        self.named: list[Named] = [one for group in groups for one in group]
        self.parameters: list[nn.Parameter] = [p for _, p in self.named]
        self.device = self.parameters[0].device
        sizes = [value.numel() for value in self._values()]
        starts = list(accumulate(sizes, initial=0))
        self.slices = [slice(*ends) for ends in pairwise(starts)]
        self.numel = starts[-1]
        counts = accumulate((len(group) for group in groups), initial=0)
        self.groups = [(starts[i], starts[j]) for i, j in pairwise(counts)]
        self.edges = chunk_edges(self.numel, ranks)
        self.places = tuple(
            Place(parameter=number, start=0, numel=numel, total=numel)
            for number, numel in enumerate(sizes)
            if numel
        )
        self._written = self._versions()

    def lines(self) -> list[str]:
        """The parameters in words, for ranks to compare."""
        values = zip(self.named, self._values(), strict=True)
        return [f"{name} {tuple(value.shape)} {p.dtype}" for (name, p), value in values]

    def empty(self) -> Tensor:
        """A vector, not initialized."""
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

    def views(self, x: Tensor) -> list[Tensor]:
        """A vector's parts, in the shapes of the parameters."""
        pairs = zip(self._values(), self.slices, strict=True)
        return [x[part].view(value.shape) for value, part in pairs]

    def read(self, x: Tensor) -> Tensor:
        """x = the parameters."""
        copy_all(self.views(x), self._values())
        return x

    def write(self, x: Tensor) -> None:
        """The parameters = x, rounded to their dtype."""
        copy_all(self._values(), self.views(x))
        self._written = self._versions()

    def changed(self, x: Tensor) -> str | None:
        """A parameter that is not x, in its own precision, if there is one; NaN is NaN."""
        for (name, _), value, part in zip(self.named, self._values(), self.views(x), strict=True):
            if not torch.equal(value.nan_to_num(), part.to(value).nan_to_num()):
                return name
        return None

    def check_unchanged(self, x: Tensor, *, trust_versions: bool = False) -> None:
        """ConfigError if the parameters were changed since x was written.

        torch counts what is done to a tensor in place (but not through `.data`). `trust_versions`
        compares values, which waits for the device, only where it has counted something.
        """
        versions = self._versions()
        if trust_versions and versions == self._written:
            return
        name = self.changed(x)
        if name is not None:
            raise ConfigError(
                f"{name} was changed since {self._owner} last wrote it, which other ranks would "
                f"not notice: load weights before making {self._owner}; its own state_dict() has "
                "this rank's"
            )
        self._written = versions

    def own(self) -> dict[str, Tensor]:
        """Copies of the values by name."""
        pairs = zip(self.named, self._values(), strict=True)
        return {name: value.clone() for (name, _), value in pairs}

    def _values(self) -> list[Tensor]:
        return [own_values(p) for p in self.parameters]

    def _versions(self) -> list[int]:
        return [p._version for p in self.parameters]

    def read_gradients(self, x: Tensor, *, missing_as_zero: bool = False) -> None:
        """x = the gradients; ConfigError where there is none, unless it counts as zero."""
        found, filled = [], []
        for (name, p), part in zip(self.named, self.views(x), strict=True):
            if p.grad is None and missing_as_zero:
                part.zero_()
                continue
            if p.grad is None:
                raise ConfigError(
                    f"{name} has no gradient: every trainable parameter must take part in every "
                    "loss (freeze it with requires_grad_(False) before making the schedule, or "
                    "add 0 * its sum to the loss)"
                )
            if p.grad.is_sparse:
                raise ConfigError(sparse(name, self._owner))
            found.append(own_values(p.grad))
            filled.append(part)
        copy_all(filled, found)

    def write_gradients(self, x: Tensor) -> None:
        """The gradients = x, rounded to the parameters' dtype."""
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.empty_like(p)
        gradients = [own_values(p.grad) for p in self.parameters if p.grad is not None]
        copy_all(gradients, self.views(x))
