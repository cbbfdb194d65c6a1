"""Local steps: every rank trains alone for a while, then all exchange what they have learnt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic._version import __version__
from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges import Exchange, pair
from laconic.exchanges._agree import agree
from laconic.exchanges._lane import Lane, own_group
from laconic.exchanges._ledger import error_stats
from laconic.exchanges._policy import Chooser, Policy
from laconic.exchanges._ratio import HasRatio
from laconic.schedules._local_checks import check, delay_of
from laconic.schedules._local_mean import Mean, Route
from laconic.schedules._local_vector import Vector, forget_broken, statistics
from laconic.schedules._module import load_buffers, own_buffers, same_start, whole
from laconic.schedules._outer import Outer
from laconic.schedules._ssd_checks import check_identity
from laconic.server._parameters import Trained


@dataclass(frozen=True, kw_only=True)
class LocalStats(HasRatio):
    """What one rank has done so far; bytes and seconds since the schedule was made."""

    steps: int
    exchanges: int  # of progress; steps of warm-up are not among them
    skipped: int  # exchanges and steps of warm-up that were not finite, and left out on all ranks
    sent_bytes: int
    plain_bytes: int  # what synchronous fp32 DDP would have sent, in a ring
    wire_seconds: float  # in collectives, waiting for other ranks included
    local_bytes: int = 0  # inside nodes, where the exchange knows them; not in sent_bytes
    # of codecs with a budget: expected relative squared error of the mean progress, of parameters
    error_budget: float | None = None  # what was asked for
    error_mean: float | None = None  # over parameters and exchanges
    error_largest: float | None = None  # of any parameter at any exchange
    exact_means: int | None = None  # how often only the exact mean could keep the budget
    kappa: float | None = None  # ‖mean‖²/average ‖progress‖², where there is a budget


class LocalSGD(torch.optim.Optimizer):
    """Local SGD, post-local SGD and DiLoCo, around any torch optimizer and a plain module.

    x_t are the common weights, x_i a rank's own, H = period:

        δ_i = x_t - x_i  after H steps from x_t         x_{t+1} = x_t - outer(mean of δ_i)

    1. Every rank takes H steps with its own optimizer, whose state (momentum, moments) stays local.
    2. The progress δ_i travels through the codec, not x_i: a codec's error is a share of what it
       encodes. ‖δ‖ is far below ‖x‖ and shrinks as training settles, and so does the error.
    3. All ranks make the same outer step of the same bits: outer=None is x - mean, plain averaging;
       `Nesterov()` makes it DiLoCo. Then all hold the same weights, to the bit.

    `warmup_steps` of synchronous training come first: post-local SGD. They average gradients in
    fp32, because a memory of error feedback in units of gradients would be wrong for progress.

    For H = 1, no outer optimizer and codec none: with gradients at common weights, mean(x_i) =
    x - lr·mean(u_i), and the buffers u_i ← μ·u_i + g_i are linear in g_i: ū ← μ·ū + ḡ. So SGD with
    momentum, weight decay and Nesterov's form too, is synchronous SGD (but for fp32 rounding); Adam
    and clipping are not linear, and differ. Plain SGD with outer Nesterov(lr=a, momentum=β) is
    synchronous SGD(lr·a, momentum=β, nesterov=True). For H > 1 neither holds.

    `overlap=True`: the exchange of a boundary runs in a thread behind the next steps, and what it
    found is taken over `overlap_steps` later (by default H, at the next boundary). With x_i^b a
    rank's weights at the boundary and p_i = x_i - x_i^b its steps since then:

        x_i ← x_{t+1} + p_i            at the next boundary  δ_i = x_{t+1} - x_i = -(all p_i since)

    So every step counts once: own ones at once, others' through x_{t+1}. Ranks hold common weights
    plus own steps since the boundary, never equal weights; x_t is equal on all ranks, to the bit.

    Not finite anywhere: the mean is not, on any rank. Then nobody makes the outer step, all go back
    to x_t, and momentum that is not finite is forgotten; `stats().skipped` counts it. (What error
    feedback of the other ranks has sent is lost with it.)

    Costs three fp32 copies of the weights (common, start, message), four with an outer optimizer.

    Stich 2019, arXiv 1805.09767 (local SGD); Lin et al. 2020, arXiv 1808.07217 (post-local);
    Douillard et al. 2023, arXiv 2311.08105 (DiLoCo), and 2025, arXiv 2501.18512 (overlap, there by
    fragments of the model and with a blend of local and global weights).
    """

    _step_supports_amp_scaling = True  # GradScaler calls step() on every rank, overflow or not

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        period: int = 8,
        codec: str | Codec = "ecdq:error=0.08",
        exchange: str | Exchange | None = None,
        outer: Outer | None = None,
        warmup_steps: int = 0,
        overlap: bool = False,
        overlap_steps: int | None = None,
        buffers: bool = True,
        policy: Chooser | None = None,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        check(optimizer, model, outer)
        self.optimizer, self.outer, self.seed = optimizer, outer, seed
        self.codec, self.exchange = pair(codec, exchange)
        self.period = whole("period", period, 1)
        self.warmup_steps = whole("warmup_steps", warmup_steps, 0)
        self.delay = delay_of(overlap, overlap_steps, self.period)
        if not dist.is_initialized():
            raise ConfigError("start torch.distributed first: torchrun, then init_process_group()")
        self._model = model
        self._trained = Trained(optimizer.param_groups, model, "LocalSGD")
        if warmup_steps:
            self._trained.check_dense(model, "warm-up")
        self._vector = Vector(self._trained, model, policy or Policy())
        self._lane = Lane(own_group(group, timeout_s))
        self._agree(buffers)
        self.exchange.prepare(self._lane.group)
        same_start(model, self._lane.group)
        self._step = self._since_made = self._exchanges = self._skipped = 0
        self._exchanges_buffers = buffers
        self._begin(statistics(model) if buffers else [])
        # until the first step: what the model's parameters must still be
        self._untouched: list[Tensor] | None = self._vector.weight_parts(self._start)

    def _begin(self, buffers: Sequence[str]) -> None:
        """Vectors that hold the model as it is now, with these buffers."""
        own = self._vector
        own.include(buffers)
        self._base = own.read(own.empty())  # x_t, and the common buffers
        self._start = self._base.clone()  # own progress is counted from here
        self._message = own.empty()
        self._momentum = torch.zeros_like(own.split(self._base)[0][: None if self.outer else 0])
        route = Route(self.codec, self.exchange, self.seed, own.encoded, own.places)
        self._mean = Mean(self._message, route, self._lane)

    def _agree(self, buffers: bool) -> None:
        settings = {
            "laconic": __version__,
            "codec": str(self.codec),
            "exchange": str(self.exchange),
            "period": str(self.period),
            "outer": str(self.outer),
            "warmup_steps": str(self.warmup_steps),
            "overlap_steps": str(self.delay),
            "seed": str(self.seed),
            "buffers": str(buffers),
            "parameters": "\n".join(self._vector.lines),
        }
        agree(settings, self._lane.group, self._vector.device)

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
        self._trained.check(self.param_groups)
        if self._untouched is not None:
            self._vector.check_values(self._untouched)
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
                self._together()
            else:
                self._alone(fine)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what travels was settled when the schedule was made."""
        raise ConfigError("add parameter groups to the optimizer before making LocalSGD")

    def _unscaled(self) -> bool:
        """Take GradScaler's scale out of the gradients; whether it found them finite."""
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            for parameter in self._vector.trained:
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.device))
        return not bool(getattr(self, "found_inf", False))

    def _together(self) -> None:
        """A step of warm-up: gradients become their mean, and so do buffers."""
        own, (gradients, moved) = self._vector, self._vector.split(self._message)
        weights, common = own.split(self._base)
        own.read_gradients(gradients)
        torch.sub(common, own.buffers.read(moved), out=moved)
        self._mean.start(self._step, plain=True)
        if self._finite():
            own.write_gradients(gradients)
            common.sub_(moved)
            self.optimizer.step()
        own.buffers.write(common)
        if self._step == self.warmup_steps:
            own.weights.read(weights)
            self._adopt()

    def _alone(self, fine: bool) -> None:
        """A local step; where a period ends, its exchange; where one has arrived, its result."""
        if fine:
            self.optimizer.step()
        since = (self._step - self.warmup_steps) % self.period
        if self._mean.under_way and since == self.delay % self.period:
            self._land()
        if since == 0:
            self._depart()
            if not self.delay:
                self._land()

    def _depart(self) -> None:
        """Send the progress since the last boundary."""
        torch.sub(self._start, self._vector.read(self._message), out=self._message)
        if self.delay:
            self._vector.weights.read(self._vector.split(self._start)[0])
        self._exchanges += 1
        self._mean.start(self._exchanges)

    def _finite(self) -> bool:
        """Wait for the mean; False on all ranks, and counted, if it is no use."""
        finite = self._mean.wait()
        self._skipped += not finite
        return finite

    def _land(self) -> None:
        """The outer step, and this rank's weights after it."""
        if not self._finite():
            forget_broken(self.optimizer.state)
            self._adopt()
            return
        mean, moved = self._vector.split(self._message)
        weights, common = self._vector.split(self._base)
        common.sub_(moved)
        if self.outer is None:
            weights.sub_(mean)
        else:
            self.outer.step(weights, mean, self._momentum)
        if self.delay:
            self._rebase()
        else:
            self._adopt()

    def _adopt(self) -> None:
        """The common weights and buffers become this rank's own."""
        self._vector.write(self._base)
        self._vector.read(self._start)

    def _rebase(self) -> None:
        """The common weights and this rank's steps since the boundary: x_i ← x_{t+1} + p_i.

        Progress is counted from what is left without these steps, so that rounding (to bfloat16,
        say) is not taken for progress, and does not add up either. Running statistics stay own.
        """
        own, (steps, _) = self._vector, self._vector.split(self._message)
        (start, buffers), (weights, common) = own.split(self._start), own.split(self._base)
        torch.sub(own.weights.read(steps), start, out=steps)
        own.weights.write(torch.add(weights, steps, out=start))
        own.weights.read(start).sub_(steps)
        buffers.copy_(common)

    def synchronize(self) -> None:
        """Bring all ranks to common weights now, in the middle of a period, too; on all ranks."""
        if self._step < self.warmup_steps:
            return
        self._untouched = None
        with torch.no_grad():
            if self._mean.under_way:
                self._land()
            self._depart()
            self._land()
            self._adopt()

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside, the model has the common weights and buffers: for evaluation, not for steps."""
        if self._step < self.warmup_steps:  # they are common already
            yield
            return
        tensors = [*self._vector.weights.tensors(), *self._vector.buffers.tensors()]
        kept = [tensor.clone() for tensor in tensors]
        self._vector.write(self._base)
        try:
            yield
        finally:
            for tensor, own in zip(tensors, kept, strict=True):
                tensor.copy_(own)

    def close(self) -> None:
        """Give the thread and the process group back; on all ranks, behind the last step.

        Waits for an exchange that is under way. It also happens when the process ends.
        """
        self._lane.close()

    def stats(self) -> LocalStats:
        """Bytes and times so far."""
        size, traffic = self._lane.size, self._lane.traffic
        ring = round(2 * (size - 1) / size * 4 * self._vector.weights.numel)
        return LocalStats(
            steps=self._step,
            exchanges=self._exchanges,
            skipped=self._skipped,
            sent_bytes=traffic.sent_bytes,
            plain_bytes=ring * self._since_made,
            wire_seconds=traffic.wire_seconds,
            local_bytes=traffic.local_bytes,
            **error_stats(self._mean.memory),
        )

    def _identity(self) -> dict[str, str]:
        """What a saved state must agree with."""
        group = self._lane.group
        return {
            "codec": str(self.codec),
            "ranks": str(group.size()),
            "rank": str(group.rank()),
            "warmup_steps": str(self.warmup_steps),
            "overlap_steps": str(self.delay),
            "outer": type(self.outer).__name__ if self.outer else "None",
            "buffers": str(self._exchanges_buffers),
            "parameters": "\n".join(self._vector.lines),
        }

    def state_dict(self) -> dict[str, Any]:
        """All that must be saved, on every rank, to go on exactly; its own weights are in it.

        Waits for an exchange that is under way. The optimizer inside is part of it.
        """
        return {
            "identity": self._identity(),
            "mean": self._mean.state_dict(),  # first: it waits
            "step": self._step,
            "exchanges": self._exchanges,
            "skipped": self._skipped,
            "exchanged buffers": list(self._vector.buffer_names),
            "weights": {name: p.detach().clone() for name, p in self._vector.named},
            "buffers": own_buffers(self._model, self._vector.buffer_names),
            "base": self._base.clone(),
            "start": self._start.clone(),
            "momentum": self._momentum.clone(),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Resume from this rank's state_dict, to the bit; the model gets this rank's weights."""
        state = state_dict
        check_identity(self._identity(), state)
        with torch.no_grad():
            if self._mean.under_way:
                self._mean.wait()  # nobody needs it any more, but all ranks have begun it
            load_buffers(self._model, state["buffers"])
            self._untouched = [state["weights"][name] for name, _ in self._vector.named]
            self._vector.set_values(self._untouched)
            if state["exchanged buffers"] != self._vector.buffer_names:
                self._begin(state["exchanged buffers"])  # others were finite then
            self._mean.load_state_dict(state["mean"])
            for name in ("base", "start", "momentum"):
                getattr(self, f"_{name}").copy_(state[name])
        self._step, self._exchanges = int(state["step"]), int(state["exchanges"])
        self._skipped = int(state["skipped"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch keeps its tensors
