"""The common base of optimizers whose weights are on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic._version import __version__
from laconic.codecs import Codec
from laconic.comm._agreement import require_same_settings
from laconic.comm._barrier import barrier, most_bytes
from laconic.comm._context import ExchangeContext, ExchangeMemory
from laconic.comm._frame import Call
from laconic.comm._threads import CommLane
from laconic.errors import ConfigError
from laconic.schedules._inputs import check_identity, load_buffers, own_buffers, same_start
from laconic.server._link import Roles
from laconic.server._serving import ServerStats, Serving
from laconic.server._shard_server import Chunk, ShardServer
from laconic.sharding._flat_parameters import FlatParameters
from laconic.sharding._shard import check_optimizer, finite_everywhere, settings_of
from laconic.sharding._trained import Trained


class FlatOptimizer(Optimizer):
    """Trains the flat vector of an optimizer's parameters, on servers perhaps. Abstract."""

    optimizer: Optimizer  # the user's, which has the settings
    flat: FlatParameters
    codec: Codec
    pull_codec: Codec
    servers: int
    seed: int
    serves: bool  # this rank keeps weights for the others: call serve()
    _serving: Serving  # where `serves`
    _trained: Trained
    _model: nn.Module
    _lane: CommLane
    _memory: ExchangeMemory
    _roles: Roles | None
    _steps: int
    _away: bool  # this worker has left
    _swapped: bool  # the model shows global weights

    def _begin(self, model: nn.Module, group: dist.ProcessGroup, owners: int) -> None:
        """All ranks have the same settings, or all raise; then they have the same weights."""
        name = type(self).__name__
        self._model, self._trained = model, Trained(self.param_groups, model, name)
        self._trained.check_dense(model, name)
        self.flat = FlatParameters(self._trained.groups, owners, name)
        self._steps, self._away, self._swapped = 0, False, False
        self._memory = ExchangeMemory()
        more = {
            "laconic": __version__,
            "groups": str(settings_of(self.param_groups)),
            "parameters": "\n".join(self.flat.lines()),
        }
        require_same_settings({**self._settings(), **more}, group, self.flat.device)
        same_start(model, group)

    def _keep(self, roles: Roles, *, most_delay: int | None) -> None:
        """On a server: its chunk of the weights."""
        chunk = Chunk(self.flat, roles.number, roles.lane, self.seed)
        shard = ShardServer(chunk, self.flat, self.optimizer, self.codec, self.pull_codec)
        self._serving = Serving(shard, roles, most_delay=most_delay)

    def _settings(self) -> dict[str, str]:
        """What all ranks must have in common; schedules add their own."""
        return {
            "optimizer": type(self.optimizer).__name__,
            "codec": str(self.codec),
            "pull_codec": str(self.pull_codec),
            "seed": str(self.seed),
            "servers": str(self.servers),
        }

    def _identity(self) -> dict[str, str]:
        """What a saved state must agree with."""
        of_rank = {"values": self.flat.numel, "ranks": self._lane.size, "rank": self._lane.rank}
        return {**self._settings(), **{name: str(value) for name, value in of_rank.items()}}

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Of a server: weights, optimizer and updates. Of a worker: steps, buffers, memories."""
        if self.serves:
            return {"identity": self._identity(), "serving": self._serving.state_dict()}
        return {
            "identity": self._identity(),
            "step": self._steps,
            **self._memory.state_dict(),
            "param_groups": settings_of(self.param_groups),
            "buffers": own_buffers(self._model),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """On a server before `serve`; on a worker at any time between steps."""
        check_identity(self._identity(), state_dict)
        if self.serves:
            self._serving.load_state_dict(state_dict["serving"])
            return
        self._steps = int(state_dict["step"])
        older = {"budget": state_dict.get("shard", {}).get("budget")}  # where it once was
        self._memory.load_state_dict({**older, **state_dict})
        for group, settings in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(settings)
        load_buffers(self._model, state_dict["buffers"])

    def close(self) -> None:
        """Release threads, connections and process groups; on all ranks, after the last step.

        Waits for what is in flight. It also happens when the process ends.
        """
        self._lane.close()
        if self._roles is not None:
            self._roles.close()

    def serve(self, each: Callable[[int], object] | None = None) -> None:
        """On server ranks: keep weights until the last worker has left, or is lost.

        `each(updates)` is called after every update of this server, say to save `state_dict()`.
        Where training cannot continue without a lost worker, LostError here and on all workers.
        """
        if not self.serves:
            raise ConfigError("this rank works: the first `servers` ranks serve (opt.serves)")
        self._serving.serve(each)

    def server_stats(self) -> ServerStats:
        """On a server rank: updates, who is there, who is lost, how late gradients were."""
        if not self.serves:
            raise ConfigError("this rank works: stats()")
        return self._serving.stats()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the schedule is made."""
        if hasattr(self, "flat"):
            raise ConfigError("add parameter groups to the optimizer before making the schedule")
        super().add_param_group(param_group)

    def barrier(self, call: Call = Call.BARRIER) -> None:
        """Return when all ranks have come here after the same step; an error on all if not.

        With servers: when they do not serve any more, because all workers have left.
        """
        if not self.serves and not self._away:
            raise ConfigError(
                f"{call.said} is for all ranks, and the servers keep serving until all workers "
                "have left: call leave() first, or save state_dict() on each rank by itself"
            )
        context = ExchangeContext(group=self._lane.group, seed=self.seed)
        barrier(call, context, most_bytes(self.codec, self.flat.numel, context))

    def _check_worker(self, what: str) -> None:
        if self.serves:
            raise ConfigError(f"{what}: this rank keeps weights for the others, call serve() on it")
        if self._away:
            raise ConfigError(f"{what}: this worker has left, call join() first")

    def _check_step(self, closure: object) -> None:
        if closure is not None:
            raise ConfigError("step() takes no closure: call backward() first, then step()")
        self._check_worker("step()")
        if self._swapped:
            raise ConfigError("step() inside global_weights(): leave the with block first")
        self._follow_optimizer()
        self.flat.check_unchanged(self._own_weights, trust_versions=True)
        self.optimizer._opt_called = True  # pyright: ignore (schedulers of its own look at this)

    def _follow_optimizer(self) -> None:
        """Its parameter groups are new objects after its load_state_dict, with other settings."""
        inner = self.optimizer.param_groups
        self._trained.check(inner)
        if any(own is not group for own, group in zip(self.param_groups, inner, strict=True)):
            check_optimizer(self.optimizer)
            self.param_groups[:] = inner

    @property
    def _own_weights(self) -> Tensor:
        """What the model was last given."""
        raise NotImplementedError

    @contextmanager
    def _showing(self, weights: Tensor, own: Callable[[], Tensor]) -> Iterator[None]:
        """The model has these weights inside, and this rank's own afterwards."""
        self.flat.write(weights)
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            self.flat.write(own())


def unscale(optimizer: Optimizer, g: Tensor) -> Tensor:
    """Undo GradScaler's scale; found_inf: 1 if the gradient is not finite, and becomes zero."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is not None:
        g.mul_(1 / scale)
    found_inf = ~finite_everywhere(g)
    if found is not None:  # what the scaler has found itself
        found_inf |= found.to(g.device).view(1) > 0
    g.masked_fill_(found_inf, 0.0)
    return found_inf.to(torch.float32)
