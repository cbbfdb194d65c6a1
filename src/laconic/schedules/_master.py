"""SSD's master weights, on the ranks or on servers: gradients go in, weights come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.codecs import Codec, Uncompressed
from laconic.comm._barrier import barrier, most_bytes
from laconic.comm._context import ExchangeContext, ExchangeMemory, ExchangeSession, Traffic, encode
from laconic.comm._frame import Call
from laconic.comm._threads import CommLane, CommStream, InFlight
from laconic.comm._transport import no_values
from laconic.exchanges._error_report import error_stats
from laconic.exchanges._scatter_reduce import gather, scatter_in_budget
from laconic.server._link import Flag, Kind, Roles
from laconic.server._server_client import Push, ServerClient, flags_of
from laconic.server._shard_server import ALL
from laconic.server._sync_server import COMMIT, FOLLOW
from laconic.sharding._flat_parameters import FlatParameters
from laconic.sharding._shard import Settings, Shard, apply_delta, projection

NO_CODEC = Uncompressed()


@dataclass(frozen=True, kw_only=True)
class Round:
    """One step's gradient, and where the weights after it should go, if anywhere."""

    step: int
    g: Tensor
    found_inf: Tensor  # 1 if all ranks must skip the step, else 0
    settings: Settings
    codec: Codec
    pull_codec: Codec | None  # None: no pull
    before: Tensor  # what all ranks pulled last
    out: Tensor


class Master(Protocol):
    """Where the master weights live. Rounds run in a thread, one after another."""

    in_flight: InFlight

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent."""
        ...

    @property
    def skipped(self) -> tuple[int, int]:
        """Steps that all ranks skipped, and those that one chunk did."""
        ...

    @property
    def error(self) -> dict[str, Any]:
        """Statistics of the error that pushes have made, where it is recorded."""
        ...

    def start(self, one: Round) -> None:
        """Push, step of the owners, and pull."""
        ...

    def gather(self, step: int, out: Tensor) -> None:
        """out = all master weights, exactly."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Of this rank's part."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict."""
        ...


class ShardedMaster:
    """Every rank owns a chunk of the master weights, and the optimizer's state of it."""

    def __init__(
        self,
        flat: FlatParameters,
        optimizer: Optimizer,
        weights: Tensor,
        lane: CommLane,
        seed: int,
        memory: ExchangeMemory,
        codec: Codec,
    ) -> None:
        self.flat, self._lane, self._codec = flat, lane, codec
        rank = lane.group.rank()
        self.shard = Shard(optimizer, flat.chunks(weights)[rank], flat.parts(rank))
        self.in_flight = InFlight(CommStream(lane, flat.device))
        self._session = ExchangeSession(seed=seed, memory=memory, traffic=lane.traffic)
        self._begins = True  # nothing tells yet that other ranks are at this step, too

    def start(self, one: Round) -> None:
        self._lane.plain_bytes += self.flat.ring_bytes(self._lane.group.size())
        self.in_flight.start(one.step, partial(self._run, one))

    def gather(self, step: int, out: Tensor) -> None:
        self.barrier(Call.GLOBAL_WEIGHTS, step)
        context = self._context(step)
        self.in_flight.now(partial(pull, self.flat, self.shard.weights, NO_CODEC, context, out))

    def barrier(self, call: Call, step: int) -> None:
        """After all rounds; see `Schedule.barrier`."""
        self.in_flight.now(partial(self._barrier, call, self._context(step)))

    def _barrier(self, call: Call, context: ExchangeContext) -> None:
        longest = self.flat.edges[1]  # the first chunk is as long as any
        barrier(call, context, most_bytes(self._codec, longest, context))

    @property
    def skipped(self) -> tuple[int, int]:
        return self.shard.skipped_steps, self.shard.skipped_shards

    @property
    def traffic(self) -> Traffic:
        return self._lane.traffic

    @property
    def error(self) -> dict[str, Any]:
        return error_stats(self._session.memory)

    def state_dict(self) -> dict[str, Any]:
        return self.shard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.shard.load_state_dict(state)
        self._begins = True

    def _run(self, one: Round) -> None:
        context, weights = self._context(one.step), self.shard.weights
        if self._begins:
            self._barrier(Call.FIRST_STEP, context)
            self._begins = False
        found_inf = push(self.flat, one.g, one.found_inf, one.codec, context, self.shard.mean)
        self.shard.step(one.settings, found_inf)
        if one.pull_codec is None:
            return
        if one.pull_codec.lossless:
            pull(self.flat, weights, one.pull_codec, context, one.out)
        else:
            pull_delta(self.flat, weights, one.pull_codec, context, one.before, one.out)

    def _context(self, step: int) -> ExchangeContext:
        return self._session.context(self._lane.group, step=step, places=self.flat.places)


class ServerMaster:
    """One worker's view of master weights that servers keep: the same rounds, over links."""

    def __init__(
        self,
        flat: FlatParameters,
        roles: Roles,
        lane: CommLane,
        seed: int,
        pull_codec: Codec,
        memory: ExchangeMemory,
    ) -> None:
        self._flat, self._roles, self._lane = flat, roles, lane
        self.client = ServerClient(flat, roles, seed, pull_codec, ALL, memory)
        self.in_flight = InFlight(CommStream(lane, flat.device))
        self.skipped = 0, 0

    @property
    def traffic(self) -> Traffic:
        return self._roles.traffic()

    @property
    def error(self) -> dict[str, Any]:
        return {}  # servers keep no account of a budget

    def start(self, one: Round) -> None:
        self._lane.plain_bytes += self._flat.ring_bytes(self._roles.workers)
        self.in_flight.start(one.step, partial(self._run, one))

    def gather(self, step: int, out: Tensor) -> None:
        self.in_flight.now(partial(self.client.read, step, out))

    def leave(self) -> None:
        """The servers do not wait for this worker any more."""
        self.in_flight.now(self.client.leave)

    def join(self, out: Tensor) -> int:
        """The step to resume from; out = what the other workers pulled last before it."""
        first = 0

        def job() -> None:
            nonlocal first
            first = self._agreed_step()
            for number in range(self._roles.servers):
                frame = self.client.ask(number, Kind.PULL, step=first)
                self.client.ratios[number] = frame.number
                self.client.take(number, frame, step=first, out=out)

        self.in_flight.now(job)
        return first

    def _agreed_step(self) -> int:
        """On all servers the same (`SyncServer`)."""
        first = self.client.ask(0, Kind.JOIN).step
        for number in range(1, self._roles.servers):
            self.client.ask(number, Kind.JOIN, number=FOLLOW, step=first)
        self.client.ask(0, Kind.JOIN, number=COMMIT)
        return first

    def _run(self, one: Round) -> None:
        flags = flags_of(one.codec, one.pull_codec)
        if bool(one.found_inf > 0):  # waits for the device: the bytes below would, too
            flags |= Flag.FOUND_INF
        push = Push(step=one.step, g=one.g, codec=one.codec, flags=flags, settings=one.settings)
        self.client.start_push(push, pull_from=self._roles.servers)
        steps, shards = self.skipped
        found = Flag.NONE
        for number in range(self._roles.servers):
            frame = self.client.finish_push(number)
            found |= frame.flags
            if one.pull_codec is not None:
                before = one.before if flags & Flag.CODED else None
                self.client.take(number, frame, step=one.step, out=one.out, before=before)
        self.skipped = (
            steps + bool(found & Flag.SKIPPED),
            shards + bool(found & Flag.SHARD_SKIPPED),
        )

    def state_dict(self) -> dict[str, Any]:
        """The ratios from servers, which save the rest."""
        return {"ratios": list(self.client.ratios)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.client.ratios = [int(ratio) for ratio in state["ratios"]]


def push(
    flat: FlatParameters,
    g: Tensor,
    found_inf: Tensor,
    codec: Codec,
    context: ExchangeContext,
    out: Tensor,
) -> Tensor:
    """out = the mean of this rank's chunk over ranks; returns the mean of `found_inf`.

    `found_inf`, one number that every rank gives, travels after the wires: all owners, those of
    nothing too, know in the same round trip whether any rank's gradient is to be skipped.
    """
    anywhere = torch.empty_like(found_inf)
    scatter_in_budget(
        flat.chunks(g),
        codec,
        context,
        out,
        places=_places(flat, context),
        uncompressed=[found_inf] * context.size,
        uncompressed_out=anywhere,
    )
    return anywhere


def pull(
    flat: FlatParameters, mine: Tensor, codec: Codec, context: ExchangeContext, out: Tensor
) -> None:
    """out = every owner's weights, bit for bit if the codec is `none`."""
    plain = [no_values(mine)] * context.size
    gather(
        mine, codec, context, flat.chunks(out), places=_places(flat, context), uncompressed=plain
    )


def pull_delta(
    flat: FlatParameters,
    mine: Tensor,
    codec: Codec,
    context: ExchangeContext,
    before: Tensor,
    out: Tensor,
) -> None:
    """out = before + λ·Q(weights - before): a lossy pull whose errors do not accumulate.

    All ranks hold the same `before`, the result of the last pull, so its owner knows exactly what
    the others have: c = M - P is what is new since then and all that earlier pulls lost. That is
    error feedback without a memory. With λ = ⟨Q, c⟩/⟨Q, Q⟩, the projection of c on Q,

        P' = P + λ·Q(c)        ‖M - P'‖² = (1 - cos²φ)·‖M - P‖²,  φ the angle between Q(c) and c

    so that any codec brings P nearer to M; for an unbiased one of relative variance w the factor
    is about w/(1+w). With D the distance that M moves in a period and ρ² a bound of the factor,
    ‖M - P‖ stays below ρ·D/(1-ρ) at all times. With λ = 1 and w above 1 it would grow w-fold each
    time. λ travels, one number from each owner; all ranks compute the same sums, hence the same
    bits.
    """
    rank, places = context.rank, _places(flat, context)
    was, chunks = flat.chunks(before), flat.chunks(out)
    delta = context.scratch.take("delta", mine.numel(), mine.device, torch.float32)
    torch.sub(mine, was[rank], out=delta)
    factors = list(torch.ones(context.size, device=mine.device).split(1))
    wire = None
    if mine.numel():
        found = chunks[rank]
        wire = encode(codec, delta, context.key(rank, rank, 1), places[rank], context)
        codec.decode(wire, out=found)
        factors[rank].copy_(projection(found, delta))
    gather(delta, codec, context, chunks, places=places, uncompressed=factors, wire=wire)
    for chunk, factor, old in zip(chunks, factors, was, strict=True):
        apply_delta(chunk, factor, old, out=chunk)


def _places(flat: FlatParameters, context: ExchangeContext) -> list:
    edges = flat.edges
    return [context.inside(edges[j], edges[j + 1]) for j in range(context.size)]
