"""The parameters that an optimizer trains, checked when a schedule is made and later."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from laconic._wire import DTYPES
from laconic.errors import ConfigError
from laconic.sharding._fsdp_shards import own_values

Named = tuple[str, nn.Parameter]


class Trained:
    """Those that the optimizer has and that require a gradient, group by group.

    Frozen ones do not travel: a codec whose mean is off by a little would move them. What travels
    is settled when the schedule is made; `check` notices later changes.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], model: nn.Module, owner: str) -> None:
        self._owner, self._names = owner, {id(p): name for name, p in model.named_parameters()}
        self._known: list[list[nn.Parameter]] = [list(group["params"]) for group in groups]
        own = [[p for p in group if p.requires_grad] for group in self._known]
        missing = sum(id(p) not in self._names for group in own for p in group)
        if missing:
            raise ConfigError(
                f"the optimizer has {missing} parameters that are not in the model: give {owner} "
                "the module that they all belong to"
            )
        self.groups: list[list[Named]] = [[(self._name(p), p) for p in some] for some in own]
        self.named: list[Named] = [one for group in self.groups for one in group]
        self._trains = {id(p) for _, p in self.named}
        self._ids = [list(map(id, some)) for some in self._known]  # these stay: they are held
        _check_kinds(self.named)
        _check_memory(self.named)

    def _name(self, parameter: nn.Parameter) -> str:
        return self._names.get(id(parameter), "a parameter that the model does not have")

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """ConfigError if the optimizer has other parameters now, or trains others."""
        if [list(map(id, group["params"])) for group in groups] != self._ids:
            raise ConfigError(
                f"parameters were added or taken away since {self._owner} was made, and it would "
                f"leave some of them out: do that first, {self._again}"
            )
        for p in (p for some in self._known for p in some):
            if p.requires_grad != (id(p) in self._trains):
                how = "unfrozen" if p.requires_grad else "frozen"
                raise ConfigError(
                    f"{self._name(p)} was {how} (requires_grad) after {self._owner} was made, and "
                    f"what travels was settled then: do that first, {self._again}"
                )

    @property
    def _again(self) -> str:
        return f"or continue with a new {self._owner}, made with the weights of global_weights()"

    def check_dense(self, model: nn.Module, where: str) -> None:
        """ConfigError for layers whose gradients will be sparse."""
        for name, layer in model.named_modules():
            if not isinstance(layer, nn.Embedding | nn.EmbeddingBag) or not layer.sparse:
                continue
            if id(layer.weight) in self._trains:
                raise ConfigError(sparse(f"{name}.weight" if name else "weight", where))


def sparse(name: str, where: str) -> str:
    """The sentence for a sparse gradient."""
    return (
        f"{name} has sparse gradients, which {where} cannot average: make its layer with "
        "sparse=False, or freeze it (requires_grad_(False)) before making the schedule"
    )


def _check_kinds(named: Sequence[Named]) -> None:
    """ConfigError unless one flat fp32 vector can hold them all."""
    if not any(p.numel() for _, p in named):
        raise ConfigError("there are no parameters with values that require a gradient")
    for name, p in named:
        if p.layout != torch.strided:
            raise ConfigError(f"{name} is a {p.layout} tensor: use a dense one, {_or_freeze}")
        if p.dtype not in DTYPES:
            how = (
                "keep it as a real one, torch.view_as_real(..), and view it as complex in forward()"
                if p.dtype.is_complex
                else "convert it (model.float())"
            )
            raise ConfigError(
                f"{name} is {p.dtype}, which fp32 messages would round: parameters of float32, "
                f"float16 or bfloat16 can be trained here; {how}, {_or_freeze}"
            )
        if p.device != named[0][1].device:
            raise ConfigError(
                f"{name} is on {p.device}, and {named[0][0]} on {named[0][1].device}: put the "
                "model on one device on each rank"
            )


_or_freeze = "or freeze it (requires_grad_(False)) before making the schedule"


def _check_memory(named: Sequence[Named]) -> None:
    """ConfigError if two of them lie in the same memory: writing one would undo the other."""
    spans = sorted((*_span(p), name) for name, p in named if own_values(p).numel())
    for (_, end, a), (start, _, b) in pairwise(spans):
        if start < end:
            raise ConfigError(
                f"{a} and {b} share memory but are two entries of the optimizer, so what one "
                "learns would be overwritten by the other: tie them by making them one parameter "
                "(layer_b.weight = layer_a.weight) and give the optimizer that once"
            )


def _span(p: Tensor) -> tuple[int, int]:
    """Addresses of the first value and after the last one."""
    own = own_values(p)
    last = sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
    return own.data_ptr(), own.data_ptr() + (last + 1) * own.element_size()
