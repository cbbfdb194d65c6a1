"""Check any schedule for what users rely on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.schedules import Schedule
from laconic.testing._processes import on_ranks
from laconic.testing._subject import broken

Factory = Callable[[nn.Module], Schedule]
_STEPS, _MORE, _BATCH, _VALUES = 25, 5, 64, 40


def check_schedule(make: Factory, *, ranks: Sequence[int] = (1, 3)) -> None:
    """AssertionError, saying which rule was broken, by what, and how to fix it; else nothing.

    `make(model)` returns a schedule that trains the model, by steps as a torch optimizer's. On so
    many ranks, every one with data of its own: it is a `laconic.Schedule`; training makes the loss
    of the global weights smaller; these are the same bits on all ranks, and finite, and a rank has
    its own weights again afterwards; one rank alone can look at its latest ones; statistics count
    steps and bytes; training resumes from a state_dict bit for bit; a state of something else is
    refused with an error.

    Starts processes over Gloo, and so needs a function that can be imported. Where there is a
    process group, call it on all of its ranks. Ranks that serve others are not for it.
    """
    for size in (1,) if dist.is_initialized() else ranks:
        on_ranks(partial(_check, make), size)


def _check(make: Factory) -> None:
    run = _Run(make)
    before = run.loss()
    run.train(_STEPS)
    run.statistics(_STEPS)
    after = run.loss()
    run.looks()
    run.schedule.wait()
    if not after < before / 2:
        run.broken(
            "training makes the loss smaller",
            f"it is {before:.3g} at first and {after:.3g} after {_STEPS} steps",
            "Let every step use its gradient, and average over ranks once",
        )
    run.resumes()
    run.refuses()
    run.schedule.close()


@dataclass
class _Run:
    """A small regression, on every rank with data of its own."""

    make: Factory

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.target = torch.randn(_VALUES, 1)
        self.model = nn.Linear(_VALUES, 1)
        self.step = 0
        self.schedule = self.make(self.model)
        lacking = [name for name in _members() if not hasattr(self.schedule, name)]
        if lacking:
            self.broken(
                "a schedule has all of laconic.Schedule",
                f"it lacks {', '.join(lacking)}",
                "laconic.schedules.Schedule says what each of them does",
            )

    def broken(self, rule: str, what: str, fix: str) -> None:
        size = dist.get_world_size()
        broken(self.schedule, rule, f"on {size} ranks {what}", fix)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.schedule.zero_grad()
            self._loss(self.step, dist.get_rank()).backward()
            self.schedule.step()
            self.step += 1

    def _loss(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(_BATCH, _VALUES, generator=generator)
        return (self.model(x) - x @ self.target).square().mean()

    def weights(self) -> Tensor:
        return torch.cat([one.detach().flatten() for one in self.model.parameters()])

    def loss(self) -> float:
        """Of the global weights, which are looked at."""
        own = self.weights().clone()
        with self.schedule.global_weights(), torch.no_grad():
            weights, loss = self.weights().clone(), float(self._loss(10_000, 0))
        if not torch.equal(self.weights(), own):
            self.broken(
                "after global_weights() a rank has its own weights again",
                "it has others",
                "Copy them before, and back in a finally",
            )
        every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(every, weights)
        if not all(torch.equal(one, every[0]) for one in every) or not weights.isfinite().all():
            self.broken(
                "global weights are finite, and the same bits on all ranks",
                "they are not",
                "Let all ranks decode the same bytes, in the same order",
            )
        return loss

    def looks(self) -> None:
        """At the latest weights, on one rank first, while the others train on."""
        for step in range(_MORE):
            if step % dist.get_world_size() == dist.get_rank():
                self._look()
            self.train(1)
        weights, old = self._look()
        shown = torch.cat([weights, torch.tensor([float(old)])])
        every = [torch.empty_like(shown) for _ in range(dist.get_world_size())]
        dist.all_gather(every, shown)
        if not all(torch.equal(one, every[0]) for one in every) or not shown.isfinite().all():
            self.broken(
                "latest weights are finite, and equal on all ranks that look after the same step",
                "they are not",
                "Show weights that ranks had in common, and tell how many steps ago",
            )

    def _look(self) -> tuple[Tensor, int]:
        own = self.weights().clone()
        with self.schedule.latest_weights() as old:
            weights = self.weights().clone()
        if not torch.equal(self.weights(), own):
            self.broken(
                "after latest_weights() a rank has its own weights again",
                "it has others",
                "Copy them before, and back in a finally",
            )
        if not isinstance(old, int) or not 0 <= old <= self.step:
            self.broken(
                "latest_weights() tells how many steps old they are",
                f"`with .. as old` gives {old!r} at step {self.step}",
                "Yield an integer from 0",
            )
        return weights, old

    def statistics(self, steps: int) -> None:
        stats = self.schedule.stats()
        found = stats.scalars()
        sent = stats.sent_bytes > 0 or dist.get_world_size() == 1
        finite = all(math.isfinite(value) for value in found.values())
        if stats.steps != steps or not sent or not finite or not found:
            self.broken(
                "stats() counts steps and bytes",
                f"after {steps} steps it says steps={stats.steps}, "
                f"sent_bytes={stats.sent_bytes}, and scalars() {found}",
                "laconic.comm's Traffic counts what its messages send",
            )

    def resumes(self) -> None:
        saved, step = copy.deepcopy(self.schedule.state_dict()), self.step
        self.train(_MORE)
        self.schedule.wait()
        want = self.weights().clone()
        other = _Run(self.make)
        other.schedule.load_state_dict(saved)
        other.step = step
        other.train(_MORE)
        other.schedule.wait()
        got = other.weights()
        if not torch.equal(got, want):
            self.broken(
                "training resumes from a state_dict bit for bit",
                f"{_MORE} steps after it weights differ by up to "
                f"{float((got - want).abs().max()):.3g}",
                "Save the weights, what optimizers keep, residuals, and the step that names draws",
            )
        other.schedule.close()

    def refuses(self) -> None:
        try:
            self.schedule.load_state_dict({})
        except (ValueError, KeyError):
            return
        self.broken(
            "a state of something else is refused",
            "load_state_dict({}) raised nothing",
            "Raise laconic.ConfigError, with what is missing",
        )


def _members() -> list[str]:
    return [name for name in vars(Schedule) if not name.startswith("_")]
