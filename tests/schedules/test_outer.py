"""Outer optimizers: names for settings, any torch optimizer, and what cannot be one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic as lc
from laconic.schedules._outer import outer_optimizer, outer_step

ADAM = partial(torch.optim.Adam, lr=0.1)


def followed(outer: Any, steps: int = 20) -> Tensor:
    """The common weights after steps with other mean progress each time."""
    weights = torch.linspace(-1, 1, 50)
    optimizer = outer_optimizer(outer, weights)
    for number in range(steps):
        g = torch.randn(50, generator=torch.Generator().manual_seed(number))
        outer_step(optimizer, weights, g)
    return weights


@pytest.mark.parametrize(
    ("name", "factory"),
    [
        (
            lc.Nesterov(lr=0.7, momentum=0.9),
            partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
        ),
        (lc.HeavyBall(lr=0.3, momentum=0.5), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5)),
        (None, lambda p: torch.optim.SGD(p, lr=1.0)),
    ],
    ids=["nesterov", "heavy ball", "averaging"],
)
def test_names_are_torchs_sgd_but_for_rounding(name: Any, factory: Any) -> None:
    assert torch.allclose(followed(name), followed(factory), rtol=1e-6, atol=1e-5)


def test_any_torch_optimizer_steps_the_flat_weights() -> None:
    own = nn.Parameter(torch.linspace(-1, 1, 50))
    plain = ADAM([own])
    for number in range(20):
        own.grad = torch.randn(50, generator=torch.Generator().manual_seed(number))
        plain.step()
    assert torch.equal(followed(ADAM), own.detach())


@pytest.mark.parametrize(
    ("outer", "advice"),
    [
        ("nesterov", r"'nesterov': outer=functools.partial\(torch.optim.SGD"),
        (
            torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=0.25),
            r"parameters of its own.*functools.partial\(torch.optim.Adam, lr=0.25\)",
        ),
        (lambda p: 3, r"returned 3, .*functools.partial"),
        (
            lambda p: torch.optim.SGD(nn.Linear(2, 2).parameters()),
            r"SGD of other parameters .*functools.partial\(torch.optim.SGD",
        ),
        (torch.optim.LBFGS, r"LBFGS cannot be .* no closure"),
        (torch.optim.SparseAdam, r"SparseAdam cannot be .* dense gradient"),
        (partial(torch.optim.SGD, lr=-1.0), r"Invalid learning rate: -1.0; outer="),
        (lambda: None, "takes 0 positional arguments"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_an_outer_optimizer(outer: Any, advice: str) -> None:
    with pytest.raises(lc.ConfigError, match=advice):
        outer_optimizer(outer, torch.zeros(4))


@pytest.mark.parametrize("kind", [lc.Nesterov, lc.HeavyBall])
@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.0}, {"lr": "1"}, {"lr": float("inf")}, {"momentum": 1.0}, {"momentum": -1}],
)
def test_outer_settings(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(lc.ConfigError, match=kind.__name__):
        kind(**settings)
