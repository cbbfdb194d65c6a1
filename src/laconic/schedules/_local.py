"""Local steps: every rank trains alone for a period, then all exchange their progress."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic._scratch import copy_all
from laconic._settings import whole
from laconic._version import __version__
from laconic.codecs import Codec
from laconic.comm._frame import Call
from laconic.comm._threads import CommLane, own_group
from laconic.errors import ConfigError
from laconic.exchanges import Exchange, pair
from laconic.exchanges._error_report import error_stats
from laconic.exchanges._policy import Chooser
from laconic.schedules._costs import LocalCost, ScheduleCost
from laconic.schedules._inputs import (
    check_identity,
    check_module,
    check_started,
    load_buffers,
    own_buffers,
    same_start,
)
from laconic.schedules._model_vector import MeanInFlight, ModelVector, running_statistics
from laconic.schedules._outer import (
    OuterFactory,
    check_outer,
    described,
    kind_of,
    needs_closure,
    outer_optimizer,
    outer_step,
)
from laconic.schedules._schedule import BudgetStats
from laconic.sharding._fsdp_shards import (
    ShardedReplica,
    cut_state,
    fsdp_modules,
    own_state,
    own_values,
    require_same_in_mesh,
)
from laconic.sharding._trained import Trained


@dataclass(frozen=True, kw_only=True)
class LocalStats(BudgetStats):
    """What one rank has done so far; bytes and seconds since the schedule was made.

    A budget is that of the mean progress.
    """

    exchanges: int  # of progress; steps of warm-up are not among them
    skipped: int  # exchanges and steps of warm-up that were not finite, and left out on all ranks
    local_bytes: int = 0  # inside nodes, where the exchange knows them; not in sent_bytes


class LocalSGD(torch.optim.Optimizer):
    """Local SGD, post-local SGD and DiLoCo, around any torch optimizer and a plain module.

    x_t are the common weights, x_i a rank's own, H = period:

        δ_i = x_t - x_i  after H steps from x_t         x_{t+1} = x_t - outer(mean of δ_i)

    1. Every rank takes H steps with its own optimizer, whose state (momentum, moments) stays local.
    2. The progress δ_i travels through the codec, not x_i: a codec's error is a share of what it
       encodes. ‖δ‖ is far below ‖x‖ and shrinks as training settles, and so does the error.
    3. All ranks make the same outer step of the same bits: outer=None is x - mean, plain averaging;
       `Nesterov()` makes it DiLoCo; `functools.partial(torch.optim.Adam, lr=0.01)`, or any other
       function of parameters that returns a torch optimizer, is called with the weights as one flat
       fp32 parameter, whose gradient is the mean progress. Then all hold the same weights, to the
       bit.

    `warmup_steps` of synchronous training come first: post-local SGD. They average gradients in
    fp32, because a memory of error feedback in units of gradients would be wrong for progress.

    For H = 1, no outer optimizer and codec none: with gradients at common weights, mean(x_i) =
    x - lr·mean(u_i), and the buffers u_i ← μ·u_i + g_i are linear in g_i: ū ← μ·ū + ḡ. So SGD with
    momentum, weight decay and Nesterov's form too, is synchronous SGD (but for fp32 rounding); Adam
    and clipping are not linear, and differ. Plain SGD with outer Nesterov(lr=a, momentum=β) is
    synchronous SGD(lr·a, momentum=β, nesterov=True). For H > 1 neither holds.

    `overlap=True`: the exchange of a boundary runs in a thread, overlapped with the next steps, and
    its result is taken over `overlap_steps` later (by default H, at the next boundary). With x_i^b
    a rank's weights at the boundary and p_i = x_i - x_i^b its steps since then:

        x_i ← x_{t+1} + p_i            at the next boundary  δ_i = x_{t+1} - x_i = -(all p_i since)

    So every step counts once: own ones at once, others' through x_{t+1}. Ranks hold common weights
    plus own steps since the boundary, never equal weights; x_t is equal on all ranks, bit for bit.

    Not finite anywhere: the mean is not, on any rank. Then no rank makes the outer step, all return
    to x_t, and momentum that is not finite is forgotten; `stats().skipped` counts it. (What error
    feedback of the other ranks has sent is lost with it.)

    Replicas of shards: a model of FSDP2 on a 2-D mesh, (replicate, shard), averages gradients among
    the shards of a replica at every step, and a rank exchanges its shard with those that hold the
    same one; "rank" above is then a replica. FSDP's own all-reduce is off until `close`. On a 1-D
    mesh give `group=`, the ranks that hold the same shard.

    Costs three fp32 copies of the weights (common, start, message), and the outer optimizer's state
    (one for momentum, two for Adam).

    Stich 2019, arXiv 1805.09767 (local SGD); Lin et al. 2020, arXiv 1808.07217 (post-local);
    Douillard et al. 2023, arXiv 2311.08105 (DiLoCo), and 2025, arXiv 2501.18512 (overlap, there by
    fragments of the model and with a blend of local and global weights).
    """

    cost: ClassVar[type[ScheduleCost]] = LocalCost

    _step_supports_amp_scaling = True  # GradScaler calls step() on every rank, overflow or not

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        period: int = 8,
        codec: str | Codec = "ecdq:error=0.08",
        exchange: str | Exchange | None = None,
        outer: OuterFactory = None,
        warmup_steps: int = 0,
        overlap: bool = False,
        overlap_steps: int | None = None,
        buffers: bool = True,
        policy: Chooser | None = None,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        _check_given(optimizer, model)
        check_outer(outer)
        self.optimizer, self.outer, self.seed = optimizer, outer, seed
        self.codec, self.exchange = pair(codec, exchange)
        self.period = whole("period", period, 1)
        self.warmup_steps = whole("warmup_steps", warmup_steps, 0)
        self.delay = _delay(overlap, overlap_steps, self.period)
        check_started()
        self._model = model
        self._trained = Trained(optimizer.param_groups, model, "LocalSGD")
        if warmup_steps:
            self._trained.check_dense(model, "warm-up")
        self._vector = ModelVector(self._trained, model, policy)
        self._replica = _replica(model, self._trained, group)
        if self._replica is not None:
            group = self._replica.replicas
        self._lane = CommLane(own_group(group, timeout_s))
        self._weights = self._vector.flat.empty()  # x_t
        self._outer = outer_optimizer(outer, self._weights)
        self._agree(buffers)
        self.exchange.prepare(self._lane.group)
        same_start(model, self._lane.group)
        self._step = self._since_made = self._exchanges = self._skipped = 0
        self._sent_at = self._common_at = 0  # steps made when an exchange began, and in x_t
        self._hidden: Tensor | None = None  # own values, while the model shows the common ones
        self._exchanges_buffers = buffers
        self._begin(running_statistics(model) if buffers else [])
        # what the model's parameters must still be at the first step
        self._untouched: Tensor | None = self._weights.clone()
        if self._replica is not None:
            self._replica.part()

    def _begin(self, buffers: Sequence[str]) -> None:
        """Vectors that hold the model as it is now, with these buffers."""
        own = self._vector
        own.include(buffers)
        self._start = own.read(own.empty())  # own progress is counted from here
        self._weights.copy_(own.split(self._start)[0])
        self._common = own.split(self._start)[1].clone()  # buffers
        self._mean = MeanInFlight(own, self.codec, self.exchange, self._lane, self.seed)
        self._message = self._mean.message

    def _agree(self, buffers: bool) -> None:
        settings = {
            "laconic": __version__,
            "codec": str(self.codec),
            "exchange": str(self.exchange),
            "period": str(self.period),
            "outer": described(self._outer),
            "warmup_steps": str(self.warmup_steps),
            "overlap_steps": str(self.delay),
            "seed": str(self.seed),
            "buffers": str(buffers),
        }
        own = {"parameters": "\n".join(self._vector.lines), **self._shard()}
        shards = None if self._replica is None else self._replica.shards
        device = self._vector.flat.device
        require_same_in_mesh(settings, shards, self._lane.group, device, own)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the optimizer inside: learning rates may be set here or there."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the optimizer inside, this rank's own."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the optimizer inside."""
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in the optimizer inside."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of this rank; at the end of a period, or in warm-up, with all others."""
        if self._hidden is not None:
            raise ConfigError("step() inside global_weights(): leave the with block first")
        self._trained.check(self.param_groups)
        if self._untouched is not None:
            self._vector.flat.check_unchanged(self._untouched)
            self._untouched = None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            fine = self._unscaled()
            self._step += 1
            self._since_made += 1
            if self._step <= self.warmup_steps:
                self._warmup_step()
            else:
                self._local_step(fine)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the parameters that travel were fixed when the schedule was made."""
        raise ConfigError("add parameter groups to the optimizer before making LocalSGD")

    def _unscaled(self) -> bool:
        """Take GradScaler's scale out of the gradients; whether it found them finite."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None and self._replica is not None:
            raise ConfigError(
                "GradScaler does not know of replicas that train alone: train in bfloat16 "
                "(MixedPrecisionPolicy), or without LocalSGD"
            )
        if scale is not None:
            for parameter in self._vector.flat.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.device))
        return not bool(getattr(self, "found_inf", False))

    def _warmup_step(self) -> None:
        """Gradients become their mean, and so do buffers."""
        own, (gradients, moved) = self._vector, self._vector.split(self._message)
        own.flat.read_gradients(gradients, missing_as_zero=True)
        torch.sub(self._common, own.read_buffers(moved), out=moved)
        self._mean.start(self._step, made=self._step, plain=True)
        if self._finite():
            own.flat.write_gradients(gradients)
            self._common.sub_(moved)
            self.optimizer.step()
        own.write_buffers(self._common)
        self._common_at = self._step
        if self._step == self.warmup_steps:
            own.flat.read(self._weights)
            self._take_common()

    def _local_step(self, fine: bool) -> None:
        """At the end of a period its exchange starts; one that has arrived is applied."""
        if fine:
            self.optimizer.step()
        since = (self._step - self.warmup_steps) % self.period
        if self._mean.in_flight and since == self.delay % self.period:
            self._finish_sync()
        if since == 0:
            self._start_sync()
            if not self.delay:
                self._finish_sync()

    def _start_sync(self) -> None:
        """Send the progress since the last boundary."""
        torch.sub(self._start, self._vector.read(self._message), out=self._message)
        if self.delay:
            self._vector.flat.read(self._vector.split(self._start)[0])
        self._exchanges += 1
        self._sent_at = self._step
        self._mean.start(self._exchanges, made=self._step)

    def _finite(self) -> bool:
        """Wait for the mean; False on all ranks, and counted, if it is not finite."""
        finite = self._everywhere(self._mean.wait())
        self._skipped += not finite
        return finite

    def _everywhere(self, fine: bool) -> bool:
        """What is true in an exchange of one shard, and must be of all shards."""
        return fine if self._replica is None else self._replica.all_shards(fine)

    def _finish_sync(self) -> None:
        """The outer step, and this rank's weights after it."""
        if not self._finite():
            self._forget_broken()
            self._take_common()
            return
        self._common_at = self._sent_at
        mean, moved = self._vector.split(self._message)
        self._common.sub_(moved)
        outer_step(self._outer, self._weights, mean)
        if self.delay:
            self._rebase()
        else:
            self._take_common()

    def _forget_broken(self) -> None:
        """Clear momentum and moments that are not finite: the next step would not be, either."""
        for state in self.optimizer.state.values():
            values = [own_values(one) for one in state.values() if isinstance(one, Tensor)]
            if not self._everywhere(all(bool(torch.isfinite(one).all()) for one in values)):
                state.clear()

    def _take_common(self) -> None:
        """The common weights and buffers become this rank's own."""
        self._show_common()
        self._vector.read(self._start)

    def _show_common(self) -> None:
        self._vector.write_weights(self._weights)
        self._vector.write_buffers(self._common)

    def _rebase(self) -> None:
        """The common weights and this rank's steps since the boundary: x_i ← x_{t+1} + p_i.

        Progress is counted from what is left without these steps, so that rounding (to bfloat16,
        say) is not taken for progress, and does not add up either. Running statistics stay own.
        """
        flat, (steps, _) = self._vector.flat, self._vector.split(self._message)
        start, buffers = self._vector.split(self._start)
        torch.sub(flat.read(steps), start, out=steps)
        self._vector.write_weights(torch.add(self._weights, steps, out=start))
        flat.read(start).sub_(steps)
        buffers.copy_(self._common)

    def wait(self) -> None:
        """Until no exchange is in flight; its result is applied at its own step."""
        self._mean.arrived()

    def barrier(self, call: Call = Call.BARRIER) -> None:
        """Return when all ranks have come here after the same step; an error on all if not.

        Ranks that go on find it out at their next exchange.
        """
        self.wait()
        self._mean.barrier(call, self._step)

    def synchronize(self) -> None:
        """Bring all ranks to common weights now, in the middle of a period, too; on all ranks."""
        if self._step < self.warmup_steps:
            return
        self._untouched = None
        with torch.no_grad():
            if self._mean.in_flight:
                self._finish_sync()
            self._start_sync()
            self._finish_sync()
            self._take_common()

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside, the model has the common weights and buffers: for evaluation, not for steps.

        Every rank holds them: any may enter, without the others.
        """
        if self._step < self.warmup_steps or self._hidden is not None:  # they are there already
            yield
            return
        own = self._vector.read(self._vector.empty())  # fp32 holds all of their dtypes exactly
        self._hidden = own
        self._show_common()
        try:
            yield
        finally:
            self._hidden = None
            self._vector.write(own)

    @contextmanager
    def latest_weights(self) -> Iterator[int]:
        """As `global_weights`; how many steps were made since the exchange that they are from."""
        with self.global_weights():
            yield self._step - self._common_at

    def close(self) -> None:
        """Release the thread and the process group; on all ranks, after the last step.

        Waits for an exchange that is in flight. It also happens when the process ends.
        """
        self._lane.close()
        if self._replica is not None:
            self._replica.close()

    def stats(self) -> LocalStats:
        """Bytes and times so far."""
        traffic = self._lane.traffic
        return LocalStats(
            steps=self._step,
            exchanges=self._exchanges,
            skipped=self._skipped,
            sent_bytes=traffic.sent_bytes,
            plain_bytes=self._vector.flat.ring_bytes(self._lane.size) * self._since_made,
            wire_seconds=traffic.wire_seconds,
            local_bytes=traffic.local_bytes,
            **error_stats(self._mean.session.memory),
        )

    def _identity(self) -> dict[str, str]:
        """What a saved state must agree with."""
        return {
            "codec": str(self.codec),
            "ranks": str(self._lane.size),
            "rank": str(self._lane.rank),
            "warmup_steps": str(self.warmup_steps),
            "overlap_steps": str(self.delay),
            "outer": kind_of(self._outer),
            "buffers": str(self._exchanges_buffers),
            "parameters": "\n".join(self._vector.lines),
            **self._shard(),
        }

    def _shard(self) -> dict[str, str]:
        """Which part of the model this rank trains, if it is cut."""
        return {} if self._replica is None else {"shard": self._replica.describe()}

    def state_dict(self) -> dict[str, Any]:
        """All that must be saved, on every rank, to resume exactly; its own weights are in it.

        Waits for an exchange that is in flight. Both optimizers are part of it.
        """
        if self._hidden is None:
            return self._state()
        self._vector.write(self._hidden)
        try:
            return self._state()
        finally:
            self._show_common()

    def _state(self) -> dict[str, Any]:
        return {
            "identity": self._identity(),
            "mean": self._mean.state_dict(),  # first: it waits
            "step": self._step,
            "sent at": self._sent_at,
            "common at": self._common_at,
            "exchanges": self._exchanges,
            "skipped": self._skipped,
            "exchanged buffers": list(self._vector.buffer_names),
            "weights": self._vector.flat.own(),
            "buffers": own_buffers(self._model, self._vector.buffer_names),
            "base": torch.cat([self._weights, self._common]),
            "start": self._start.clone(),
            "outer": self._outer and copy.deepcopy(self._outer.state_dict()),
            "optimizer": own_state(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Resume from this rank's state_dict, bit for bit; the model gets this rank's weights."""
        state = state_dict
        check_identity(self._identity(), state)
        if self._hidden is not None:
            raise ConfigError("load_state_dict() inside global_weights(): leave the block first")
        with torch.no_grad():
            if self._mean.in_flight:
                self._mean.wait()  # it is not needed any more, but all ranks have started it
            load_buffers(self._model, state["buffers"])
            flat = self._vector.flat
            self._untouched = flat.empty()
            saved = [state["weights"][name] for name, _ in flat.named]
            copy_all(flat.views(self._untouched), saved)
            self._vector.write_weights(self._untouched)
            if state["exchanged buffers"] != self._vector.buffer_names:
                self._begin(state["exchanged buffers"])  # others were finite then
            self._mean.load_state_dict(state["mean"])
            weights, common = self._vector.split(state["base"])
            self._weights.copy_(weights)
            self._common.copy_(common)
            self._start.copy_(state["start"])
        self._step, self._exchanges = int(state["step"]), int(state["exchanges"])
        self._skipped = int(state["skipped"])
        # states of earlier versions do not have these; only `latest_weights` uses them
        self._sent_at = int(state.get("sent at", self._step))
        self._common_at = int(state.get("common at", self._step))
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch keeps its tensors
        cut_state(self.optimizer)
        if self._outer is not None:
            self._outer.load_state_dict(copy.deepcopy(state["outer"]))


def _check_given(optimizer: object, model: nn.Module) -> None:
    """ConfigError, with what works, for what LocalSGD cannot wrap."""
    check_module(model, sharded=True)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "LocalSGD wraps a torch optimizer, such as SGD or AdamW, not "
            f"{type(optimizer).__name__}"
        )
    if needs_closure(optimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates its closure several times in a step, which "
            "LocalSGD does once: use an optimizer whose step() needs none, such as SGD or AdamW"
        )


def _delay(overlap: bool, steps: int | None, period: int) -> int:
    """Steps between the start of an exchange and its use; 0 without overlap."""
    if steps is None:
        return period if overlap else 0
    if not overlap:
        raise ConfigError("overlap_steps= goes with overlap=True")
    if whole("overlap_steps", steps, 1) > period:
        raise ConfigError(f"overlap_steps must be from 1 to period={period}, not {steps}")
    return steps


def _replica(
    model: nn.Module, trained: Trained, group: dist.ProcessGroup | None
) -> ShardedReplica | None:
    """Of a model that FSDP2 has cut; None of a whole one."""
    if not fsdp_modules(model):
        return None
    return ShardedReplica(model, [p for _, p in trained.named], group)
