"""What a rank does to its own weights while the global ones are on their way."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from laconic.errors import ConfigError

_MEMORY = 0.95  # of DC-ASGD's mean square, and the constant under its root
_EPSILON = 1e-7


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a local rule may look at: equal slices of flat fp32 vectors, one parameter group's.

    `w` are the weights to step from, `seen` those that `g` was computed at (other ones only where
    w has just been pulled), `pulled` what was pulled before: one period ago if `fresh`, that is if
    w has just been pulled, else at the start of this period. `square` and `velocity` are the
    rule's own memories, where it asked for them (`LocalRule.remembers`).
    """

    w: Tensor
    g: Tensor
    seen: Tensor
    pulled: Tensor
    square: Tensor | None = None  # zero at first
    velocity: Tensor | None = None  # at first what the last step of warm-up subtracted, else zero
    fresh: bool
    period: int
    lr: float
    lr_change: float = 1.0  # lr over that of the step before; 1 where there was none
    decay: float


@dataclass(frozen=True, kw_only=True)
class LocalRule(ABC):
    """A local step Δ: w ← w - Δ. Settings only; lr is local_lr_scale times the group's."""

    local_lr_scale: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool):
                continue
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(
                    f"{type(self).__name__}: {item.name} must be a number from 0, not {value!r}"
                )

    @property
    def remembers(self) -> tuple[str, ...]:
        """Vectors that it keeps from step to step: "square", "velocity" (of `Moment`)."""
        return ()

    @abstractmethod
    def step(self, at: Moment, out: Tensor) -> None:
        """out = Δ. `out` may be the memory of `at.seen`, where that is not w's."""


@dataclass(frozen=True, kw_only=True)
class LocalSGDRule(LocalRule):
    """A plain SGD step: Δ = lr·(g + wd·w)."""

    def step(self, at: Moment, out: Tensor) -> None:
        torch.mul(at.w, at.lr * at.decay, out=out)
        out.add_(at.g, alpha=at.lr)


@dataclass(frozen=True, kw_only=True)
class GLU(LocalRule):
    """Global gradients guide the local step (SSD-SGD's own rule).

        gs = (w_pre - w)/(k·lr) - wd·w        Δ = h·lr·(α·g + wd·w + β·gs)

    1. w has just been pulled: w_pre is what was pulled before, so gs is the global gradient, as the
       owners' optimizers followed it over one period (their momentum included), less what weight
       decay moved. h = 1. From here on w_pre is w.
    2. On the other steps of the period, and before the first pull, gs is the rank's own
       displacement since the pull, and h = ½.

    lr·gs has no division by lr: Δ = h·[lr·(α·g + (1-β)·wd·w) + β·(w_pre - w)/k]; lr may be 0.

    SSD-SGD (Xu et al. 2020), as released, but: k is the period, not a constant of the script, and
    all parameters are in phase with the pull (the released code has one counter for all tensors,
    so that w_pre is saved at other times than the pull for most of them).
    """

    alpha: float = 2.0
    beta: float = 0.5

    def step(self, at: Moment, out: Tensor) -> None:
        half = 1.0 if at.fresh else 0.5
        torch.sub(at.pulled, at.w, out=out).mul_(half * self.beta / at.period)
        out.add_(at.g, alpha=half * at.lr * self.alpha)
        out.add_(at.w, alpha=half * at.lr * (1 - self.beta) * at.decay)


@dataclass(frozen=True, kw_only=True)
class DCASGD(LocalRule):
    """A gradient of other weights is corrected to first order (delay compensation).

        Δ = lr·(g + λ·g⊙g⊙(w - w') + wd·w),    w' the weights that g was computed at

    g(w) ≈ g(w') + H·(w - w'), and λ·g⊙g stands for the diagonal of H. w differs from w' only where
    w has just been pulled; on all other steps this is plain SGD. `adaptive` divides λ (`strength`)
    by √(MS + 1e-7), MS ← 0.95·MS + 0.05·g⊙g, zero at first.

    Zheng et al., ICML 2017 (DC-ASGD-c and -a), on the worker instead of the server.
    """

    strength: float = 0.04
    adaptive: bool = False

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("square",) if self.adaptive else ()

    def step(self, at: Moment, out: Tensor) -> None:
        if at.square is not None:
            at.square.mul_(_MEMORY).addcmul_(at.g, at.g, value=1 - _MEMORY)
        torch.sub(at.w, at.seen, out=out).mul_(at.g).mul_(at.g)
        if at.square is None:
            out.mul_(self.strength)
        elif at.fresh:  # elsewhere it is zero anyway
            out.mul_(self.strength).div_((at.square + _EPSILON).sqrt_())
        out.add_(at.g).add_(at.w, alpha=at.decay).mul_(at.lr)


@dataclass(frozen=True, kw_only=True)
class MomentumRule(LocalRule):
    """Momentum of the rank's own, kept near the owners' by what pulls say.

        v ← μ·v + lr·(g + wd·w),  Δ = v        v ← v + ρ·(W - w)/k  before, where w was just pulled

    with μ the owners' momentum, and W the weights that the rank had in place of w.

    1. The owners' SGD makes m ← μ·m + ḡ + wd·M, M ← M - lr·m. A rank does the same with g for ḡ,
       and all of it is linear: the means over ranks stay what the owners have, v̄ = lr·m and
       W̄ = M. So ranks are never behind, however long the period. (GLU's velocity fades within a
       few steps, and its ranks fall behind by what is missing.)
    2. A pull takes what is the rank's own out of W, and `share` (ρ) takes it out of v: had v been
       off by a constant δ through the period, W would be off by -k·δ. W̄ - M = 0, so this changes
       no mean either, and whatever mean there is (of the codec's errors) it makes smaller.

    v starts as the last step of warm-up, which is lr·m exactly; without one it is zero, as m is.
    It is in units of weights, and follows lr at once as lr·m does. For SGD without Nesterov's form
    and dampening. With ρ = 0 and no codec this is local SGD, with exchanges that take a step.
    """

    momentum: float = 0.9
    share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum > 1:
            raise ConfigError(f"MomentumRule: momentum must be at most 1, not {self.momentum!r}")

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("velocity",)

    def step(self, at: Moment, out: Tensor) -> None:
        v = at.velocity
        assert v is not None
        v.mul_(at.lr_change)
        if at.fresh:
            share = self.share / at.period
            v.add_(at.seen, alpha=share).sub_(at.w, alpha=share)
        v.mul_(self.momentum).add_(at.g, alpha=at.lr).add_(at.w, alpha=at.lr * at.decay)
        out.copy_(v)
