"""One line in a DistributedDataParallel script: gradients travel encoded, behind backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.codecs._memory import Scratch
from laconic.exchanges import Call
from laconic.exchanges._lane import Lane
from laconic.exchanges._preconditioner import Preconditioner
from laconic.exchanges._replicas import compare
from laconic.exchanges._transport import plain_mean
from laconic.integrations._bucket_order import Bucket
from laconic.integrations._state import HookState, Load, Piece, Plan

_UNITS = "second moments of the optimizers"


def comm_hook(state: HookState, bucket: Any) -> Future[Tensor]:
    """DDP's hook: starts the exchange of a bucket and returns at once."""
    state.meet()
    if isinstance(bucket, tuple):  # a compiled DDP with the Python reducer: gradient, parameter
        blocking: Any = torch.compiler.disable(_one_by_one)
        return blocking(state, *bucket)
    if bucket.index() == 0:
        raise_after_backward(state.lanes)
    return state.order.exchange(bucket, state.step, partial(exchange_bucket, state))


def exchange_bucket(state: HookState, bucket: Bucket) -> Future[Tensor]:
    """Start the exchange of a bucket that is laid out as it must be."""
    buffer, step = bucket.buffer(), state.step
    lane = state.lanes[bucket.index() % len(state.lanes)]
    has_joined = not in_backward()
    if has_joined:
        state.passes = None
    call = _call(state, lane, step, state.passes)
    if bucket.is_last():
        state.end_pass()
        state.watch_budget(step)
        if state.replicas_due(step):
            check = partial(state.compare_replicas, lane, step, has_joined=has_joined)
            start(lane, buffer.new_empty(0), check)
    if state.alone:
        return _done(buffer)
    if buffer.is_sparse:
        state.warn_of_sparse(bucket.parameters())
        own = buffer * (1 / lane.group.size())  # in place it would change what backward still reads
        return start(lane, own, partial(_sparse_sum, lane, own))
    renew_units(state, buffer, step)
    plan = state.plan(bucket.parameters())
    return start(lane, buffer, partial(_exchange, state, lane, buffer, plan, call))


def renew_units(state: HookState, buffer: Tensor, step: int) -> None:
    """Where gradients are encoded in an optimizer's units, make a snapshot of these if it is due.

    That is before the first bucket of a step, whatever its number, in the first lane; the other one
    waits where it needs them. If digests differ, `backward` raises.
    """
    units = state.preconditioner
    if units is not None and state.units_due(step):
        units.begin()
        lane = state.lanes[0]
        start(lane, buffer.new_empty(0), partial(_renew, state, units, lane, step, buffer.device))


def _renew(
    state: HookState, units: Preconditioner, lane: Lane, step: int, device: torch.device
) -> None:
    """All ranks compare, also those without units: others may have some, and would wait."""
    agreed = False
    try:
        found = state.renew_units(step)
        if found is None:
            found = torch.full((), int(units.undecided), dtype=torch.int64, device=device)
        compare(found, lane.group, step, _UNITS)
        agreed = True
    finally:
        units.end(agreed=agreed)


# DDP compares these with the objects themselves, which postponed annotations are not
comm_hook.__annotations__ |= {
    "bucket": dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
    "return": Future[Tensor],
}


def raise_after_backward(lanes: Sequence[Lane]) -> None:
    """What goes wrong in a lane is raised by `backward`, with its type.

    torch turns the error of a Python hook's future into "Unable to cast". So futures end with NaN,
    and the error is raised by a callback of autograd's behind DDP's own, which waits for all
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
    plan = state.plan([parameter])
    number = (plan.plain or plan.loads[0].pieces)[0].number
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
    flat = real.contiguous().view(-1)
    _exchange(state, state.lanes[0], flat, plan, _call(state, state.lanes[0], step))
    if flat.data_ptr() != real.data_ptr():
        real.copy_(flat.view_as(real))
    return _done(gradient)


def _done(value: Tensor) -> Future[Tensor]:
    done: Future[Tensor] = Future(devices=[value.device]) if value.is_cuda else Future()
    done.set_result(value)
    return done


def start(lane: Lane, buffer: Tensor, work: Callable[[], None]) -> Future[Tensor]:
    """`work` in the lane's thread, after all that it has; then the future gets `buffer`.

    If work fails the buffer is NaN, and `lane.failure` has the error.

    On CUDA work runs on a stream of its own, behind what is on the caller's now.
    """
    cuda = buffer.device.type == "cuda"
    done: Future[Tensor] = Future(devices=[buffer.device]) if cuda else Future()
    ready = torch.cuda.current_stream(buffer.device).record_event() if cuda else None
    lane.thread.submit(_job, lane, buffer, work, ready, done)
    return done


def _job(
    lane: Lane, buffer: Tensor, work: Callable[[], None], ready: Any, done: Future[Tensor]
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
            _spoil(buffer)
        done.set_result(buffer)


def _spoil(buffer: Tensor) -> None:
    """Whoever goes on in spite of an error must not take what is there for a mean."""
    values = buffer._values() if buffer.is_sparse else buffer
    values.fill_(torch.nan)


def _sparse_sum(lane: Lane, gradient: Tensor) -> None:
    """Add up gradients of nn.Embedding(sparse=True), in place: the backend's own sum, as DDP's."""
    values = gradient._values()
    lane.plain_bytes += values.numel() * values.element_size()
    with lane.traffic.sending(values.numel() * values.element_size()):
        dist.all_reduce(gradient, group=lane.group)


def _exchange(state: HookState, lane: Lane, buffer: Tensor, plan: Plan, call: Call) -> None:
    """The bucket becomes its mean over ranks, in place."""
    start = time.perf_counter()
    size = lane.group.size()
    lane.plain_bytes += round(2 * (size - 1) / size * buffer.numel() * buffer.element_size())
    if call.step < state.warmup_steps or state.cold or not plan.loads:
        plain_mean(buffer, call)
    else:
        with _copied(buffer, plan.plain, state.scratch, "plain", torch.float32) as rest:
            for load in plan.loads:
                first = load is plan.loads[0]
                _carry(state, buffer, load, call, rest if first and plan.plain else None)
    lane.seconds += time.perf_counter() - start


def _carry(state: HookState, buffer: Tensor, load: Load, call: Call, rest: Tensor | None) -> None:
    """One codec's part of the bucket, and values that travel with it."""
    call = replace(call, tensor=load.pieces[0].number, places=load.places)
    for piece in load.fillers:  # `rest` has their values
        _part(buffer, piece).zero_()
    weighed = state.weighs(load, call.step)
    parts = [_part(buffer, piece) for piece in load.pieces] if weighed else []
    own = norms(parts)
    with gathered(buffer, load.pieces, state.scratch, state.units_of(load)) as x:
        load.exchange.mean(x, load.codec, call, rest)
        encoded = norms(x.split([piece.numel for piece in load.pieces])) if weighed else []
    if weighed:
        state.weigh(load, own, encoded, parts, call.step)


def _call(state: HookState, lane: Lane, step: int, passes: int | None = None) -> Call:
    return Call(
        group=lane.group,
        seed=state.draws,
        step=step,
        known=state.known,
        memory=state.memory,
        scratch=state.scratch,
        verify=state.verify,
        traffic=lane.traffic,
        passes=passes,
    )


@contextmanager
def gathered(
    buffer: Tensor, pieces: Sequence[Piece], space: Scratch, units: Preconditioner | None = None
) -> Iterator[Tensor]:
    """The pieces as one tensor, put back afterwards; the buffer itself if they lie together.

    With a preconditioner they are in its units meanwhile; halves, whose range these may leave, are
    float32 then.
    """
    total = sum(piece.numel for piece in pieces)
    start, end = pieces[0].start, pieces[-1].start + pieces[-1].numel
    wide = units is not None and buffer.dtype == torch.float16
    if end - start != total or wide:
        dtype = torch.float32 if wide else buffer.dtype
        with _copied(buffer, pieces, space, "packed", dtype, units) as x:
            yield x
        return
    x = buffer[start:end]
    if units is None:
        yield x
        return
    for piece in pieces:
        units.into(_part(buffer, piece), piece.number, _part(buffer, piece))
    yield x
    for piece in pieces:
        units.back(_part(buffer, piece), piece.number, _part(buffer, piece))


@contextmanager
def _copied(
    buffer: Tensor,
    pieces: Sequence[Piece],
    space: Scratch,
    name: str,
    dtype: torch.dtype,
    units: Preconditioner | None = None,
) -> Iterator[Tensor]:
    """The pieces one behind another, put back afterwards; in a preconditioner's units if given."""
    sizes = [piece.numel for piece in pieces]
    x = space.take(name, sum(sizes), buffer.device, dtype)
    into = _plain_copy if units is None else units.into
    back = _plain_copy if units is None else units.back
    for part, piece in zip(x.split(sizes), pieces, strict=True):
        into(_part(buffer, piece), piece.number, part)
    yield x
    for part, piece in zip(x.split(sizes), pieces, strict=True):
        back(part, piece.number, _part(buffer, piece))


def _plain_copy(source: Tensor, _: int, out: Tensor) -> None:
    out.copy_(source)


def norms(parts: Sequence[Tensor]) -> list[Tensor]:
    """Two-norms, on the parts' device."""
    return [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]


def _part(buffer: Tensor, piece: Piece) -> Tensor:
    return buffer[piece.start : piece.start + piece.numel]


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
