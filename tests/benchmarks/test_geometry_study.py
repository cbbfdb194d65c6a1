"""benchmarks/geometry.py: rows come out, and strategies differ in one thing only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks._geometry_run import Case, Data, Strategy, Training, frozen_step, train
from benchmarks._geometry_tables import tables
from benchmarks._spectral import Spectral
from benchmarks.geometry import STRATEGIES, cases, done, study

LENGTH = 20_000
PLAIN = Case(
    strategy="plain",
    optimizer="adamw",
    workers=2,
    steps=3,
    seed=1,
    rate=4e-3,
    width=32,
    layers=1,
)
CODED = replace(PLAIN, strategy="adam 0.15")


def training(case: Case) -> Training:
    return Training(case, STRATEGIES[case.strategy], "cpu", LENGTH)


def test_a_run_makes_a_row() -> None:
    row = train(CODED, STRATEGIES["adam 0.15"], "cpu", LENGTH)
    assert 0 < row["loss"] < 10 and 8 < row["bits"] < 16  # the first of three steps is plain
    assert 0 < row["error_early"] <= row["largest_error"] and row["unit_error_early"] > 0
    assert row["error_late"] is None and 0 <= row["clipped"] <= 1
    assert row["encoded"] < row["parameters"]
    assert done([row], "cpu") == {CODED} and not done([row], "cuda")
    assert "| adam 0.15 | " in tables([row])


@pytest.mark.parametrize("name", ["dqsg4", "block 0.08", "adam dqsg3", "adam feedback 1.0"])
def test_other_strategies_run(name: str) -> None:
    row = train(replace(CODED, strategy=name), STRATEGIES[name], "cpu", LENGTH)
    assert row["loss"] < 10 and row["bits"] < 16


def test_plain_runs_of_one_seed_are_equal_to_the_bit() -> None:
    first, again = (train(PLAIN, Strategy(), "cpu", LENGTH) for _ in range(2))
    assert first["loss"] == again["loss"] and first["bits"] == 32.0


def test_strategies_have_the_same_first_weights_and_data() -> None:
    plain, coded = training(PLAIN), training(CODED)
    other = training(replace(PLAIN, seed=2))
    for one in (plain, coded, other):
        one.step(0)  # plain in an optimizer's units, too: it has no state yet
    assert same(plain, coded) and not same(plain, other)
    plans = [Data.on("cpu", LENGTH).plan(case) for case in (PLAIN, CODED)]
    assert torch.equal(*plans)
    for t in (1, 2):
        plain.step(t)
        coded.step(t)
    assert not same(plain, coded)
    coded.close()


def same(a: Training, b: Training) -> bool:
    """Whether their last mean gradients and weights are nearly equal."""
    pairs = zip(a.workers.parameters, b.workers.parameters, strict=True)
    return all(torch.allclose(p, q, rtol=1e-4, atol=1e-6) for p, q in pairs) and torch.allclose(
        a.mean, b.mean, rtol=1e-4, atol=1e-6
    )


def test_sgd_has_no_units_of_its_own() -> None:
    """So the second and third steps are those of the same codec without units, given the first."""
    runs = [
        training(replace(PLAIN, optimizer="sgd", rate=0.0, strategy=name))
        for name in ("adam 0.08", "uniform 0.08")
    ]
    for one in runs:
        for t in range(3):
            one.step(t)
        one.close()
    first, second = (one.mean[: one.workers.numel] for one in runs)
    assert float((first - second).norm() / second.norm()) < 0.01


@pytest.mark.parametrize("optimizer", ["rmsprop", "adafactor"])
def test_other_optimizers_have(optimizer: str) -> None:
    row = train(replace(CODED, optimizer=optimizer), STRATEGIES["adam 0.15"], "cpu", LENGTH)
    assert row["unit_error_early"] > 0 and row["unit_error_early"] != row["error_early"]


def test_muon_trains_matrices_and_has_no_units() -> None:
    row = train(replace(CODED, optimizer="muon"), STRATEGIES["block 0.08"], "cpu", LENGTH)
    assert row["unit_error_early"] == row["error_early"] > 0


def test_tokens_may_be_pairs_of_characters() -> None:
    case = replace(CODED, pairs=True)
    one, other = training(case), training(CODED)
    assert one.data.tokens > 5 * other.data.tokens
    row = train(case, STRATEGIES["adam 0.15"], "cpu", LENGTH)
    assert done([row], "cpu") == {case} and "tokens of two characters" in tables([row])


def test_spectral_units_weigh_the_error_as_orthogonalisation_does() -> None:
    """An error that is even in them moves UVᵀ less than the same bits spent evenly on G."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(24, 16))
    momentum = torch.randn(24, 16) * torch.logspace(0, -2, 16)
    muon = torch.optim.Muon([p], 0.1)
    muon.state[p]["momentum_buffer"] = momentum
    units = Spectral([muon], 0.08)
    assert units.cold and units.due(0)
    units.refresh(0, {3: p})
    assert not units.cold and not units.due(0)

    def polar(m: torch.Tensor) -> torch.Tensor:
        u, _, vt = torch.linalg.svd(m, full_matrices=False)
        return u @ vt

    y, found = torch.empty(24 * 16), torch.empty(24 * 16)
    units.into(momentum.flatten(), 3, y)
    units.back(y, 3, found)
    assert torch.allclose(found.view(24, 16), momentum, atol=1e-6)
    moved = {"even": 0.0, "spectral": 0.0}
    for _ in range(20):
        noise = 0.05 * torch.randn(24 * 16)
        units.back(y + noise * y.norm() / 20, 3, found)
        even = momentum + (noise * momentum.norm() / 20).view(24, 16)
        for name, m in (("even", even), ("spectral", found.view(24, 16))):
            moved[name] += float((polar(m) - polar(momentum)).square().sum())
    assert moved["spectral"] < 0.5 * moved["even"]


def test_frozen_second_moments_stay_and_only_then_are_gradients_encoded() -> None:
    one = training(replace(CODED, strategy="frozen feedback 1.0", steps=10))
    assert one.encoded is not None
    for t in range(2):  # a fifth
        one.step(t)
    assert not any(rank.sent_bytes for rank in one.encoded.traffic)
    moments = {p: state["exp_avg_sq"].clone() for p, state in one.optimizers[0].state.items()}
    weights = [p.detach().clone() for p in one.workers.parameters]
    for t in range(2, 10):
        one.step(t)
    after = one.optimizers[0].state
    assert all(torch.equal(after[p]["exp_avg_sq"], moment) for p, moment in moments.items())
    assert not any(map(torch.equal, weights, one.workers.parameters))
    assert 0 < one.row()["bits"] < 6
    one.close()


def test_a_frozen_step_is_adamws_but_for_the_moments() -> None:
    pair = [torch.nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2)]
    both = [torch.optim.AdamW([p], lr=0.1, betas=(0.0, 0.999)) for p in pair]
    for p, adam in zip(pair, both, strict=True):
        p.grad = torch.tensor([3.0, 0.5])
        adam.step()
    frozen_step(both[0])  # an equal gradient leaves the average square as it is
    both[1].step()
    assert torch.allclose(*pair, rtol=1e-5)


def test_the_study_starts_with_what_matters() -> None:
    every = list(study(range(2)))
    assert [case.strategy for case in every[:6]][::3] == ["plain", "uniform 0.08"]
    assert {(case.steps, case.workers, case.optimizer) for case in every[:12]} == {
        (250, 3, "adamw")
    }
    assert len(set(every)) == len(every)
    (one,) = cases(["plain"], ["sgd"], [4], [7], [3], [0.25])
    assert (one.rate, one.workers, one.steps, one.seed) == (0.25, 4, 7, 3)
