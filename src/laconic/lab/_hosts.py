"""A host: a network namespace, and its link to the switch.

    host 0 ── eth0 ══ port0 ──┐
    host 1 ── eth0 ══ port1 ──┤ switch (a bridge, in a namespace of its own)
    host 2 ── eth0 ══ port2 ──┘

A link is a pair of virtual interfaces. What leaves either end passes a token bucket, so a host
sends and receives at the rate of its link, both ways at once, as over a switched Ethernet.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass

from laconic.errors import ConfigError, LaconicError
from laconic.lab._rates import Rate, rate_of

_SBIN = ("/usr/sbin", "/sbin")  # often not in a user's PATH


class LabError(LaconicError, RuntimeError):
    """This machine, or a process in the lab, did not do what it was asked to."""


def find(tool: str) -> str | None:
    """The program's path, or None."""
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), *_SBIN]))


def ip(*arguments: str) -> str:
    """Run `ip` with these arguments; returns what it prints."""
    return _run("ip", arguments)


def tc(*arguments: str) -> str:
    """Run `tc` with these arguments; returns what it prints."""
    return _run("tc", arguments)


def _run(tool: str, arguments: tuple[str, ...]) -> str:
    path = find(tool)
    if path is None:
        raise LabError(f"`{tool}` is not installed (the package is called iproute2)")
    done = subprocess.run(
        [path, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        said = done.stderr.strip() or f"status {done.returncode}"
        raise LabError(f"`{tool} {' '.join(arguments)}` failed: {said}")
    return done.stdout


INTERFACE = "eth0"  # of every host, inside its namespace
SWITCH = "switch"

_SMALLEST, _LARGEST = 4 * 1024, 70 * 1024  # bytes of a burst: some packets; the largest one
_LARGEST_BURST_KB = 1e6
_LATENCY_MS = 50  # the longest that a packet waits in the queue


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Bytes at a host's end of its link, Ethernet headers included.

    On fast links the kernel cuts large packets only after it has counted them, so most headers are
    missing here (4%). The token buckets count every header, at all rates.
    """

    sent_bytes: int
    received_bytes: int

    def __sub__(self, before: Counters) -> Counters:
        return Counters(
            sent_bytes=self.sent_bytes - before.sent_bytes,
            received_bytes=self.received_bytes - before.received_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a lab; `switch` is the namespace that its link leads to."""

    index: int
    namespace: str
    switch: str
    address: str

    @property
    def port(self) -> str:
        """The switch's end of the link."""
        return f"port{self.index}"

    def connect(self) -> None:
        """Make the link, with an address on the host's side; the loopback interface is on, too."""
        here, there = ("-n", self.namespace, "link"), ("-n", self.switch, "link")
        ends = ("type", "veth", "peer", "name", INTERFACE, "netns", self.namespace)
        ip(*there, "add", self.port, *ends)
        # no IPv6: its announcements would be counted, and Gloo might choose such an address
        ip(*there, "set", self.port, "addrgenmode", "none", "master", SWITCH)
        ip(*here, "set", INTERFACE, "addrgenmode", "none")
        ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", INTERFACE)
        ip(*there, "set", self.port, "up")
        ip(*here, "set", INTERFACE, "up")
        ip(*here, "set", "lo", "up")

    def shape(self, rate: float | Rate | None, burst_kb: float | None = None) -> None:
        """Set the rate of the link, a number for both directions; None takes the limit off.

        `burst_kb` is what an idle link lets through at once, instead of `burst_bytes`.
        """
        rate = rate_of(rate)
        for namespace, end, rate_mbit in (
            (self.namespace, INTERFACE, rate.up_mbit),
            (self.switch, self.port, rate.down_mbit),
        ):
            tc(
                "-n",
                namespace,
                "qdisc",
                "replace",
                "dev",
                end,
                "root",
                *_queue(rate_mbit, burst_kb),
            )

    def cut(self) -> None:
        """Disconnect the link: what is sent is lost, connections wait and break."""
        ip("-n", self.switch, "link", "set", self.port, "down")

    def mend(self) -> None:
        """Connect it again; the rate is as before."""
        ip("-n", self.switch, "link", "set", self.port, "up")

    def counters(self) -> Counters:
        """Bytes sent and received so far."""
        text = ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", INTERFACE)
        stats = json.loads(text)[0]["stats64"]
        return Counters(
            sent_bytes=stats["tx"]["bytes"],
            received_bytes=stats["rx"]["bytes"],
        )


def burst_bytes(rate_mbit: float) -> int:
    """What a link that was idle lets through at once.

    A real link lets nothing through, and a step that computes first and then sends little gains
    from every byte (256 KiB at 100 Mbit/s are 21 ms). But the bucket must not be full before the
    kernel's timer comes back, or rate is lost, and on fast links it must hold the largest packet
    that passes in one piece (64 KiB), or cutting packets costs more than sending them. Hence:

        2.5 ms of the rate, but at most 70 KiB; or 0.56 ms of the rate, if that is more

    which is 31 KB at 100 Mbit/s and 72 KB (0.57 ms) at 1 Gbit/s.
    """
    slow, fast = min(312 * rate_mbit, _LARGEST), 70 * rate_mbit
    return max(_SMALLEST, round(max(slow, fast)))


def _queue(rate_mbit: float | None, burst_kb: float | None) -> tuple[str, ...]:
    """What `tc` calls a queue of this rate."""
    if rate_mbit is None:
        return ("noqueue",)
    if burst_kb is not None and not 0 < burst_kb <= _LARGEST_BURST_KB:
        raise ConfigError(f"burst_kb is above 0 and up to {_LARGEST_BURST_KB:g}, not {burst_kb}")
    burst = burst_bytes(rate_mbit) if burst_kb is None else round(1024 * burst_kb)
    rate = ("rate", f"{round(rate_mbit * 1e6)}bit", "burst", f"{burst}b")
    return ("tbf", *rate, "latency", f"{_LATENCY_MS}ms")
