"""`lc.compress(model, "auto")`: measure, choose, tell why; plain DDP is among the candidates."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs._memory import Scratch
from laconic.errors import ConfigError
from laconic.exchanges._agree import agree
from laconic.exchanges._lane import lanes
from laconic.exchanges._policy import Chooser
from laconic.exchanges._preconditioner import preconditioner_of
from laconic.integrations._bucket_order import Bucket
from laconic.integrations._choices import check_warmup
from laconic.integrations._common import Stats
from laconic.integrations._compress import check_free, not_parallel, unwrapped
from laconic.integrations._ddp import (
    comm_hook,
    exchange_bucket,
    in_backward,
    raise_after_backward,
    renew_units,
)
from laconic.integrations._fsdp import is_fsdp
from laconic.integrations._state import HookState
from laconic.planner._auto_candidates import ERROR, families_of, group_of, measurable
from laconic.planner._auto_course import MEASURED, Ask, Candidate, Course, Do, Field
from laconic.planner._auto_decide import PLAIN, Report
from laconic.planner._auto_look import Looking
from laconic.planner._auto_meter import Meter
from laconic.planner._auto_shared import Shared

_AHEAD = 2  # steps from sharing numbers to using them
_log = logging.getLogger("laconic")


def auto(
    model: nn.Module,
    *,
    error: float | None = None,
    candidates: Sequence[str] | None = None,
    optimizer: Any = None,
    policy: Chooser | None = None,
    warmup_steps: int = 0,
    seed: int = 0,
    timeout_s: float | None = None,
    meter: Meter | None = None,
) -> Auto:
    """Let a DDP model's gradients travel in the way that is found to be fastest.

    `error` (0.08) is the most that the mean of gradients may be off, relative to its square;
    `candidates` are texts to choose from instead of the usual ones, and plain DDP is always among
    them. Without `error` all of those may be used. `meter` measures times.
    """
    model = unwrapped(model)
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "auto is for DistributedDataParallel models; name a codec for FSDP2, such as "
            "'ecdq:error=0.08'"
            if is_fsdp(model)
            else not_parallel(model)
        )
    check_free(model)
    if error is not None and not (_is_number(error) and 0 < error < math.inf):
        raise ConfigError(f"error= is the NMSE that you allow, above 0 (0.08, say), not {error!r}")
    check_warmup(warmup_steps)
    handle = Auto(
        model,
        families=families_of(model, error, candidates),
        error=error if error is not None else ERROR if candidates is None else math.inf,
        optimizer=optimizer,
        policy=policy,
        warmup_steps=warmup_steps,
        seed=seed,
        timeout_s=timeout_s or 300.0,
        meter=meter,
    )
    model.register_comm_hook(handle, _hook)
    return handle


class Auto:
    """What the hook of an "auto" model knows; `lc.compress(model, "auto")` makes one.

    One hook hands each bucket to the strategy of the step (`Course`). Strategies share threads and
    process groups; numbers that ranks compare travel as the strategy's buckets do, before the last
    of them, so that collectives come in one order everywhere.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        families: Sequence[Sequence[str]],
        error: float,
        optimizer: Any,
        policy: Chooser | None,
        warmup_steps: int,
        seed: int,
        timeout_s: float,
        meter: Meter | None,
    ) -> None:
        module, self._group = model.module, group_of(model)
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        own = lanes(self._group, self._device, timeout_s)
        said = " ".join(spec for family in families for spec in family)
        wanted = {"error": str(error), "candidates": said, "warmup_steps": str(warmup_steps)}
        agree(wanted, own[0].group, self._device)
        self._states: dict[str, HookState] = {}
        units = preconditioner_of(optimizer)
        for spec in (PLAIN, *(spec for family in families for spec in family)):
            self._states[spec] = HookState(
                module,
                spec,
                policy=policy,
                seed=seed,
                group=self._group,
                lanes=own,
                optimizer=units,
            )
        self._share_out()
        self._meter = Meter(self._device) if meter is None else meter
        self._size = self._group.size()
        field = Field(
            families=tuple(tuple(map(self._candidate, family)) for family in families),
            error=error,
        )
        self._course = Course(field, warmup_steps)
        self._do: Do | None = None  # what is done in the step that is under way
        self._asked: dict[int, Shared] = {}  # by the step that they are for
        self._looking: Looking | None = None
        self._sizes: dict[int, tuple[int, int, int]] = {}
        self._plain_bytes = self._looked_bytes = 0

    @property
    def choice(self) -> str:
        """The strategy that is used outside of trials; "none" is plain DDP."""
        return self._course.choice

    def __repr__(self) -> str:
        return str(self.report() or f"auto: {self._course.step} steps so far, nothing chosen yet")

    def report(self) -> Report | None:
        """What the last trial measured, and why it ended so; None before the first has."""
        return self._course.report

    def stats(self) -> Stats:
        """Bytes so far, of all strategies together; times are those of compressed steps."""
        stats = self._states[self.choice].stats()
        ring = 2 * (self._size - 1) / self._size
        plain, looked = (round(ring * count) for count in (self._plain_bytes, self._looked_bytes))
        return replace(
            stats,
            steps=self._course.step + (self._do is None),
            sent_bytes=stats.sent_bytes + plain,
            plain_bytes=stats.plain_bytes + plain + looked,
        )

    def close(self) -> None:
        """Give threads, connections and process groups back; on all ranks, behind the last step.

        It also happens when the process ends.
        """
        self._states[PLAIN].close()  # all share its lanes

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to go on: the step, the choice, and its memories."""
        hook = self._states[self.choice]
        hook.step = self._course.step + 1
        return {"course": self._course.state_dict(), "hook": hook.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the choice of a state_dict, without a new trial."""
        choice = state["course"]["choice"]
        if choice not in self._states:
            raise ConfigError(
                f"this state goes on with {choice}, which is not among the candidates: "
                f"{', '.join(self._states)}"
            )
        self._course.load_state_dict(state["course"])
        self._asked.clear()
        self._let_go()
        self._states[choice].load_state_dict(state["hook"])
        for one in self._states.values():
            one.passes = None

    def hand(self, bucket: Any) -> Future[Tensor]:
        """Start the exchange of one of DDP's buckets."""
        plain = self._states[PLAIN]
        if bucket.index() == 0:
            raise_after_backward(plain.lanes)
            if not in_backward():  # nor do those strategies count that others use meanwhile
                for state in self._states.values():
                    state.passes = None
        return plain.order.exchange(bucket, self._course.step + (self._do is None), self._hand)

    def _hand(self, bucket: Bucket) -> Future[Tensor]:
        """The strategy of the step takes a bucket."""
        buffer, last, plain = bucket.buffer(), bucket.is_last(), self._states[PLAIN]
        do = self._do or self._begin()
        if do.ask is not None and not buffer.is_sparse:
            self._measure_sizes(bucket)
        if last:
            self._meter.last()
            if do.ask is not None:
                self._share(do, bucket)
            self._do = None
        if buffer.is_sparse:
            return self._sparse(bucket, last)
        if do.look:
            renew_units(plain, buffer, self._course.step)
            return self._look(bucket)
        if do.spec == PLAIN:
            return self._plain(buffer, last)
        state = self._states[do.spec]
        state.step = self._course.step
        return exchange_bucket(state, bucket)

    def one_by_one(self, bucket: tuple[Tensor, Tensor]) -> Future[Tensor]:
        """A compiled DDP with the Python reducer has no buckets and no steps: plain means."""
        return comm_hook(self._states[PLAIN], bucket)

    def _begin(self) -> Do:
        """A step's first bucket is there: what is to be done with this step?"""
        course, shared = self._course, self._asked.pop(self._course.step + 1, None)
        self._do = do = course.next(None if shared is None else shared.table())
        if course.news is not None:
            self._tell(course.news)
            course.news = None
        self._meter.first(do.spec)
        return do

    def _tell(self, report: Report) -> None:
        self._let_go()
        if self._group.rank() == 0:
            _log.info("%s", report)

    def _plain(self, buffer: Tensor, last: bool) -> Future[Tensor]:
        """As DDP does it without a hook: multiplied by 1/n, then added up."""
        self._plain_bytes += buffer.numel() * buffer.element_size()
        buffer.mul_(1 / self._size)
        added = self._group.allreduce([buffer]).get_future()
        return added.then(self._ended if last else _first)

    def _sparse(self, bucket: Bucket, last: bool) -> Future[Tensor]:
        """No strategy encodes it."""
        done = exchange_bucket(self._states[PLAIN], replace(bucket, last=False))
        if last:
            done.add_done_callback(lambda _: self._meter.end())
        return done

    def _ended(self, done: Future[list[Tensor]]) -> Tensor:
        self._meter.end()
        return done.value()[0]

    def _look(self, bucket: Any) -> Future[Tensor]:
        if self._looking is None:
            looked_at = self._course.field.looked_at
            pairs = [(self._states[c.spec].codec, self._states[c.spec].exchange) for c in looked_at]
            self._looking = Looking(self._states[PLAIN], pairs, self._meter.now)
        buffer = bucket.buffer()
        self._looked_bytes += buffer.numel() * buffer.element_size()
        loaded = {index: sizes[0] for index, sizes in self._sizes.items()}
        largest = max(loaded, key=loaded.__getitem__)
        return self._looking.hook(bucket, bucket.index() == largest and loaded[largest] > 0)

    def _measure_sizes(self, bucket: Any) -> None:
        """Values that would be encoded, all, and bytes; for the looks at a later step."""
        if bucket.index() == 0:
            self._sizes.clear()
        plan, buffer = self._states[PLAIN].plan(bucket.parameters()), bucket.buffer()
        encoded = sum(piece.numel for load in plan.loads for piece in load.pieces)
        self._sizes[bucket.index()] = encoded, buffer.numel(), buffer.element_size()

    def _share(self, do: Do, bucket: Any) -> None:
        """Own numbers to all ranks, before the last bucket and in the way that it will go."""
        assert do.ask is not None
        lane = None
        if do.spec != PLAIN:
            own = self._states[do.spec].lanes
            lane = own[bucket.index() % len(own)]
        shared = Shared(self._numbers(do.ask), self._group, lane, bucket.buffer().device)
        self._asked[self._course.step + _AHEAD] = shared

    def _numbers(self, ask: Ask) -> list[float]:
        meter = self._meter
        if ask.what == "window":
            return [meter.typical(ask.specs[0])]
        if ask.what == "looks":
            return self._looked()
        meter.settle()
        if ask.what == "times":
            return [one for spec in ask.specs for one in meter.times(spec, MEASURED)]
        return [
            one
            for moments in (meter.times, meter.waits, meter.spans)
            for one in moments(PLAIN, MEASURED)
        ]

    def _looked(self) -> list[float]:
        """Wait for this rank's looks to end; what they found."""
        looking, self._looking = self._looking, None
        assert looking is not None
        looks = looking.wait()
        encoded = sum(sizes[0] for sizes in self._sizes.values())
        rest = sum((every - part) * width for part, every, width in self._sizes.values())
        plain = sum(every * width for _, every, width in self._sizes.values())
        last = self._sizes[max(self._sizes)]
        found = [*looking.squares(), encoded, rest, plain, last[1] * last[2] / plain]
        for look in looks:
            found += [look.error, look.bytes_per_value, look.seconds_per_value]
        return found

    def _candidate(self, spec: str) -> Candidate:
        codec, exchange = self._states[spec].codec, self._states[spec].exchange
        return Candidate(
            spec=spec,
            exchange=exchange.name,
            budget=codec.budget,
            measurable=measurable(codec),
        )

    def _share_out(self) -> None:
        """One room for buffers, and one order of buckets, for all strategies."""
        scratch, order = Scratch(), self._states[PLAIN].order
        order.settled = 0  # nothing is chosen yet, and plain steps are DDP's own
        for state in self._states.values():
            state.scratch, state.order = scratch, order

    def _let_go(self) -> None:
        """Buffers that the choice may not need, and the memories of all others."""
        self._share_out()
        for spec, state in self._states.items():
            if spec != self.choice:
                state.memory, codec = {}, state.codec
                if codec.remembers:
                    codec.reset()  # pyright: ignore[reportAttributeAccessIssue]


def _hook(state: Auto, bucket: Any) -> Future[Tensor]:
    """DDP's hook: returns at once, but for steps that decide."""
    if isinstance(bucket, tuple):
        return state.one_by_one(bucket)
    return state.hand(bucket)


# DDP compares these with the objects themselves, which postponed annotations are not
_hook.__annotations__ |= {
    "bucket": dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
    "return": Future[Tensor],
}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _first(done: Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
