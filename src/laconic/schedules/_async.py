"""Asynchronous SGD on a parameter server: no worker waits for the slowest one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic._settings import whole
from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.schedules._costs import AsyncCost, ScheduleCost
from laconic.schedules._flat_optimizer import FlatOptimizer, unscale
from laconic.schedules._inputs import (
    check_given,
    chosen_codec,
    chosen_pull_codec,
    warn_of_amplifying,
)
from laconic.schedules._master import NO_CODEC
from laconic.schedules._schedule import ScheduleStats
from laconic.server._async_server import Delays
from laconic.server._link import Flag, Frame, Kind, Roles
from laconic.server._server_client import Push, ServerClient, flags_of
from laconic.sharding._shard import settings_of


@dataclass(frozen=True, kw_only=True)
class AsyncStats(ScheduleStats):
    """What one worker has done so far."""

    skipped_steps: int  # gradients that were not finite and never left
    skipped_shards: int  # thrown away by a server: finite, but too large for the codec
    delays: Delays  # of this worker's gradients on server 0


class AsyncSGD(FlatOptimizer):
    """Asynchronous SGD: a server applies each worker's gradient as it arrives (QSGD, section 4).

    The first `servers` ranks of the group keep the weights x, cut among them; all others compute.
    A worker reads x_r, computes g at it and sends Q(g); a server that has made v updates since the
    start applies it,

        x_{v+1} = optimizer(x_v, Q(g(x_r))),    v - r ≤ τ

    and answers with x_{v+1}. The delay v - r counts updates by others in between; it is about
    workers - 1 when all are equally fast. `max_delay` τ bounds it, exactly and for every gradient:
    a worker that is too far ahead of a slow one waits for it, and with τ < workers - 1 workers also
    wait before they read (`laconic.server._async_server`).

    For a smooth f with gradients of variance σ², and τ of the order of √(steps), the average of
    ‖∇f‖² over updates falls as σ/√updates (Lian et al. 2015); an unbiased codec with
    E‖Q(g) - g‖² ≤ ω‖g‖² puts (1 + ω)σ² + ω‖∇f‖² in place of σ².

    - On servers call `serve()`, which returns when the last worker has called `leave()`. A worker
      that ends without that is lost: servers report it and continue with the others.
    - A gradient that is not finite never leaves its worker, which reads again.
    - `codec` is for gradients, any that decodes alone. `pull_codec` is for weights: None sends them
      as they are, others send differences to what this worker has (a server then remembers that,
      for each worker).
    - Learning rates and other settings are those that the pushing worker has.
    - Workers' buffers (batch normalisation) are equal at the start, their own afterwards.
    """

    cost: ClassVar[type[ScheduleCost]] = AsyncCost

    _step_supports_amp_scaling = True  # GradScaler: call step() anyway, with found_inf

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        servers: int = 1,
        max_delay: int = 8,
        codec: str | Codec = "qsgd:bits=4",
        pull_codec: str | Codec | None = None,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        check_given(optimizer, model, seed, timeout_s)
        whole("servers", servers, 1)
        whole("max_delay", max_delay, 0)
        self.servers, self.max_delay, self.seed = servers, max_delay, seed
        self.codec = chosen_codec(codec, "codec")
        warn_of_amplifying(optimizer, self.codec)
        self.pull_codec = NO_CODEC if pull_codec is None else chosen_pull_codec(pull_codec)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, roles = optimizer, Roles(group, servers, timeout_s)
        self._roles, self._lane, self._traffic = roles, roles.lane, roles.traffic
        self._begin(model, roles.group, servers)
        self.serves = roles.serves  # this rank keeps weights: call serve()
        self._skipped, self._delays, self._plain_bytes = [0, 0], Delays(), 0
        if self.serves:
            self._keep(roles, most_delay=max_delay)
            return
        # draws of coded pulls are this worker's own
        self._client = ServerClient(
            self.flat, roles, seed, self.pull_codec, roles.number + 1, self._memory
        )
        self._g, self._own, self._next = self.flat.empty(), self.flat.empty(), self.flat.empty()
        self._read(coded=False)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Send this worker's gradients, and continue with the newest weights."""
        self._check_step(closure)
        self.flat.read_gradients(self._g)
        if bool(unscale(self, self._g) > 0):
            self._skipped[0] += 1
            self._read(coded=self._coded)
        else:
            self._push_and_read()
        self._steps += 1
        self._plain_bytes += self.flat.ring_bytes(self._lane.size - self.servers)

    @property
    def _coded(self) -> bool:
        return not self.pull_codec.lossless

    def _push_and_read(self) -> None:
        push = Push(
            step=self._steps,
            g=self._g,
            codec=self.codec,
            flags=flags_of(self.codec, self.pull_codec),
            settings=settings_of(self.param_groups),
        )
        # only server 0 answers with weights: see _read
        self._client.start_push(push, pull_from=1)
        first = self._client.finish_push(0)
        self._delays.add(first.number)
        found = first.flags
        for server in range(1, self.servers):
            found |= self._client.finish_push(server).flags
        self._skipped[1] += bool(found & Flag.SHARD_SKIPPED)
        self._read(coded=self._coded, first=first)

    def _read(self, *, coded: bool, first: Frame | None = None) -> None:
        """Weights of all servers, from one after the other.

        In the same order for all workers: a worker that waits for a server's permission to read
        holds no other server's that one before it needs, so that workers cannot wait in a circle.
        """
        flags = Flag.CODED if coded else Flag.NONE
        for server in range(self.servers):
            frame = first if server == 0 else None
            if frame is None:
                frame = self._client.ask(server, Kind.PULL, step=self._steps, flags=flags)
            before = self._own if coded else None
            self._client.take(server, frame, step=self._steps, out=self._next, before=before)
        self._own, self._next = self._next, self._own
        self.flat.write(self._own)

    def wait(self) -> None:
        """Nothing is in flight between steps: step() returns with the answers of all servers."""

    def leave(self) -> None:
        """On a worker: servers continue without it. Every worker should, for `serve` to return."""
        self._check_worker("leave()")
        self._client.leave()
        self._away = True

    def join(self) -> None:
        """On a worker that has left: take part again, with the newest weights."""
        if self.serves or not self._away:
            raise ConfigError("join() is for a worker that has left")
        for server in range(self.servers):
            self._client.ask(server, Kind.JOIN)
        self._away = False
        self._read(coded=False)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """The model has the servers' weights as they are now; its own ones afterwards."""
        self._check_worker("global_weights()")
        with torch.no_grad():
            self._client.read(self._steps, self._next)
        with self._showing(self._next, lambda: self._own):
            yield

    @contextmanager
    def latest_weights(self) -> Iterator[int]:
        """As `global_weights`: servers answer each worker by itself. 0 steps old."""
        with self.global_weights():
            yield 0

    def stats(self) -> AsyncStats:
        """On a worker: counts, bytes and delays so far."""
        if self.serves:
            raise ConfigError("this rank serves: server_stats()")
        traffic = self._traffic()
        return AsyncStats(
            steps=self._steps,
            skipped_steps=self._skipped[0],
            skipped_shards=self._skipped[1],
            delays=self._delays,
            sent_bytes=traffic.sent_bytes,
            plain_bytes=self._plain_bytes,
            wire_seconds=traffic.wire_seconds,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """On a server before `serve`; on a worker between steps: its weights are the servers'."""
        super().load_state_dict(state_dict)
        if not self.serves:
            self.flat.write(self._own)

    @property
    def _own_weights(self) -> Tensor:
        return self._own

    def _settings(self) -> dict[str, str]:
        return {**super()._settings(), "max_delay": str(self.max_delay)}
