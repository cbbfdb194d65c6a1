"""Local rules by name: the product's, and experiments that only this study has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import laconic as lc
from laconic.schedules import LocalRule, Moment
from laconic.schedules._rules import MomentumRule


@dataclass(frozen=True, kw_only=True)
class Held(LocalRule):
    """GLU whose w_pre - w is the global displacement of the last period all through the next.

    Δ = h·[lr·(α·g + (1-β)·wd·w) + β·v],  v = (w_pre - w)/k of the last pull
    """

    alpha: float = 2.0
    beta: float = 0.5
    halve: bool = True

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("velocity",)

    def step(self, at: Moment, out: Tensor) -> None:
        v = at.velocity
        assert v is not None
        if at.fresh:
            torch.sub(at.pulled, at.w, out=v).mul_(1 / at.period)
        half = 0.5 if self.halve and not at.fresh else 1.0
        torch.mul(v, half * self.beta, out=out)
        out.add_(at.g, alpha=half * at.lr * self.alpha)
        out.add_(at.w, alpha=half * at.lr * (1 - self.beta) * at.decay)


@dataclass(frozen=True, kw_only=True)
class Lagged(LocalRule):
    """MomentumRule that takes its velocity from the pull alone: v = (w_pre - w)/k.

    That is the owners' mean velocity over the last period, hence k/2 steps old.
    """

    momentum: float = 0.9

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("velocity",)

    def step(self, at: Moment, out: Tensor) -> None:
        v = at.velocity
        assert v is not None
        if at.fresh:
            torch.sub(at.pulled, at.w, out=v).mul_(1 / at.period)
        v.mul_(self.momentum).add_(at.g, alpha=at.lr).add_(at.w, alpha=at.lr * at.decay)
        out.copy_(v)


@dataclass(frozen=True, kw_only=True)
class LocalAdam(LocalRule):
    """MomentumRule for owners that run AdamW, with a second moment of the rank's own gradients.

    v ← β₁·v + (1-β₁)·lr·(g/√s + wd·w), s ← β₂·s + (1-β₂)·g², and v ← v + ρ·(W - w)/k at a pull,
    or v = (w_pre - w)/k if `lagged`. Owners have √s of the mean gradient, which is smaller where
    noise is most of g, by up to √workers: `local_lr_scale` from 1 to that.
    """

    first: float = 0.9
    second: float = 0.95
    share: float = 1.0
    lagged: bool = False

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("velocity", "square")

    def step(self, at: Moment, out: Tensor) -> None:
        v, s = at.velocity, at.square
        assert v is not None and s is not None
        v.mul_(at.lr_change)
        if at.fresh and self.lagged:
            torch.sub(at.pulled, at.w, out=v).mul_(1 / at.period)
        elif at.fresh:
            v.add_(at.seen - at.w, alpha=self.share / at.period)
        s.mul_(self.second).addcmul_(at.g, at.g, value=1 - self.second)
        share = (1 - self.first) * at.lr
        v.mul_(self.first).addcdiv_(at.g, s.sqrt().add_(1e-8), value=share)
        v.add_(at.w, alpha=share * at.decay)
        out.copy_(v)


RULES: dict[str, LocalRule | None] = {
    "glu": lc.GLU(),
    "dcasgd": lc.DCASGD(),
    "plain": lc.LocalSGDRule(),
    "none": None,
    "momentum": MomentumRule(),
    "momentum-share-0": MomentumRule(share=0.0),
    "momentum-share-0.5": MomentumRule(share=0.5),
    "momentum-share-1.5": MomentumRule(share=1.5),
    "momentum-share-2": MomentumRule(share=2.0),
    "momentum-g/2": MomentumRule(local_lr_scale=0.5),
    "momentum-2g": MomentumRule(local_lr_scale=2.0),
    "momentum-0.8": MomentumRule(momentum=0.8),
    "lagged": Lagged(),
    "lagged-g/2": Lagged(local_lr_scale=0.5),
    "lagged-2g": Lagged(local_lr_scale=2.0),
    "line": Held(alpha=0.0, beta=1.0, halve=False),
    "held-0.5": Held(beta=0.5),
    "held-1": Held(beta=1.0),
    "held-1-whole": Held(beta=1.0, halve=False),
    "glu-beta-0": lc.GLU(beta=0.0),
    "glu-beta-1": lc.GLU(beta=1.0),
    "glu-alpha-1": lc.GLU(alpha=1.0),
    "glu-alpha-4": lc.GLU(alpha=4.0),
    "glu-alpha-4-beta-1": lc.GLU(alpha=4.0, beta=1.0),
    "glu-alpha-8-beta-1": lc.GLU(alpha=8.0, beta=1.0),
    "adam": LocalAdam(),
    "adam-2g": LocalAdam(local_lr_scale=2.0),
    "adam-share-0": LocalAdam(share=0.0),
    "adam-lagged": LocalAdam(lagged=True),
    "adam-lagged-2g": LocalAdam(lagged=True, local_lr_scale=2.0),
}
