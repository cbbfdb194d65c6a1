"""What a server rank does: its chunk, its links, and the order in which it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from laconic.errors import LaconicError
from laconic.exchanges._nested import Nesting
from laconic.server._async_server import AsyncServer, Delays
from laconic.server._link import Roles
from laconic.server._request_queue import Request, RequestQueue
from laconic.server._shard_server import ALL, ShardServer
from laconic.server._sync_server import SyncServer

_TELL_S = 10.0  # to send an error to all workers; later they see that the server is gone


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


class Server(Protocol):
    """What answers the requests of workers: `SyncServer` or `AsyncServer`."""

    members: set[int]  # workers that take part

    @property
    def updates(self) -> int: ...

    @property
    def expects_requests(self) -> bool: ...

    def handle(self, request: Request, each: Callable[[int], object] | None) -> None: ...

    def stats(self) -> dict[str, Any]: ...


class Serving:
    """Synchronous, or asynchronous with a bounded delay."""

    def __init__(self, shard: ShardServer, roles: Roles, *, most_delay: int | None) -> None:
        self._shard, self._roles, self._most_delay = shard, roles, most_delay
        self._loaded_updates = 0
        if most_delay is None:
            shard.remember(ALL)  # all begin with the same weights
        self._server: Server | None = None

    def serve(self, each: Callable[[int], object] | None) -> None:
        """Until the last worker has left; errors are sent to all workers first."""
        server = self._server = self._made()
        queue = RequestQueue(self._roles.links, self._shard.most_bytes, self._shard.settings)
        self._roles.threads.extend(queue.threads)
        try:
            while server.expects_requests:
                server.handle(queue.take(), each)
        except BaseException as error:
            known = isinstance(error, LaconicError)
            queue.close(str(error) if known else f"a server failed: {error!r}", _TELL_S)
            raise
        queue.close()

    def _made(self) -> Server:
        updates = self.updates
        if self._most_delay is None:
            return SyncServer(self._shard, self._roles, updates)
        return AsyncServer(self._shard, self._roles, self._most_delay, updates)

    @property
    def updates(self) -> int:
        """So far, those of a loaded state included."""
        return self._loaded_updates if self._server is None else self._server.updates

    def stats(self) -> ServerStats:
        """May be called from `each`, or from another thread."""
        server, shard, nested = self._server, self._shard.shard, self._shard.nested
        members = sorted(server.members) if server else range(self._roles.workers)
        return ServerStats(
            updates=self.updates,
            members=tuple(self._roles.rank_of(worker) for worker in members),
            nesting=None if nested is None else nested.stats(),
            skipped_steps=shard.skipped_steps,
            skipped_shards=shard.skipped_shards,
            sent_bytes=self._roles.traffic().sent_bytes,
            **(server.stats() if server else {}),
        )

    def state_dict(self) -> dict[str, Any]:
        """Weights, the optimizer's state, the number of updates."""
        return {"updates": self.updates, "keeper": self._shard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before `serve`."""
        self._server, self._loaded_updates = None, int(state["updates"])
        self._shard.load_state_dict(state["keeper"])
