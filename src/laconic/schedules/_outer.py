"""Outer optimizers of LocalSGD, which apply the mean of all ranks' progress."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.errors import ConfigError
from laconic.sharding._shard import settings_of


class Outer(ABC):
    """One step on the common weights; settings only, the momentum belongs to the schedule."""

    @abstractmethod
    def step(self, base: Tensor, mean: Tensor, momentum: Tensor) -> None:
        """Move base against `mean`, the outer gradient, and momentum on; in place."""


@dataclass(frozen=True, kw_only=True)
class _Momentum(Outer):
    """The settings of both."""

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not _number(self.lr) or not 0 < self.lr < float("inf"):
            raise ConfigError(f"{name}: lr must be a number above 0, not {self.lr!r}")
        if not _number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigError(f"{name}: momentum must be from 0 to below 1, not {self.momentum!r}")


@dataclass(frozen=True, kw_only=True)
class Nesterov(_Momentum):
    """DiLoCo's outer optimizer: m ← β·m + δ, then x ← x - lr·(β·m + δ).

    A name for torch's SGD(lr=lr, momentum=β, nesterov=True), with the ranks' mean progress δ in
    place of a gradient. Douillard et al., DiLoCo, 2023, arXiv 2311.08105, whose settings are the
    defaults.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def step(self, base: Tensor, mean: Tensor, momentum: Tensor) -> None:
        momentum.mul_(self.momentum).add_(mean)
        base.add_(momentum, alpha=-self.lr * self.momentum).add_(mean, alpha=-self.lr)


@dataclass(frozen=True, kw_only=True)
class HeavyBall(_Momentum):
    """SlowMo's outer optimizer: m ← β·m + δ, then x ← x - lr·m.

    Wang et al., SlowMo, ICLR 2020, arXiv 1910.00643, whose momentum buffers of the ranks are kept
    here, not averaged or reset. With momentum=0 and lr=1 it is plain averaging.
    """

    lr: float = 1.0
    momentum: float = 0.5

    def step(self, base: Tensor, mean: Tensor, momentum: Tensor) -> None:
        momentum.mul_(self.momentum).add_(mean)
        base.add_(momentum, alpha=-self.lr)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


OuterFactory = Outer | Callable[[list[nn.Parameter]], Optimizer] | None


class _Settings(Optimizer):
    """An `Outer` as a torch optimizer."""

    def __init__(self, parameter: nn.Parameter, outer: Outer) -> None:
        super().__init__([parameter], {})
        self.outer = outer
        self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter, state in self.state.items():
            assert parameter.grad is not None
            self.outer.step(parameter, parameter.grad, state["momentum"])


def outer_optimizer(outer: OuterFactory, weights: Tensor) -> Optimizer | None:
    """A torch optimizer of one flat parameter, in the memory of `weights`; None averages.

    ConfigError, with what to write, if `outer` cannot make one.
    """
    check_outer(outer)
    if outer is None:
        return None
    parameter = nn.Parameter(weights)
    if isinstance(outer, Outer):
        return _Settings(parameter, outer)
    try:
        made: object = outer([parameter])
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"outer made no optimizer of one flat fp32 parameter: {error}; {_use()}"
        ) from error
    if not isinstance(made, Optimizer):
        raise ConfigError(f"outer returned {made!r}, not a torch optimizer: {_use()}")
    name = type(made).__name__
    if [p is parameter for group in made.param_groups for p in group["params"]] != [True]:
        raise ConfigError(
            f"outer returned an {name} of other parameters than the one it was given: pass its "
            f"argument on, as in {_use(name)}"
        )
    if needs_closure(made) or isinstance(made, torch.optim.SparseAdam):
        raise ConfigError(
            f"{name} cannot be an outer optimizer, which gets one dense gradient and no closure: "
            f"{_use()}"
        )
    return made


def check_outer(outer: object) -> None:
    """ConfigError unless it is an outer optimizer, or makes one."""
    if isinstance(outer, Optimizer):
        lr = outer.defaults.get("lr", 0.7)
        raise ConfigError(
            f"outer is an {type(outer).__name__} with parameters of its own, and LocalSGD has the "
            "common weights as one flat parameter that is made with it: give what makes the "
            f"optimizer, {_use(type(outer).__name__, lr)}"
        )
    if outer is not None and not isinstance(outer, Outer) and not callable(outer):
        raise ConfigError(
            f"outer must be None (plain averaging), lc.Nesterov(), lc.HeavyBall() or what makes a "
            f"torch optimizer of parameters, not {outer!r}: {_use()}"
        )


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether step() evaluates the loss, perhaps several times, as that of LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def outer_step(optimizer: Optimizer | None, weights: Tensor, mean: Tensor) -> None:
    """Move the common weights against the mean progress, in place."""
    if optimizer is None:
        weights.sub_(mean)
        return
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = mean
    optimizer.step()
    parameter.grad = None  # the mean's memory holds other values next


def kind_of(optimizer: Optimizer | None) -> str:
    """Its class, or that of its settings; None for plain averaging."""
    if isinstance(optimizer, _Settings):
        return type(optimizer.outer).__name__
    return "None" if optimizer is None else type(optimizer).__name__


def described(optimizer: Optimizer | None) -> str:
    """Kind and settings, which all ranks must have in common."""
    if isinstance(optimizer, _Settings):
        return str(optimizer.outer)
    return f"{kind_of(optimizer)} {settings_of(optimizer.param_groups) if optimizer else ''}"


def _use(name: str = "SGD", lr: float = 0.7) -> str:
    more = ", momentum=0.9, nesterov=True" if name == "SGD" else ""
    return f"outer=functools.partial(torch.optim.{name}, lr={lr}{more})"
