"""A lab: hosts and a switch that exist while a `with` block runs; ranks without a lab, too."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

from laconic._settings import whole
from laconic.lab import _signals
from laconic.lab._hosts import INTERFACE, SWITCH, Counters, Host, LabError, find, ip
from laconic.lab._rates import Rates, rates_of
from laconic.lab._requirements import missing
from laconic.lab._run import Echo, Run, Runs, Seat, seats

NAMESPACES = Path("/run/netns")  # where `ip netns` keeps their names
_MOST_HOSTS = 250  # addresses of 10.77.0.0/24
_FIRST_PORT = 29500  # torchrun's


def new_name() -> str:
    """laconic-PID-START-TOKEN: a process, when it started (PIDs come again), and a lab of its."""
    pid = os.getpid()
    return f"laconic-{pid}-{_started(pid)}-{secrets.token_hex(3)}"


def abandoned() -> list[str]:
    """Namespaces with such names whose process has ended."""
    found = []
    for path in NAMESPACES.glob("laconic-*-*-*"):
        parts = path.name.split("-")
        if len(parts) < 4 or not (parts[1].isdigit() and parts[2].isdigit()):
            continue
        if _started(int(parts[1])) != int(parts[2]):
            found.append(path.name)
    return found


def _started(pid: int) -> int:
    """When the process started, in the kernel's ticks; -1 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(text.rpartition(")")[2].split()[19])


@dataclass(frozen=True, kw_only=True)
class Lab:
    """`hosts` hosts on one switch, every link of `rate_mbit` in each direction, or without a limit.

    `rate_mbit` may be a list with one for each host, and `lab.Rate(up_mbit=, down_mbit=)` in
    the place of a number.

    Used in a `with` statement, it makes a Network, and removes it whatever happens inside: an
    exception, Ctrl-C, and in the main thread SIGTERM and SIGHUP, which then raise SystemExit unless
    the program handles them itself. After SIGKILL all of it remains, and the next lab on this
    machine removes it: names contain the process. Nothing is made outside the lab's own namespaces.
    """

    hosts: int
    rate_mbit: Rates = None
    _open: list[tuple[Network, dict[signal.Signals, Any]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        whole("hosts", self.hosts, 1, _MOST_HOSTS)
        rates_of(self.rate_mbit, self.hosts)

    def __enter__(self) -> Network:
        """Make the hosts."""
        network, handlers = Network(self.hosts), _signals.unwind_on_signals()
        try:
            lacking = missing()
            if lacking:
                raise LabError(lacking)
            for namespace in abandoned():
                _remove(namespace)
            network.make(self.rate_mbit)
            self._open.append((network, handlers))
        except BaseException:
            network.close()
            _signals.restore(handlers)
            raise
        return network

    def __exit__(self, *error: object) -> None:
        """Remove them, and all that runs on them."""
        _signals.close_last(self._open)


class _Starter(ABC):
    """What starts ranks."""

    _runs: Runs

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
        """Start the command on every host, with the variables that torchrun would set.

        It inherits our environment, with `env` on top. The first ranks are those of the first host.
        `echo(rank, line)` is called with every line of output as it is written.
        """
        whole("ranks_per_host", ranks_per_host, 1, 1000)
        places = self._seats(ranks_per_host)
        return self._runs.start(places, command, env=env, cwd=cwd, talk=talk, echo=echo)

    @abstractmethod
    def _seats(self, ranks_per_host: int) -> list[Seat]:
        """Where each rank starts."""


class Network(_Starter):
    """The hosts of a lab that exists."""

    def __init__(self, hosts: int) -> None:
        name = new_name()
        self._switch = f"{name}-switch"
        self.hosts = tuple(
            Host(
                index=i,
                namespace=f"{name}-{i}",
                switch=self._switch,
                address=f"10.77.0.{i + 1}",
            )
            for i in range(hosts)
        )
        self._runs = Runs()

    def make(self, rate_mbit: Rates) -> None:
        """Make namespaces, switch and links."""
        for namespace in self._namespaces:
            ip("netns", "add", namespace)
        quiet = ("stp_state", "0", "mcast_snooping", "0")  # no packets of the switch's own
        ip("-n", self._switch, "link", "add", SWITCH, "type", "bridge", *quiet)
        ip("-n", self._switch, "link", "set", SWITCH, "addrgenmode", "none", "up")
        for host in self.hosts:
            host.connect()
        self.shape(rate_mbit)

    def shape(self, rate_mbit: Rates, burst_kb: float | None = None) -> None:
        """Give all links this rate, or each its own, while processes run."""
        for host, rate in zip(self.hosts, rates_of(rate_mbit, len(self.hosts)), strict=True):
            host.shape(rate, burst_kb)

    def counters(self) -> tuple[Counters, ...]:
        """Bytes that every host has sent and received."""
        return tuple(host.counters() for host in self.hosts)

    def _seats(self, ranks_per_host: int) -> list[Seat]:
        enter = (find("ip") or "ip", "netns", "exec")
        return seats(
            prefixes=[(*enter, host.namespace) for host in self.hosts],
            ranks_per_host=ranks_per_host,
            address=self.hosts[0].address,
            port=_FIRST_PORT + len(self._runs),  # the last run's may not be free yet
            interface=INTERFACE,
        )

    def close(self) -> None:
        """Kill what runs on the hosts and remove them; done twice, it does nothing."""
        with _signals.postponed(), ExitStack() as stack:  # every step is taken, even if one fails
            for namespace in self._namespaces:
                stack.callback(_remove, namespace)
            stack.callback(self._runs.kill)

    @property
    def _namespaces(self) -> tuple[str, ...]:
        return (self._switch, *(host.namespace for host in self.hosts))


def _remove(namespace: str) -> None:
    """End all processes inside, and delete the namespace."""
    if not (NAMESPACES / namespace).exists():
        return
    with suppress(LabError):  # a namespace half made has no processes, and cannot be asked
        while pids := ip("netns", "pids", namespace).split():
            for pid in map(int, pids):
                _end(pid)
    try:
        ip("netns", "del", namespace)
    except LabError:
        if (NAMESPACES / namespace).exists():  # otherwise another lab was faster
            raise


def _end(pid: int) -> None:
    """Kill a process, not necessarily our child, and wait until it has ended."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            wait_for_any([descriptor])
        finally:
            os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class Loopback:
    """Replaces a Lab where something is `missing()`: processes, but no hosts or shaped links."""

    hosts: int
    _open: list[tuple[LoopbackNetwork, dict[Any, Any]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        whole("hosts", self.hosts, 1, 1000)

    def __enter__(self) -> LoopbackNetwork:
        """Nothing is made yet."""
        network = LoopbackNetwork(self.hosts)
        self._open.append((network, _signals.unwind_on_signals()))
        return network

    def __exit__(self, *error: object) -> None:
        """Kill what runs."""
        _signals.close_last(self._open)


class LoopbackNetwork(_Starter):
    """Starts ranks as a lab's Network does, each its own host by name only."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self._runs = Runs()

    def _seats(self, ranks_per_host: int) -> list[Seat]:
        return seats(
            prefixes=[()] * self._hosts,
            ranks_per_host=ranks_per_host,
            address="127.0.0.1",
            port=_free_port(),
            interface="lo",
        )

    def close(self) -> None:
        """Kill what runs; done twice, it does nothing."""
        self._runs.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
