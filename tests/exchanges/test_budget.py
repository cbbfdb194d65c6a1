"""error= is a promise: the mean's relative squared error, of each parameter, at every step.

Ranks are threads whose groups pass tensors through memory; one test runs DDP over Gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_cuda_ranks import host_never_waits, needs_cuda
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from benchmarks._gradients import KINDS, gradients
from benchmarks._ranks import World, on_all
from laconic.comm._context import ExchangeContext
from laconic.comm._transport import no_values
from laconic.exchanges._budget import (
    LEAST,
    LIMIT,
    MOST,
    Ledger,
    Spending,
    typical_shares,
)
from laconic.exchanges._error_report import budget_report, kappa_of
from laconic.exchanges._scatter_reduce import scatter_in_budget

E = 0.08
MEAN, ONCE = 1.1, 3.0  # of the budget: what draws may have on average, and at a single step
SMALL = tuple(kind for kind in KINDS if kind != "embedding")
SOME = ("dense", "outlier", "cancelling", "changing")


def mean_of(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.double() for x in xs]).mean(0)


def errors(x: Tensor, xs: Sequence[Tensor], parts: Sequence[int]) -> list[float]:
    """Of each parameter, against the exact mean; 0 where all is 0."""
    exact, tiny = mean_of(xs), torch.finfo(torch.float64).tiny
    return [
        float((a.double() - b).square().sum() / b.square().sum().clamp(min=tiny))
        for a, b in zip(x.split(list(parts)), exact.split(list(parts)), strict=True)
    ]


def gaussian(size: int, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator) for _ in range(size)]


CASES = [
    ("ecdq:error=0.08", 3, KINDS),
    ("ecdq:error=0.08,coder=rans", 2, SMALL),
    ("ecdq:error=0.08,coder=elias,subtract=never", 2, SOME),
    ("ecdq:error=0.08,subtract=always", 5, SOME),
    ("ecdq:error=0.5", 8, SOME),
    ("rotate(ecdq:error=0.08)", 3, SOME),
    ("ecdq:error=0.08@allgather", 2, SMALL),
    ("rotate(ecdq:error=0.08)@allgather", 3, SOME),
    ("ecdq:error=0.08@hierarchical", 4, SOME),
]


@pytest.mark.parametrize(("spec", "size", "kinds"), CASES, ids=lambda case: str(case)[:40])
def test_the_budget_holds_at_every_step(spec: str, size: int, kinds: Sequence[str]) -> None:
    """With evidence of the steps before, and without: gradients change, cancel, are sparse."""
    budget = lc.codec(spec.partition("@")[0]).budget
    assert budget is not None
    nodes = ((0, 1), (2, 3)) if "hierarchical" in spec else ()
    for kind in kinds:
        made: list[float] = []
        steps = 4 if kind == "embedding" else 6
        with World(spec, size, nodes) as world:
            for step in range(steps):
                xs = [x.reshape(-1) for x in gradients(kind, size, step)]
                parts = (2 * xs[0].numel() // 3, xs[0].numel() - 2 * xs[0].numel() // 3)
                made += errors(world.mean(xs, parts, step), xs, parts)
            found = budget_report(world.memories[0])
        assert max(made) <= ONCE * budget, kind
        assert sum(made) / len(made) <= MEAN * budget, kind
        assert found is not None and found.budget == budget
        assert found.largest <= LIMIT * budget, kind  # in expectation, at every single step
        if not nodes:  # where a rank knows of its own lane alone
            assert found.mean == pytest.approx(sum(made) / len(made), rel=0.25), kind


def test_gradients_that_cancel_keep_the_budget_from_the_first_step_on() -> None:
    """κ far below 1/n: nothing averages away, and the first encodings must be much finer."""
    sent, made = [], []
    with World("ecdq:error=0.08", 4) as world:
        for step in range(5):
            xs = gradients("cancelling", 4, step)
            before = world.sent
            made += errors(world.mean(xs, [xs[0].numel()], step), xs, [xs[0].numel()])
            sent.append(world.sent - before)
        found, kappa = budget_report(world.memories[0]), kappa_of(world.memories[0])
    assert max(made) < 1.3 * E
    assert found is not None and found.fallbacks <= 2  # then they are encoded finely
    assert max(sent[2:]) < sent[0] / 3
    assert kappa is not None and kappa == pytest.approx(1e-4, rel=0.5)


@pytest.mark.parametrize("spec", ["ecdq:error=0.08", "ecdq:error=0.08@allgather"])
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-21, 1e21, 1e36])
def test_the_budget_knows_no_units(spec: str, scale: float) -> None:
    """Squares of such gradients leave the range of fp32; whether they cancel must be seen."""
    with World(spec, 3) as world:
        for step in range(2):
            for kind in ("cancelling", "dense"):
                xs = [x.mul(scale) for x in gradients(kind, 3, step)]
                made = errors(world.mean(xs, [xs[0].numel()], 2 * step), xs, [xs[0].numel()])
                assert max(made) < 1.3 * E
        found = budget_report(world.memories[0])
    assert found is not None and found.fallbacks
    assert found.parameters[0].steps == 4
    assert found.largest <= LIMIT * E


def test_gradients_may_become_independent_from_one_step_to_the_next() -> None:
    """What was known of equal gradients is no licence for the first different ones."""
    made, sent, kappas = [], [], []
    with World("ecdq:error=0.08", 8) as world:
        for step in range(14):
            xs = gaussian(8, 8000, step) if step in (7, 8, 9, 13) else gaussian(1, 8000, step) * 8
            before = world.sent
            made += errors(world.mean(xs, [8000], step), xs, [8000])
            sent.append(world.sent - before)
            kappas.append(kappa_of(world.memories[0]))
    assert max(made) < 1.3 * E
    assert sent[6] < sent[0]  # evidence saves bytes
    assert kappas[6] == pytest.approx(1, abs=0.05) and kappas[8] == pytest.approx(1 / 8, rel=0.1)


def test_parameters_that_share_a_tensor_have_budgets_of_their_own() -> None:
    """One cancels, one does not: only the first is sent again, at the bytes of a plain mean."""
    n, parts, sent = 4, (6000, 20_000), []
    cancelled = [x[:6000] for x in gradients("cancelling", n, 0)]
    ordinary = gaussian(n, 20_000, 1)
    for first in (gaussian(n, 6000, 2), cancelled):
        xs = [torch.cat(pieces) for pieces in zip(first, ordinary, strict=True)]
        with World("ecdq:error=0.08", n) as world:
            made = errors(world.mean(xs, parts, 0), xs, parts)
            sent.append(world.sent)
            found = budget_report(world.memories[0])
    assert made[0] < 1e-8 and 0.5 * E < made[1] < 1.3 * E
    assert found is not None and [row.fallbacks for row in found.parameters] == [1, 0]
    assert found.parameters[0].largest == 0 and found.parameters[1].largest > 0
    ring = 2 * (n - 1) / n * 4 * 6000
    assert 0.95 * ring < sent[1] - sent[0] < 1.2 * ring  # its owner encodes it finely, in vain


def test_bf16_gradients_fall_back_to_their_own_mean() -> None:
    xs = [x.bfloat16() for x in gradients("cancelling", 3, 0)]
    with World("ecdq:error=0.08", 3) as world:
        found = world.mean(xs, [xs[0].numel()], 0)
    torch.testing.assert_close(found, mean_of(xs).bfloat16())


@pytest.mark.parametrize("spec", ["ecdq:error=0.08", "ecdq:error=0.08@allgather"])
def test_an_error_makes_no_half_infinite(spec: str) -> None:
    """Near the largest half, as where GradScaler has just raised its scale."""
    xs = [(65_000 * (2 * torch.rand(9000) - 1)).half()] * 2
    with World(spec, 2) as world:
        found = world.mean(xs, [9000], 0)
        assert found.isfinite().all() and errors(found, xs, [9000])[0] < 1.3 * E
        xs[1] = xs[1].clone().index_fill_(0, torch.tensor([5]), torch.inf)
        assert not world.mean(xs, [9000], 1).isfinite().all()


def test_a_resumed_run_ends_at_the_same_bits() -> None:
    def run(world: World, first: int, last: int) -> Tensor:
        steps = [
            world.mean(gradients("dense", 3, s), (30_000, 10_000), s) for s in range(first, last)
        ]
        return torch.stack(steps)

    spec = "ecdq:error=0.08"
    with World(spec, 3) as world:
        run(world, 0, 4)
        states = [memory.state_dict() for memory in world.memories]
        whole = run(world, 4, 7)
    resumed = [lc.ExchangeMemory() for _ in states]
    for memory, state in zip(resumed, states, strict=True):
        memory.load_state_dict(state)
    with World(spec, 3, memories=resumed) as world:
        assert torch.equal(run(world, 4, 7), whole)
        assert all(
            torch.equal(a["budget"]["rows"], b["budget"]["rows"]) for a, b in _pairs(world.memories)
        )
    with World(spec, 3) as world:  # it is the evidence that makes it so
        assert not torch.equal(run(world, 4, 7), whole)


def _pairs(memories: list[lc.ExchangeMemory]) -> list[tuple[Any, Any]]:
    states = [memory.state_dict() for memory in memories]
    return list(pairwise(states))


def test_what_is_not_finite_is_not_sent_again() -> None:
    with World("ecdq:error=0.08", 3) as world:
        for step in range(4):
            xs = gaussian(3, 9000, step)
            if step == 2:
                xs[1][700] = torch.inf
            x = world.mean(xs, (5000, 4000), step)
            assert x[:5000].isfinite().all() == (step != 2) and x[5000:].isfinite().all()
            if step != 2:
                assert max(errors(x, xs, (5000, 4000))) < 1.3 * E
        found = budget_report(world.memories[0])
    assert found is not None and found.fallbacks == 0
    assert [row.steps for row in found.parameters] == [3, 4]


def test_a_ceiling_of_bits_is_no_promise() -> None:
    """max_bits comes first: who sets it takes the error that it makes."""
    with World("ecdq:error=0.001,max_bits=2", 3) as world:
        for step in range(2):
            xs = gaussian(3, 9000, step)
            assert errors(world.mean(xs, [9000], step), xs, [9000])[0] > 0.01
        found = budget_report(world.memories[0])
    assert found is not None and found.fallbacks == 0 and found.mean > 0.01


def test_codecs_without_a_budget_keep_no_account() -> None:
    for spec in ("dqsg:bits=4", "dqsg:bits=4@allgather", "ecdq:step=1.0"):
        with World(spec, 3) as world:
            world.mean(gaussian(3, 9000, 0), [9000], 0)
            assert [one.kept for one in world.memories] == [{}, {}, {}]
            assert kappa_of(world.memories[0]) is None and budget_report(world.memories[0]) is None


def test_a_tensor_without_places_has_a_budget_too() -> None:
    with World("ecdq:error=0.08", 4) as world:
        for step in range(3):
            xs = gradients("cancelling", 4, step)
            assert errors(world.mean(xs, (), step), xs, [xs[0].numel()])[0] < 1.3 * E


@pytest.mark.parametrize("kind", SOME)
def test_a_reduce_scatter_keeps_its_budget(kind: str) -> None:
    """One encoding, no mean that goes around: owners end with their chunks."""
    n, made = 3, []
    with World("ecdq:error=0.08", n) as world:
        for step in range(5):
            xs = gradients(kind, n, step)
            parts = (25_000, xs[0].numel() - 25_000)
            edges = [0, 12_000, 30_000, xs[0].numel()]  # of ranks' shards
            own = [torch.empty(b - a) for a, b in pairwise(edges)]
            calls = world.calls(parts, step)
            work = [
                partial(_reduce, x, edges, world.codec, context, out)
                for x, context, out in zip(xs, calls, own, strict=True)
            ]
            on_all(world.switches, work)
            made += errors(torch.cat(own), xs, parts)
        found = budget_report(world.memories[0])
    assert max(made) <= ONCE * E and sum(made) / len(made) <= MEAN * E
    assert found is not None and found.largest <= LIMIT * E
    assert found.mean == pytest.approx(sum(made) / len(made), rel=0.25)
    assert (found.fallbacks > 0) == (kind in ("cancelling", "changing"))


def _reduce(
    x: Tensor, edges: list[int], codec: lc.Codec, context: ExchangeContext, out: Tensor
) -> None:
    bounds = list(pairwise(edges))
    scatter_in_budget(
        [x[a:b] for a, b in bounds],
        codec,
        context,
        out,
        places=[context.inside(a, b) for a, b in bounds],
        uncompressed=[no_values(x)] * len(bounds),
        uncompressed_out=no_values(x),
    )


@needs_cuda
def test_shares_that_only_a_device_knows_are_those_of_the_host() -> None:
    codec, x = lc.codec("ecdq:error=0.08"), torch.randn(40_000, device="cuda")
    shares = torch.tensor([0.25, 2.0], dtype=torch.float64)
    spent = [torch.empty(2, device="cuda") for _ in range(2)]
    said: Any = {"key": lc.Key(step=3), "segments": [30_000, 10_000]}
    wires = [codec.encode(x, **said, shares=shares.tolist(), spent=spent[0])]
    own, room = shares.cuda(), torch.empty_like(wires[0].buffer)
    codec.encode(x, **said, shares=own, spent=spent[1], out=room)
    with host_never_waits():
        wires.append(codec.encode(x, **said, shares=own, spent=spent[1], out=room))
    assert torch.equal(wires[0].data, wires[1].data) and torch.equal(*spent)
    with pytest.raises(ValueError, match="float64"):
        codec.encode(x, **said, shares=own.float())


@needs_cuda
@pytest.mark.parametrize("spec", ["ecdq:error=0.08", "ecdq:error=0.08@allgather"])
def test_the_budget_holds_on_a_gpu(spec: str) -> None:
    made: list[float] = []
    for kind in ("dense", "cancelling"):
        with World(spec, 3) as world:
            for step in range(4):
                xs = [x.cuda() for x in gradients(kind, 3, step)]
                parts = (25_000, xs[0].numel() - 25_000)
                made += errors(world.mean(xs, parts, step), xs, parts)
            found = budget_report(world.memories[0])
        assert found is not None and found.largest <= LIMIT * E
    assert max(made) <= 1.3 * E


# what a ledger tells


def seen(ledger: Ledger, step: int, demand: float, broken: bool = False) -> None:
    one = torch.ones(1).double().numpy()
    ledger.record(
        [0],
        step,
        Spending(
            budget=E,
            demand=demand * one,
            kappa=demand * one / 4,
            error=E * one,
            broken=one * broken == 1,
        ),
    )


def told(ledger: Ledger, step: int, numel: int = 1 << 30) -> float:
    return float(ledger.factors([0], [numel], step)[0])


def test_evidence_counts_for_the_next_step_alone() -> None:
    ledger = Ledger()
    assert told(ledger, 0) == pytest.approx(1)
    for step in range(30):
        seen(ledger, step, 4.0)
    assert told(ledger, 30) == pytest.approx(4, rel=0.05)
    assert told(ledger, 31) == pytest.approx(1)  # a gap
    seen(ledger, 30, float("nan"))  # not all was finite
    assert told(ledger, 31) == pytest.approx(1)
    seen(ledger, 31, 4.0)  # and begins anew, with more doubt
    assert 1 < told(ledger, 32) < 3
    for step in range(32, 60):
        seen(ledger, step, 0.01)
    assert told(ledger, 60) < 0.011 and told(ledger, 99) < 0.011  # less is never forgotten


def test_what_has_broken_its_budget_starts_from_one_or_less() -> None:
    for demand, most in ((3.0, 1.0), (0.5, 0.5)):
        ledger = Ledger()
        for step in range(9):
            seen(ledger, step, 8.0)
        seen(ledger, 9, demand, broken=True)
        assert told(ledger, 10) < most


def test_small_parameters_and_restless_ones_get_finer_steps() -> None:
    calm, restless = Ledger(), Ledger()
    for step in range(30):
        seen(calm, step, 2.0)
        seen(restless, step, 2.0 * 2 ** (2 * (step % 2) - 1))
    assert told(restless, 30) < told(calm, 30) / 2
    assert told(calm, 30, numel=64) < told(calm, 30, numel=10_000) / 8
    assert LEAST <= told(calm, 30, numel=1) < 0.01 and told(calm, 30) <= MOST


def test_shares_of_a_plan_are_those_that_training_settles_at() -> None:
    with World("ecdq:error=0.08", 4) as world:
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            common = torch.randn(40_000, generator=generator)
            world.mean([common + x for x in gaussian(4, 40_000, 100 + step)], [40_000], step)
        ledger = world.memories[0].kept["budget"]
    first, _ = typical_shares(4, 5 / 8)
    assert 0.4 * told(ledger, 12) == pytest.approx(first, rel=0.3)


# in training


class Given(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(120, 100))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def from_equal_to_independent(rank: int) -> dict[str, Any]:
    """Twenty steps with equal gradients, then others."""
    model = DistributedDataParallel(Given())
    handle = lc.compress(model, "ecdq:error=0.08")
    made = []
    for step in range(28):
        generator = torch.Generator().manual_seed(step + (1000 * rank if step >= 20 else 0))
        x = torch.randn(120, 100, generator=generator)
        exact = x.double()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        model.zero_grad()
        model(x).backward()
        gradient = model.module.weight.grad
        made.append(float((gradient.double() - exact).square().sum() / exact.square().sum()))
    return {"made": made, "kappa": handle.stats().kappa}


def any_rank_may_load(rank: int) -> bool:
    """The budget's state is the same on all ranks: rank 0's file serves all of them."""
    model = DistributedDataParallel(Given())
    handle = lc.compress(model, "ecdq:error=0.08")
    for step in range(3):
        model(torch.randn(120, 100, generator=torch.Generator().manual_seed(step))).backward()
    states: list[Any] = [handle.state_dict()]
    dist.broadcast_object_list(states, 0)
    handle.load_state_dict(states[0])
    return handle.stats().kappa == pytest.approx(1, abs=0.05)


def test_budget_under_ddp(tmp_path: Path) -> None:
    answers = ranks.run([from_equal_to_independent, any_rank_may_load], 3, tmp_path)
    for rank in range(3):
        found = answers[rank, "from_equal_to_independent"]
        assert max(found["made"]) < 1.3 * E
        assert found["kappa"] == pytest.approx(1 / 3, rel=0.1)
        assert answers[rank, "any_rank_may_load"]
