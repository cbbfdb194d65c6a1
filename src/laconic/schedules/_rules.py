"""Updates of a rank's own weights between pulls: local rules, and the replica they act on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from laconic.errors import ConfigError
from laconic.sharding._flat_parameters import FlatParameters

_MEMORY = 0.95  # of DC-ASGD's mean square, and the constant under its root
_EPSILON = 1e-7
_SHARES = "below 2, where a pull would turn velocities around instead of correcting them"


@dataclass(frozen=True, kw_only=True)
class LocalStep:
    """What a local rule may look at: equal slices of flat fp32 vectors, one parameter group's.

    `w` are the weights to step from, `seen` those that `g` was computed at (other ones only where
    w has just been pulled), `pulled` what was pulled before: one period ago if `fresh`, that is if
    w has just been pulled, else at the start of this period. `square` and `velocity` are the
    rule's own memories, where it has them (`LocalRule.remembers`). `decay` and all below are
    the group's settings; where its optimizer has no such thing, they are as here.
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
    count: int = 1  # of local steps since the memories began, this one included
    decay: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = True  # weight decay is no part of the gradient, as in AdamW


@dataclass(frozen=True, kw_only=True)
class LocalRule(ABC):
    """A local step Δ: w ← w - Δ. Settings only; lr is local_lr_scale times the group's."""

    local_lr_scale: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, bool) and item.default is not None:
                self._check(item.name, _number(value), "a number from 0")

    def _check(self, name: str, fits: bool, what: str) -> None:
        if not fits:
            value = getattr(self, name)
            raise ConfigError(f"{type(self).__name__}: {name} must be {what}, not {value!r}")

    @property
    def remembers(self) -> tuple[str, ...]:
        """Vectors that it keeps from step to step: "square", "velocity" (of `LocalStep`)."""
        return ()

    @property
    def follows(self) -> tuple[type[Optimizer], ...]:
        """The owners' optimizers that it is made for; empty: any."""
        return ()

    @abstractmethod
    def step(self, at: LocalStep, out: Tensor) -> None:
        """out = Δ. `out` may be the memory of `at.seen`, where that is not w's."""


def _number(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


@dataclass(frozen=True, kw_only=True)
class LocalSGDRule(LocalRule):
    """A plain SGD step: Δ = lr·(g + wd·w)."""

    def step(self, at: LocalStep, out: Tensor) -> None:
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

    def step(self, at: LocalStep, out: Tensor) -> None:
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

    def step(self, at: LocalStep, out: Tensor) -> None:
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
    """Momentum of the rank's own, kept near the owners' by what pulls say. For SGD.

        v ← μ·v + lr·(g + wd·w),  Δ = v        v ← v + ρ·(W - w)/k  before, where w was just pulled

    with μ the owners' momentum (`momentum`; None: the parameter group's own), and W the weights
    that the rank had in place of w. Dampening and Nesterov's form are the group's, too.

    1. The owners' SGD makes m ← μ·m + ḡ + wd·M, M ← M - lr·m. A rank does the same with g for ḡ,
       and all of it is linear: the means over ranks stay what the owners have, v̄ = lr·m and
       W̄ = M. So ranks are never behind, however long the period. (GLU's velocity fades within a
       few steps, and its ranks fall behind by what is missing.)
    2. A pull takes what is the rank's own out of W, and `share` (ρ) takes it out of v: had v been
       off by a constant δ through the period, W would be off by -k·δ, and δ becomes (1 - ρ)·δ.
       W̄ - M = 0, so this changes no mean either, and whatever mean there is (of the codec's
       errors) it makes smaller. With 4 workers and k = 2, 4 and 8 shares of 0, ½ and 1 are level
       on the test set; 2, refused since, broke down (`python -m benchmarks.schedules_gpu`).

    v starts as the last step of warm-up, which is lr·m exactly (but for Nesterov's form); without
    one it is zero, as m is. It is in units of weights, and follows lr at once as lr·m does. With
    ρ = 0 and no codec this is local SGD, with exchanges that take a step.
    """

    momentum: float | None = None
    share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.momentum is None or (_number(self.momentum) and self.momentum <= 1)
        self._check("momentum", fits, "a number from 0 to 1, or None for the optimizer's own")
        self._check("share", self.share < 2, _SHARES)

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("velocity",)

    @property
    def follows(self) -> tuple[type[Optimizer], ...]:
        return (SGD,)

    def step(self, at: LocalStep, out: Tensor) -> None:
        momentum = at.momentum if self.momentum is None else self.momentum
        lr = at.lr * (1 - at.dampening)
        v = _corrected(at, self.share)
        v.mul_(momentum).add_(at.g, alpha=lr).add_(at.w, alpha=lr * at.decay)
        if at.nesterov:
            torch.mul(v, momentum, out=out)
            out.add_(at.g, alpha=at.lr).add_(at.w, alpha=at.lr * at.decay)
        else:
            out.copy_(v)


@dataclass(frozen=True, kw_only=True)
class AdamRule(LocalRule):
    """MomentumRule for owners that run Adam or AdamW: steps are divided by the rank's own √s.

        s ← β₂·s + (1-β₂)·g²        v ← β₁·v + (1-β₁)·lr·(γ·g/(√ŝ + ε) + wd·w),  Δ = v

    1. Where w was just pulled, v ← v + ρ·(W - w)/k before, as in MomentumRule (ρ is `share`).
    2. ŝ = s/(1 - β₂ᵗ) at the rule's t-th step. s is zero at the end of warm-up: a few gradients
       are enough for a scale, and β₂ = 0.999 without ŝ would begin with steps 30 times too large.
       v starts as the last step of warm-up, which is Adam's own; without one it is zero, and what
       is missing comes with the first pulls.
    3. γ (`gain`): owners divide by √s of the mean gradient. Noise is most of a rank's gradient, and
       n ranks' mean has 1/n of its square, so a rank's √s is larger by up to √n, its steps are too
       short, and it falls behind. γ from 1 to √n makes up for that. With 4 workers 2 = √4 was
       better than 1, the more the longer the period, and than 1.5; more was not tried. Other
       numbers of workers were not measured: take 1 with one worker, and try with many.
    4. Unlike MomentumRule, ranks' mean is the owners' only roughly: Adam is not linear.

    `betas` and `eps` are the parameter group's own where they are None. Weight decay is as above
    for AdamW, and a part of g for Adam. amsgrad's maximum is not followed.
    """

    gain: float = 2.0
    share: float = 1.0
    betas: tuple[float, float] | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("share", self.share < 2, _SHARES)
        self._check("eps", self.eps is None or _number(self.eps), "a number from 0, or None")
        given: object = self.betas
        pair = isinstance(given, tuple) and len(given) == 2
        fits = given is None or (pair and all(_number(one) and one < 1 for one in given))
        self._check("betas", fits, "two numbers from 0, below 1, or None for the optimizer's own")

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("velocity", "square")

    @property
    def follows(self) -> tuple[type[Optimizer], ...]:
        return (Adam, AdamW)

    def step(self, at: LocalStep, out: Tensor) -> None:
        first, second = at.betas if self.betas is None else self.betas
        eps = at.eps if self.eps is None else self.eps
        v, s = _corrected(at, self.share), at.square
        assert s is not None
        g = at.g if at.decoupled else torch.add(at.g, at.w, alpha=at.decay, out=out)
        s.mul_(second).addcmul_(g, g, value=1 - second)
        root = torch.sqrt(s, out=out).mul_((1 - second**at.count) ** -0.5).add_(eps)
        lr = (1 - first) * at.lr
        v.mul_(first).addcdiv_(at.g, root, value=lr * self.gain)
        if at.decoupled:
            v.add_(at.w, alpha=lr * at.decay)
        else:  # g's other part; its room is the root's now
            v.addcdiv_(at.w, root, value=lr * self.gain * at.decay)
        out.copy_(v)


def _corrected(at: LocalStep, share: float) -> Tensor:
    """The velocity in today's lr, less a share of what was the rank's own in it."""
    v = at.velocity
    assert v is not None
    v.mul_(at.lr_change)
    if at.fresh:
        v.add_(at.seen, alpha=share / at.period).sub_(at.w, alpha=share / at.period)
    return v


class Replica:
    """Three flat vectors: own weights, the last pull, and the next one.

    The next pull's memory is a local step's room while no pull is in flight (`coming`).
    """

    def __init__(
        self, flat: FlatParameters, rule: LocalRule | None, period: int, *, decoupled: bool = False
    ) -> None:
        self._flat, self._rule, self._period = flat, rule, period
        self._decoupled = decoupled  # weight decay, where the settings do not say
        self.own, self.pulled, self.next = flat.empty(), flat.empty(), flat.empty()
        flat.read(self.own)
        self.pulled.copy_(self.own)
        kept = () if rule is None else rule.remembers
        self._memory = {name: torch.zeros_like(self.own) for name in kept}
        self._rates = [0.0] * len(flat.groups)  # of the last step
        self._count = 0  # of steps since the memories began
        self.coming = False  # a pull was started, and not applied yet

    def move(self, g: Tensor, found_inf: Tensor, groups: Sequence[Mapping[str, Any]]) -> None:
        """Own weights = (pulled weights, if new, or own weights) - a local step, 0 if found_inf."""
        fresh = self.coming
        # the step is computed in memory that is free: W's own, if there are newer weights
        w, room = (self.next, self.own) if fresh else (self.own, self.next)
        if self._rule is not None:
            self._count += 1
            for number, (first, last) in enumerate(self._flat.groups):
                at = self._local_step(w, g, groups[number], slice(first, last), self._rates[number])
                self._rule.step(at, room[first:last])
            self._rates = [float(settings["lr"]) for settings in groups]
            room.masked_fill_(found_inf > 0, 0.0)  # without waiting for a device
            torch.sub(w, room, out=self.own)
        elif fresh:
            self.own.copy_(w)
        if fresh:
            self._take_over()

    def _local_step(
        self, w: Tensor, g: Tensor, settings: Mapping[str, Any], part: slice, before: float
    ) -> LocalStep:
        assert self._rule is not None
        lr = float(settings["lr"])
        first, second = settings.get("betas", LocalStep.betas)
        return LocalStep(
            w=w[part],
            g=g[part],
            seen=self.own[part],
            pulled=self.pulled[part],
            **{name: memory[part] for name, memory in self._memory.items()},
            fresh=self.coming,
            period=self._period,
            lr=lr * self._rule.local_lr_scale,
            lr_change=lr / before if before else 1.0,
            count=self._count,
            decay=float(settings.get("weight_decay", 0.0)),
            momentum=float(settings.get("momentum", 0.0)),
            dampening=float(settings.get("dampening", 0.0)),
            nesterov=bool(settings.get("nesterov", False)),
            betas=(float(first), float(second)),
            eps=float(settings.get("eps", LocalStep.eps)),
            decoupled=bool(settings.get("decoupled_weight_decay", self._decoupled)),
        )

    def take_as_they_are(self) -> None:
        """Own weights = pulled weights, after a synchronous step."""
        velocity = self._memory.get("velocity")
        if velocity is not None:
            torch.sub(self.own, self.next, out=velocity)
        self.own.copy_(self.next)
        self._take_over()

    def begin_again(self) -> None:
        """Own weights = pulled weights, after an absence: memories are reset."""
        for memory in self._memory.values():
            memory.zero_()
        self._count = 0
        self.own.copy_(self.next)
        self._take_over()

    def _take_over(self) -> None:
        self.pulled, self.next = self.next, self.pulled
        self.coming = False

    def state_dict(self) -> dict[str, Any]:
        """Copies; of the next pull only if it has arrived and was not applied."""
        return {
            "own": self.own.clone(),
            "pulled": self.pulled.clone(),
            "coming": self.next.clone() if self.coming else None,
            "memory": {name: memory.clone() for name, memory in self._memory.items()},
            "rates": list(self._rates),
            "count": self._count,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict."""
        self.own.copy_(state["own"])
        self.pulled.copy_(state["pulled"])
        self.coming = state["coming"] is not None
        if self.coming:
            self.next.copy_(state["coming"])
        self._rates, self._count = list(state["rates"]), int(state["count"])
        for name, memory in self._memory.items():
            memory.copy_(state["memory"][name])
