"""What ranks exchange of a model, as one flat fp32 vector: parameters, then statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic._wire import DTYPES
from laconic.codecs import Place
from laconic.errors import ConfigError
from laconic.exchanges._policy import Chooser


class Pack:
    """Tensors of any shapes and dtypes as one flat fp32 vector.

    They are asked for at each use: a module may put new tensors in place of its buffers.
    """

    def __init__(self, tensors: Callable[[], list[Tensor]]) -> None:
        self.tensors = tensors
        self.sizes = [tensor.numel() for tensor in tensors()]
        self.numel = sum(self.sizes)

    def read(self, out: Tensor) -> Tensor:
        """out ← the tensors."""
        _copy(self.parts(out), self.tensors())
        return out

    def write(self, flat: Tensor) -> None:
        """The tensors ← flat, rounded to their dtypes."""
        _copy(self.tensors(), self.parts(flat))

    def parts(self, flat: Tensor) -> list[Tensor]:
        """flat's parts, in the shapes of the tensors."""
        parts = flat.split(self.sizes)
        return [part.view(own.shape) for part, own in zip(parts, self.tensors(), strict=True)]


class Vector:
    """Where the tensors of a model lie: parameters to encode, plain ones, then buffers.

    Parameters are those that the optimizer has. Buffers are those of floating point that are finite
    now: a mask of -inf, or an observer that has seen nothing yet, has no mean.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, policy: Chooser, buffers: bool
    ) -> None:
        named = _trained(optimizer, model)
        choices = [_choice(policy, name, parameter) for name, parameter in named]
        encoded = [one for one, choice in zip(named, choices, strict=True) if choice]
        plain = [one for one, choice in zip(named, choices, strict=True) if not choice]
        statistics = _statistics(model) if buffers else []
        self.trained = [parameter for _, parameter in (*encoded, *plain)]
        self.weights = Pack(lambda: [parameter.detach() for parameter in self.trained])
        self.buffers = Pack(lambda: [model.get_buffer(name).detach() for name, _ in statistics])
        self.encoded = sum(parameter.numel() for _, parameter in encoded)
        self.device = self.trained[0].device
        self.places = tuple(
            Place(parameter=i, start=0, numel=p.numel(), total=p.numel())
            for i, (_, p) in enumerate(encoded)
        )
        self.lines = [
            f"{name} {tuple(tensor.shape)} {tensor.dtype} {said}"
            for said, some in (("encoded", encoded), ("plain", plain), ("buffer", statistics))
            for name, tensor in some
        ]

    def empty(self) -> Tensor:
        """A vector, all zero."""
        numel = self.weights.numel + self.buffers.numel
        return torch.zeros(numel, dtype=torch.float32, device=self.device)

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Its weights and its buffers."""
        return flat[: self.weights.numel], flat[self.weights.numel :]

    def read(self, out: Tensor) -> Tensor:
        """out ← the model's values."""
        weights, buffers = self.split(out)
        self.weights.read(weights)
        self.buffers.read(buffers)
        return out

    def write(self, flat: Tensor) -> None:
        """The model ← flat, rounded to its dtypes."""
        weights, buffers = self.split(flat)
        self.weights.write(weights)
        self.buffers.write(buffers)

    def read_gradients(self, out: Tensor) -> None:
        """out ← gradients; one that is not there counts as zero."""
        for part, parameter in zip(self.weights.parts(out), self.trained, strict=True):
            gradient = parameter.grad
            if gradient is None:
                part.zero_()
            elif gradient.is_sparse:
                raise ConfigError(
                    "sparse gradients cannot be averaged in warm-up; use nn.Embedding(sparse=False)"
                )
            else:
                part.copy_(gradient)

    def write_gradients(self, flat: Tensor) -> None:
        """Gradients ← flat."""
        for part, parameter in zip(self.weights.parts(flat), self.trained, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part)


def forget_broken(state: Mapping[Any, Any]) -> None:
    """A parameter's momentum or moments that are not finite would spoil its next step, too."""
    for own in state.values():
        values = [value for value in own.values() if isinstance(value, Tensor)]
        if not all(bool(torch.isfinite(value).all()) for value in values):
            own.clear()


def _trained(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The model's parameters that the optimizer has, in the model's order."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [(name, p) for name, p in model.named_parameters() if id(p) in own]
    if len(named) < len(own):
        raise ConfigError(
            f"the optimizer has {len(own) - len(named)} parameters that are not in the model; give "
            "LocalSGD the module that they all belong to"
        )
    for name, p in named:
        if p.dtype not in DTYPES:
            raise ConfigError(
                f"{name} is {p.dtype}; parameters of float32, float16 or bfloat16 can be exchanged"
            )
    if len({p.device for _, p in named}) > 1:
        raise ConfigError("the model is on several devices; put it on one on each rank")
    filled = [(name, p) for name, p in named if p.numel()]
    if not filled:
        raise ConfigError("the optimizer has no parameters with values")
    return filled


def _choice(policy: Chooser, name: str, parameter: nn.Parameter) -> bool:
    choice = policy(name, parameter)
    if not isinstance(choice, bool):
        raise ConfigError(
            f"policy said {choice!r} for {name}: LocalSGD has one codec, so it says True or False"
        )
    return choice


def _statistics(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if buffer.dtype in DTYPES and buffer.numel() and bool(torch.isfinite(buffer).all())
    ]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors; one launch for many on a GPU."""
    if not targets:
        return
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]
