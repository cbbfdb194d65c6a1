"""DDP's communication hook: gradients travel encoded, overlapped with backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.comm._agreement import compare
from laconic.comm._context import ExchangeContext
from laconic.comm._sums import plain_mean
from laconic.comm._threads import CommLane
from laconic.exchanges._preconditioner import Preconditioner
from laconic.integrations._buckets import (
    Bucket,
    BucketLayout,
    CodecGroup,
    copied,
    gathered,
    new_future,
    norms,
)
from laconic.integrations._state import HookState

_UNITS = "second moments of the optimizers"
_Hook = TypeVar("_Hook", bound=Callable[..., Future[Tensor]])


def as_comm_hook(hook: _Hook) -> _Hook:
    """With the annotations that DDP compares: the types themselves, not their names."""
    hook.__annotations__ |= {
        "bucket": dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
        "return": Future[Tensor],
    }
    return hook


@as_comm_hook
def comm_hook(state: HookState, bucket: Any) -> Future[Tensor]:
    """DDP's hook: starts the exchange of a bucket and returns at once."""
    state.connect()
    if isinstance(bucket, tuple):  # a compiled DDP with the Python reducer: gradient, parameter
        blocking: Any = torch.compiler.disable(_one_by_one)
        return blocking(state, *bucket)
    if bucket.index() == 0:
        raise_after_backward(state.lanes)
    return state.order.exchange(bucket, state.step, partial(exchange_bucket, state))


def exchange_bucket(state: HookState, bucket: Bucket) -> Future[Tensor]:
    """Start the exchange of a bucket that is laid out as it must be."""
    buffer, step = bucket.buffer, state.step
    lane = state.lanes[bucket.index % len(state.lanes)]
    has_joined = not in_backward()
    if has_joined:
        state.optimizers.passes = None
    context = state.session.context(
        lane.group, step=step, passes=state.optimizers.passes, traffic=lane.traffic
    )
    if bucket.is_last:
        state.end_pass()
        if state.replicas_due(step):
            check = partial(state.compare_replicas, lane, step, has_joined=has_joined)
            start(lane, buffer.new_empty(0), check)
    if state.alone:
        return _done(buffer)
    if buffer.is_sparse:
        state.warn_of_sparse(bucket.parameters)
        own = buffer * (1 / lane.group.size())  # in place it would change what backward still reads
        return start(lane, own, partial(_sparse_sum, lane, own))
    renew_units(state, buffer, step)
    layout = state.layout(bucket.parameters)
    return start(lane, buffer, partial(_exchange, state, lane, buffer, layout, context))


def renew_units(state: HookState, buffer: Tensor, step: int) -> None:
    """Where gradients are encoded in an optimizer's units, make a snapshot of these if it is due.

    In the first lane, before the first bucket of a step, whatever its number; the other lane waits
    where it needs them. If digests differ, `backward` raises.
    """
    units = state.preconditioner
    if units is not None and state.units_due(step):
        units.begin()
        lane = state.lanes[0]
        start(lane, buffer.new_empty(0), partial(_renew, state, units, lane, step, buffer.device))


def _renew(
    state: HookState, units: Preconditioner, lane: CommLane, step: int, device: torch.device
) -> None:
    """All ranks compare, also those without units: others that have some would wait."""
    agreed = False
    try:
        found = state.renew_units(step)
        if found is None:
            found = torch.full((), int(units.undecided), dtype=torch.int64, device=device)
        compare(found, lane.group, step, _UNITS)
        agreed = True
    finally:
        units.end(agreed=agreed)


def raise_after_backward(lanes: Sequence[CommLane]) -> None:
    """Errors in a lane are raised by `backward`, with their type.

    torch turns the error of a Python hook's future into "Unable to cast". So futures end with NaN,
    and the error is raised by a callback of autograd's after DDP's own, which waits for all
    futures: callbacks run in order, and DDP queues its own after the last bucket. Outside of a
    backward pass there are no callbacks; the next call of the hook raises then.
    """

    def check() -> None:
        failures = [failure for lane in lanes if (failure := lane.failure()) is not None]
        if failures:
            raise failures[0]

    check()
    engine: Any = torch.autograd.Variable._execution_engine
    with suppress(RuntimeError):
        engine.queue_callback(lambda: engine.queue_callback(check))


def in_backward() -> bool:
    """False where DDP's `join` has a rank without inputs send zeros for others' backward passes.

    Such a rank steps no optimizer, so it does not know how many passes they count.
    """
    return torch._C._current_graph_task_id() >= 0


def _one_by_one(state: HookState, gradient: Tensor, parameter: Tensor) -> Future[Tensor]:
    """Without buckets: one parameter's gradient becomes its mean, in place, before this returns."""
    if not parameter.numel():
        return _done(gradient)
    layout = state.layout([parameter])
    number = (layout.plain or layout.groups[0].slices)[0].number
    step = state.turns.get(number, 0)
    state.turns[number] = step + 1
    state.step = max(state.step, step + 1)
    if state.alone:
        return _done(gradient)
    units = state.preconditioner
    if units is not None and state.units_due(step):
        units.begin()
        _renew(state, units, state.lanes[0], step, gradient.device)
    own = gradient.detach().permute(parameter.dim_order())  # units follow the parameter's memory
    real = torch.view_as_real(own) if own.is_complex() else own
    flat, lane = real.contiguous().view(-1), state.lanes[0]
    context = state.session.context(lane.group, step=step, traffic=lane.traffic)
    _exchange(state, lane, flat, layout, context)
    if flat.data_ptr() != real.data_ptr():
        real.copy_(flat.view_as(real))
    return _done(gradient)


def _done(value: Tensor) -> Future[Tensor]:
    done = new_future(value)
    done.set_result(value)
    return done


def start(lane: CommLane, buffer: Tensor, work: Callable[[], None]) -> Future[Tensor]:
    """`work` in the lane's thread, after earlier jobs; then the future gets `buffer`.

    If work fails the buffer is NaN, and `lane.failure` has the error.

    On CUDA work runs on a stream of its own, after what is on the caller's now.
    """
    done = new_future(buffer)
    ready = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
    lane.thread.submit(_job, lane, buffer, work, ready, done)
    return done


def _job(
    lane: CommLane, buffer: Tensor, work: Callable[[], None], ready: Any, done: Future[Tensor]
) -> None:
    """Runs in a lane's thread."""
    stream = nullcontext() if ready is None else torch.cuda.stream(_side_stream(buffer.device))
    with stream:
        try:
            if ready is not None:
                ready.wait()
            work()
        except Exception as error:
            lane.fail(error)
            _fill_with_nan(buffer)
        done.set_result(buffer)


def _fill_with_nan(buffer: Tensor) -> None:
    """So that code that continues in spite of an error cannot take it for a mean."""
    values = buffer._values() if buffer.is_sparse else buffer
    values.fill_(torch.nan)


def _sparse_sum(lane: CommLane, gradient: Tensor) -> None:
    """Add up gradients of nn.Embedding(sparse=True), in place: the backend's own sum, as DDP's."""
    values = gradient._values()
    lane.plain_bytes += values.numel() * values.element_size()
    with lane.traffic.sending(values.numel() * values.element_size()):
        dist.all_reduce(gradient, group=lane.group)


def _exchange(
    state: HookState,
    lane: CommLane,
    buffer: Tensor,
    layout: BucketLayout,
    context: ExchangeContext,
) -> None:
    """The bucket becomes its mean over ranks, in place."""
    start = time.perf_counter()
    size = lane.group.size()
    lane.plain_bytes += round(2 * (size - 1) / size * buffer.numel() * buffer.element_size())
    if context.step < state.warmup_steps or state.cold or not layout.groups:
        plain_mean(buffer, context)
    else:
        scratch, plain = state.session.scratch, layout.plain
        with copied(buffer, plain, scratch, "plain", torch.float32) as values:
            for group in layout.groups:
                first = group is layout.groups[0]
                _exchange_group(state, buffer, group, context, values if first and plain else None)
    lane.seconds += time.perf_counter() - start


def _exchange_group(
    state: HookState,
    buffer: Tensor,
    group: CodecGroup,
    context: ExchangeContext,
    uncompressed: Tensor | None,
) -> None:
    """One codec's part of the bucket, and values that travel with it."""
    context = replace(context, tensor=group.slices[0].number, places=group.places)
    for one in group.fillers:  # `uncompressed` has their values
        one.of(buffer).zero_()
    estimated = state.estimates(group, context.step)
    parts = [one.of(buffer) for one in group.slices] if estimated else []
    own = norms(parts)
    with gathered(buffer, group.slices, state.session.scratch, state.units_of(group)) as x:
        group.exchange.mean(x, group.codec, context, uncompressed)
        encoded = norms(x.split([one.numel for one in group.slices])) if estimated else []
    if estimated:
        state.monitor.estimate(group, own, encoded, parts, context.step)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
