"""`lc.compress(model, "auto")`: measure, choose, report why; plain DDP is a candidate."""

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

from laconic._scratch import Scratch
from laconic._settings import whole
from laconic.comm._agreement import require_same_settings
from laconic.comm._threads import lanes
from laconic.errors import ConfigError
from laconic.exchanges import pair
from laconic.exchanges._policy import Chooser
from laconic.exchanges._preconditioner import preconditioner_of
from laconic.integrations._buckets import Bucket
from laconic.integrations._compress import check_free, not_parallel, unwrapped
from laconic.integrations._ddp import (
    as_comm_hook,
    comm_hook,
    exchange_bucket,
    in_backward,
    raise_after_backward,
    renew_units,
)
from laconic.integrations._fsdp import is_fsdp
from laconic.integrations._handle import Stats
from laconic.integrations._state import HookState
from laconic.planner._auto_decide import PLAIN_DDP, Candidate, Report
from laconic.planner._auto_measure import GradientProfiler, RankNumbers, StepTimer
from laconic.planner._auto_schedule import (
    MEASURED,
    Candidates,
    Gather,
    StepAction,
    TrialSchedule,
)

ERROR = 0.08  # of the mean: training is not affected
_WIDTHS = (2, 3, 4, 8)
_MAX_SUMMED = 127  # ranks: more do not fit into int8
_DELAY = 2  # steps from sharing numbers to using them
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
    timer: StepTimer | None = None,
) -> Auto:
    """Exchange a DDP model's gradients by the strategy that measures fastest.

    `error` (0.08) is the largest relative squared error of the averaged gradient; `candidates` are
    specs to choose from instead of the usual ones, and plain DDP is always among them. Without
    `error` all of those may be used. `timer` measures times.
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
    whole("warmup_steps", warmup_steps, 0)
    handle = Auto(
        model,
        _families(model, error, candidates),
        error=error if error is not None else ERROR if candidates is None else math.inf,
        warmup_steps=warmup_steps,
        timeout_s=timeout_s or 300.0,
        timer=timer,
        policy=policy,
        seed=seed,
        optimizer=preconditioner_of(optimizer),
    )
    model.register_comm_hook(handle, _hook)
    return handle


def _families(
    model: DistributedDataParallel, error: float | None, candidates: Sequence[str] | None
) -> list[list[str]]:
    """Specs in addition to plain DDP; of each list, the first within the error is tried."""
    if candidates is not None:
        if isinstance(candidates, str) or not all(isinstance(one, str) for one in candidates):
            raise ConfigError(
                f'candidates= are specs of codecs, such as ("none", "fp16"), not {candidates!r}'
            )
        return [[spec] for spec in dict.fromkeys(candidates) if not pair(spec)[0].lossless]
    budget = ERROR if error is None else error
    found = [[f"ecdq:error={float(budget)!r}"], [f"dqsg:bits={bits}" for bits in _WIDTHS]]
    if any(p.requires_grad and p.element_size() > 2 for p in model.module.parameters()):
        found.insert(0, ["fp16"])
    if _group_of(model).size() <= _MAX_SUMMED:
        found.append(["global:bits=8"])
    return found


def _group_of(model: DistributedDataParallel) -> dist.ProcessGroup:
    """The process group that DDP adds gradients up in."""
    assert isinstance(model.process_group, dist.ProcessGroup)
    return model.process_group


class Auto:
    """The state of an "auto" model's hook; `lc.compress(model, "auto")` makes one.

    One hook hands each bucket to the strategy of the step (`TrialSchedule`). Strategies share
    threads and process groups; numbers that ranks compare travel as the strategy's buckets do,
    before the last of them, so that collectives come in one order everywhere.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        families: Sequence[Sequence[str]],
        *,
        error: float,
        warmup_steps: int,
        timeout_s: float,
        timer: StepTimer | None,
        **settings: Any,
    ) -> None:
        """`settings` are those that all strategies share, as `HookState` takes them."""
        module, self._group = model.module, _group_of(model)
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        own = lanes(self._group, self._device, timeout_s)
        specs = [spec for family in families for spec in family]
        wanted = {
            "error": str(error),
            "candidates": " ".join(specs),
            "warmup_steps": str(warmup_steps),
        }
        require_same_settings(wanted, own[0].group, self._device)
        self._states = {
            spec: HookState(module, spec, group=self._group, lanes=own, **settings)
            for spec in (PLAIN_DDP, *specs)
        }
        self._share_buffers()
        self._timer = StepTimer(self._device) if timer is None else timer
        self._size = self._group.size()
        candidates = Candidates(
            families=tuple(tuple(map(Candidate.of, family)) for family in families),
            error=error,
        )
        self._schedule = TrialSchedule(candidates, warmup_steps)
        self._profiler = GradientProfiler(
            self._states[PLAIN_DDP], candidates.measurable, self._timer.now
        )
        self._action: StepAction | None = None  # of the current step
        self._gathered: dict[int, RankNumbers] = {}  # by the step that uses them
        self._plain_bytes = self._profiled_bytes = 0

    @property
    def choice(self) -> str:
        """The strategy that is used outside of trials; "none" is plain DDP."""
        return self._schedule.choice

    def __repr__(self) -> str:
        return str(self.report() or f"auto: {self._schedule.step} steps so far, nothing chosen yet")

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """A copy, as in a copied or pickled DDP model, is the state_dict: all else stays here."""
        return dict, (self.state_dict(),)

    def report(self) -> Report | None:
        """What the last trial measured, and why it ended so; None before the first has."""
        return self._schedule.report

    def stats(self) -> Stats:
        """Bytes so far, of all strategies together; times are those of compressed steps."""
        stats = self._states[self.choice].stats()
        ring = 2 * (self._size - 1) / self._size
        plain, profiled = (
            round(ring * count) for count in (self._plain_bytes, self._profiled_bytes)
        )
        return replace(
            stats,
            steps=self._schedule.step + (self._action is None),
            sent_bytes=stats.sent_bytes + plain,
            plain_bytes=stats.plain_bytes + plain + profiled,
        )

    def close(self) -> None:
        """Release threads, connections and process groups; on all ranks, after the last step.

        It also happens when the process ends.
        """
        self._states[PLAIN_DDP].close()  # all share its lanes

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to resume: the step, the choice, its residuals."""
        hook = self._states[self.choice]
        hook.step = self._schedule.step + 1
        return {"course": self._schedule.state_dict(), "hook": hook.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the choice of a state_dict, without a new trial."""
        choice = state["course"]["choice"]
        if choice not in self._states:
            raise ConfigError(
                f"this state continues with {choice}, which is not among the candidates: "
                f"{', '.join(self._states)}"
            )
        self._schedule.load_state_dict(state["course"])
        self._gathered.clear()
        self._release()
        self._states[choice].load_state_dict(state["hook"])
        for one in self._states.values():
            one.optimizers.passes = None

    def exchange(self, bucket: Any) -> Future[Tensor]:
        """Start the exchange of one of DDP's buckets."""
        plain = self._states[PLAIN_DDP]
        if bucket.index() == 0:
            raise_after_backward(plain.lanes)
            if not in_backward():  # other strategies do not count passes meanwhile
                for state in self._states.values():
                    state.optimizers.passes = None
        step = self._schedule.step + (self._action is None)
        return plain.order.exchange(bucket, step, self._exchange)

    def _exchange(self, bucket: Bucket) -> Future[Tensor]:
        """Exchange a bucket by the step's strategy."""
        buffer, last, plain = bucket.buffer, bucket.is_last, self._states[PLAIN_DDP]
        action = self._action or self._begin()
        if action.gather is not None and not buffer.is_sparse:
            self._profiler.measure(bucket)
        if last:
            self._timer.last()
            if action.gather is not None:
                self._share(action.spec, action.gather, bucket)
            self._action = None
        if buffer.is_sparse:
            return self._sparse(bucket, last)
        if action.profile:
            renew_units(plain, buffer, self._schedule.step)
            self._profiled_bytes += buffer.numel() * buffer.element_size()
            return self._profiler.exchange(bucket)
        if action.spec == PLAIN_DDP:
            return self._plain(buffer, last)
        state = self._states[action.spec]
        state.step = self._schedule.step
        return exchange_bucket(state, bucket)

    def one_by_one(self, bucket: tuple[Tensor, Tensor]) -> Future[Tensor]:
        """A compiled DDP with the Python reducer has no buckets and no steps: plain means."""
        return comm_hook(self._states[PLAIN_DDP], bucket)

    def _begin(self) -> StepAction:
        """At a step's first bucket: decide what this step does."""
        schedule = self._schedule
        numbers = self._gathered.pop(schedule.step + 1, None)
        self._action = action = schedule.next(None if numbers is None else numbers.table())
        if schedule.news is not None:
            self._release()
            if self._group.rank() == 0:
                _log.info("%s", schedule.news)
            schedule.news = None
        self._timer.first(action.spec)
        return action

    def _plain(self, buffer: Tensor, last: bool) -> Future[Tensor]:
        """As DDP does it without a hook: multiplied by 1/n, then added up."""
        self._plain_bytes += buffer.numel() * buffer.element_size()
        buffer.mul_(1 / self._size)
        added = self._group.allreduce([buffer]).get_future()
        return added.then(self._ended if last else lambda done: done.value()[0])

    def _sparse(self, bucket: Bucket, last: bool) -> Future[Tensor]:
        """A sparse bucket, which no strategy encodes."""
        done = exchange_bucket(self._states[PLAIN_DDP], replace(bucket, is_last=False))
        if last:
            done.add_done_callback(lambda _: self._timer.end())
        return done

    def _ended(self, done: Future[list[Tensor]]) -> Tensor:
        self._timer.end()
        return done.value()[0]

    def _share(self, spec: str, gather: Gather, bucket: Bucket) -> None:
        """Own numbers to all ranks, before the last bucket and by the same strategy."""
        lane = None
        if spec != PLAIN_DDP:
            own = self._states[spec].lanes
            lane = own[bucket.index % len(own)]
        numbers = RankNumbers(self._numbers(gather), self._group, lane, bucket.buffer.device)
        self._gathered[self._schedule.step + _DELAY] = numbers

    def _numbers(self, gather: Gather) -> list[float]:
        timer = self._timer
        if gather.what == "window":
            return [timer.typical(gather.specs[0])]
        if gather.what == "profiles":
            return self._profiler.wait().pack()
        timer.settle()
        if gather.what == "times":
            return [one for spec in gather.specs for one in timer.times(spec, MEASURED)]
        kinds = timer.times, timer.waits, timer.spans
        return [one for kind in kinds for one in kind(PLAIN_DDP, MEASURED)]

    def _share_buffers(self) -> None:
        """One scratch, and one order of buckets, for all strategies."""
        scratch, order = Scratch(), self._states[PLAIN_DDP].order
        order.settled = 0  # nothing is chosen yet, and plain steps are DDP's own
        for state in self._states.values():
            state.session.scratch, state.order = scratch, order

    def _release(self) -> None:
        """Free buffers that the choice may not need, and the memory of all others."""
        self._share_buffers()
        for spec, state in self._states.items():
            if spec != self.choice:
                state.session.memory.reset()


@as_comm_hook
def _hook(state: Auto, bucket: Any) -> Future[Tensor]:
    """DDP's hook: returns at once, except in steps that decide."""
    if isinstance(bucket, tuple):
        return state.one_by_one(bucket)
    return state.exchange(bucket)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
