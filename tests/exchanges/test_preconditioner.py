"""An optimizer's own units: what they are made of, what they promise, and their kernel."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DTYPES, assert_same_bits, gaussian
from test_backends import Fast, compare, fast, rough
from torch import Tensor, nn

import laconic as lc
from laconic.exchanges import Nested, _preconditioner
from laconic.exchanges._budget import ledger_of
from laconic.exchanges._preconditioner import Preconditioner, is_adaptive, second_moment
from laconic.kernels import backend
from laconic.kernels._layout import MOST_EXPONENT
from laconic.kernels._reference.powers import rounded_log2

__all__ = ["fast"]
ADAPTIVE: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "capturable": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}
SPREAD = torch.logspace(-0.5, 0.5, 24)  # within the floor's reach


def stepped(make: Callable[[list[Tensor]], Any], steps: int = 30, **shape: Any) -> tuple[Any, Any]:
    """A parameter whose columns have gradients of other sizes, and its optimizer."""
    torch.manual_seed(3)
    parameter = torch.nn.Parameter(torch.randn(16, 24))
    optimizer = make([parameter])
    for _ in range(steps):
        parameter.grad = torch.randn(16, 24) * SPREAD
        optimizer.step()
    return parameter, optimizer


def exponents(optimizer: Any, parameter: Tensor, step: int = 30, error: float = 0.08) -> Tensor:
    units = Preconditioner(optimizer)
    units.allow(error)
    assert units.refresh(step, {7: parameter}) is not None
    found = units.units(7)
    assert found is not None
    return found.view(parameter.shape)


# --- the kernel ----------------------------------------------------------------------------


def times_powers(
    kernels: Any, put: Any, x: Tensor, e: Tensor, dtype: torch.dtype, inverse: bool
) -> dict[str, Tensor]:
    out = put(torch.empty(x.shape, dtype=dtype))
    kernels.times_powers(put(x), put(e), out, inverse=inverse)
    return {"out": out}


def test_kernels_write_the_same_bits(fast: Fast) -> None:
    for count, dtype, inverse in fast.some("powers", (1, 127, 4097, 70001), DTYPES, (False, True)):
        x = fast.input(rough(count, 128), dtype)
        e = torch.randint(-MOST_EXPONENT, MOST_EXPONENT + 1, (count,)).to(torch.int8)
        if fast.interpreted or dtype == torch.float16:  # its casts of subnormals are not a GPU's
            e = e % 8
        for out_dtype in {torch.float32, dtype}:
            results = fast.both(times_powers, x, e, out_dtype, inverse)
            compare(results, (count, dtype, out_dtype, inverse))


def row_exponents(kernels: Any, put: Any, v: Tensor, **settings: float) -> dict[str, Tensor]:
    out = put(torch.empty(v.shape, dtype=torch.int8))
    return {"known": kernels.row_exponents(put(v), out, **settings), "out": out}


def test_kernels_find_the_same_exponents(fast: Fast) -> None:
    for rows, columns, share in fast.some("exponents", (1, 3, 40), (1, 37, 1000), (0.0, 0.1, 0.5)):
        v = rough(rows * columns, 128).square().view(rows, columns)
        v[0, 0] = torch.inf if columns == 37 else 0.0
        settings = {"factor": 3.3, "share": share, "epsilon": 1e-8}
        compare(fast.both(row_exponents, v, **settings), (rows, columns, share))


def test_units_follow_the_memory_of_a_parameter() -> None:
    """DDP's buckets hold gradients in the order of the parameter's strides."""
    draw, found = torch.randn(4, 3, 5, 5).exp(), []
    for form in (torch.contiguous_format, torch.channels_last):
        parameter = torch.nn.Parameter(torch.zeros(4, 3, 5, 5).to(memory_format=form))
        parameter.grad = draw.to(memory_format=form)
        optimizer = torch.optim.RMSprop([parameter])
        optimizer.step()
        units = Preconditioner(optimizer)
        units.refresh(0, {0: parameter})
        own = units.units(0)
        assert own is not None
        found.append(own)
    plain, last = found
    assert torch.equal(plain.view(4, 3, 5, 5).permute(0, 2, 3, 1).flatten(), last)
    assert not torch.equal(plain, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_way_there_and_back_loses_nothing(dtype: torch.dtype) -> None:
    x = gaussian(5000).to(dtype)
    e = torch.randint(-60, 61, (5000,)).to(torch.int8)
    y = torch.empty_like(x)
    backend(x.device).times_powers(x, e, y, inverse=True)
    assert not torch.equal(x, y)
    backend(x.device).times_powers(y, e, y, inverse=False)
    assert_same_bits(y, x)


# --- exponents -----------------------------------------------------------------------------


def test_exponents_round_the_logarithm() -> None:
    w = torch.cat([torch.logspace(-28, 28, 4001), torch.exp2(torch.arange(-90.0, 91.0))])
    near = torch.log2(w.double())
    clear = (near - near.floor() - 0.5).abs() > 1e-6
    assert torch.equal(rounded_log2(w)[clear].double(), near.round()[clear])
    bad = torch.tensor([math.nan, math.inf, 0.0, 1e-45, 3e38])
    assert rounded_log2(bad).tolist() == [0, 0, -MOST_EXPONENT, -MOST_EXPONENT, MOST_EXPONENT]


@pytest.mark.parametrize("name", ADAPTIVE)
def test_units_are_those_of_the_step(name: str) -> None:
    """A small change of a gradient, in its units, changes the step by the same everywhere."""
    parameter, optimizer = stepped(ADAPTIVE[name])
    w = torch.exp2(exponents(optimizer, parameter).float())
    gradient, moved = torch.randn(16, 24) * SPREAD, []
    state, weights = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
    for change in (0.0, 1e-3):
        optimizer.load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            parameter.copy_(weights)
        parameter.grad = gradient + change * w
        optimizer.step()
        moved.append(parameter.detach().double().clone())
    by_column = (moved[1] - moved[0]).abs().median(0).values
    assert by_column.max() < 3 * by_column.min(), by_column  # 10 times, were w = 1


def test_no_second_moment_no_units() -> None:
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Muon(p) if hasattr(torch.optim, "Muon") else torch.optim.SGD(p),
    ):
        parameter, optimizer = stepped(make, steps=2)
        units = Preconditioner(optimizer)
        assert units.refresh(2, {0: parameter}) is None
        assert units.units(0) is None and not units.cold


def test_first_step_is_cold_for_those_who_divide() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    sgd = Preconditioner(torch.optim.SGD([parameter], lr=0.1))
    assert sgd.refresh(0, {0: parameter}) is None and not sgd.cold
    adam = torch.optim.Adam([parameter])
    units = Preconditioner(adam)
    for step in range(4):  # as under a GradScaler that skips steps
        assert units.due(step)
        units.refresh(step, {0: parameter})
        assert units.cold
    units.refresh(4, {0: parameter})
    assert not units.cold, "an optimizer that never steps must not keep gradients plain"
    parameter.grad = torch.ones(4, 4)
    adam.step()
    assert units.due(5) and units.refresh(5, {0: parameter}) is not None


def test_adagrad_is_cold_although_it_has_state_from_the_start() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    adagrad = torch.optim.Adagrad([parameter])
    units = Preconditioner(adagrad)
    assert units.refresh(0, {0: parameter}) is None and units.cold
    parameter.grad = torch.ones(4, 4)
    adagrad.step()
    assert units.refresh(1, {0: parameter}) is not None and not units.cold


@pytest.mark.parametrize("shape", [(384,), (1, 384), (8, 1, 48), (4, 8, 12)])
def test_adafactor_of_transformers_in_any_shape(shape: tuple[int, ...]) -> None:
    """Its vectors have state of Adam's name in groups without betas; rows of one column."""
    moments = {"exp_avg_sq_row": torch.rand(shape[:-1]) + 1}
    moments["exp_avg_sq_col"] = torch.rand(*shape[:-2], shape[-1]) + 1
    state = {"exp_avg_sq": torch.rand(shape) + 1} if len(shape) == 1 else moments
    found = second_moment({"eps": (1e-30, 1e-3)}, {"step": 3, **state})
    assert found is not None and found.v.shape == shape


@pytest.mark.parametrize("shape", [(), (16, 1), (24,)])
def test_moments_that_are_not_of_each_value_are_no_units(shape: tuple[int, ...]) -> None:
    """As NovoGrad's, one for a tensor: kernels would read behind its end."""
    parameter, optimizer = stepped(ADAPTIVE["adamw"], steps=3)
    optimizer.state[parameter]["exp_avg_sq"] = torch.ones(shape)
    units = Preconditioner(optimizer)
    assert units.refresh(3, {0: parameter}) is None and not units.cold


def test_steps_may_be_counted_by_groups() -> None:
    """As Apex's FusedAdam does."""
    parameter, optimizer = stepped(ADAPTIVE["adamw"])
    before = exponents(optimizer, parameter)
    optimizer.param_groups[0]["step"] = int(optimizer.state[parameter].pop("step"))
    assert torch.equal(before, exponents(optimizer, parameter))


def test_gaps_between_snapshots_grow() -> None:
    parameter, optimizer = stepped(ADAPTIVE["adamw"], steps=1)
    units, made = Preconditioner(optimizer), []
    for step in range(1, 400):
        if units.due(step):
            made.append(step)
            units.refresh(step, {0: parameter})
    assert made[:10] == list(range(1, 11))
    gaps = torch.tensor(made).diff()
    assert gaps.max() == 16 and gaps[-1] == 16 and (gaps.diff() >= 0).all()


def test_unknown_parameters_stay_as_they_are() -> None:
    parameter, optimizer = stepped(ADAPTIVE["adamw"], steps=3)
    frozen = torch.nn.Parameter(torch.randn(8, 8))
    units = Preconditioner(optimizer)
    units.refresh(3, {0: parameter, 1: frozen})
    x, y = torch.randn(64), torch.empty(64)
    units.into(x, 1, y)
    assert torch.equal(x, y)
    units.back(y, 1, y)
    assert torch.equal(x, y)


def test_second_moment_that_is_zero_or_not_finite() -> None:
    for value in (0.0, math.nan, math.inf):
        parameter, optimizer = stepped(ADAPTIVE["adamw"], steps=3)
        optimizer.state[parameter]["exp_avg_sq"].fill_(value)
        found = exponents(optimizer, parameter)
        assert (found == 0).all(), value


def test_eps_is_part_of_the_units() -> None:
    """Where √v is far below eps, Adam is momentum SGD, and all values count the same."""
    parameter, optimizer = stepped(lambda p: torch.optim.Adam(p, eps=10.0))
    assert len(exponents(optimizer, parameter).unique()) <= 2


# --- the promise: a plain error of 10 at most ---------------------------------------------


def second_moments() -> dict[str, Tensor]:
    torch.manual_seed(0)
    rows = torch.ones(64, 128)
    rows[5] = 1e8
    one = torch.full((64, 128), 1e-20)
    one[3, 4] = 1.0
    return {
        "even": torch.ones(64, 128),
        "wide": torch.logspace(-12, 4, 64).unsqueeze(1).expand(64, 128).contiguous(),
        "one row": rows,
        "one value": one,
        "heavy tails": torch.randn(64, 128).div(torch.rand(64, 128)).square(),
        "first step": torch.randn(64, 128).square(),
        "mostly zero": torch.randn(64, 128).square() * (torch.rand(64, 128) < 0.02),
    }


@pytest.mark.parametrize("error", [0.04, 0.15, 0.5])
@pytest.mark.parametrize("name", second_moments())
def test_plain_error_is_bounded_whatever_comes(name: str, error: float) -> None:
    """All of the gradient where v is least: the worst there is."""
    v = second_moments()[name]
    parameter = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.zeros(64, 128)
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"].copy_(v * (1 - 0.999))
    units = Preconditioner(optimizer)
    units.allow(error)
    units.refresh(1, {0: parameter})
    order = v.flatten().argsort()
    codec, gradients = lc.codec(f"ecdq:error={error}"), []
    for count in (1, 100, 4000, len(order)):
        g = torch.zeros(64 * 128)
        g[order[:count]] = torch.randn(count)
        gradients.append(g)
    for g in gradients:
        y, found = torch.empty_like(g), []
        units.into(g, 0, y)
        for step in range(8):
            decoded = codec.decode(codec.encode(y, lc.Key(step=step)))
            units.back(decoded, 0, decoded)
            found.append(float((decoded - g).square().sum() / g.square().sum()))
        assert sum(found) / len(found) <= 10, (name, found)


def test_codecs_without_a_budget_have_a_floor_beside_fine_ones() -> None:
    """As in a policy: dqsg's error is not that of ecdq:error=1e-6."""
    v = second_moments()["wide"]
    parameter = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = torch.optim.RMSprop([parameter])
    parameter.grad = v.sqrt()
    optimizer.step()
    spreads = []
    for budgets in ((None,), (1e-6, None)):
        units = Preconditioner(optimizer)
        for budget in budgets:
            units.allow(budget)
        units.refresh(1, {0: parameter})
        own = units.units(0)
        assert own is not None
        spreads.append(int(own.max() - own.min()))
    assert spreads[0] == spreads[1]


def test_without_a_floor_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above sees a missing floor."""
    monkeypatch.setattr(_preconditioner, "_floor", lambda error: 1e-60)
    monkeypatch.setattr(_preconditioner, "_APART", math.inf)
    with pytest.raises(AssertionError):
        test_plain_error_is_bounded_whatever_comes("wide", 0.15)


def test_errors_are_even_in_the_units_of_the_optimizer() -> None:
    """And uneven without: what this is for."""
    parameter, optimizer = stepped(ADAPTIVE["adamw"])
    units = Preconditioner(optimizer)
    units.refresh(30, {0: parameter})
    moment = second_moment(optimizer.param_groups[0], optimizer.state[parameter])
    assert moment is not None
    g = (torch.randn(16, 24) * SPREAD).flatten()
    scale, codec, errors = moment.v.sqrt().flatten(), lc.codec("ecdq:error=0.1"), []
    for own in (False, True):
        total = torch.zeros(())
        for step in range(40):
            y = g.clone()
            if own:
                units.into(g, 0, y)
            decoded = codec.decode(codec.encode(y, lc.Key(step=step)))
            if own:
                units.back(decoded, 0, decoded)
            total += ((decoded - g) / scale).square().sum() / (g / scale).square().sum()
        errors.append(float(total) / 40)
    assert errors[1] < 0.15 < 0.3 < errors[0], errors


# --- state, memories, errors -----------------------------------------------------------------


def test_state_restores_the_snapshot() -> None:
    parameter, optimizer = stepped(ADAPTIVE["adamw"])
    units, again = Preconditioner(optimizer), Preconditioner(optimizer)
    units.refresh(30, {4: parameter})
    parameter.grad = torch.randn(16, 24)
    optimizer.step()  # a snapshot that is made now would differ
    again.load_state_dict(units.state_dict(), {4: parameter})
    x = torch.randn(16 * 24)
    a, b = torch.empty_like(x), torch.empty_like(x)
    units.into(x, 4, a)
    again.into(x, 4, b)
    assert torch.equal(a, b) and not torch.equal(a, x)
    assert [units.due(step) for step in range(60)] == [again.due(step) for step in range(60)]
    other = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(lc.ConfigError, match="other parameters"):
        again.load_state_dict(units.state_dict(), {4: other})


def test_residuals_follow_a_change_of_units() -> None:
    """What feedback still owes is the same gradient before and after."""
    codec, residuals = lc.codec("feedback(dqsg:bits=2)"), lc.Residuals()
    parameter, optimizer = stepped(ADAPTIVE["adamw"])
    units = Preconditioner(optimizer)
    units.listen(residuals.change_units)
    units.refresh(30, {0: parameter})
    place = lc.Place(parameter=0, start=0, numel=384, total=384)
    y = torch.empty(384)
    units.into(torch.randn(384), 0, y)
    codec.encode(y, lc.Key(), places=[place], residuals=residuals)

    def owed() -> Tensor:
        residual = residuals.of(place, 0, y.device).clone()
        units.back(residual, 0, residual)
        return residual

    before = owed()
    for _ in range(60):
        parameter.grad = 100 * torch.randn(16, 24)
        optimizer.step()
    units.refresh(60, {0: parameter})
    assert before.abs().max() > 0
    assert torch.equal(before, owed())


def test_residuals_survive_the_loss_of_moments() -> None:
    """As of an optimizer that is made anew for a second fit."""
    codec, residuals = lc.codec("feedback(dqsg:bits=2)"), lc.Residuals()
    parameter, optimizer = stepped(ADAPTIVE["adamw"])
    units = Preconditioner(optimizer)
    units.listen(residuals.change_units)
    place = lc.Place(parameter=0, start=0, numel=384, total=384)
    x = torch.randn(384)
    codec.encode(x, lc.Key(), places=[place], residuals=residuals)
    before = residuals.of(place, 0, x.device).clone()
    units.refresh(30, {0: parameter})
    assert not torch.equal(before, residuals.of(place, 0, x.device))
    optimizer.state.clear()
    units.refresh(60, {0: parameter})
    assert torch.equal(before, residuals.of(place, 0, x.device))


def test_a_dead_listener_is_forgotten() -> None:
    parameter, optimizer = stepped(ADAPTIVE["adamw"])
    units, residuals = Preconditioner(optimizer), lc.Residuals()
    units.listen(residuals.change_units)
    del residuals
    assert units.refresh(1, {0: parameter}) is not None


@pytest.mark.parametrize("what", ["adamw", 3, [torch.nn.Linear(2, 2)]])
def test_optimizer_is_an_optimizer(what: Any) -> None:
    with pytest.raises(lc.ConfigError, match=r"optimizer= takes the torch optimizer"):
        Preconditioner(what)


def test_side_information_of_other_units_is_refused() -> None:
    with pytest.raises(lc.ConfigError, match="side=group"):
        Nested(side="previous").check_units(lc.codec("ndqsg"))
    lc.Hierarchical().check_units(lc.codec("ecdq"))


def test_states_that_are_of_no_parameter_are_left_out() -> None:
    weight = nn.Parameter(torch.ones(20, 30))
    optimizer = torch.optim.Adam([weight])
    kept: Any = optimizer.state
    kept["calls"] = 0
    units = Preconditioner(optimizer)
    assert units.refresh(0, {0: weight}) is None
    assert not is_adaptive(optimizer)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert is_adaptive(optimizer) and units.refresh(1, {0: weight}) is not None


def test_a_ledger_knows_nothing_of_parameters_that_no_exchange_has_recorded() -> None:
    errors, kappas = ledger_of(lc.ExchangeMemory()).latest([3, 7])
    assert list(errors) == list(kappas) == [0, 0]
