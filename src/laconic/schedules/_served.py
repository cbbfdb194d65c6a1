"""Master weights on servers, for SSD: the same rounds as `Masters`, over links."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from laconic.codecs import Codec
from laconic.exchanges import Traffic
from laconic.exchanges._lane import Lane
from laconic.schedules._behind import Behind, Turns
from laconic.schedules._masters import Round
from laconic.server._flat import Flat
from laconic.server._keeper import ALL
from laconic.server._link import Flag, Kind
from laconic.server._remote import Push, Remote, Vectors, flags_of
from laconic.server._roles import Roles
from laconic.server._rounds import COMMIT, FOLLOW


class Served:
    """One worker's view of the master weights. Rounds run behind the main thread."""

    def __init__(self, flat: Flat, roles: Roles, lane: Lane, seed: int, pull_codec: Codec) -> None:
        self._flat, self._roles, self._lane = flat, roles, lane
        self.remote = Remote(flat, roles, seed, pull_codec, ALL)
        self.turns = Turns(Behind(lane, flat.device))
        self.skipped = 0, 0

    @property
    def traffic(self) -> Traffic:
        """What this worker has sent."""
        return self._roles.traffic()

    @property
    def error(self) -> dict[str, Any]:
        """Servers keep no account of a budget."""
        return {}

    def start(self, one: Round) -> None:
        """Push, step of the servers, and pull."""
        self._lane.plain_bytes += self._flat.ring_bytes(self._roles.workers)
        self.turns.start(one.step, partial(self._run, one))

    def gather(self, step: int, out: Tensor) -> None:
        """out = all master weights, exactly."""
        self.turns.now(partial(self.remote.peek, step, out))

    def leave(self) -> None:
        """The servers do not wait for this worker any more."""
        self.turns.now(self.remote.leave)

    def join(self, out: Tensor) -> int:
        """The step to go on with; out = what the other workers have pulled last before it."""
        first = 0

        def job() -> None:
            nonlocal first
            first = self._agreed_step()
            for number in range(self._roles.servers):
                frame = self.remote.ask(number, Kind.PULL, step=first)
                self.remote.ratios[number] = frame.number
                self.remote.take(number, frame, coded=False, step=first, out=Vectors(out, out))

        self.turns.now(job)
        return first

    def _agreed_step(self) -> int:
        """On all servers the same (`Rounds`)."""
        first = self.remote.ask(0, Kind.JOIN).step
        for number in range(1, self._roles.servers):
            self.remote.ask(number, Kind.JOIN, number=FOLLOW, step=first)
        self.remote.ask(0, Kind.JOIN, number=COMMIT)
        return first

    def _run(self, one: Round) -> None:
        flags = flags_of(one.codec, one.pull_codec)
        if bool(one.spoilt > 0):  # waits for the device: the bytes below would, too
            flags |= Flag.SPOILT
        push = Push(step=one.step, g=one.g, codec=one.codec, flags=flags, settings=one.settings)
        self.remote.start_push(push, pull_from=self._roles.servers)
        steps, shards = self.skipped
        found = Flag.NONE
        for number in range(self._roles.servers):
            frame = self.remote.finish_push(number)
            found |= frame.flags
            if one.pull_codec is not None:
                out = Vectors(one.out, one.before)
                coded = bool(flags & Flag.CODED)
                self.remote.take(number, frame, coded=coded, step=one.step, out=out)
        self.skipped = (
            steps + bool(found & Flag.SKIPPED),
            shards + bool(found & Flag.SHARD_SKIPPED),
        )

    def state_dict(self) -> dict[str, Any]:
        """What servers have told; they save the rest."""
        return {"ratios": list(self.remote.ratios)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        self.remote.ratios = [int(ratio) for ratio in state["ratios"]]
