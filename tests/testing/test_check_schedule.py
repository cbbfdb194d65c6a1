"""check_schedule passes for ours, and finds what is wrong with broken ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import nn

import laconic as lc
from laconic.testing import check_schedule
from laconic.testing._subject import RuleError

EXAMPLES = Path(__file__).parents[2] / "examples"


class Broken(lc.LocalSGD):
    """Local SGD in which one thing is wrong."""

    how = ""

    def step(self, closure: Any = None) -> Any:
        if self.how == "learns nothing":
            for one in self.param_groups[0]["params"]:
                one.grad.zero_()
        return None if self.how == "still" else super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        if self.how == "forgets":
            found["optimizer"]["state"] = {}
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        if state_dict or self.how != "anything":
            super().load_state_dict(state_dict)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        if self.how == "own":
            yield
            return
        with super().global_weights():
            yield
        if self.how == "lost":
            for one in self.param_groups[0]["params"]:
                one.data.add_(1.0)

    @contextmanager
    def latest_weights(self) -> Iterator[Any]:
        if self.how == "stale":
            yield torch.distributed.get_rank()
            return
        with super().latest_weights() as old:
            yield None if self.how == "ageless" else old


def local(model: nn.Module, how: str = "", **settings: Any) -> lc.LocalSGD:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    made = Broken(optimizer, model, **{"period": 3, "codec": "dqsg:bits=8", **settings})
    made.how = how
    return made


def encoded(name: str, parameter: nn.Parameter) -> bool:
    """A policy: the model is smaller than what is encoded by itself."""
    return True


LOCAL: dict[str, dict[str, Any]] = {
    "local": {},
    "post-local": {"warmup_steps": 5},
    "diloco": {"outer": lc.Nesterov(lr=0.7, momentum=0.5)},
    "overlap": {"overlap": True},
    "feedback": {"codec": "feedback(qsgd:bits=2)", "policy": encoded},
    "ecdq": {"codec": "ecdq:error=0.05", "policy": encoded},
}


def ssd(model: nn.Module) -> lc.SSD:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return lc.SSD(optimizer, model, period=2, warmup_steps=2)


def lacking(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


MAKERS = {"ssd": ssd, **{name: partial(local, **one) for name, one in LOCAL.items()}}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_ours_keep_every_rule(make: Any) -> None:
    ranks.processes()  # those that have imported torch
    check_schedule(make, ranks=(1, 2))


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ("still", "Broken .* stats.. counts steps"),
        ("learns nothing", "the loss smaller"),
        ("forgets", "bit for bit"),
        ("anything", "load_state_dict.*raised nothing"),
        ("own", "same bits on all ranks"),
        ("lost", "its own weights again"),
        ("stale", "equal on all ranks that look"),
        ("ageless", "how many steps old"),
    ],
)
def test_what_is_wrong_is_found(how: str, rule: str) -> None:
    ranks.processes()
    with pytest.raises(RuleError, match=rule):
        check_schedule(partial(local, how=how), ranks=(2,))


def test_what_a_schedule_lacks_is_named() -> None:
    ranks.processes()
    with pytest.raises(RuleError, match=r"lacks .*wait"):
        check_schedule(lacking, ranks=(1,))


def test_the_example_keeps_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    ranks.processes()
    check_schedule(import_module("own_schedule").Periodic, ranks=(1, 2))
