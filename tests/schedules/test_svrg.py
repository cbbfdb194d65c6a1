"""QSVRG: linear convergence on real data with few bits, on real ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import ranks
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

import laconic as lc
from laconic._scratch import Scratch
from laconic._wire import HEADER_BYTES
from laconic.codecs import Codec
from laconic.comm._context import ExchangeContext
from laconic.comm._sums import checked_sum_bytes
from laconic.comm._transport import message_bytes, padded
from laconic.exchanges import Exchange
from laconic.schedules._finite_sum import FiniteSum
from laconic.schedules._svrg import World, paper_codec

SIZE = 3
SHARES = (900, 600, 297)  # unequal on purpose
LAMBDA, LR, STEPS, EPOCHS, BATCH = 0.05, 0.3, 40, 16, 4  # f_j is 5-smooth: more than 1/L
D = 650
SGD_EPOCHS = 9
BOUND = (32 + 2.8 * D) * (STEPS + 1) + 32 * D  # bits an epoch, as printed


@lru_cache
def digits() -> tuple[Tensor, Tensor]:
    bunch: Any = load_digits()
    pixels = torch.from_numpy(bunch.data).float() / 16
    return pixels - pixels.mean(0), torch.from_numpy(bunch.target)


def shard(rank: int) -> tuple[Tensor, Tensor]:
    own = slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))[own]
    return digits()[0][order], digits()[1][order]


def linear() -> nn.Linear:
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def logistic(model: nn.Module, batch: Any) -> Tensor:
    squares = sum(p.square().sum() for p in model.parameters())
    return cross_entropy(model(batch[0]), batch[1]) + LAMBDA / 2 * squares


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def objective(w: Tensor) -> Tensor:
    """f in fp64, over all digits."""
    w, (pixels, labels) = w.double(), digits()
    scores = pixels.double() @ w[:640].view(10, 64).T + w[640:]
    return cross_entropy(scores, labels) + LAMBDA / 2 * w.square().sum()


def told(rank: int, model: nn.Module) -> float:
    """f, by the first rank only: it takes a while."""
    return math.nan if rank else objective(flat(model)).item()


@lru_cache
def minimum() -> float:
    def both(w: Any) -> tuple[float, Any]:
        x = torch.tensor(w, requires_grad=True)
        value = objective(x)
        value.backward()
        return value.item(), x.grad.numpy() if x.grad is not None else None

    from scipy.optimize import minimize  # only here: ranks need not load it

    tight = {"ftol": 1e-16, "gtol": 1e-8, "maxcor": 50}
    start = torch.zeros(D).double().numpy()
    found = minimize(both, start, jac=True, method="L-BFGS-B", options=tight)
    return float(found.fun)


def digest(model: nn.Module) -> str:
    return hashlib.sha1(flat(model).float().numpy().tobytes()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Metered(Exchange):
    """All-gather that remembers how long this rank's wires were, and at which steps."""

    name: ClassVar[str] = "metered"
    sizes: list[int] = field(default_factory=list, compare=False)
    steps: list[int] = field(default_factory=list, compare=False)

    def check(self, codec: Codec) -> None:
        pass

    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        self.steps.append(context.step)
        self.sizes.append(codec.encode(x, context.key(context.rank)).nbytes)
        lc.AllGather().mean(x, codec, context, uncompressed)


# Jobs on three ranks


def qsvrg(rank: int) -> dict[str, Any]:
    """f(y) before each epoch, bits of each epoch, and all iterates' digests."""
    model, meter = linear(), Metered()
    svrg = lc.QSVRG(
        model, logistic, shard(rank), lr=LR, steps=STEPS, batch_size=BATCH, exchange=meter
    )
    values, wires, sent, seen = [], [], [], []
    for _ in range(EPOCHS):
        values.append(told(rank, model))
        meter.sizes.clear()
        before = svrg.stats()
        for _ in range(STEPS):
            svrg.step()
            seen.append(digest(model))
        wires.append(list(meter.sizes))
        sent.append(svrg.stats().sent_bytes - before.sent_bytes)
    values.append(told(rank, model))
    return {
        "values": values,
        "wires": wires,
        "sent": sent,
        "seen": seen,
        "last": svrg.stats(),
        "keys": meter.steps,
    }


def qsgd(rank: int) -> list[float]:
    """The same steps of plain QSGD: same size, codec, shards and exchange."""
    model, (pixels, labels) = linear(), shard(rank)
    generator, scratch, values = torch.Generator().manual_seed(rank), Scratch(), []
    group = dist.group.WORLD
    assert group is not None
    for step in range(SGD_EPOCHS * STEPS):
        if step % STEPS == 0:
            values.append(told(rank, model))
        j = torch.randint(len(labels), (BATCH,), generator=generator)
        model.zero_grad()
        logistic(model, (pixels[j], labels[j])).backward()
        v = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        v *= SIZE * SHARES[rank] / sum(SHARES)
        lc.AllGather().mean(
            v, paper_codec(D), ExchangeContext(group=group, step=step, scratch=scratch)
        )
        with torch.no_grad():
            for p, g in zip(model.parameters(), v.split([640, 10]), strict=True):
                p.sub_(LR * g.view(p.shape))
    return [*values, told(rank, model)]


def tiny(rank: int) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], tuple[Tensor, Tensor]]:
    """Logistic regression on 1, 2 and 3 samples, in five dimensions."""
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(6, 5, generator=generator), torch.tensor([0, 1, 1, 0, 1, 0])
    own = slice((0, 1, 3)[rank], (1, 3, 6)[rank])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.softplus((1 - 2 * batch[1]) * model(batch[0])[:, 0]).mean()

    return nn.Linear(5, 1), loss, (a[own], b[own])


def enumerated(rank: int) -> tuple[list[float], list[float]]:
    """The average step over all draws, and -η∇f(x), at some x that is not y."""
    torch.manual_seed(0)
    model, loss, data = tiny(rank)
    svrg = lc.QSVRG(model, loss, data, lr=0.5, steps=10, codec="none")
    for _ in range(4):
        svrg.step()
    state, start = svrg.state_dict(), flat(model).double()
    moved = torch.zeros_like(start)
    for k in range(6):  # 1, 2 and 3 divide 6: every sample comes equally often on its rank
        svrg.load_state_dict(state)
        svrg._draw = lambda k=k: [k % len(data[0])]
        svrg.step()
        moved += (flat(model).double() - start) / 6
    svrg.load_state_dict(state)
    every = [tiny(i)[2] for i in range(SIZE)]
    full = loss(model, tuple(map(torch.cat, zip(*every, strict=True))))
    gradient = torch.autograd.grad(full, list(model.parameters()))
    return moved.tolist(), (-0.5 * torch.cat([g.flatten() for g in gradient])).tolist()


PAIRS = (
    "global:bits=8@allreduce",
    "none@allreduce",
    "dqsg:bits=4@scatter-reduce",
    "qsgd:bits=4",
    "global:bits=8@ring",
    "feedback(qsgd-topk)@scatter-reduce",
)


def pairs(rank: int) -> dict[str, Any]:
    """Any codec and exchange, from different starts on different ranks, fp32 and bf16."""
    answers = {}
    for text in PAIRS:
        for dtype in (torch.float32, torch.bfloat16)[: 2 if text == PAIRS[0] else 1]:
            torch.manual_seed(rank)
            model = nn.Linear(64, 10).to(dtype)
            pixels, labels = shard(rank)
            data = (pixels.to(dtype), labels)
            svrg = lc.QSVRG(model, logistic, data, lr=0.1, steps=5, batch_size=rank + 1, codec=text)
            first, _ = svrg.epoch(), svrg.epoch()
            answers[f"{text} {dtype}"] = (digest(model), first.loss, svrg.stats().loss)
            assert svrg.stats().sent_bytes > 0
    return answers


def complaints(rank: int) -> dict[str, str]:
    """What is refused, on all ranks at once, and a group that goes on after it."""
    heard = {}

    def hear(name: str, **other: Any) -> None:
        given = {"model": linear(), "data": shard(rank), "lr": LR, "steps": 5, **other}
        with pytest.raises(lc.ConfigError) as error:
            lc.QSVRG(given.pop("model"), logistic, given.pop("data"), **given)
        heard[name] = str(error.value)

    hear("lr", lr=LR * (rank + 1))
    hear("steps", steps=5 + rank // 2)
    hear("empty", data=tuple(part[: 4 * (rank != 1)] for part in shard(rank)))
    hear("ddp", model=DistributedDataParallel(linear()))
    return heard


def poisoned(rank: int) -> tuple[bool, str]:
    """NaN in one rank's data reaches all, and a diverged run does not complain of the user."""
    model, (pixels, labels) = linear(), shard(rank)
    pixels = torch.full_like(pixels, math.nan) if rank == 1 else pixels
    svrg = lc.QSVRG(model, logistic, (pixels, labels), lr=LR, steps=2)
    svrg.epoch()
    return bool(flat(model).isfinite().any()), str(svrg.epoch().loss)


def part_of_the_world(rank: int) -> str:
    group = dist.new_group([0, 2])
    if rank == 1:
        return ""
    assert isinstance(group, dist.ProcessGroup)
    model = linear()
    svrg = lc.QSVRG(model, logistic, shard(rank), lr=LR, steps=5, group=group)
    svrg.epoch()
    svrg.epoch()
    return digest(model)


def drawn(rank: int) -> list[int]:
    svrg = lc.QSVRG(linear(), logistic, digits(), lr=LR, steps=5, batch_size=8)
    return svrg._draw()


JOBS = (drawn, qsvrg, qsgd, enumerated, pairs, complaints, poisoned, part_of_the_world)
answers = ranks.shared(JOBS, SIZE)


def gaps(values: Sequence[float]) -> list[float]:
    return [value - minimum() for value in values]


def test_qsvrg_converges_linearly_to_the_end(answers: ranks.Answers) -> None:
    gap = gaps(answers[0, "qsvrg"]["values"])
    factors = [b / a for a, b in pairwise(gap)]
    assert (gap[-1] / gap[0]) ** (1 / EPOCHS) <= 0.7  # the theorem says 0.9
    assert max(factors) <= 0.9  # in every epoch: no plateau
    assert gap[-1] < 1e-5 * gap[0]


def test_plain_qsgd_stays_on_its_noise_floor(answers: ranks.Answers) -> None:
    """The same step, codec, shards and number of steps: later epochs bring nothing."""
    sgd, svrg = gaps(answers[0, "qsgd"]), gaps(answers[0, "qsvrg"]["values"])
    floor = sorted(sgd[4:])[len(sgd[4:]) // 2]
    assert min(sgd[4:]) > floor / 4 and max(sgd[4:]) < 4 * floor
    assert svrg[SGD_EPOCHS] < floor / 20


def test_bits_of_every_epoch_keep_to_the_papers_bound(answers: ranks.Answers) -> None:
    """Codes, counts and padding, and the norm: the bits that stand for the paper's.

    What laconic adds is 76 bytes a wire (header, table of one chunk, kind of the chunk), 8 for
    its length, and padding to 16.
    """
    for rank in range(SIZE):
        for wires in answers[rank, "qsvrg"]["wires"]:
            assert len(wires) == STEPS
            payload = sum(8 * (size - HEADER_BYTES - 8 - 4) for size in wires)
            assert 1.5 * D * STEPS < payload + 32 * D <= BOUND


def test_the_dense_code_alone_does_not_keep_to_it() -> None:
    """Why the default takes the shorter code: on Gaussian values 2.8 bits are not enough."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    bits = {}
    for name in ("elias", "elias-dense"):
        codec = lc.QSGD(levels=64, norm="l2", block=None, coder=name)
        bits[name] = 8 * (codec.encode(x, lc.Key()).nbytes - HEADER_BYTES - 12)
    assert bits["elias"] < 32 + 2.8 * 4096 < bits["elias-dense"]


def test_sent_bytes_are_those_of_the_messages(answers: ranks.Answers) -> None:
    for rank in range(SIZE):
        found = answers[rank, "qsvrg"]
        full = round(checked_sum_bytes(padded(4 * (D + 1)), SIZE))
        for wires, sent in zip(found["wires"], found["sent"], strict=True):
            assert sent == full + (SIZE - 1) * sum(message_bytes(size, 0) + 16 for size in wires)
        last = found["last"]
        assert last.plain_bytes == EPOCHS * STEPS * 2 * (SIZE - 1) * 4 * D // SIZE
        assert last.steps == EPOCHS * STEPS and last.epochs == EPOCHS


def test_statistics_tell_the_objective(answers: ranks.Answers) -> None:
    found = answers[0, "qsvrg"]
    assert all(answers[rank, "qsvrg"]["last"].loss == found["last"].loss for rank in range(SIZE))
    assert found["last"].loss == pytest.approx(found["values"][-2], rel=1e-6)
    assert 0 < found["last"].gradient_norm < 0.01


def test_all_ranks_hold_the_same_bits_after_every_step(answers: ranks.Answers) -> None:
    first = answers[0, "qsvrg"]["seen"]
    assert len(set(first)) == len(first)
    assert all(answers[rank, "qsvrg"]["seen"] == first for rank in range(SIZE))
    assert answers[0, "part_of_the_world"] == answers[2, "part_of_the_world"] != ""


def test_the_average_step_over_all_draws_is_the_gradient(answers: ranks.Answers) -> None:
    """Unequal shards: 1, 2 and 3 samples."""
    for rank in range(SIZE):
        moved, expected = answers[rank, "enumerated"]
        assert moved == pytest.approx(expected, rel=1e-5, abs=2e-7)


def test_every_pair_works_and_starts_from_the_first_rank(answers: ranks.Answers) -> None:
    for rank in range(SIZE):
        for name, (bits, before, after) in answers[rank, "pairs"].items():
            assert (bits, before, after) == answers[0, "pairs"][name]
            assert after < before, name


def test_ranks_draw_different_samples(answers: ranks.Answers) -> None:
    assert len({tuple(answers[rank, "drawn"]) for rank in range(SIZE)}) == SIZE


def test_ranks_refuse_together(answers: ranks.Answers) -> None:
    heard = answers[0, "complaints"]
    assert all(answers[rank, "complaints"] == heard for rank in range(SIZE))
    assert "disagree on lr (rank 0: 0.3; rank 1: 0.6; rank 2" in heard["lr"]
    assert "disagree on steps (ranks 0, 1: 5; rank 2: 6)" in heard["steps"]
    assert "ranks have [4, 0, 4]" in heard["empty"]
    assert "not its DistributedDataParallel" in heard["ddp"]


def test_nan_on_one_rank_is_seen_by_all(answers: ranks.Answers) -> None:
    assert all(answers[rank, "poisoned"] == (False, "nan") for rank in range(SIZE))


# In one process


def square(model: nn.Module, batch: Any) -> Tensor:
    """½(x - a_j)²: the difference of two gradients is x - y, whatever j."""
    return (next(model.parameters()) - batch).square().mean() / 2


class Number(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([value]))


@pytest.mark.parametrize(("snapshot", "expected"), [("mean", (2.5, 2.125)), ("last", (1.5, 1.125))])
def test_trajectory_by_hand(snapshot: Any, expected: tuple[float, float]) -> None:
    """a = 0, 2, so v = x - 1 for any draw; η = ½, T = 2, x = 3.

    x_0, x_1, x_2 = 3, 2, 1.5: mean of the first two 2.5, last 1.5. From y, y - 1 shrinks to its
    half, then to its quarter: mean y' - 1 = ¾(y - 1), last ¼(y - 1).
    """
    model = Number(3.0)
    svrg = lc.QSVRG(
        model, square, torch.tensor([0.0, 2.0]), lr=0.5, steps=2, codec="none", snapshot=snapshot
    )
    svrg.step()
    assert model.x.item() == 2.0
    svrg.epoch()  # its other step
    assert model.x.item() == pytest.approx(expected[0])
    stats = svrg.epoch()
    assert model.x.item() == pytest.approx(expected[1])
    assert stats.loss == pytest.approx(((expected[0] - 1) ** 2 + 1) / 2)
    assert stats.gradient_norm == pytest.approx(expected[0] - 1)
    assert stats.epochs == 1 and stats.steps == 2 and stats.sent_bytes == 0


def test_the_theorems_constants_hold_on_a_quadratic() -> None:
    """f_j = ½ Σ h_i (x_i - a_ji)², h from 1 to 4: η = 1/(20L), T = 40·L/ℓ, factor 0.875."""
    h, a = torch.linspace(1, 4, 8), torch.randn(20, 8, generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (h * (model.get_parameter("weight")[0] - batch).square()).sum(1).mean() / 2

    model = nn.Linear(8, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    svrg = lc.QSVRG(model, loss, a, lr=1 / 80, steps=160)

    def gap() -> float:
        return (h * (model.weight[0] - a.mean(0)).square()).sum().item() / 2

    first = gap()
    for _ in range(8):
        svrg.epoch()
    assert gap() < 0.875**8 * first


def test_the_papers_codec_never_more_than_doubles_the_second_moment() -> None:
    for d in (1, 2, 3, 10, 99, 650, 16128, 16129, 16130, 10**6):
        bound = paper_codec(d).variance_bound(d)
        assert bound is not None and bound <= 1
    assert str(paper_codec(100)) == "qsgd:bits=5,levels=10,norm=l2,block=tensor,coder=elias"
    assert paper_codec(10**6).block == 16128


def test_draws_are_uniform_and_depend_on_seed_and_step() -> None:
    data, seen = torch.arange(5.0), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch.tolist())
        return square(model, batch)

    def run(seed: int) -> list[list[float]]:
        seen.clear()
        lc.QSVRG(Number(0.0), loss, data, lr=0.1, steps=400, batch_size=3, seed=seed).epoch()
        assert seen[0] == data.tolist()  # the full gradient
        assert seen[1::2] == seen[2::2]  # at x and at y
        return seen[1::2]

    one, two = run(0), run(1)
    assert one == run(0) != two
    counts = torch.tensor(one).flatten().long().bincount(minlength=5)
    assert ((counts - 240).abs() < 5 * math.sqrt(240)).all()
    assert len({tuple(drawn) for drawn in one}) > 100  # of 125


def test_no_draw_of_a_codec_is_used_twice(answers: ranks.Answers) -> None:
    assert answers[0, "qsvrg"]["keys"] == list(range(EPOCHS * STEPS))
    codec, way, found = lc.codec("qsgd:bits=2"), lc.AllGather(), []
    for seed, step in ((0, 0), (0, 0), (0, 1), (1, 0)):
        x = torch.linspace(-1, 1, 999)
        World(None, 1.0, x.device, seed).mean(x, codec, way, step, ())
        found.append(x)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2]) and not torch.equal(found[0], found[3])


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return digits()[0][index], int(digits()[1][index])


def test_data_may_come_in_any_form() -> None:
    ends = []
    columns = tuple(part[:300] for part in digits())
    for data in (columns, TensorDataset(*columns), Rows(), list(zip(*columns, strict=True))):
        model = linear()
        lc.QSVRG(model, logistic, data, lr=LR, steps=5, batch_size=2, full_batch=128).epoch()
        ends.append(digest(model))
    assert len(set(ends)) == 1


def test_frozen_and_unused_parameters_stay() -> None:
    model = nn.ModuleDict({"used": linear(), "unused": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    kept = [flat(model[name]) for name in ("unused", "frozen")]

    def loss(model: Any, batch: Any) -> Tensor:
        return cross_entropy(model["used"](batch[0]), batch[1])

    lc.QSVRG(model, loss, digits(), lr=LR, steps=5).epoch()
    assert all(map(torch.equal, kept, [flat(model[name]) for name in ("unused", "frozen")]))
    assert flat(model["used"]).any()
    out = torch.full((656,), 7.0)  # room that held other values
    FiniteSum(model, loss, digits()).gradient(digits(), out)
    assert not out[650:].any()
    assert all(p.grad is None for p in model.parameters())


def test_full_batches_of_any_size_give_the_same_gradient() -> None:
    found = []
    for size in (7, 1797, 5000):
        svrg = lc.QSVRG(linear(), logistic, digits(), lr=LR, steps=1, full_batch=size)
        found.append(svrg.epoch().gradient_norm)
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


def make(model: nn.Module | None = None, data: Any = None, **other: Any) -> lc.QSVRG:
    given = {"lr": LR, "steps": 3, **other}
    loss = given.pop("loss", logistic)
    return lc.QSVRG(model or linear(), loss, digits() if data is None else data, **given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"lr": math.nan}, "lr must be a positive number"),
        ({"steps": 0}, "steps must be an integer from 1"),
        ({"batch_size": True}, "batch_size must be an integer from 1"),
        ({"snapshot": "best"}, "'mean' or 'last'"),
        ({"codec": "qsgd@allreduce"}, "do not add up"),
        ({"codec": "fp16@allreduce", "exchange": "ring"}, "leave exchange= out"),
        ({"data": {"a": torch.zeros(3)}}, "not dict"),
        ({"data": iter([1])}, "a dataset with a length"),
        ({"data": (torch.zeros(3), torch.zeros(2))}, "one row for each sample"),
        ({"data": torch.zeros(0, 64)}, r"ranks have \[0\]"),
        ({"model": nn.Linear(2, 2).double()}, "model.float()"),
        ({"model": nn.ReLU()}, "no parameters"),
        ({"model": nn.Sequential(nn.Linear(64, 10), nn.Dropout())}, "1 draws at random"),
        ({"model": nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))}, "0 normalizes"),
    ],
)
def test_what_cannot_work_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(lc.ConfigError, match=said):
        make(**arguments)


def test_layers_at_rest_are_taken_and_waking_them_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10), nn.Dropout(0.5)).eval()
    svrg = make(model)
    svrg.epoch()
    model[2].train()
    with pytest.raises(lc.ConfigError, match="draws at random"):
        svrg.epoch()
    model.train()
    with pytest.raises(lc.ConfigError, match="normalizes by the batch"):
        svrg.epoch()
    with pytest.raises(lc.ConfigError, match="normalizes by the batch"):
        make(nn.Sequential(nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 10)).eval())


def test_a_loss_that_draws_is_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(dropout(batch[0])), batch[1])

    with pytest.raises(lc.ConfigError, match="draws random numbers"):
        make(loss=loss).epoch()


def test_a_loss_of_several_numbers_is_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    with pytest.raises(lc.ConfigError, match="the batch's mean"):
        make(loss=loss).epoch()


def test_parameters_changed_from_outside_are_noticed() -> None:
    model = linear()
    svrg = make(model)
    svrg.epoch()
    nn.init.ones_(model.bias)
    with pytest.raises(lc.ConfigError, match="bias was changed"):
        svrg.epoch()


def test_a_state_of_other_settings_is_refused() -> None:
    state = make().state_dict()
    make(lr=0.1).load_state_dict(state)  # may change
    with pytest.raises(lc.ConfigError, match="steps 3, not 4; seed 0, not 1"):
        make(steps=4, seed=1).load_state_dict(state)


def test_an_error_in_the_loss_leaves_the_model_where_it_was() -> None:
    model, calls = linear(), []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[1]))
        if len(calls) == 10:  # full (two batches), then x, y, x, y, x, y, x: now at y
            raise RuntimeError("no memory")
        return logistic(model, batch)

    svrg = make(model, loss=loss, steps=9)
    for _ in range(3):
        svrg.step()
    before = digest(model)
    with pytest.raises(RuntimeError, match="no memory"):
        svrg.step()
    assert digest(model) == before
