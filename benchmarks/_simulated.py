"""Several workers of a schedule in one process: the product's rules and steps, no transport.

A slot has the models of all workers of one run and, on a GPU, a graph of their forward and backward
passes. Slots have a stream each, so that many runs overlap on one GPU. What is simulated is how
gradients and weights travel: a mean is computed, and a pull is a copy that is taken over one step
later. `tests/benchmarks/test_simulated.py` compares it with the product on real processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

import laconic as lc
from benchmarks._ranks import Rank, Switch, on_all
from laconic._scratch import copy_all
from laconic.codecs import Codec
from laconic.comm._context import ExchangeContext
from laconic.schedules import LocalRule, Outer
from laconic.schedules._master import NO_CODEC, push
from laconic.schedules._rules import Replica
from laconic.sharding._flat_parameters import FlatParameters
from laconic.sharding._shard import Shard, settings_of
from laconic.sharding._trained import Trained


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train: `kind` is sync, ssd or local (local SGD, DiLoCo with an outer step)."""

    name: str
    kind: str
    rate: float  # the peak
    period: int = 1
    rule: LocalRule | None = None
    outer: Outer | None = None
    codec: str = "none"  # of SSD's push
    warmup: float = 1.0  # synchronous epochs before
    momentum: float = 0.9
    decay: float = 5e-4
    clip: float | None = None  # of each worker's own gradient
    adam: bool = False

    def optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        if self.adam:
            betas = (0.9, 0.95)
            return torch.optim.AdamW(parameters, self.rate, betas, weight_decay=self.decay)
        return torch.optim.SGD(
            parameters, self.rate, momentum=self.momentum, weight_decay=self.decay
        )


class Task(Protocol):
    """What is learnt; everything on one device."""

    workers: int
    steps: int
    epoch: int  # steps of one
    device: torch.device

    def model(self) -> nn.Module: ...
    def start(self, seed: int) -> Tensor:
        """The first weights, as a flat vector."""
        ...

    def plan(self, seed: int) -> Tensor:
        """(steps, ..) integers: which data all workers see at each step."""
        ...

    def losses(self, models: Sequence[nn.Module], now: Tensor) -> Iterator[Tensor]:
        """Each worker's loss, of one row of a plan."""
        ...

    def score(self, weights: Tensor) -> float: ...


class Packed(FlatParameters):
    """The same vector, but the parameters lie in it: reading and writing are one copy.

    Kernels in channels-last order keep it: their values have other places in the vector, which
    optimizers and rules that step value by value do not see.
    """

    def __init__(self, model: nn.Module, ranks: int) -> None:
        groups = [{"params": list(model.parameters())}]
        super().__init__(Trained(groups, model, "a simulation").groups, ranks)
        self.weights, self.gradients = self.empty(), self.empty()
        super().read(self.weights)
        for p, view in zip(self.parameters, self.views(self.weights), strict=True):
            p.data = view
        self.gradient_views = self.views(self.gradients)

    def read(self, x: Tensor) -> Tensor:
        return x.copy_(self.weights)

    def write(self, x: Tensor) -> None:
        self.weights.copy_(x)

    def views(self, x: Tensor) -> list[Tensor]:
        views = []
        for p, part in zip(self.parameters, self.slices, strict=True):
            if p.is_contiguous():
                views.append(x[part].view(p.shape))
            else:
                a, b, c, d = p.shape
                views.append(x[part].view(a, c, d, b).permute(0, 3, 1, 2))
        return views


class Slot:
    """Room for one run: models of all workers, and their gradients at the next row of a plan."""

    def __init__(self, task: Task, graph: bool) -> None:
        self.task = task
        self.stream = torch.cuda.Stream() if task.device.type == "cuda" else None
        with self.on():
            self.models = [task.model() for _ in range(task.workers)]
            self.flats = [Packed(model, task.workers) for model in self.models]
            self.plan = torch.zeros_like(task.plan(0))
            self.at = torch.zeros(1, dtype=torch.long, device=task.device)
            self.losses = torch.zeros(task.steps, device=task.device)
        self._graph = self._captured() if graph and self.stream is not None else None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Work for this slot's stream."""
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def reset(self, seed: int) -> None:
        """A new run."""
        start = self.task.start(seed)
        for flat in self.flats:
            flat.write(start)
        self.plan.copy_(self.task.plan(seed))
        self.at.zero_()
        self.losses.zero_()

    def gradients(self) -> list[Tensor]:
        """Of all workers' own weights at their next data."""
        if self._graph is None:
            self._work()
        else:
            self._graph.replay()
        return [flat.gradients for flat in self.flats]

    def _work(self) -> None:
        now = self.plan.index_select(0, self.at).squeeze(0)
        every = zip(self.task.losses(self.models, now), self.flats, strict=True)
        for number, (loss, flat) in enumerate(every):
            copy_all(flat.gradient_views, torch.autograd.grad(loss, flat.parameters))
            if number == 0:
                self.losses.index_copy_(0, self.at, loss.detach().float().view(1))
        self.at.add_(1)

    def _captured(self) -> torch.cuda.CUDAGraph:
        assert self.stream is not None
        with self.on():
            self.reset(0)
            for _ in range(3):  # libraries choose kernels and make their workspaces
                self._work()
            self.at.zero_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self._work()
        return graph


class Run(Protocol):
    """A schedule at work in a slot."""

    def step(self, t: int, rate: float) -> None: ...
    def result(self) -> Tensor:
        """The weights that a user would keep."""
        ...


def begun(slot: Slot, setting: Setting, seed: int) -> Run:
    slot.reset(seed)
    return Local(slot, setting) if setting.kind == "local" else Delayed(slot, setting, seed)


class Delayed:
    """SSD, step by step as `SSD.step` takes them; synchronous training is a warm-up without end.

    Gradients are taken to be finite: looking at them would wait for the device at every step.
    """

    def __init__(self, slot: Slot, setting: Setting, seed: int) -> None:
        self._slot, self._setting = slot, setting
        flat = slot.flats[0]
        steps = slot.task.steps if setting.kind == "sync" else setting.warmup * slot.task.epoch
        self._warmup = round(steps)
        optimizer = setting.optimizer(flat.parameters)
        self._settings = settings_of(optimizer.param_groups)
        self._replicas = [
            Replica(own, setting.rule, setting.period, decoupled=setting.adam) for own in slot.flats
        ]
        self._shard = Shard(optimizer, self._replicas[0].own, flat.groups)
        self._fine = torch.zeros(1, device=flat.device)
        self._codec = lc.codec(setting.codec)
        workers = slot.task.workers
        self._switch = Switch(workers)
        self._calls = [
            ExchangeContext(group=Rank(self._switch, rank), seed=seed, places=flat.places)
            for rank in range(workers)
        ]

    def step(self, t: int, rate: float) -> None:
        gradients = clipped(self._slot.gradients(), self._setting.clip)
        self._settings[0]["lr"] = rate
        if t < self._warmup:
            self._owners(gradients, t, NO_CODEC)
            for one in self._replicas:
                one.next.copy_(self._shard.weights)
                one.take_as_they_are()
        else:
            for one, g in zip(self._replicas, gradients, strict=True):
                one.move(g, self._fine, self._settings)
            self._owners(gradients, t, self._codec)
            if (t - self._warmup + 1) % self._setting.period == 0:
                for one in self._replicas:
                    one.next.copy_(self._shard.weights)
                    one.coming = True
        for one, flat in zip(self._replicas, self._slot.flats, strict=True):
            flat.write(one.own)

    def result(self) -> Tensor:
        return self._shard.weights

    def _owners(self, gradients: Sequence[Tensor], t: int, codec: Codec) -> None:
        if codec.name == "none":
            mean_of(gradients, self._shard.mean)
        else:
            self._encoded_mean(gradients, t, codec)
        for group, one in zip(self._shard.optimizer.param_groups, self._settings, strict=True):
            group.update(one)
        self._shard.optimizer.step()

    def _encoded_mean(self, gradients: Sequence[Tensor], t: int, codec: Codec) -> None:
        """The product's own push, on ranks that are threads."""
        flat = self._slot.flats[0]
        work = []
        for j, (g, context) in enumerate(zip(gradients, self._calls, strict=True)):
            out = flat.chunks(self._shard.mean)[j]
            now = replace(context, step=t)
            work.append(partial(push, flat, g, self._fine.clone(), codec, now, out))
        on_all([self._switch], work)


class Local:
    """LocalSGD: every worker has an optimizer of its own; progress is averaged at period's end."""

    def __init__(self, slot: Slot, setting: Setting) -> None:
        self._slot, self._setting = slot, setting
        self._warmup = round(setting.warmup * slot.task.epoch)
        first = slot.flats[0]
        self._base = first.weights.clone()
        self._momentum, self._mean = torch.zeros_like(self._base), torch.empty_like(self._base)
        optimizer = setting.optimizer(first.parameters)
        self._shards = [Shard(optimizer, self._base, flat.groups) for flat in slot.flats]

    def step(self, t: int, rate: float) -> None:
        gradients = clipped(self._slot.gradients(), self._setting.clip)
        if t < self._warmup:
            gradients = [mean_of(gradients, self._mean)] * len(gradients)
        for own, g in zip(self._shards, gradients, strict=True):
            own.mean.copy_(g)
            own.optimizer.param_groups[0]["lr"] = rate
            own.optimizer.step()
        since = t + 1 - self._warmup
        if since <= 0:
            self._base.copy_(self._shards[0].weights)
        elif since % self._setting.period == 0:
            self._outer()
        for own, flat in zip(self._shards, self._slot.flats, strict=True):
            flat.write(own.weights)

    def _outer(self) -> None:
        mean_of([self._base - own.weights for own in self._shards], self._mean)
        if self._setting.outer is None:
            self._base.sub_(self._mean)
        else:
            self._setting.outer.step(self._base, self._mean, self._momentum)
        for own in self._shards:
            own.weights.copy_(self._base)

    def result(self) -> Tensor:
        return self._base


def mean_of(vectors: Sequence[Tensor], out: Tensor) -> Tensor:
    """In order of workers, each weighed first, as owners do it."""
    torch.mul(vectors[0], 1 / len(vectors), out=out)
    for x in vectors[1:]:
        out.add_(x, alpha=1 / len(vectors))
    return out


def clipped(gradients: list[Tensor], most: float | None) -> list[Tensor]:
    """Each scaled to a two-norm of `most`, if it has more."""
    if most is not None:
        for g in gradients:
            g.mul_((most / (torch.linalg.vector_norm(g) + 1e-6)).clamp_(max=1.0))
    return gradients
