"""Master weights on servers, for SSD: the same rounds as `ShardedMaster`, over links."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from laconic.codecs import Codec
from laconic.comm._context import ExchangeMemory, Traffic
from laconic.comm._threads import CommLane, CommStream, InFlight
from laconic.schedules._master import Round
from laconic.server._link import Flag, Kind, Roles
from laconic.server._server_client import Push, ServerClient, flags_of
from laconic.server._shard_server import ALL
from laconic.server._sync_server import COMMIT, FOLLOW
from laconic.sharding._flat_parameters import FlatParameters


class ServerMaster:
    """One worker's view of the master weights."""

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
        """What servers have told; they save the rest."""
        return {"ratios": list(self.client.ratios)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.client.ratios = [int(ratio) for ratio in state["ratios"]]
