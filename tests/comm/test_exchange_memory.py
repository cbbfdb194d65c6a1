"""What exchanges remember: one state for all of it, and states of earlier versions."""

from __future__ import annotations

import pytest
import torch

import laconic as lc
from laconic.comm._context import ExchangeMemory
from laconic.exchanges._budget import ledger_of
from laconic.integrations._fsdp import _newer

OWED = {"3,0": torch.ones(4), "5,1": torch.zeros(2)}


def filled() -> ExchangeMemory:
    memory = ExchangeMemory()
    memory.residuals.load_state_dict(OWED)
    ledger_of(memory).latest([3])  # makes a row for parameter 3
    memory.kept["nested", 7] = lc.Residuals()  # anything that has a state_dict
    return memory


def same(found: dict, wanted: dict) -> bool:
    return set(found) == set(wanted) and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_state_holds_everything_and_resumes() -> None:
    state = filled().state_dict()
    assert set(state) == {"residuals", "budget", "exchange memory"}
    again = ExchangeMemory()
    again.load_state_dict({"step": 3, **state})  # among other entries
    assert same(again.residuals.state_dict(), OWED)
    assert again.state_dict()["budget"]["parameters"] == [3]  # before it is used
    assert ledger_of(again).latest([3])[0].shape == (1,)  # and afterwards
    assert again.state_dict()["exchange memory"] == {("nested", 7): {}}
    again.reset()
    assert again.state_dict() == {"residuals": {}, "budget": None, "exchange memory": {}}


def test_loading_forgets_what_was_known() -> None:
    memory = filled()
    memory.load_state_dict({"residuals": {}})
    assert memory.state_dict() == {"residuals": {}, "budget": None, "exchange memory": {}}


@pytest.mark.parametrize(
    "memory",
    [OWED, {"": OWED}, {"": {"3,0": OWED["3,0"]}, "dqsg": {"5,1": OWED["5,1"]}}],
    ids=["one codec's", "a handle's", "several codecs'"],
)
def test_residuals_of_states_in_which_codecs_kept_them_are_read(memory: dict) -> None:
    again = ExchangeMemory()
    again.load_state_dict({"memory": memory, "budget": None, "exchange memory": {}})
    assert same(again.residuals.state_dict(), OWED)


@pytest.mark.parametrize("memory", [None, {}])
def test_states_of_codecs_without_memory_are_read(memory: dict | None) -> None:
    again = filled()
    again.load_state_dict({"memory": memory})
    assert again.state_dict()["residuals"] == {}


def test_fsdp_states_in_which_codecs_kept_residuals_are_read() -> None:
    budget = filled().state_dict()["budget"]
    found = _newer({"memory": {"shards ": OWED, "replicas ": {}}, "budget": [budget, None]})
    for name, owed in (("shards", OWED), ("replicas", {})):
        again = ExchangeMemory()
        again.load_state_dict(found[name])
        assert same(again.residuals.state_dict(), owed)
    assert found["shards"]["budget"] is budget
    assert _newer({"memory": {}})["replicas"] == {"memory": {}, "budget": None}
