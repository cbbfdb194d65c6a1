"""A kernel of the CPU on tensors of another device: copied there, and what it wrote copied back.

Each kernel declares which of its arguments it writes. All others are copied one way only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from laconic.kernels._coding import Budgets, Section
from laconic.kernels._protocol import Output, StepRule

CPU = torch.device("cpu")

P = ParamSpec("P")
R = TypeVar("R")


def staged(kernel: Callable[P, R], *writes: str) -> Callable[P, R]:
    """The kernel, staged through the CPU; it writes the arguments of these names.

    A tensor that it returns is on the device of the first argument. Arguments are copied even if
    they are on the CPU: tests run this path there.
    """
    own = signature(kernel)
    if unknown := set(writes) - set(own.parameters):
        raise TypeError(f"{kernel.__name__} has no arguments {sorted(unknown)}")

    @wraps(kernel)
    def through_host(*args: P.args, **options: P.kwargs) -> R:
        bound = own.bind(*args, **options)
        bound.apply_defaults()
        given = bound.arguments
        copies = {name: _on_host(value) for name, value in given.items()}
        result: Any = kernel(**copies)  # pyright: ignore[reportCallIssue]
        for name in writes:
            for target, source in zip(_tensors(given[name]), _tensors(copies[name]), strict=True):
                target.copy_(source)
        if isinstance(result, Tensor):
            result = result.to(_device(given))
        return result

    return through_host


def _on_host(value: Any) -> Any:
    """The value, or a copy of it whose tensors are on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to(CPU, copy=True)
    if isinstance(value, Output):
        return value._replace(tensor=_on_host(value.tensor))
    if isinstance(value, StepRule):
        return value._replace(errors=_on_host(value.errors))
    if isinstance(value, Section | Budgets):
        copies = {one.name: _on_host(getattr(value, one.name)) for one in fields(value)}
        return replace(value, **copies)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors that a kernel may write, of an argument."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Output):
        yield value.tensor
    elif is_dataclass(value):
        yield from (getattr(value, one.name) for one in fields(value))


def _device(given: dict[str, Any]) -> torch.device:
    return next(tensor.device for value in given.values() for tensor in _tensors(value))
