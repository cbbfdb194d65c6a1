"""Nodes of 2 × 2, 2 + 3 and 3 × 2 ranks: the mean of ranks, the same bits, fewer bytes between.

One set of processes per number of ranks, over Gloo, runs all cases; each is asserted on its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import PATIENCE_S
from ranks import run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from laconic._scratch import Scratch
from laconic.comm._context import ExchangeContext, Traffic
from laconic.exchanges import AllGather, Exchange, Hierarchical, Ring, ScatterReduce, pair
from laconic.exchanges._hierarchical import _far, _Team

NODES = {4: ((0, 1), (2, 3)), 5: ((0, 3), (1, 2, 4)), 6: ((0, 1), (2, 3), (4, 5))}
STEPS = 10
PARTS = (5000, 1, 12_000, 3000)  # parameters in the tensor
COUNT = sum(PARTS)
CODECS = {  # and the error of the mean that each may have
    "none": 1e-12,
    "fp16": 1e-5,
    "dqsg:bits=4": 0.1,
    "ecdq:error=0.05": 0.05,
    "ecdq:error=0.05,block=512": 0.05,
    "global:bits=8": 0.05,
    "global-exp:bits=8": 0.3,
    "feedback(ecdq:error=0.5)": 2.0,
}
TORCHRUN = ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
Case = Callable[[int], Any]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def new_group(*ranks: int, seconds: float = PATIENCE_S) -> dist.ProcessGroup:
    """Of all ranks, or of these; all ranks call it."""
    group = dist.new_group(ranks or None, timeout=timedelta(seconds=seconds))
    return group  # pyright: ignore[reportReturnType] (no group for other ranks)


def gradients(size: int, step: int, count: int = COUNT) -> list[Tensor]:
    """One vector a rank, half of it shared by all; ranks differ in size, so that weights matter."""
    generator = torch.Generator().manual_seed(step)
    common = torch.randn(count, generator=generator)
    return [common + (1 + i) * torch.randn(count, generator=generator) for i in range(size)]


def places(parts: tuple[int, ...] = PARTS) -> tuple[lc.Place, ...]:
    return tuple(
        lc.Place(parameter=i, start=0, numel=numel, total=numel) for i, numel in enumerate(parts)
    )


def error_of(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).square().sum() / exact.square().sum())


def mean_of(xs: list[Tensor]) -> Tensor:
    return torch.stack([x.double() for x in xs]).mean(0)


def same_everywhere(x: Tensor, group: dist.ProcessGroup) -> bool:
    words = x.contiguous().view(torch.uint8)
    every = [torch.empty_like(words) for _ in range(group.size())]
    dist.all_gather(every, words, group=group)
    return all(torch.equal(words, other) for other in every)


def one_mean(
    way: Exchange,
    text: str,
    group: dist.ProcessGroup,
    step: int = 0,
    traffic: Traffic | None = None,
) -> tuple[Tensor, Tensor]:
    """This rank's result, and the exact mean."""
    xs = gradients(group.size(), step=0)
    x = xs[group.rank()].clone()
    context = ExchangeContext(group=group, tensor=3, places=places(), traffic=traffic or Traffic())
    way.mean(x, lc.codec(text), context)
    return x, mean_of(xs)


def steps_of_every_codec(size: int) -> dict[str, Any]:
    found, group = {}, world()
    for text in CODECS:
        codec, way, space = lc.codec(text), Hierarchical(nodes=NODES[size]), Scratch()
        same, error = True, 0.0
        for step in range(STEPS):
            xs = gradients(size, step)
            if step == STEPS - 2:
                xs = [x.bfloat16() for x in xs]
            x = xs[group.rank()].clone()
            context = ExchangeContext(
                group=group, step=step, tensor=3, places=places(), scratch=space
            )
            way.mean(x, codec, context)
            same = same and same_everywhere(x, group)
            error = error_of(x, mean_of(xs))
        x = gradients(size, 99)[group.rank()]
        if group.rank() == 1:
            x[700] = torch.nan
        context = ExchangeContext(group=group, step=99, tensor=3, places=places(), scratch=space)
        way.mean(x, codec, context)
        bad = not bool(x.isfinite().all())
        found[text] = {"same": same, "error": error, "nan": bad}
    return found


def other_exchanges_between_nodes(size: int) -> dict[str, float]:
    ways = {
        "dqsg:bits=8": AllGather(),
        "global:bits=8": Ring(),
        "qsgd:bits=8": ScatterReduce(),
    }
    found = {}
    for text, inner in ways.items():
        x, exact = one_mean(Hierarchical(nodes=NODES[size], inner=inner), text, world())
        found[text] = error_of(x, exact) if same_everywhere(x, world()) else 1.0
    return found


def plain_values_and_dtypes(size: int) -> dict[str, float]:
    """`rest` beside long, short and no tensors; some owners of a short one have nothing."""
    found, group = {}, world()
    ways = {"none": None, "dqsg:bits=8": AllGather(), "qsgd:bits=8": None, "global:bits=8": None}
    for text, inner in ways.items():
        for count in (COUNT, 5, 0):
            for dtype in (torch.float32, torch.bfloat16):
                xs = [x.to(dtype) for x in gradients(size, 1, count)]
                rests = gradients(size, 2, 31)
                x, uncompressed = xs[group.rank()].clone(), rests[group.rank()].clone()
                context = ExchangeContext(group=group, places=places((count,)) if count else ())
                way = Hierarchical(nodes=NODES[size], inner=inner)
                way.mean(x, lc.codec(text), context, uncompressed)
                same = same_everywhere(x, group) and same_everywhere(uncompressed, group)
                error = error_of(uncompressed, mean_of(rests)) if same else 1.0
                found[f"{text} rest {count} {dtype}"] = error
                if count:
                    found[f"{text} x {count} {dtype}"] = error_of(x, mean_of(xs))
    return found


def bytes_sent(size: int) -> dict[str, tuple[int, int]]:
    found = {}
    for text in ("none", "dqsg:bits=4"):
        for dtype in (torch.float32, torch.bfloat16):
            x, traffic = torch.randn(4096 * 12).to(dtype), Traffic()
            context = ExchangeContext(group=world(), traffic=traffic)
            Hierarchical(nodes=NODES[size]).mean(x, lc.codec(text), context)
            found[f"{text} {dtype}"] = traffic.sent_bytes, traffic.local_bytes
    return found


def parts_draw_differently(size: int) -> dict[str, bool]:
    """Both parts of the tensor hold the same values: their errors must not be the same."""
    found = {}
    for text, inner in (("dqsg:bits=4", None), ("global:bits=8", Ring()), ("ecdq", AllGather())):
        half = gradients(size, 5, 65_536)[world().rank()]
        x = torch.cat([half, half])
        Hierarchical(nodes=NODES[size], inner=inner).mean(
            x, lc.codec(text), ExchangeContext(group=world())
        )
        pieces = x.split(16_384)
        found[text] = not any(
            torch.equal(a, b) for a in pieces[:4] for b in pieces[4:] if a is not b
        ) and not torch.equal(x[:65_536], x[65_536:])
    return found


def memory_follows_the_part(size: int) -> dict[str, bool]:
    """An owner remembers of parameters only what its part holds."""
    codec, way = lc.codec("feedback(qsgd-topk)"), Hierarchical(nodes=NODES[size])
    x = gradients(size, 0)[world().rank()].clone()
    context = ExchangeContext(group=world(), places=places())
    way.mean(x, codec, context)
    owed = context.memory.residuals.state_dict()
    kept = [owed.get(f"{i},0", torch.zeros(total)) for i, total in enumerate(PARTS)]
    used = torch.cat(kept).nonzero().flatten()
    lane = next(node.index(world().rank()) for node in NODES[size] if world().rank() in node)
    first = 10_240 * lane  # 20001 values on two lanes, in steps of 512
    inside = bool((used >= first).all() and (used < first + 10_240).all())
    return {"inside": inside and bool(len(used)) == (lane < 2)}


def degenerate_layouts(size: int) -> dict[str, bool]:
    group, traffic = world(), Traffic()
    everyone = Hierarchical(nodes=(tuple(range(size)),))
    x, exact = one_mean(everyone, "qsgd:bits=2", group, traffic=traffic)
    alone = Hierarchical(nodes=tuple((rank,) for rank in range(size)))
    y, _ = one_mean(alone, "dqsg:bits=4", group)
    z, _ = one_mean(ScatterReduce(), "dqsg:bits=4", group)
    unset, _ = one_mean(Hierarchical(), "dqsg:bits=4", group)
    return {
        "one node is a plain mean": error_of(x, exact) < 1e-12 and same_everywhere(x, group),
        "and sends nothing away": traffic.sent_bytes == 0 and traffic.local_bytes > 0,
        "one rank a node is inner alone": torch.equal(y, z),
        "as is no environment": torch.equal(unset, z),
    }


def nodes_from_the_environment(size: int) -> dict[str, bool]:
    """What torchrun sets; ranks of a node need not be neighbours, if it says which node."""
    found, rank = {}, world().rank()
    node = next(i for i, ranks in enumerate(NODES[size]) if rank in ranks)
    given, _ = one_mean(Hierarchical(nodes=NODES[size]), "dqsg:bits=4", world())
    settings = {"LOCAL_WORLD_SIZE": str(len(NODES[size][node])), "GROUP_RANK": str(node)}
    with environment(settings):
        fresh = new_group()
        x, _ = one_mean(Hierarchical(), "dqsg:bits=4", fresh)
        found["GROUP_RANK"] = torch.equal(x, given)
    if size != 5:
        with environment({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}):
            fresh = new_group()
            x, _ = one_mean(Hierarchical(), "dqsg:bits=4", fresh)
            found["LOCAL_RANK"] = torch.equal(x, given)
    return found


class environment:  # noqa: N801 (a context manager)
    """torchrun's variables, for a while."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.settings = settings

    def __enter__(self) -> None:
        for name in TORCHRUN:
            os.environ.pop(name, None)
        os.environ.update(self.settings)

    def __exit__(self, *_: object) -> None:
        for name in TORCHRUN:
            os.environ.pop(name, None)


def sub_groups(size: int) -> dict[str, bool]:
    """The last four ranks: groups that not all ranks of the world are in."""
    found = {}
    members = list(range(size - 4, size))
    group = new_group(*members)
    if world().rank() not in members:
        return found
    rank = group.rank()
    way = Hierarchical(nodes=((0, 2), (1, 3)))
    way.prepare(group)
    x, exact = one_mean(way, "none", group)
    found["given"] = error_of(x, exact) < 1e-12 and same_everywhere(x, group)
    with environment({"LOCAL_WORLD_SIZE": "9", "GROUP_RANK": str(rank // 3)}):
        y, exact = one_mean(Hierarchical(), "ecdq:error=0.02", group)
    found["environment, 3 + 1"] = error_of(y, exact) < 0.02 and same_everywhere(y, group)
    return found


def groups_are_made_once(size: int) -> dict[str, bool]:
    group = new_group(seconds=543)
    names = dist.distributed_c10d._world.pg_names
    before = len(names)
    Hierarchical(nodes=NODES[size]).prepare(group)
    made = list(names)[before:]
    one_mean(Hierarchical(nodes=NODES[size]), "dqsg:bits=4", group)
    limits = {own._get_backend(torch.device("cpu")).options._timeout for own in made}
    return {
        "two for each rank, once": len(names) == before + 2 and len(made) == 2,
        "as patient as the group": limits == {timedelta(seconds=543)},
    }


def refusals(size: int) -> dict[str, str]:
    rank, found = world().rank(), {}
    unequal = NODES[size] if rank else (tuple(range(size)),)
    attempts = {
        "too few": (Hierarchical(nodes=((0, 1), (2,))), {}),
        "different": (Hierarchical(nodes=unequal), {}),
        "only some": (Hierarchical(), {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"} if rank else {}),
    }
    for name, (way, settings) in attempts.items():
        group = new_group()
        with environment(settings):
            try:
                one_mean(way, "none", group)
                found[name] = "nothing was raised"
            except lc.ConfigError as error:
                found[name] = str(error)
    return found


def ddp_replicas_stay_equal(size: int) -> dict[str, bool]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 8)))
    way = Hierarchical(nodes=NODES[size])
    lc.compress(model, "dqsg:bits=4", exchange=way, policy=lc.Policy(min_numel=1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + world().rank()))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"equal": same_everywhere(flat, world()) and bool(flat.isfinite().all())}


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        steps_of_every_codec,
        other_exchanges_between_nodes,
        plain_values_and_dtypes,
        bytes_sent,
        parts_draw_differently,
        memory_follows_the_part,
        degenerate_layouts,
        nodes_from_the_environment,
        sub_groups,
        groups_are_made_once,
        refusals,
        ddp_replicas_stay_equal,
    )
}


def every_case(rank: int) -> dict[str, Any]:
    return {name: case(world().size()) for name, case in CASES.items()}


Ranks = Callable[[Case], list[Any]]


@pytest.fixture(scope="module", params=list(NODES), ids=lambda size: f"ranks{size}")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What a case found, on every rank."""
    size = request.param
    answers = run([every_case], size, tmp_path_factory.mktemp("nodes"))
    return lambda case: [answers[rank, "every_case"][case.__name__] for rank in range(size)]


@pytest.mark.parametrize("text", list(CODECS))
def test_all_ranks_hold_the_same_bits_near_the_mean(text: str, ranks: Ranks) -> None:
    for found in ranks(steps_of_every_codec):
        assert found[text]["same"] and found[text]["nan"]
        assert found[text]["error"] <= CODECS[text]


def test_any_exchange_may_be_between_nodes(ranks: Ranks) -> None:
    for found in ranks(other_exchanges_between_nodes):
        assert all(error < 2e-3 for error in found.values()), found


def test_plain_values_travel_along(ranks: Ranks) -> None:
    for found in ranks(plain_values_and_dtypes):
        assert all(error < 1e-13 for name, error in found.items() if "rest" in name), found
        assert all(error < 2e-3 for error in found.values()), found
        assert found[f"none x {COUNT} torch.float32"] < 1e-12


@pytest.mark.parametrize("case", [
    parts_draw_differently,
    memory_follows_the_part,
    degenerate_layouts,
    nodes_from_the_environment,
    sub_groups,
    groups_are_made_once,
    ddp_replicas_stay_equal,
], ids=lambda case: case.__name__)  # fmt: skip
def test_what_should_hold(case: Case, ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(case)):
        assert all(found.values()), f"rank {rank}: {found}"


def test_ranks_that_disagree_all_say_so(ranks: Ranks) -> None:
    for found in ranks(refusals):
        assert "nodes hold 3 ranks, but the group has" in found["too few"]
        assert "different nodes" in found["different"]
        assert "not on ranks [0]; start all ranks with torchrun" in found["only some"]


def test_bytes_are_those_of_the_equations(ranks: Ranks) -> None:
    every = ranks(bytes_sent)
    values, nodes = 4096 * 12, len(NODES[len(every)])
    for found in every if len(every) != 5 else ():  # whose nodes are not alike
        for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
            apart, inside = found[f"none {dtype}"]
            # nodes of two: half of the tensor each way inside, and half of it between nodes
            frames = 2 * 16  # of a message each way
            assert inside == values * width + frames
            frames = 2 * (nodes - 1) * 16
            assert apart == 2 * (nodes - 1) / nodes * values / 2 * width + frames
            apart, inside = found[f"dqsg:bits=4 {dtype}"]
            assert inside == values * width + 2 * 16
            wire = lc.codec("dqsg:bits=4").nbytes(values // 2 // nodes)
            assert apart == 2 * (nodes - 1) * (16 + wire + -wire % 16)


@pytest.mark.parametrize(
    "nodes", [(), ((),), ((0, 1), (1, 2)), ((0, 1), (3,)), ((0, 1), ()), 4, ((0, "1"),), ((-1, 0),)]
)
def test_nodes_that_are_no_partition_are_refused(nodes: Any) -> None:
    with pytest.raises(lc.ConfigError, match="each rank of the group once"):
        Hierarchical(nodes=nodes)


def test_settings_are_checked_and_named() -> None:
    assert str(pair("dqsg:bits=4@hierarchical")[1]) == "hierarchical"
    way = Hierarchical(nodes=((3, 2), (1, 0)), inner=AllGather())
    assert str(way) == "hierarchical:nodes=((0,1),(2,3)),inner=allgather"
    assert way == Hierarchical(nodes=((0, 1), (2, 3)), inner=AllGather())
    with pytest.raises(lc.ConfigError, match="flat exchange"):
        Hierarchical(inner=Hierarchical())
    assert str(pair("ndqsg@hierarchical")[0]) == str(lc.codec("ndqsg"))  # nested between nodes
    with pytest.raises(lc.ConfigError, match="scatter-reduce"):
        pair("dqsg:bits=4", Hierarchical(inner=Ring()))


def test_parts_have_draws_of_their_own() -> None:
    """However many chunks an exchange between nodes makes (ring: several for each rank)."""
    group: Any = None
    context, parts = ExchangeContext(group=group, tensor=2), torch.zeros(3000).split(1000)
    lanes = [_far(context, _Team(nodes=2, lanes=3), group, lane, parts) for lane in range(3)]
    keys = {lane.key(rank, chunk) for lane in lanes for rank in range(2) for chunk in range(500)}
    assert len(keys) == 3000
    following = ExchangeContext(group=group, tensor=3)
    assert not keys & {following.key(rank, chunk) for rank in range(2) for chunk in range(500)}


def test_a_wrong_environment_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.delenv("GROUP_RANK", raising=False)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        for name, value in (("GROUP_RANK", None), ("LOCAL_RANK", "1"), ("GROUP_RANK", "first")):
            if value:
                monkeypatch.setenv(name, value)
            with pytest.raises(lc.ConfigError, match="on ranks .0. LOCAL_WORLD_SIZE is set"):
                Hierarchical().prepare(world())
        monkeypatch.setenv("GROUP_RANK", "7")
        x, exact = one_mean(Hierarchical(), "none", world())
        assert torch.equal(x, exact.float())
    finally:
        dist.destroy_process_group()
