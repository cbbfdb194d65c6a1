"""check_exchange passes for ours, and finds what is wrong with broken ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

import laconic as lc
from laconic.exchanges import Traffic
from laconic.planner import Paper, machine, paper_workload, plan
from laconic.testing import check_exchange
from laconic.testing._subject import RuleError

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW = ("none", "dqsg:bits=4")


@dataclass(frozen=True, kw_only=True)
class Broken(lc.AllGather):
    """An all-gather in which one thing is wrong."""

    name: ClassVar[str] = "broken"

    how: str = ""

    def check(self, codec: lc.Codec) -> None:
        if self.how == "refuses":
            raise lc.ConfigError("no")

    def mean(
        self,
        x: Tensor,
        codec: lc.Codec,
        context: lc.ExchangeContext,
        uncompressed: Tensor | None = None,
    ) -> None:
        how = self.how
        if how == "draws":
            context = replace(context, step=0)
        if how == "uncounted":
            context = replace(context, traffic=Traffic())
        super().mean(x, codec, context, None if how == "plain" else uncompressed)
        if how == "sum":
            x.mul_(context.size)
        if how == "bits" and x.numel():
            x[0] += 1e-3 * context.rank
        if how == "nan":
            x.nan_to_num_()
        if how == "empty" and not x.numel():
            raise IndexError("chunk 0")

    def cost(self, load: Any, cluster: Any) -> list[Any]:
        return [] if self.how == "cost" else super().cost(load, cluster)


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ("draws", "errors average out"),
        ("uncounted", "bytes are counted"),
        ("plain", "plain values become their mean"),
        ("sum", "x becomes the mean"),
        ("bits", "the same bits"),
        ("nan", "not finite"),
        ("empty", "IndexError: chunk 0"),
        ("cost", "cost predicts the bytes"),
        ("refuses", "is refused names it"),
    ],
)
def test_what_is_wrong_is_found(how: str, rule: str) -> None:
    ranks.processes()  # those that have imported torch
    with pytest.raises(RuleError, match=rule):
        check_exchange(Broken(how=how), codecs=FEW, ranks=(2,))


OURS = {
    "scatter-reduce": FEW,
    "hierarchical:inner=allgather": FEW,
    "nested": ("ndqsg",),
    "allreduce": ("none", "global:bits=8"),
    "ring:pieces=2": ("global:bits=4",),
    "tree": ("global-exp:bits=8",),
    "sparse": ("global:norm=l2,coder=elias",),
}


@pytest.mark.parametrize("name", OURS)
def test_ours_keep_every_rule(name: str) -> None:
    ranks.processes()
    check_exchange(name, codecs=OURS[name], ranks=(1, 3))


def test_what_processes_cannot_be_given_is_told() -> None:
    kind = dataclass(frozen=True, kw_only=True)(type("Local", (Broken,), {}))
    with pytest.raises(RuleError, match="top of a module"):
        check_exchange(kind(), codecs=FEW)


def on_all_ranks(rank: int) -> str:
    check_exchange("ring", codecs=("global:bits=4",))
    assert dist.get_world_size() == 3
    return "kept"


def test_with_the_group_that_there_is(tmp_path: Path) -> None:
    answers = ranks.run([on_all_ranks], 3, tmp_path)
    assert {answers[rank, "on_all_ranks"] for rank in range(3)} == {"kept"}


def test_no_values_pass_through_every_exchange(tmp_path: Path) -> None:
    """All-gather sent a wire for them, for which there was no room."""
    answers = ranks.run([empty], 2, tmp_path)
    assert answers[0, "empty"] == answers[1, "empty"] == 0


def empty(rank: int) -> int:
    group, x = dist.group.WORLD, torch.empty(0)
    assert isinstance(group, dist.ProcessGroup)
    lc.AllGather().mean(x, lc.DQSG(), lc.ExchangeContext(group=group))
    return x.numel()


def test_the_example_keeps_every_rule_and_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import_module("own_exchange")
    ranks.processes()
    check_exchange("broadcast", codecs=FEW, ranks=(1, 2))
    paper = Paper(machine=machine("home"), workers=4)
    found = plan(paper.cluster(), paper_workload(10**7, 0.1), error=1.0)
    assert "dqsg:bits=4@broadcast" in {one.name for one in found.choices}
