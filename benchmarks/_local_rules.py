"""Local rules by name: the product's, and experiments that only this study has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import laconic as lc
from laconic.schedules import LocalRule, LocalStep


def of_the_pull(at: LocalStep) -> Tensor:
    """The velocity, made anew of what the last pull has brought."""
    assert at.velocity is not None
    if at.fresh:
        torch.sub(at.pulled, at.w, out=at.velocity).mul_(1 / at.period)
    return at.velocity


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

    def step(self, at: LocalStep, out: Tensor) -> None:
        v = of_the_pull(at)
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

    def step(self, at: LocalStep, out: Tensor) -> None:
        v = of_the_pull(at)
        v.mul_(self.momentum).add_(at.g, alpha=at.lr).add_(at.w, alpha=at.lr * at.decay)
        out.copy_(v)


@dataclass(frozen=True, kw_only=True)
class LaggedAdam(LocalRule):
    """AdamRule that takes its velocity from the pull alone, as Lagged does."""

    gain: float = 1.0

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("velocity", "square")

    def step(self, at: LocalStep, out: Tensor) -> None:
        of_the_pull(at)
        lc.AdamRule(gain=self.gain, share=0.0).step(at, out)


def _momentum(momentum: float = 0.9, share: float = 1.0, scale: float = 1.0) -> LocalRule:
    """Momentum is named, and not the optimizer's: some runs have another one, or Adam."""
    return lc.MomentumRule(momentum=momentum, share=share, local_lr_scale=scale)


# Rows are kept under names that are not here any more. "adam", "adam-2g", "adam-share-0" and
# "adam-lagged" are forms before AdamRule was the product's: without the bias correction of its
# second moment, and with a gain that also multiplied weight decay. "momentum-share-2":
# MomentumRule refuses it since.
RULES: dict[str, LocalRule | None] = {
    "glu": lc.GLU(),
    "dcasgd": lc.DCASGD(),
    "plain": lc.LocalSGDRule(),
    "none": None,
    "momentum": _momentum(),
    "momentum-share-0": _momentum(share=0.0),
    "momentum-share-0.5": _momentum(share=0.5),
    "momentum-share-1.5": _momentum(share=1.5),
    "momentum-g/2": _momentum(scale=0.5),
    "momentum-2g": _momentum(scale=2.0),
    "momentum-0.8": _momentum(momentum=0.8),
    "momentum-0.8-share-0.5": _momentum(momentum=0.8, share=0.5),
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
    "adam-gain-1": lc.AdamRule(gain=1.0),
    "adam-gain-1.5": lc.AdamRule(gain=1.5),
    "adam-gain-2": lc.AdamRule(gain=2.0),
    "adam-gain-1-share-0": lc.AdamRule(gain=1.0, share=0.0),
    "adam-gain-2-share-0.5": lc.AdamRule(gain=2.0, share=0.5),
    "adam-gain-1-lagged": LaggedAdam(),
    "adam-gain-2-lagged": LaggedAdam(gain=2.0),
}
