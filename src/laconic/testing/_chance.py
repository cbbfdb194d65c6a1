"""Statistical rules: means and variances, with limits that a correct codec passes.

Keys are fixed, so a check passes always or never. The limits are such that a correct codec with
ideal draws would fail one of these tests once in a million times.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic._key import Key
from laconic.testing._subject import Subject, broken

_T = math.log(1e6)
_SIGMAS = math.sqrt(2 * _T) + 0.7  # of a normal variable; the rest is for tails of a finite sum
_ROUNDING = 2.0**-21  # of a value: what fp32 may add to a mean
_SLACK = 1.001  # of a bound: draws have finitely many bits


def vectors(subject: Subject, size: int = 600) -> dict[str, Tensor]:
    """What gradients look like, and what is hard."""
    x = subject.gaussian(size)
    spike = torch.zeros_like(x)
    spike[7] = 3.0
    return {
        "Gaussian values": x,
        "values with heavy tails": x / (subject.gaussian(size, seed=1).abs() + 0.05),
        "mostly zeros": x * (subject.gaussian(size, seed=2) > 1.3),
        "equal values": torch.full_like(x, 0.37),
        "one value among zeros": spike,
    }


def unbiased(subject: Subject) -> None:
    """The mean of what is decoded, over keys, is what was encoded.

    With e_k the error of draw k of n, the products e_k·e_l of different draws have mean ‖bias‖².
    Their mean is at most (2√t + 2t)·√tr(Σ²)/n for an unbiased codec, but for e^-t of the time
    (Laurent and Massart 2000, Σ the covariance of e). Along x, sign(x) and (1, .., 1), where codecs
    shrink or drift, means are judged by their standard error.
    """
    own = subject.fresh()
    if not own.unbiased:
        return
    for label, x in vectors(subject).items():
        errors = _errors(subject, x)
        n = errors.shape[0]
        gram = errors @ errors.T
        pairs = gram[~torch.eye(n, dtype=torch.bool, device=gram.device)]
        limit = (2 * math.sqrt(_T) + 2 * _T) * float(pairs.square().mean().sqrt()) / n
        limit += float((_ROUNDING * x.double()).square().sum())
        bias = float(pairs.mean())
        if bias > limit:
            size = math.sqrt(bias) / float(x.double().norm())
            _biased(subject, f"{label} come back wrong by {size:.1%} on average over {n} keys")
        ones = torch.ones_like(x)
        for way, along in {"x": x, "its signs": x.sign(), "(1, .., 1)": ones}.items():
            direction = along.double() / along.double().norm()
            parts = errors @ direction
            spread = float(parts.std()) / math.sqrt(n)
            room = _SIGMAS * spread + _ROUNDING * float(x.double().norm())
            if abs(float(parts.mean())) > room:
                size = float(parts.mean()) / float(x.double().norm())
                _biased(subject, f"{label}, along {way}, are off by {size:+.2%} over {n} keys")


def _biased(subject: Subject, what: str) -> None:
    broken(
        subject.fresh(),
        "a codec that says unbiased=True has the input as its mean over keys",
        what,
        "Round up with the probability of the fraction, floor(v + uniform(key, ..)), "
        "not to nearest, and let no other choice depend on the draw; or say unbiased=False",
    )


def variance(subject: Subject) -> None:
    """E‖decoded - x‖²/‖x‖² is within variance_bound."""
    own = subject.fresh()
    for size in (1, 30, 600):
        bound = own.variance_bound(size)
        if bound is None:
            continue
        for label, x in vectors(subject, max(size, 8)).items():
            x = x[-size:] if size > 1 else x[:1] + 1.0
            power = float(x.double().square().sum())
            if not power:
                continue
            ratios = _errors(subject, x).square().sum(1) / power
            low = float(ratios.mean()) - _SIGMAS * float(ratios.std()) / math.sqrt(len(ratios))
            if low > _SLACK * bound + _ROUNDING:
                broken(
                    own,
                    "E‖decoded - x‖²/‖x‖² is at most variance_bound",
                    f"{label}, {size} of them, have {float(ratios.mean()):.4g} where "
                    f"variance_bound({size}) is {bound:.4g}",
                    "It is to hold for all inputs, the worst too; return None if you know no bound",
                )


def _errors(subject: Subject, x: Tensor) -> Tensor:
    """A row for each key, in fp64."""
    own = subject.fresh()
    rows = []
    for step in range(subject.draws):
        rows.append(subject.round_trip(x, Key(seed=5, step=step), own).double() - x.double())
    return torch.stack(rows)
