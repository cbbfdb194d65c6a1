"""Outer optimizers: what is done with the mean of all ranks' progress."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from laconic.errors import ConfigError


class Outer(ABC):
    """One step on the common weights; settings only, the momentum belongs to the schedule."""

    @abstractmethod
    def step(self, base: Tensor, mean: Tensor, momentum: Tensor) -> None:
        """Move base against `mean`, the outer gradient, and momentum on; in place."""


@dataclass(frozen=True, kw_only=True)
class _Momentum(Outer):
    """The settings of both; nobody makes one of these."""

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

    That is torch's SGD(nesterov=True) with the ranks' mean progress δ in place of a gradient.
    Douillard et al., DiLoCo, 2023, arXiv 2311.08105, whose settings are the defaults.
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
