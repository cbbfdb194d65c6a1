"""What a server rank does: its chunk, its links, and the order in which it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from laconic.errors import LaconicError
from laconic.exchanges._nested import Nesting
from laconic.server._arrivals import Arrivals, Delays
from laconic.server._desk import Desk
from laconic.server._keeper import ALL, Keeper
from laconic.server._roles import Roles
from laconic.server._rounds import Rounds

_TELL_S = 10.0  # for workers to hear of an error of the server; later they see that it is gone


@dataclass(frozen=True, kw_only=True)
class ServerStats:
    """What one server has done so far."""

    updates: int
    members: tuple[int, ...]  # global ranks of workers that take part
    lost: dict[int, str] = field(default_factory=dict)  # global ranks, and what was seen
    delays: dict[int, Delays] = field(default_factory=dict)  # by global rank; asynchronous only
    held_seconds: float = 0.0  # of all workers together, until they were answered
    nesting: Nesting | None = None  # where the codec is ndqsg
    skipped_steps: int = 0
    skipped_shards: int = 0
    sent_bytes: int = 0


class Serving:
    """Synchronous, or asynchronous with a bounded delay."""

    def __init__(self, keeper: Keeper, roles: Roles, *, most_delay: int | None) -> None:
        self._keeper, self._roles, self._most_delay = keeper, roles, most_delay
        self.updates = 0
        if most_delay is None:
            keeper.remember(ALL)  # all begin with the same weights
        self._now: Rounds | Arrivals | None = None

    def serve(self, each: Callable[[int], object] | None) -> None:
        """Until the last worker has left; errors are told to all workers first."""
        now = self._now = self._mode()
        desk = Desk(self._roles.links, self._keeper.most_bytes, self._keeper.settings)
        self._roles.threads.extend(desk.threads)
        try:
            now.serve(desk, each)
        except BaseException as error:
            known = isinstance(error, LaconicError)
            desk.close(str(error) if known else f"a server failed: {error!r}", _TELL_S)
            raise
        finally:
            self.updates = self._updates()
        desk.close()

    def _mode(self) -> Rounds | Arrivals:
        if self._most_delay is None:
            return Rounds(self._keeper, self._roles, self.updates)
        return Arrivals(self._keeper, self._roles, self._most_delay, self.updates)

    def _updates(self) -> int:
        now = self._now
        if now is None:
            return self.updates
        return now.step if isinstance(now, Rounds) else now.order.version

    def stats(self) -> ServerStats:
        """May be called from `each`, or from another thread."""
        now, shard, nests = self._now, self._keeper.shard, self._keeper.nests
        members = sorted(now.members) if now else range(self._roles.workers)
        found: dict[str, Any] = {}
        if isinstance(now, Arrivals):
            found = {
                "lost": dict(now.lost),
                "delays": dict(now.delays),
                "held_seconds": now.held_seconds,
            }
        return ServerStats(
            updates=self._updates(),
            members=tuple(self._roles.rank_of(worker) for worker in members),
            nesting=None if nests is None else nests.stats(),
            skipped_steps=shard.skipped_steps,
            skipped_shards=shard.skipped_shards,
            sent_bytes=self._roles.traffic().sent_bytes,
            **found,
        )

    def state_dict(self) -> dict[str, Any]:
        """Weights, the optimizer's state, the number of updates."""
        return {"updates": self._updates(), "keeper": self._keeper.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before `serve`."""
        self.updates = int(state["updates"])
        self._keeper.load_state_dict(state["keeper"])
