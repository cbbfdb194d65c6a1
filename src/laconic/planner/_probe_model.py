"""The times of a step of the user's model without communication, and its gradients.

The model is wrapped in DistributedDataParallel with a hook that sends nothing: DDP's own work and
its real buckets are measured, too.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic._cost import Bucket, Workload
from laconic.errors import ConfigError
from laconic.exchanges._policy import Chooser, policy_for
from laconic.exchanges._preconditioner import Preconditioner, is_adaptive
from laconic.integrations._ddp import as_comm_hook
from laconic.kernels import backend
from laconic.planner._probe_cluster import Clock, typical
from laconic.planner._probe_codecs import Sample

_UNMEASURED, _FEWEST, _MOST = 4, 8, 60  # steps


@dataclass(frozen=True)
class Setup:
    """A model, and a function of it that computes a loss of a new batch."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    optimizer: torch.optim.Optimizer | None = None


def load_setup(name: str) -> Setup:
    """Call `module:function`, which returns (model, loss) or (model, loss, optimizer)."""
    module, _, function = name.partition(":")
    if not function:
        raise ConfigError(f"name a function as module:function, not {name!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name} cannot be loaded: {error}") from error
    finally:
        sys.path.pop(0)
    return checked_setup(made, name)


def checked_setup(made: Any, name: str) -> Setup:
    """What a function returned, as a Setup."""
    right = isinstance(made, tuple) and len(made) in (2, 3)
    if not right or not isinstance(made[0], nn.Module) or not callable(made[1]):
        raise ConfigError(
            f"{name} must return (model, loss) or (model, loss, optimizer), where loss(model) "
            "computes the loss of a new batch"
        )
    return Setup(*made)


@dataclass
class _Seen:
    """One step, as the hook and the loop saw it."""

    ready: list[float] = field(default_factory=list)
    buckets: list[list[nn.Parameter]] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    keep: bool = False


def probe_model(
    setup: Setup, clock: Clock, patience_s: float, policy: Chooser | None = None
) -> tuple[Workload, Sample]:
    """Times of forward, backward up to each bucket, and the rest; and gradients to encode."""
    cuda = clock.device.type == "cuda"
    model = setup.model.to(clock.device)
    replicas = DistributedDataParallel(
        model, process_group=clock.group, device_ids=[clock.device.index] if cuda else None
    )
    seen = _Seen()
    replicas.register_comm_hook(seen, _silent)
    optimizer = setup.optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    steps = [_step(replicas, setup.loss, optimizer, seen, clock) for _ in range(_UNMEASURED)]
    # before the timed steps: nothing is exchanged in them, so that they may well diverge
    seen.keep = True
    _step(replicas, setup.loss, optimizer, seen, clock)
    seen.keep = False
    chosen = policy_for(policy, model.named_parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    worth = [[bool(chosen(names[id(p)], p)) for p in bucket] for bucket in seen.buckets]
    adaptive = is_adaptive(optimizer)
    units = Preconditioner(optimizer) if adaptive else None
    sample = _sample(seen, worth, clock.group, units)
    count = round(patience_s / max(1e-6, clock.mean(sum(steps[-1].spans))))
    count = max(_FEWEST, min(_MOST, count))
    steps = [_step(replicas, setup.loss, optimizer, seen, clock) for _ in range(count)]
    skew = _skew(lambda: _step(replicas, setup.loss, optimizer, seen, clock), clock, steps)
    forward, backward, rest = (
        clock.mean(typical([step.spans[i] for step in steps])) for i in range(3)
    )
    buckets = []
    for number, (bucket, encoded) in enumerate(zip(seen.buckets, worth, strict=True)):
        ready = clock.mean(typical([step.ready[number] for step in steps]))
        sizes = [p.numel() for p in bucket]
        kept = sum(size for size, yes in zip(sizes, encoded, strict=True) if yes)
        buckets.append(Bucket(encoded=kept, plain=sum(sizes) - kept, ready_s=min(ready, backward)))
    return (
        Workload(
            forward_s=forward,
            backward_s=backward,
            rest_s=rest,
            buckets=tuple(buckets),
            value_bytes=seen.buckets[0][0].element_size(),
            kappa=sample.kappa,
            skew_s=skew,
            adaptive=adaptive,
        ),
        sample,
    )


@dataclass(frozen=True)
class _Step:
    spans: tuple[float, float, float]  # forward, backward, rest
    ready: tuple[float, ...]


def _skew(step: Callable[[], _Step], clock: Clock, alone: Sequence[_Step]) -> float:
    """How much longer a step takes with a barrier after it, without the barrier's own time.

    Ranks do not take equally long, and where they share cores, they share them unevenly: a
    collective waits for the last.
    """

    def meet() -> float:
        return clock.mean(0.0)

    count = len(alone)
    free = clock.mean(typical([sum(one.spans) for one in alone]))
    meeting = clock.mean(typical([clock.timed(meet) for _ in range(count)]))
    both = clock.mean(typical([clock.timed(lambda: (step(), meet())) for _ in range(count)]))
    return max(0.0, both - free - meeting)


def _step(
    replicas: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    optimizer: torch.optim.Optimizer,
    seen: _Seen,
    clock: Clock,
) -> _Step:
    """A step; on CUDA the device is waited for at the marks, because hosts run ahead."""
    seen.ready, seen.buckets = [], []
    start = time.perf_counter()
    value = loss(replicas)
    clock.finish()
    forward = time.perf_counter()
    value.backward()
    clock.finish()
    backward = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad()
    clock.finish()
    spans = forward - start, backward - forward, time.perf_counter() - backward
    return _Step(spans, tuple(moment - forward for moment in seen.ready))


@as_comm_hook
def _silent(state: _Seen, bucket: Any) -> Future[Tensor]:
    """Sends nothing; records when a bucket was ready, and once its gradients."""
    state.ready.append(time.perf_counter())
    state.buckets.append(list(bucket.parameters()))
    if state.keep:
        state.gradients.append(bucket.buffer().detach().clone())
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


def _sample(
    seen: _Seen,
    worth: list[list[bool]],
    group: dist.ProcessGroup,
    units: Preconditioner | None = None,
) -> Sample:
    """The values worth encoding, of all buckets, in an optimizer's units; κ over all of them."""
    kept = []
    for flat, bucket, encoded in zip(seen.gradients, seen.buckets, worth, strict=True):
        parts = flat.split([p.numel() for p in bucket])
        kept += [(x, p) for x, p, yes in zip(parts, bucket, encoded, strict=True) if yes]
    if not kept:
        raise ConfigError("this model has no tensor that is worth encoding: plain DDP is best")
    gradients = [x for x, _ in kept]
    if units is not None:
        gradients = _in_units(gradients, [p for _, p in kept], units, group)
    own = torch.cat(gradients)
    mean = own.float().clone()  # float() of fp32 is the same tensor
    dist.all_reduce(mean, group=group)
    mean /= group.size()
    power = torch.stack([own.float().square().sum(), mean.square().sum()])
    dist.all_reduce(power, group=group)
    alone, common = power.tolist()
    if not math.isfinite(alone):
        raise ConfigError(
            "the gradients of this model are not finite after a few steps on each rank alone: "
            "probe with a lower learning rate"
        )
    sizes = tuple(x.numel() for x in gradients)
    return Sample(own, mean.to(own.dtype), sizes, common / alone if alone else 1.0)


def _in_units(
    gradients: Sequence[Tensor],
    parameters: Sequence[Tensor],
    units: Preconditioner,
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """Gradients in the units that `lc.compress(optimizer=)` would encode them in.

    Ranks have trained alone here, so their second moments differ: the largest of each is taken.
    """
    units.refresh(0, dict(enumerate(parameters)))
    found = []
    for number, gradient in enumerate(gradients):
        half = gradient.dtype == torch.float16  # whose range units may leave
        x, own = gradient.float() if half else gradient, units.units(number)
        if own is not None:
            dist.all_reduce(own, dist.ReduceOp.MAX, group=group)
            backend(x.device).times_powers(x, own, x, inverse=True)
        found.append(x)
    return found
