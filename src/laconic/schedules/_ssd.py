"""SSD-SGD: push every step, pull every k-th, both overlapped with computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from laconic._settings import whole
from laconic.codecs import Codec
from laconic.comm._frame import Call
from laconic.comm._threads import CommLane, own_group
from laconic.errors import ConfigError
from laconic.schedules._costs import ScheduleCost, SSDCost
from laconic.schedules._flat_optimizer import FlatOptimizer, unscale
from laconic.schedules._inputs import (
    check_given,
    chosen_codec,
    chosen_pull_codec,
    chosen_rule,
    warn_of_amplifying,
)
from laconic.schedules._master import NO_CODEC, Master, Round, ServerMaster, ShardedMaster
from laconic.schedules._rules import LocalRule, Replica
from laconic.schedules._schedule import BudgetStats
from laconic.server._link import Roles
from laconic.sharding._shard import settings_of


@dataclass(frozen=True, kw_only=True)
class SSDStats(BudgetStats):
    """What one rank has done so far; a budget is that of the mean gradient."""

    pulls: int  # asynchronous ones; a warm-up step has one of its own
    skipped_steps: int  # on all ranks, because a gradient of some rank was not finite
    skipped_shards: int  # by this rank alone: finite gradients, but too large for the codec
    exchange_seconds: float  # in the communication thread: codec, optimizer and wire


class SSD(FlatOptimizer):
    """SSD-SGD: gradients to their owners at every step, weights from them at every k-th.

    All trainable parameters are one fp32 vector; rank j owns the j-th chunk of n: the master
    weights M, and the optimizer's state. `step()` number t = 0, 1, .. has the gradient g_t of this
    rank's own weights W_t, and

    1. takes M_t, if a pull was started at step t - 1 (waits for it; M_t has all gradients up
       to g_{t-1}): w = M_t, otherwise w = W_t;
    2. makes a local step, W_{t+1} = w - Δ(w, g_t), by the rule `local` (None: W_{t+1} = w);
    3. starts the push, overlapped with the next forward and backward: the owners get the mean of
       g_t over ranks and step, M_{t+1} = optimizer(M_t, mean g_t). At every k-th step a pull
       follows: every rank is sent all of M_{t+1}.

    What is used when depends on t alone, never on the network. Step t waits for the push of step
    t - 2, whose memory it needs. With period 1 and local=None this is SGD with gradients delayed
    by one step, M_{t+1} = M_t - lr·mean g(M_{t-1}).
    The first `warmup_steps` are synchronous and in full precision: what DDP does.

    Bytes per rank and step: (1 + 1/k)·(n-1)/n of the encoded vector, against 2·(n-1)/n.
    Time: [(k-1)·max(C, P) + max(C, P + L)]/k, with C computation, P push and L pull.

    - `optimizer` is the optimizer that the owners run and holds its settings (learning-rate
      schedulers may act on it or on this object); its own step() is never called. It must step
      value by value: SGD, Adam, AdamW and the like.
    - `local`: "auto" is MomentumRule() for SGD and AdamRule() for Adam and AdamW, which keep a rank
      near the owners through long periods, and None for other optimizers. GLU() is the paper's.
    - `codec` is for gradients; `error=` of a codec is the budget of the mean that owners step
      with, spent in one encoding (with `servers`: of each worker's own gradient). `pull_codec` is
      for weights: None sends them as they are, others send differences to the last pull, so that
      errors do not accumulate.
    - A gradient that is not finite on some rank is skipped on all, in the local steps of that
      rank, too: M, the optimizer's state and W stay finite. This is also what GradScaler needs:
      `scaler.step(opt)` runs on every rank, and each rank unscales by its own scale.
    - `servers=S`: the first S ranks of the group keep the master weights and do nothing else (call
      `serve()` there), all others work: the paper's form, for workers whose links are slower than
      the servers', or that come and go (`leave`, `join`). Bytes per worker and step: the
      encoded vector; a server sends each worker 1/(k·S) of the weights.
    - Weights differ between ranks: evaluate and save `with opt.global_weights():` on all ranks, or
      `with opt.latest_weights():`, those of the last pull, on any. Buffers, such as those of batch
      normalisation, stay each rank's own after the start.

    SSD-SGD (Xu et al. 2020). Differs from the paper: owners of chunks instead of parameter servers
    unless `servers` is given, weights taken over at a fixed step instead of when they come, and all
    tensors in phase.
    """

    cost: ClassVar[type[ScheduleCost]] = SSDCost

    _step_supports_amp_scaling = True  # GradScaler: call step() on all ranks, with found_inf

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        period: int = 4,
        warmup_steps: int = 500,
        local: LocalRule | Literal["auto"] | None = "auto",
        codec: str | Codec = "dqsg:bits=4",
        pull_codec: str | Codec | None = None,
        servers: int = 0,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        check_given(optimizer, model, seed, timeout_s)
        for name, value, least in (
            ("period", period, 1),
            ("warmup_steps", warmup_steps, 0),
            ("servers", servers, 0),
        ):
            whole(name, value, least)
        self.period, self.warmup_steps, self.seed = period, warmup_steps, seed
        self.local = chosen_rule(local, optimizer)
        self.codec = chosen_codec(codec, "codec", rounds=servers > 0)
        warn_of_amplifying(optimizer, self.codec)
        self.pull_codec = NO_CODEC if pull_codec is None else chosen_pull_codec(pull_codec)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        roles = Roles(group, servers, timeout_s) if servers else None
        self._roles = roles
        self._lane = roles.lane if roles else CommLane(own_group(group, timeout_s))
        self.optimizer, self.servers = optimizer, servers
        self.serves = roles is not None and roles.serves  # this rank keeps weights: call serve()
        self._begin(model, self._lane.group, servers or self._lane.size)
        self._pulls = 0
        self._server_master: ServerMaster | None = None
        self._sharded: ShardedMaster | None = None
        if roles and roles.serves:
            self._keep(roles, most_delay=None)
            return
        decoupled = isinstance(optimizer, AdamW)
        self._replica = Replica(self.flat, self.local, period, decoupled=decoupled)
        self._master: Master
        if roles:
            self._master = self._server_master = ServerMaster(
                self.flat, roles, self._lane, seed, self.pull_codec, self._memory
            )
        else:
            self._master = self._sharded = ShardedMaster(
                self.flat, optimizer, self._replica.own, self._lane, seed, self._memory, self.codec
            )
        self._gradients = self.flat.empty(), self.flat.empty()  # one is sent, one is filled

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take this rank's gradients; on all ranks."""
        self._check_step(closure)
        self._master.in_flight.raise_errors()
        t, mine = self._steps, self._replica
        self._master.in_flight.wait(t)  # the push before the last one has this buffer
        g = self._gradients[t % 2]
        self.flat.read_gradients(g)
        found_inf = unscale(self, g)
        if t < self.warmup_steps:
            self._start(g, found_inf, NO_CODEC, NO_CODEC)
            self._master.in_flight.wait(t)
            mine.take_as_they_are()
        else:
            if mine.coming:
                self._master.in_flight.wait(t - 1)
            mine.move(g, found_inf, self.param_groups)
            pulls = (t - self.warmup_steps + 1) % self.period == 0
            self._start(g, found_inf, self.codec, self.pull_codec if pulls else None)
            mine.coming = pulls
            self._pulls += pulls
        self.flat.write(mine.own)
        self._steps += 1

    def _start(self, g: Tensor, found_inf: Tensor, codec: Codec, pull_codec: Codec | None) -> None:
        self._master.start(
            Round(
                step=self._steps,
                g=g,
                found_inf=found_inf,
                settings=settings_of(self.param_groups),  # as they are now: schedulers change them
                codec=codec,
                pull_codec=pull_codec,
                before=self._replica.pulled,
                out=self._replica.next,
            )
        )

    def wait(self) -> None:
        """Until nothing is in flight; errors of the communication thread are raised here."""
        if not self.serves:
            self._master.in_flight.wait_for_all()

    def barrier(self, call: Call = Call.BARRIER) -> None:
        """Return when all ranks have come here after the same step; an error on all if not."""
        if self._sharded is None:
            super().barrier(call)
            return
        self.wait()
        self._sharded.barrier(call, self._steps)

    def leave(self) -> None:
        """On a worker: servers continue without it. Every worker must, for `serve` to return."""
        master = self._on_server("leave()")
        self.wait()
        master.leave()
        self._away = True

    def join(self) -> int:
        """On a worker that has left: take part again, from the step that is returned on."""
        master = self._on_server("join()", away=True)
        self._steps = master.join(self._replica.next)
        self._replica.begin_again()
        self.flat.write(self._replica.own)
        self._away = False
        return self._steps

    def _on_server(self, what: str, *, away: bool = False) -> ServerMaster:
        if self.serves or self._server_master is None:
            raise ConfigError(f"{what} is for the workers of servers: SSD(.., servers=1)")
        if self._away != away:
            raise ConfigError(f"{what}: this worker has {'' if self._away else 'not '}left")
        return self._server_master

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """The model has the master weights, the same bits on all ranks; its own ones afterwards.

        For evaluation and checkpoints. All ranks (of servers: any worker) must enter: the weights
        are gathered, exactly. Changes to the parameters inside are discarded.
        """
        self._check_worker("global_weights()")
        self.wait()
        room = self._gradients[0]  # nothing is in flight
        self._master.gather(self._steps, room)
        with self._showing(room, lambda: self._replica.own):
            yield

    @contextmanager
    def latest_weights(self) -> Iterator[int]:
        """The model has the weights of the last pull, and knows how many steps ago it began.

        On any rank, without the others; the next step's push is not waited for. Right after a step
        that pulls, and in warm-up, they are 0 steps old. With servers these are asked.
        """
        self._check_worker("latest_weights()")
        if self._server_master is not None:
            with self.global_weights():
                yield 0
            return
        mine = self._replica
        if mine.coming:  # all ranks have begun this pull, or will without this one
            self._master.in_flight.wait(self._steps - 1)
        with self._showing(mine.next if mine.coming else mine.pulled, lambda: mine.own):
            yield max(self._steps - self.warmup_steps, 0) % self.period

    def stats(self) -> SSDStats:
        """Bytes, times and counts so far; `wait()` first to count what is in flight."""
        if self.serves:
            raise ConfigError("this rank serves: server_stats()")
        traffic, (steps, shards) = self._master.traffic, self._master.skipped
        return SSDStats(
            steps=self._steps,
            pulls=self._pulls,
            skipped_steps=steps,
            skipped_shards=shards,
            sent_bytes=traffic.sent_bytes,
            plain_bytes=self._lane.plain_bytes,
            exchange_seconds=self._lane.seconds,
            wire_seconds=traffic.wire_seconds,
            **self._master.error,
        )

    @property
    def _own_weights(self) -> Tensor:
        return self._replica.own

    def _settings(self) -> dict[str, str]:
        own = {"period": self.period, "warmup_steps": self.warmup_steps, "local": self.local}
        return {**super()._settings(), **{name: str(value) for name, value in own.items()}}

    def state_dict(self) -> dict[str, Any]:
        """Everything of this rank, its weights and buffers too; save it on every rank. Waits."""
        self.wait()
        found = super().state_dict()
        if not self.serves:
            found["pulls"] = self._pulls
            found["replica"] = self._replica.state_dict()
            found["shard"] = self._master.state_dict()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from this rank's state_dict, bit for bit; the model gets its weights, too."""
        self.wait()
        super().load_state_dict(state_dict)
        if self.serves:
            return
        self._pulls = int(state_dict["pulls"])
        self._replica.load_state_dict(state_dict["replica"])
        self._master.load_state_dict(state_dict["shard"])
        self.flat.write(self._replica.own)
