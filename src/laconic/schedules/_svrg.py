"""QSVRG: quantized variance reduction, for sums of finitely many terms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic._key import Key
from laconic._settings import whole
from laconic._version import __version__
from laconic.codecs import QSGD, Codec, Place
from laconic.comm._agreement import require_same_settings
from laconic.comm._barrier import barrier, most_bytes
from laconic.comm._context import ExchangeSession
from laconic.comm._frame import Call
from laconic.comm._sums import sum_in_place
from laconic.comm._threads import CommLane, own_group
from laconic.errors import ConfigError
from laconic.exchanges import Exchange, pair
from laconic.schedules._finite_sum import FiniteSum, Loss
from laconic.schedules._inputs import (
    check_identity,
    check_started,
    load_buffers,
    own_buffers,
    same_start,
)
from laconic.schedules._schedule import ScheduleStats

_SAMPLE = 1 << 32  # phase of the draws of samples: exchanges and codecs count theirs from 0
_MOST_LEVELS, _MOST_BLOCK = 127, 127**2 - 1  # of qsgd; whole groups of 128 values
_VECTORS = ("x", "center", "gradient", "drift")


@dataclass(frozen=True, kw_only=True)
class SVRGStats(ScheduleStats):
    """What one rank has done: in an epoch, or in all of them.

    `sent_bytes` are those to all receivers together, everything around the codes included.
    """

    epochs: int
    loss: float  # f(y) over all ranks' samples, at the start of the latest epoch
    gradient_norm: float  # ‖∇f(y)‖ there


class QSVRG:
    """`QSVRG`: minimize f = average of f_j over all ranks' samples, with unbiased small messages.

    Epoch: center y, T steps of size η, n ranks; rank i has N_i of all N samples:

        v_i = w_i·(∇f_j(x) - ∇f_j(y)) + ∇f(y),   w_i = n·N_i/N,    j drawn from rank i's samples
        x  ←  x - η·mean_i Q(v_i)

    1. All ranks add up ∇f(y), in fp32, unquantized. x = y.
    2. T times: every rank draws `batch_size` samples (with replacement), sends Q(v_i), all decode.
    3. y ← mean of x_0 .. x_{T-1} (snapshot="mean", as printed), or x_T ("last").

    Unbiased: mean_i E[v_i] = Σ_i N_i/N·(∇F_i(x) - ∇F_i(y)) + ∇f(y) = ∇f(x), with F_i the average
    of rank i's terms; w_i = 1 if ranks have equally many. And v_i shrinks to 0 as x and y approach
    the optimum, so that a constant η converges, quantized, too: the error of Q is a share ω of
    ‖v_i‖². With E‖Q(v)‖² ≤ (1+ω)‖v‖² and f_j that are L-smooth (w_i·L, if counts differ), f
    ℓ-strongly convex, a = 2(1+ω)Lη < 1,

        E f(y_next) - f* ≤ (1/(ℓηT) + a)/(1 - a) · (f(y) - f*)

    for any n: with ω = 1, η = 1/(20L) and T = 40·L/ℓ the factor is 0.875. Practice takes η some
    ten times larger and T smaller. Nothing needs convexity to run.

    `codec=None` is the paper's: qsgd with two-norm, s = ⌈√d⌉ levels (ω ≤ 1), one scale, the shorter
    of the two Elias codes; beyond 127 levels (d > 16129) one scale for every 16128 values.

    Bits that a rank broadcasts per epoch, in the paper: (32 + 2.8·d)(T+1) + 32·d. A wire here has a
    header and check sums on top, some 80 bytes (docs/schedules.md counts both).

    Alistarh et al., QSGD, NIPS 2017, section 3.3 and appendix. Differs: any codec and exchange,
    ranks with unequal counts, mini-batches, the last iterate. The paper's dense Elias code alone
    does not keep to 2.8 bits (2.94 on Gaussian vectors).

    `loss(model, batch)` returns the mean of the batch's terms, regularization included. `data` are
    this rank's samples: a tensor, a tuple of tensors, or a dataset with a length. Make it on all
    ranks of the group at once; all start from the first rank's parameters and hold the same bits of
    x and y after every step. Without a process group it is a world of one. Draws are a function of
    (seed, rank, step): a run resumes bit for bit.

    >>> import torch, laconic as lc
    >>> a, b = torch.eye(4), torch.arange(4.0)
    >>> model = torch.nn.Linear(4, 1, bias=False)
    >>> loss = lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean()
    >>> svrg = lc.QSVRG(model, loss, (a, b), lr=0.2, steps=40)
    >>> for _ in range(10):
    ...     stats = svrg.epoch()
    >>> (model.weight.detach() - b).abs().max().item() < 0.01
    True
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Any,
        *,
        lr: float,
        steps: int,
        batch_size: int = 1,
        codec: str | Codec | None = None,
        exchange: str | Exchange | None = None,
        snapshot: Literal["mean", "last"] = "mean",
        full_batch: int = 1024,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        _check_numbers(lr, steps=steps, batch_size=batch_size, full_batch=full_batch)
        if snapshot not in ("mean", "last"):
            raise ConfigError(f"snapshot must be 'mean' or 'last', not {snapshot!r}")
        self._sum = FiniteSum(model, loss, data)
        self._flat = flat = self._sum.flat
        named = isinstance(codec, str) and "@" in codec
        way = "allgather" if exchange is None and not named else exchange
        self.codec, self.exchange = pair(paper_codec(flat.numel) if codec is None else codec, way)
        self.model, self.lr, self.steps = model, float(lr), steps
        self.seed, self._snapshot = seed, snapshot
        self._batch_size, self._full_batch = batch_size, full_batch
        self._world = World(group, timeout_s, flat.device, seed)
        self._epochs = self._step = self._taken = 0  # epochs ended; all steps; those of this epoch
        self._begins = True  # nothing tells yet that other ranks are at this step, too
        self._since, self._seen = 0, torch.full((2,), math.nan)
        self._x, self._center, self._gradient, self._drift = (
            flat.empty().zero_() for _ in _VECTORS
        )
        self._join()

    def _join(self) -> None:
        """Compare settings, gather numbers of samples, start from the same parameters."""
        self._world.join(self._settings(), self.exchange)
        counts = self._world.gather(len(self._sum))
        if not all(counts):
            raise ConfigError(
                f"every rank needs a sample, but ranks have {counts}: deal them out, or use a "
                "group of fewer ranks"
            )
        self._share = len(self._sum) / sum(counts)
        self._world.same_start(self.model)
        self._flat.read(self._x)

    def _settings(self) -> dict[str, str]:
        """What all ranks must have in common."""
        return {
            "laconic": __version__,
            "codec": str(self.codec),
            "exchange": str(self.exchange),
            "lr": repr(self.lr),
            "steps": str(self.steps),
            "snapshot": self._snapshot,
            "seed": str(self.seed),
            "parameters": "\n".join(f"{tuple(p.shape)} {p.dtype}" for p in self._flat.parameters),
        }

    def epoch(self) -> SVRGStats:
        """Take the steps that are left of this epoch, a whole one usually; what it did."""
        before = self.stats()
        target = self._epochs + 1
        while self._epochs < target:
            self.step()
        return _since(before, self.stats())

    def step(self) -> None:
        """One step; the first of an epoch computes ∇f(y), the last one moves y."""
        if self._begins:
            self.barrier(Call.FIRST_STEP)
            self._begins = False
        if not self._taken:
            self._open()
        with torch.no_grad():
            v = self._direction()
            self._world.mean(v, self.codec, self.exchange, self._step, self._flat.places)
            self._follow()
            # a product, then a sum: fused they would round differently where loops are cut
            self._x.sub_(v.mul_(self.lr))
        self._flat.write(self._x)
        self._step, self._taken = self._step + 1, self._taken + 1
        if self._taken == self.steps:
            self._close()

    def _open(self) -> None:
        """y = x, and the full gradient there."""
        self._sum.check()
        self._flat.check_unchanged(self._x)
        self._center.copy_(self._x)
        self._drift.zero_()
        joint = self._take("full", 1)
        with self._sum.without_draws():
            self._local_sum(joint[:-1], joint[-1:])
        self._world.sum(joint)
        self._gradient.copy_(joint[:-1])
        self._seen = torch.stack([joint[-1], self._gradient.norm()])

    def _local_sum(self, gradient: Tensor, value: Tensor) -> None:
        """This rank's part of ∇f and f: over all its samples, divided by the number of all."""
        total, one = len(self._sum), self._take("one")
        gradient.zero_()
        value.zero_()
        for start in range(0, total, self._full_batch):
            index = range(start, min(start + self._full_batch, total))
            share = self._share * len(index) / total
            value.add_(self._sum.gradient(self._sum.batch(index), one), alpha=share)
            gradient.add_(one, alpha=share)

    def _direction(self) -> Tensor:
        """v: unbiased for ∇f(x), and small where x and y are near the optimum."""
        batch, v, there = self._sum.batch(self._draw()), self._take("v"), self._take("one")
        self._sum.gradient(batch, v)
        self._flat.write(self._center)
        try:
            self._sum.gradient(batch, there)
        finally:
            self._flat.write(self._x)
        return v.sub_(there).mul_(self._world.size * self._share).add_(self._gradient)

    def _draw(self) -> list[int]:
        """This step's samples: a hash of (seed, step, rank), in 64 bits, scaled to the number."""
        keys = (
            Key(seed=self.seed, step=self._step, tensor=k, rank=self._world.rank, phase=_SAMPLE)
            for k in range(self._batch_size)
        )
        return [(k1 << 32 | k0) * len(self._sum) >> 64 for k0, k1 in map(Key.stream, keys)]

    def _follow(self) -> None:
        """drift += (x - y)/T: added up as a difference, it loses no digits near the optimum."""
        moved = torch.sub(self._x, self._center, out=self._take("one"))
        self._drift.add_(moved.mul_(1 / self.steps))

    def _close(self) -> None:
        if self._snapshot == "mean":
            torch.add(self._center, self._drift, out=self._x)
            self._flat.write(self._x)
        self._epochs, self._taken = self._epochs + 1, 0

    def _take(self, name: str, more: int = 0) -> Tensor:
        return self._world.session.scratch.take(name, self._x.numel() + more, self._flat.device)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch optimizers; steps themselves neither read nor leave gradients there."""
        self.model.zero_grad(set_to_none)

    def wait(self) -> None:
        """Nothing is in flight between steps."""

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Inside, the model has x, as always; changes to it inside are discarded."""
        try:
            yield
        finally:
            self._flat.write(self._x)

    def barrier(self, call: Call = Call.BARRIER) -> None:
        """Return when all ranks have come here after the same step; an error on all if not."""
        self._world.barrier(call, self._step, self.codec, self._x.numel())

    @contextmanager
    def latest_weights(self) -> Iterator[int]:
        """As `global_weights`: x is the same on all ranks after every step. 0 steps old."""
        with self.global_weights():
            yield 0

    def close(self) -> None:
        """Release the process group; on all ranks, after the last step."""
        self._world.close()

    def stats(self) -> SVRGStats:
        """What this rank has done; bytes and times since it was made or loaded."""
        (loss, norm), traffic, n = (
            self._seen.tolist(),
            self._world.session.traffic,
            self._world.size,
        )
        steps, n = self._step - self._since, self._world.size
        return SVRGStats(
            epochs=self._epochs,
            steps=self._step,
            sent_bytes=traffic.sent_bytes,
            plain_bytes=steps * 2 * (n - 1) * 4 * self._x.numel() // n,
            wire_seconds=traffic.wire_seconds,
            loss=loss,
            gradient_norm=norm,
        )

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to resume exactly, in the middle of an epoch too."""
        return {
            "identity": self._fixed(),
            "epochs": self._epochs,
            "step": self._step,
            "taken": self._taken,
            "seen": self._seen.tolist(),
            **self._world.session.memory.state_dict(),
            "buffers": own_buffers(self.model),
            **{name: getattr(self, f"_{name}").clone() for name in _VECTORS},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from this rank's state_dict; the model gets its parameters from it."""
        state = state_dict
        check_identity(self._fixed(), state, "the saved model's weights")
        load_buffers(self.model, state["buffers"])
        self._epochs, self._step = int(state["epochs"]), int(state["step"])
        self._since = self._step
        self._taken, self._seen = int(state["taken"]), torch.tensor(state["seen"])
        self._world.session.memory.load_state_dict(state)
        for name in _VECTORS:
            getattr(self, f"_{name}").copy_(state[name])
        self._flat.write(self._x)
        self._begins = True

    def _fixed(self) -> dict[str, str]:
        """What a resumed run must not change; its lr it may."""
        numbers = {
            "rank": self._world.rank,
            "ranks": self._world.size,
            "batch_size": self._batch_size,
            "samples": len(self._sum),
        }
        kept = {k: v for k, v in self._settings().items() if k not in ("laconic", "lr")}
        return kept | {name: str(number) for name, number in numbers.items()}


def paper_codec(d: int) -> QSGD:
    """The paper's quantizer of d values: s = √d, so that at most twice the second moment is sent.

    >>> str(paper_codec(650))
    'qsgd:bits=6,levels=26,norm=l2,block=tensor,coder=elias'
    """
    if d > _MOST_LEVELS**2:
        return QSGD(levels=_MOST_LEVELS, norm="l2", block=_MOST_BLOCK, coder="elias")
    return QSGD(levels=math.ceil(math.sqrt(d)), norm="l2", block=None, coder="elias")


def _check_numbers(lr: float, **counts: int) -> None:
    if not isinstance(lr, float | int) or not 0 < lr < math.inf:
        raise ConfigError(f"lr must be a positive number, not {lr!r}")
    for name, count in counts.items():
        whole(name, count, 1)


def _since(before: SVRGStats, now: SVRGStats) -> SVRGStats:
    """Counts as differences, measurements as they are now."""
    latest = ("loss", "gradient_norm")
    values = {item.name: getattr(now, item.name) for item in fields(SVRGStats)}
    counted = {k: v - getattr(before, k) for k, v in values.items() if k not in latest}
    return SVRGStats(**{**values, **counted})


class World:
    """Communication of a method without overlap: every call waits, on all ranks.

    Alone, nothing is sent, but values are encoded and decoded as they would be.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, timeout_s: float, device: torch.device, seed: int
    ) -> None:
        if group is not None:
            check_started()
        self._lane = CommLane(own_group(group, timeout_s)) if dist.is_initialized() else None
        self.rank = self._group.rank() if self._group else 0
        self.size = self._group.size() if self._group else 1
        self._device = device
        self.session = ExchangeSession(seed=seed)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._lane and self._lane.group

    def close(self) -> None:
        """Release the group."""
        if self._lane is not None:
            self._lane.close()

    def join(self, settings: dict[str, str], exchange: Exchange) -> None:
        """ConfigError on all ranks unless all have the same settings."""
        if self._group is not None:
            require_same_settings(settings, self._group, self._device)
            exchange.prepare(self._group)

    def barrier(self, call: Call, step: int, codec: Codec, numel: int) -> None:
        """See `Schedule.barrier`."""
        if self._group is not None:
            context = self.session.context(self._group, step=step)
            barrier(call, context, most_bytes(codec, numel, context))

    def gather(self, number: int) -> list[int]:
        """Every rank's number."""
        if self._group is None:
            return [number]
        numbers = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        dist.all_gather(numbers, torch.tensor([number], device=self._device), group=self._group)
        return [int(one) for one in numbers]

    def same_start(self, model: nn.Module) -> None:
        """All begin with the first rank's parameters and buffers."""
        if self._group is not None:
            same_start(model, self._group)

    def sum(self, x: Tensor) -> None:
        """x becomes its sum over ranks, in its own precision."""
        if self._group is not None:
            sum_in_place(x, self.session.context(self._group))

    def mean(
        self, x: Tensor, codec: Codec, exchange: Exchange, step: int, places: Sequence[Place]
    ) -> None:
        """x becomes the mean of what all ranks' encoded x decode to."""
        if self._group is not None:
            context = self.session.context(self._group, step=step, places=places)
            exchange.mean(x, codec, context)
            return
        room = self.session.scratch.take("wire", codec.nbytes(x.numel()), self._device, torch.uint8)
        key = Key(seed=self.session.seed, step=step)
        wire = codec.encode(x, key, out=room, residuals=self.session.memory.residuals)
        codec.decode(wire, out=x)
