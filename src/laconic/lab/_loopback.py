"""The same ranks without a lab: on the loopback interface, which has no rate and no counters."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laconic.lab import _signals
from laconic.lab._lab import check_count
from laconic.lab._ranks import Echo, seats
from laconic.lab._run import Run, Runs


@dataclass(frozen=True, kw_only=True)
class Loopback:
    """Stands in for a Lab where `missing()` says no: processes, but no hosts, no shaped links."""

    hosts: int
    _open: list[tuple[LoopbackNetwork, dict[Any, Any]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_count("hosts", self.hosts, 1000)

    def __enter__(self) -> LoopbackNetwork:
        """Nothing is made yet."""
        network = LoopbackNetwork(self.hosts)
        self._open.append((network, _signals.unwind_on_signals()))
        return network

    def __exit__(self, *error: object) -> None:
        """Kill what runs."""
        _signals.close_last(self._open)


class LoopbackNetwork:
    """Starts ranks as a lab's Network does, each its own host by name only."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._runs = Runs()

    def start(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        talk: bool = False,
        echo: Echo | None = None,
    ) -> Run:
        """As Network.start."""
        check_count("ranks_per_host", ranks_per_host, 1000)
        places = seats(
            prefixes=[()] * self._hosts,
            ranks_per_host=ranks_per_host,
            address="127.0.0.1",
            port=_free_port(),
            interface="lo",
        )
        return self._runs.start(places, command, env=env, cwd=cwd, talk=talk, echo=echo)

    def close(self) -> None:
        """Kill what runs; done twice, it does nothing."""
        self._runs.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
