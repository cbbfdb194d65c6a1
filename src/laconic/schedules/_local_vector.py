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
from laconic.server._flat import same_values
from laconic.server._parameters import Named, Trained, sparse


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

    Parameters are those that the optimizer trains. Buffers are given by name, by `include`.
    """

    def __init__(self, trained: Trained, model: nn.Module, policy: Chooser) -> None:
        named = _in_order(trained, model)
        choices = [_choice(policy, name, parameter) for name, parameter in named]
        encoded = [one for one, choice in zip(named, choices, strict=True) if choice]
        plain = [one for one, choice in zip(named, choices, strict=True) if not choice]
        self._model, self.named = model, (*encoded, *plain)
        self.trained = [parameter for _, parameter in self.named]
        self.weights = Pack(lambda: [parameter.detach() for parameter in self.trained])
        self.include([])
        self.encoded = sum(parameter.numel() for _, parameter in encoded)
        self.device = self.trained[0].device
        self.places = tuple(
            Place(parameter=i, start=0, numel=p.numel(), total=p.numel())
            for i, (_, p) in enumerate(encoded)
        )
        self.lines = [
            f"{name} {tuple(tensor.shape)} {tensor.dtype} {said}"
            for said, some in (("encoded", encoded), ("plain", plain))
            for name, tensor in some
        ]

    def include(self, buffers: Sequence[str]) -> None:
        """Which buffers are exchanged; vectors have another length from here on."""
        model, self.buffer_names = self._model, list(buffers)
        self.buffers = Pack(lambda: [_buffer(model, name) for name in self.buffer_names])

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

    def weight_parts(self, flat: Tensor) -> list[Tensor]:
        """A vector's weights, in the shapes of the parameters."""
        return self.weights.parts(self.split(flat)[0])

    def set_values(self, values: Sequence[Tensor]) -> None:
        """The parameters ← values."""
        _copy(self.weights.tensors(), values)

    def check_values(self, values: Sequence[Tensor]) -> None:
        """ConfigError unless these are the parameters' values, in their dtypes."""
        for (name, p), value in zip(self.named, values, strict=True):
            if not same_values(p.detach(), value):
                raise ConfigError(
                    f"{name} was changed after LocalSGD was made, or after its state was loaded, "
                    "and would count as this rank's progress: load weights before making LocalSGD; "
                    "its own state_dict() has this rank's"
                )

    def read_gradients(self, out: Tensor) -> None:
        """out ← gradients; one that is not there counts as zero."""
        for part, (name, parameter) in zip(self.weights.parts(out), self.named, strict=True):
            gradient = parameter.grad
            if gradient is None:
                part.zero_()
            elif gradient.is_sparse:
                raise ConfigError(sparse(name, "warm-up"))
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


def _in_order(trained: Trained, model: nn.Module) -> list[Named]:
    """The trained parameters that have values, in the model's order."""
    own = {id(p) for _, p in trained.named}
    return [(name, p) for name, p in model.named_parameters() if id(p) in own and p.numel()]


def _choice(policy: Chooser, name: str, parameter: nn.Parameter) -> bool:
    choice = policy(name, parameter)
    if not isinstance(choice, bool):
        raise ConfigError(
            f"policy said {choice!r} for {name}: LocalSGD has one codec, so it says True or False"
        )
    return choice


def statistics(model: nn.Module) -> list[str]:
    """Names of buffers of floating point that are finite now.

    A mask of -inf, or an observer that has seen nothing yet, has no mean.
    """
    return [
        name
        for name, buffer in model.named_buffers()
        if buffer.dtype in DTYPES and buffer.numel() and bool(torch.isfinite(buffer).all())
    ]


def _buffer(model: nn.Module, name: str) -> Tensor:
    try:
        return model.get_buffer(name).detach()
    except AttributeError:
        raise ConfigError(
            f"this state has a buffer {name}, which the model has not: it is of another model"
        ) from None


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors; one launch for many on a GPU."""
    if not targets:
        return
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]
