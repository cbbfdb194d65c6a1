"""Which ranks serve, which work, and the links between them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from threading import Thread, current_thread

import torch.distributed as dist

from laconic.errors import ConfigError
from laconic.exchanges import Traffic
from laconic.exchanges._ending import close_at_exit
from laconic.exchanges._lane import Lane, own_group
from laconic.server._link import Link


class Roles:
    """The first `servers` ranks of a group serve, all others work.

    Servers are numbered 0, 1, .. and own the chunks of that number; workers are numbered 0, 1, ..
    behind them. `links` are this rank's: to all workers, or to all servers, by their numbers.
    """

    def __init__(self, group: dist.ProcessGroup | None, servers: int, timeout_s: float) -> None:
        self.lane, self.servers = Lane(own_group(group, timeout_s)), servers
        self.workers = self.group.size() - servers
        if self.workers < 1:
            raise ConfigError(
                f"{servers} servers among {self.group.size()} ranks leave no worker: start more "
                "ranks, or take fewer servers"
            )
        rank = self.group.rank()
        self.serves = rank < servers
        self.number = rank if self.serves else rank - servers
        self.links = self._link(timedelta(seconds=timeout_s))
        self.threads: list[Thread] = []  # that wait at links
        weakref.finalize(self, _hang_up, self.links, self.threads).atexit = False
        close_at_exit(self)

    @property
    def group(self) -> dist.ProcessGroup:
        """Of all servers and workers."""
        return self.lane.group

    def close(self) -> None:
        """End what is under way, the links, the threads that wait there, and the group."""
        self.lane.close()
        _hang_up(self.links, self.threads)

    def _link(self, timeout: timedelta) -> list[Link]:
        ranks = dist.get_process_group_ranks(self.group)
        peers = ranks[self.servers :] if self.serves else ranks[: self.servers]
        # both sides make their links in order of ranks, so some pair can always go on
        return [Link(dist.get_rank(), peer, timeout) for peer in peers]

    def traffic(self) -> Traffic:
        """Of all links together."""
        found = Traffic()
        for link in self.links:
            found.sent_bytes += link.traffic.sent_bytes
            found.wire_seconds += link.traffic.wire_seconds
        return found

    def rank_of(self, worker: int) -> int:
        """A worker's global rank, for people."""
        return dist.get_global_rank(self.group, self.servers + worker)


def _hang_up(links: Sequence[Link], threads: list[Thread]) -> None:
    for link in links:
        link.close()
    while threads:
        thread = threads.pop()
        if thread is not current_thread():
            thread.join()
