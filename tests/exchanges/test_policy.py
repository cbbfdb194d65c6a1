"""What is encoded by default follows what trains; rules and settings come first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import laconic as lc
from laconic.exchanges._policy import policy_for


def model(*shapes: tuple[int, ...], frozen: Iterable[int] = ()) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"p{i}", nn.Parameter(torch.zeros(shape), requires_grad=i not in frozen))
        for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    ("named", "encoded"),
    [
        pytest.param(model((100, 100), (99, 101), (10_000,)), "p0", id="large matrices alone"),
        pytest.param(model(*[(8, 768)] * 2), "p0 p1", id="small ones that are 10,000 together"),
        pytest.param(model((8, 768)), "", id="too few"),
        pytest.param(model(*[(8, 768)] * 2, (1000, 1300)), "p2", id="under 1% of what trains"),
        pytest.param(model((8, 768), (1000, 300)), "p1", id="few beside a large one"),
        pytest.param(model(*[(8, 768)] * 2, (1000, 1300), frozen=[2]), "p0 p1", id="a frozen base"),
        pytest.param(
            model(*[(8, 768)] * 2, (1000, 1300), frozen=[0]), "p2", id="frozen ones do not count"
        ),
        pytest.param(model(*[(8, 768)] * 2, (7, 73), (16, 32)), "p0 p1 p3", id="512 or more"),
        pytest.param(model(*[(6144,)] * 9), "", id="vectors"),
        pytest.param([], "", id="nothing"),
    ],
)
def test_by_default(named: list[tuple[str, nn.Parameter]], encoded: str) -> None:
    policy = policy_for(None, named)
    found = [name for name, one in named if one.requires_grad and policy(name, one)]
    assert " ".join(found) == encoded


def test_rules_come_first_and_their_parameters_do_not_count() -> None:
    named = model(*[(8, 768)] * 2)
    rules = {"p1": False}
    assert lc.Policy(rules=rules).for_parameters(named).min_numel == 10_000
    policy = lc.Policy(rules=rules).for_parameters([*named, *model((8, 768), (8, 768))[:1]])
    assert policy.min_numel == 512 and policy("p0", named[0][1]) and not policy(*named[1])


def test_a_number_and_functions_stay() -> None:
    given = lc.Policy(min_numel=7)
    assert given.for_parameters(model(*[(8, 768)] * 9)) is given

    def own(name: str, parameter: nn.Parameter) -> bool:
        return name == "p0"

    assert policy_for(own, model((8, 768))) is own


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1000"])
def test_wrong_numbers_are_refused(wrong: Any) -> None:
    with pytest.raises(lc.ConfigError, match=r"min_numel must be an integer from 0, not "):
        lc.Policy(min_numel=wrong)
