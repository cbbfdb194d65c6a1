"""Which ranks serve, which work, and the links between them."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from laconic.errors import ConfigError
from laconic.exchanges import Traffic
from laconic.exchanges._lane import own_group
from laconic.server._link import Link


class Roles:
    """The first `servers` ranks of a group serve, all others work.

    Servers are numbered 0, 1, .. and own the chunks of that number; workers are numbered 0, 1, ..
    behind them. `links` are this rank's: to all workers, or to all servers, by their numbers.
    """

    def __init__(self, group: dist.ProcessGroup | None, servers: int, timeout_s: float) -> None:
        self.group, self.servers = own_group(group, timeout_s), servers
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
