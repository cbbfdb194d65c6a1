"""optimizer= on real processes: equal replicas, exact resume, errors in the units that count."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import test_ddp
import torch
from helpers import PATIENCE_S, equal_everywhere, refusal, warnings_told
from test_ddp import batch, flat, network, sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from laconic.exchanges import _preconditioner
from laconic.integrations._ddp import comm_hook

RANKS, STEPS = 3, 14
SPECS = (
    "ecdq:error=0.08",
    "ecdq:error=0.15,coder=rans,block=4096",
    "ecdq:error=0.08@allgather",
    "dqsg:bits=4",
    "global:bits=8@ring",
    "qsgd:bits=3",
    "ndqsg@nested",
    "rotate(ecdq:error=0.08)",
    "feedback(dqsg:bits=2)",
    "fp16",
)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() > 1], lr=1e-3)


class Run(test_ddp.Run):
    """In AdamW's units, unless something else is said."""

    def __init__(
        self,
        spec: str = "ecdq:error=0.08",
        make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        *,
        units: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(spec, make, units=units, **options)


def resumes(rank: int) -> dict[str, bool]:
    draw, found = random.Random(1), {}
    for spec in SPECS:
        kill = draw.randrange(1, STEPS)
        whole, first = Run(spec), Run(spec)
        whole.train(0, STEPS)
        first.train(0, kill)
        second = Run(spec)
        second.load(first.save())
        second.train(kill, STEPS)
        found[f"{spec} at {kill}"] = torch.equal(flat(whole.model), flat(second.model))
        found[f"{spec}, replicas"] = equal_everywhere(second.model)
    return found


def halves(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float16):
        run = Run(dtype=dtype, make=lambda m: torch.optim.AdamW(m.parameters(), 1e-3, eps=1e-4))
        run.train(0, STEPS)
        found[str(dtype)] = (
            equal_everywhere(run.model),
            bool(flat(run.model).isfinite().all()),
            run.handle.stats(),
        )
    return found


def gradients_of(run: Run, step: int) -> torch.Tensor:
    run.backward(step)
    return torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None])


def sees_what_counts(rank: int) -> dict[str, Any]:
    """The error of the mean beside plain DDP's, in Adam's units and in its own."""
    found: dict[str, Any] = {}
    for units in (False, True):
        run = Run(units=units)
        run.train(0, 17)  # a snapshot was made at 16
        plain = Run("none", units=False)
        plain.model.module.load_state_dict(run.model.module.state_dict())
        exact, errors, own = gradients_of(plain, 17), [], []
        v = [run.optimizer.state[p]["exp_avg_sq"] for p in run.model.parameters()]
        scale = torch.cat([one.flatten() for one in v]).sqrt() + 1e-8
        for step in range(20):  # other draws of the same gradient
            run.handle.step = 17 + step
            got = gradients_of(run, 17)
            errors.append(float(((got - exact) / scale).square().sum()))
            own.append(float((got - exact).square().sum()))
        found["units" if units else "own"] = (
            sum(errors) / 20 / float((exact / scale).square().sum()),
            sum(own) / 20 / float(exact.square().sum()),
        )
        found["stats" if units else "plain stats"] = run.handle.stats()
    return found


def cold_start(rank: int) -> dict[str, bool]:
    """Gradients are plain until Adam has made its first step, also where a GradScaler skips it."""
    run, plain = Run(), Run("none", units=False)
    same = []
    for step in range(3):
        a, b = gradients_of(run, step), gradients_of(plain, step)
        same.append(torch.allclose(a, b, rtol=1e-5, atol=1e-8))
        if step:  # step 0 is skipped by both
            run.optimizer.step()
            plain.optimizer.step()
    return {"skipped": same[0], "first": same[1], "then": same[2]}


def leaves_sgd_alone(rank: int) -> bool:
    weights = []
    for units in (False, True):
        run = Run(make=sgd, units=units)
        run.train(0, STEPS)
        weights.append(flat(run.model))
    return torch.equal(*weights)


def drifts(rank: int) -> str:
    """Moments of one rank are damaged: found before anything is decoded wrongly."""
    run = Run()
    run.train(0, 6)
    if rank == 1:
        next(iter(run.optimizer.state.values()))["exp_avg_sq"].mul_(16)
    try:
        run.train(6, 30)
    except lc.ReplicaError as error:
        return str(error)
    return "not found"


def with_and_without(rank: int) -> dict[str, Any]:
    """What feedback owes, as a gradient, where a run goes on without units, or with them."""
    found: dict[str, Any] = {}
    for units in (False, True):
        run, other = (Run("feedback(dqsg:bits=2)", units=own) for own in (units, not units))
        run.train(0, 10)
        other.load(run.save())
        found[f"units: {units}"] = [largest_gradient(one) for one in (run, other)]
    back = Run("feedback(dqsg:bits=2)")
    early = back.save()
    back.train(0, 10)
    back.load(early)
    found["back to the start"] = back.handle.preconditioner.units(0) is None
    return found


def largest_gradient(run: Run) -> float:
    return float(gradients_of(run, 10).norm())


def other_number_of_ranks(rank: int) -> dict[str, bool]:
    """Units are no memory of a rank's own, so they do not bind a checkpoint to its ranks."""
    found = {}
    for spec in ("ecdq:error=0.08", "auto"):
        options: dict[str, Any] = {"candidates": ["ecdq:error=0.08"]} if spec == "auto" else {}
        run = Run(spec, **options)
        run.train(0, 6)
        one = {"states": [run.handle.state_dict()]}
        lc.AllRanks(run.handle).load_state_dict(copy.deepcopy(one))
        run.train(6, 8)
        found[spec] = equal_everywhere(run.model)
    return found


def forgotten_moments(rank: int) -> dict[str, tuple[str, str]]:
    """One rank has no optimizer state, as after a checkpoint that another one did not load."""
    found = {}
    for case, first in {"from the start": 0, "later": 6}.items():
        run = Run(timeout_s=PATIENCE_S)
        run.train(0, first)
        if not first and rank == 0:
            for parameter in run.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            run.optimizer.step()
        if first and rank == 1:
            run.optimizer.state.clear()
        try:
            run.train(first, 30)
        except lc.LaconicError as error:
            found[case] = type(error).__name__, str(error)
    return found


def forgets_on_one_rank(rank: int) -> str:
    model = DistributedDataParallel(network())
    given = adamw(model) if rank else None
    return refusal(lambda: lc.compress(model, "ecdq", optimizer=given))


def warns(rank: int) -> dict[str, list[str]]:
    found = {}
    cases: dict[str, tuple[str, Any, bool]] = {
        "adam": ("ecdq:error=0.08", adamw, False),
        "told": ("ecdq:error=0.08", adamw, True),
        "sgd": ("ecdq:error=0.08", sgd, False),
        "blocks": ("dqsg:bits=4", adamw, False),
        "steps": ("ecdq:error=0.08,block=4096", adamw, False),
        "muon": ("dqsg:bits=4", muon, False),
        "muon, plain": ("none", muon, False),
    }
    for name, (spec, make, units) in cases.items():
        with warnings_told() as found[name]:
            Run(spec, make, units=units).train(0, 3)
    pushes = {
        "ssd": ("ecdq:error=0.08", adamw),
        "ssd, steps": ("ecdq:error=0.08,block=4096", adamw),
        "ssd, sgd": ("ecdq:error=0.08", sgd),
    }
    for name, (spec, make) in pushes.items():
        model = network()
        with warnings_told() as found[name]:
            lc.SSD(make(model), model, codec=spec).close()
    return found


def warns_of_a_stranger(rank: int) -> dict[str, list[str]]:
    """The optimizer that was given steps other parameters, or has its moments elsewhere."""
    found = {}
    for name, kept in {"stranger": False, "own": True}.items():
        model = DistributedDataParallel(network())
        stepped, other = adamw(model), adamw(network())
        with warnings_told() as found[name]:
            lc.compress(model, "ecdq:error=0.08", optimizer=stepped if kept else other)
            for step in range(3):
                x, y = batch(rank, step)
                nn.functional.cross_entropy(model(x), y).backward()
                stepped.step()
    return found


def rare_words(rank: int) -> dict[bool, dict[str, Any]]:
    """With units although rows are far apart, and as the product does it."""
    return {apart: rare_words_at(rank, apart=apart) for apart in (True, False)}


def rare_words_at(rank: int, *, apart: bool) -> dict[str, Any]:
    """An embedding most of whose rows are seldom used: zeros cost ecdq nothing, used rows all."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(4000, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words, weight = 1 / torch.arange(1, 4001).float() ** 1.1, model.module.weight
    found: dict[str, Any] = {"errors": []}
    with warnings_told() as found["told"], pytest.MonkeyPatch.context() as patch:
        if apart:
            patch.setattr(_preconditioner, "_APART", math.inf)
        handle = lc.compress(model, "ecdq:error=0.08", optimizer=optimizer)
        for step in range(130):
            draw = torch.Generator().manual_seed(100 * step + rank)
            optimizer.zero_grad()
            used = torch.multinomial(words, 64, replacement=True, generator=draw)
            (model(used) * torch.randn(64, 32, generator=draw)).sum().backward()
            assert weight.grad is not None
            if step % 16 == 0 and step:
                mean = torch.zeros(4000, 32)
                for r in range(RANKS):
                    own = torch.Generator().manual_seed(100 * step + r)
                    used = torch.multinomial(words, 64, replacement=True, generator=own)
                    mean.index_add_(0, used, torch.randn(64, 32, generator=own), alpha=1 / RANKS)
                wrong = (weight.grad - mean).square().sum() / mean.square().sum()
                found["errors"].append(float(wrong))
            optimizer.step()
    found["stats"] = handle.stats()
    return found


def one_by_one(rank: int) -> float:
    """A compiled DDP hands over gradients one by one, here of a kernel that is channels_last."""
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 64, 3, bias=False)
    layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)
    model = DistributedDataParallel(layer)
    optimizer, weight = adamw(model), layer.weight
    handle: Any = lc.compress(model, "ecdq:error=0.08", optimizer=optimizer)
    sizes, errors = torch.logspace(-0.5, 0.5, 64).view(1, 64, 1, 1), 0.0
    for step in range(20):
        draw = torch.Generator().manual_seed(step)
        gradient = torch.randn(64, 64, 3, 3, generator=draw) * sizes
        weight.grad = gradient.to(memory_format=torch.channels_last)
        exact = weight.grad.clone()
        comm_hook(handle, (weight.grad, weight))  # pyright: ignore[reportArgumentType]
        if step >= 10:
            scale = optimizer.state[weight]["exp_avg_sq"].sqrt()
            error = ((weight.grad - exact) / scale).square().sum()
            errors += float(error / (exact / scale).square().sum()) / 10
        optimizer.step()
    return errors


def auto(rank: int) -> dict[str, Any]:
    logging.getLogger("laconic").setLevel(logging.ERROR)
    run = Run("auto", candidates=["ecdq:error=0.08", "dqsg:bits=4"])
    run.train(0, 45)
    looked = run.handle._states["none"].preconditioner
    return {
        "equal": equal_everywhere(run.model),
        "shared": all(one.preconditioner is looked for one in run.handle._states.values()),
        "snapshot": looked.units(0) is not None,
        "choice": run.handle.choice,
    }


def several(rank: int) -> dict[str, Any]:
    """Two optimizers, one of them SGD; a third part is trained by none that was named."""

    layers = network()
    model = DistributedDataParallel(layers, bucket_cap_mb=0.05)
    adam = torch.optim.Adam(layers[0].parameters(), lr=1e-3)
    sgd = torch.optim.SGD(layers[2].parameters(), lr=0.1)
    every, policy = [adam, sgd], lc.Policy(min_numel=0, min_dims=0)
    handle: Any = lc.compress(model, "ecdq", optimizer=every, policy=policy)
    for step in range(6):
        x, y = batch(rank, step)
        nn.functional.cross_entropy(model(x), y).backward()
        for one in every:
            one.step()
            one.zero_grad()
    known = [handle.preconditioner.units(number) is not None for number in range(6)]
    return {"equal": equal_everywhere(model), "known": known}


JOBS = [
    resumes,
    halves,
    sees_what_counts,
    cold_start,
    leaves_sgd_alone,
    drifts,
    forgotten_moments,
    with_and_without,
    other_number_of_ranks,
    forgets_on_one_rank,
    warns,
    one_by_one,
    rare_words,
    warns_of_a_stranger,
    auto,
    several,
]


found = ranks.shared(JOBS, RANKS)


def test_killed_and_resumed_runs_end_with_the_same_bits(found: ranks.Answers) -> None:
    for rank in range(RANKS):
        wrong = [name for name, same in found[rank, "resumes"].items() if not same]
        assert not wrong, wrong


def test_half_precision(found: ranks.Answers) -> None:
    for rank in range(RANKS):
        for dtype, (equal, finite, stats) in found[rank, "halves"].items():
            assert equal and finite, dtype
            assert 0 < stats.error_mean <= 1.1 * 0.08, dtype


def test_the_budget_is_kept_where_adam_looks(found: ranks.Answers) -> None:
    answers = found[0, "sees_what_counts"]
    (uniform, _), (own, plain) = answers["own"], answers["units"]
    assert own < 0.12 < 0.14 < uniform, answers  # the rest is what snapshot and floor cost
    stats, without = answers["stats"], answers["plain stats"]
    assert stats.error_mean <= 1.1 * 0.08
    assert 0.4 * plain < stats.gradient_error_mean < 2.5 * plain
    assert stats.gradient_error_largest <= 10
    assert without.gradient_error_mean is None


def test_gradients_are_exact_until_the_first_step(found: ranks.Answers) -> None:
    assert found[0, "cold_start"] == {"skipped": True, "first": True, "then": False}


def test_sgd_is_as_before_to_the_bit(found: ranks.Answers) -> None:
    assert found[0, "leaves_sgd_alone"]


def test_moments_that_differ_are_found_and_named(found: ranks.Answers) -> None:
    for rank in range(RANKS):
        said = found[rank, "drifts"]
        assert "second moments" in said and "rank 1" in said, said


def test_memories_change_their_units_with_the_run(found: ranks.Answers) -> None:
    for rank in range(RANKS):
        answers = found[rank, "with_and_without"]
        for units in (False, True):
            own, other = answers[f"units: {units}"]
            assert 0.5 * own < other < 2 * own, answers
        assert answers["back to the start"]


def test_states_with_units_resume_on_other_numbers_of_ranks(found: ranks.Answers) -> None:
    for rank in range(RANKS):
        assert all(found[rank, "other_number_of_ranks"].values())


def test_moments_that_one_rank_lacks_are_found(found: ranks.Answers) -> None:
    """Before ranks wait for each other: one would send plain gradients, the other encoded ones."""
    for rank in range(RANKS):
        for case in ("from the start", "later"):
            kind, said = found[rank, "forgotten_moments"][case]
            assert kind == "ReplicaError" and "second moments" in said, (case, said)


def test_ranks_agree_whether_an_optimizer_is_given(found: ranks.Answers) -> None:
    for rank in range(RANKS):
        assert "optimizer" in found[rank, "forgets_on_one_rank"]


def test_one_warning_where_an_optimizer_is_missing(found: ranks.Answers) -> None:
    told = found[0, "warns"]
    assert len(told["adam"]) == 1
    assert "AdamW" in told["adam"][0] and "optimizer=optimizer" in told["adam"][0]
    assert "block=4096" in told["adam"][0]
    assert len(told["muon"]) == 1 and "Muon" in told["muon"][0] and "0.02" in told["muon"][0]
    assert len(told["ssd"]) == 1
    assert "AdamW" in told["ssd"][0] and "block=4096" in told["ssd"][0]
    quiet = ("told", "sgd", "blocks", "steps", "muon, plain", "ssd, steps", "ssd, sgd")
    assert not any(told[name] for name in quiet), told
    assert not any(found[1, "warns"].values())


def test_a_warning_where_the_optimizer_is_another_one(found: ranks.Answers) -> None:
    told = found[0, "warns_of_a_stranger"]
    assert len(told["stranger"]) == 1 and not told["own"], told
    assert "without moments" in told["stranger"][0] and "block=4096" in told["stranger"][0]


def test_rare_words_have_no_units_which_would_serve_them_badly(found: ranks.Answers) -> None:
    """And somebody who finds another such gradient is told so."""
    units, none = found[0, "rare_words"][True], found[0, "rare_words"][False]
    for told in (units, none):
        assert told["stats"].error_mean < 1.1 * 0.08
    assert not none["told"] and max(none["errors"]) < 1.3 * 0.08
    assert len(units["told"]) == 1 and "block=4096" in units["told"][0], units
    made = sum(units["errors"]) / len(units["errors"])
    assert made > 1
    assert 0.5 * made < units["stats"].gradient_error_mean < 2 * made, (made, units["stats"])


def test_gradients_one_by_one_meet_their_own_units(found: ranks.Answers) -> None:
    assert 0.04 < found[0, "one_by_one"] < 0.12, found[0, "one_by_one"]


def test_auto_measures_and_trains_in_the_same_units(found: ranks.Answers) -> None:
    for rank in range(RANKS):
        answer = found[rank, "auto"]
        assert answer["equal"] and answer["shared"], answer
        assert answer["snapshot"], "codecs were looked at without units"


def test_several_optimizers(found: ranks.Answers) -> None:
    for rank in range(RANKS):
        assert found[rank, "several"]["equal"]
        assert found[rank, "several"]["known"] == [True, True, False, False, False, False]
