"""What a bucket of DDP's is made of, and in which buckets the gradients of a step travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from laconic._scratch import Scratch
from laconic.codecs import Codec, Place
from laconic.exchanges import Exchange
from laconic.exchanges._preconditioner import Preconditioner

Buckets = tuple[tuple[int, ...], ...]  # numbers of parameters, bucket by bucket

_SETTLED = 2  # steps after which an uninterrupted run has seen the buckets that DDP keeps
_REBUILT = 1  # backward passes of a fresh DDP before it rebuilds its buckets
_MOST_FILLED = 1 / 64  # of a group, zeros that are encoded to save copying


@dataclass(frozen=True)
class ParameterSlice:
    """A parameter inside a bucket."""

    number: int
    start: int
    numel: int

    def of(self, buffer: Tensor) -> Tensor:
        """Its values, a view."""
        return buffer[self.start : self.start + self.numel]


@dataclass(frozen=True)
class CodecGroup:
    """The slices of a bucket that one codec encodes.

    `fillers` are among them, zeroed: small plain slices that lie between encoded ones. Encoding
    zeros costs less than copying all the others together and back.
    """

    codec: Codec
    exchange: Exchange
    slices: tuple[ParameterSlice, ...]
    fillers: tuple[ParameterSlice, ...] = ()

    @cached_property
    def lossy(self) -> bool:
        """Whether it matters in which units the slices are encoded."""
        return self.codec.variance_bound(1) != 0

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The slices, for codecs with a step or a memory for each."""
        return tuple(
            Place(parameter=one.number, start=0, numel=one.numel, total=one.numel)
            for one in self.slices
        )


@dataclass(frozen=True)
class BucketLayout:
    """What a bucket is made of: groups that are encoded, and values that travel as they are."""

    groups: tuple[CodecGroup, ...]
    plain: tuple[ParameterSlice, ...]

    @staticmethod
    def of(
        by_spec: Mapping[str, Sequence[ParameterSlice]],
        plain: Sequence[ParameterSlice],
        pairs: Mapping[str, tuple[Codec, Exchange]],
    ) -> BucketLayout:
        """Slices by the spec of their codec, and those that stay plain."""
        groups = [CodecGroup(*pairs[spec], *_filled(own, plain)) for spec, own in by_spec.items()]
        return BucketLayout(tuple(groups), tuple(plain))


def _filled(
    slices: Sequence[ParameterSlice], plain: Sequence[ParameterSlice]
) -> tuple[tuple[ParameterSlice, ...], tuple[ParameterSlice, ...]]:
    """The slices, with plain ones between them if these are few and make one run of all."""
    first, last = slices[0].start, slices[-1].start + slices[-1].numel
    between = tuple(one for one in plain if first < one.start < last)
    added, total = (sum(one.numel for one in some) for some in (between, slices))
    if added + total != last - first or added > _MOST_FILLED * total:
        return tuple(slices), ()
    return tuple(sorted((*slices, *between), key=lambda one: one.start)), between


@contextmanager
def gathered(
    buffer: Tensor,
    slices: Sequence[ParameterSlice],
    space: Scratch,
    units: Preconditioner | None = None,
) -> Iterator[Tensor]:
    """The slices as one tensor, put back afterwards; a view of the buffer if they are adjacent.

    With a preconditioner they are in its units meanwhile; halves, whose range these may leave, are
    float32 then.
    """
    total = sum(one.numel for one in slices)
    start, end = slices[0].start, slices[-1].start + slices[-1].numel
    wide = units is not None and buffer.dtype == torch.float16
    if end - start != total or wide:
        dtype = torch.float32 if wide else buffer.dtype
        with copied(buffer, slices, space, "packed", dtype, units) as x:
            yield x
        return
    x = buffer[start:end]
    if units is None:
        yield x
        return
    for one in slices:
        units.into(one.of(buffer), one.number, one.of(buffer))
    yield x
    for one in slices:
        units.back(one.of(buffer), one.number, one.of(buffer))


@contextmanager
def copied(
    buffer: Tensor,
    slices: Sequence[ParameterSlice],
    space: Scratch,
    name: str,
    dtype: torch.dtype,
    units: Preconditioner | None = None,
) -> Iterator[Tensor]:
    """The slices one after another, put back afterwards; in a preconditioner's units if given."""
    sizes = [one.numel for one in slices]
    x = space.take(name, sum(sizes), buffer.device, dtype)
    into = _plain_copy if units is None else units.into
    back = _plain_copy if units is None else units.back
    for part, one in zip(x.split(sizes), slices, strict=True):
        into(one.of(buffer), one.number, part)
    yield x
    for part, one in zip(x.split(sizes), slices, strict=True):
        back(part, one.number, one.of(buffer))


def _plain_copy(source: Tensor, _: int, out: Tensor) -> None:
    out.copy_(source)


def norms(parts: Sequence[Tensor]) -> list[Tensor]:
    """Two-norms, on the parts' device."""
    return [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together; the part of DDP's GradBucket that is used."""

    buffer: Tensor  # all of them, flat
    parameters: Sequence[Tensor]  # whose they are
    index: int  # among the buckets of this step
    is_last: bool  # of the step

    @staticmethod
    def of(bucket: Any) -> Bucket:
        """DDP's own bucket."""
        parameters = tuple(bucket.parameters())
        return Bucket(bucket.buffer(), parameters, bucket.index(), bucket.is_last())


Start = Callable[[Bucket], Future[Tensor]]


@dataclass
class _Held:
    """A bucket of DDP's that waits until its gradients are exchanged in other buckets."""

    bucket: Bucket
    done: Future[Tensor]


@dataclass
class BucketOrder:
    """Hands DDP's buckets to an exchange, in the layout that this step must have.

    What a step does to a gradient depends on the bucket it travels in: chunks and blocks are cut
    from the start of a bucket, draws are named by its first parameter, sums are added in the order
    of owners. DDP rebuilds its buckets after the first backward pass of every process, so a run
    that resumes would see other buckets in its first step than an uninterrupted run. So:

        step < 2              one bucket for each dtype, in order of registration
        first step resumed    the layout that the checkpoint names
        any other step        DDP's own buckets, as they come

    The first rule lets a run that was saved after one step resume, too: its checkpoint cannot know
    the layout that DDP chooses later. DDP's first backward pass has such a bucket anyway, so step 1
    alone is exchanged without overlap. With `static_graph=True` DDP cuts after two passes, and all
    numbers of steps double (`passes=2`).

    `settled=0` disables the first rule, where the first steps must be those of plain DDP.

    A bucket that is as wanted passes at once. Others wait for the last bucket of the step, are put
    together and exchanged, and their means put back: one more copy, on these few steps.
    """

    passes: int = _REBUILT
    settled: int = _SETTLED
    _numbers: dict[int, int] = field(default_factory=dict)  # by id of the parameter
    _kinds: dict[int, tuple[torch.dtype, torch.device]] = field(default_factory=dict)
    _seen: Buckets = ()  # DDP's own, in the last backward pass
    _saved: Buckets | None = None  # of a checkpoint
    _since: int = 0  # backward passes since it was loaded, or since the start
    _coming: list[tuple[int, ...]] = field(default_factory=list)
    _held: list[_Held] = field(default_factory=list)

    def know(self, parameters: Iterable[tuple[int, Tensor]]) -> None:
        """The parameters that train, with numbers that are the same after a restart."""
        for number, parameter in parameters:
            self._numbers[id(parameter)] = number
            self._kinds[number] = parameter.dtype, parameter.device

    def exchange(self, given: Any, step: int, start: Start) -> Future[Tensor]:
        """Start the exchange of one of DDP's buckets, now or with the last one of the step."""
        bucket = Bucket.of(given)
        numbers = tuple(self._numbers.get(id(one), -1) for one in bucket.parameters)
        self._coming.append(numbers)
        wanted = self._wanted(step)
        passes = wanted is None or numbers in wanted or bucket.buffer.is_sparse
        if bucket.is_last:
            self._seen, self._coming = tuple(self._coming), []
            self._since += 1
        if passes:
            done = start(replace(bucket, is_last=bucket.is_last and not self._held))
        else:
            done = new_future(bucket.buffer)
            self._held.append(_Held(bucket, done))
        if bucket.is_last and self._held:
            held, self._held = self._held, []
            groups = self._regrouped(held, wanted or ())
            _exchange_all(held, groups, start, first_index=bucket.index + 1)
        return done

    def state_dict(self) -> dict[str, Any]:
        """The layout of the next step, if a new DDP is made before it."""
        layout = self._seen
        if self._saved is not None and self._since <= self.passes:
            layout = self._saved  # DDP has not shown yet what it keeps
        return {"layout": [list(bucket) for bucket in layout]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next step has the layout of a state_dict."""
        self._saved = tuple(tuple(map(int, bucket)) for bucket in state["layout"])
        self._since = 0

    def _wanted(self, step: int) -> Buckets | None:
        """The layout of a step; None if it is DDP's own."""
        if step < self.settled * self.passes:
            return self._whole(self._numbers.values())
        if self._saved is not None and self._since < self.passes:
            return self._saved
        return None

    def _whole(self, numbers: Iterable[int]) -> Buckets:
        """One bucket for each dtype and device, in order of registration."""
        kinds: dict[Any, list[int]] = {}
        for number in sorted(numbers):
            if number in self._kinds:
                kinds.setdefault(self._kinds[number], []).append(number)
        return tuple(map(tuple, kinds.values()))

    def _regrouped(self, held: Sequence[_Held], wanted: Buckets) -> list[list[Tensor]]:
        """The parameters of held buckets, as they will be exchanged."""
        members = {
            self._numbers.get(id(one), -1): one for own in held for one in own.bucket.parameters
        }
        layout = [bucket for bucket in wanted if any(number in members for number in bucket)]
        if sorted(number for bucket in layout for number in bucket) != sorted(members):
            # DDP has fewer parameters than were known, or the checkpoint's are others
            layout = self._whole(members)
        if -1 in members or sum(map(len, layout)) != len(members):
            return [list(own.bucket.parameters) for own in held]
        return [[members[number] for number in bucket] for bucket in layout]


def _exchange_all(
    held: Sequence[_Held],
    groups: Sequence[Sequence[Tensor]],
    start: Start,
    *,
    first_index: int,
) -> None:
    """Exchange the gradients of some buckets in others, and end all of their futures."""
    slices = _slices([own.bucket for own in held])
    buckets, futures = [], []
    for index, members in enumerate(groups):
        flat = torch.cat([slices[id(one)] for one in members])
        buckets.append(Bucket(flat, members, first_index + index, index == len(groups) - 1))
        futures.append(start(buckets[-1]))

    def end(done: Any) -> None:
        try:
            for bucket, one in zip(buckets, done.value(), strict=True):
                sizes = [slices[id(member)].numel() for member in bucket.parameters]
                parts = one.value().split(sizes)
                for member, part in zip(bucket.parameters, parts, strict=True):
                    slices[id(member)].copy_(part)
            for own in held:
                own.done.set_result(own.bucket.buffer)
        except Exception as error:
            for own in held:
                own.done.set_exception(error)  # pyright: ignore[reportArgumentType]

    torch.futures.collect_all(futures).then(end)


def _slices(buckets: Iterable[Bucket]) -> dict[int, Tensor]:
    """Each parameter's part of its bucket."""
    found: dict[int, Tensor] = {}
    for bucket in buckets:
        parts = bucket.buffer.split([real_numel(member) for member in bucket.parameters])
        found |= {id(member): part for member, part in zip(bucket.parameters, parts, strict=True)}
    return found


def real_numel(parameter: Tensor) -> int:
    """Values of a parameter in a bucket: DDP holds complex ones as pairs of real numbers."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def new_future(buffer: Tensor) -> Future[Tensor]:
    """A future of what lies where the buffer does."""
    return Future(devices=[buffer.device]) if buffer.is_cuda else Future()
