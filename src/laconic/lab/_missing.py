"""What this machine lacks to run a lab."""

from __future__ import annotations

import secrets
import sys
from contextlib import suppress
from pathlib import Path

from laconic.lab._errors import LabError
from laconic.lab._hosts import SWITCH, Host
from laconic.lab._signals import postponed
from laconic.lab._tools import find, ip

_STATUS = Path("/proc/self/status")
_NEEDED = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # links and shaping; namespaces


def missing() -> str | None:
    """A sentence saying exactly what this machine lacks for a lab; None if nothing.

    The last question is put to the kernel: a namespace with one shaped link is made, and removed.
    """
    if sys.platform != "linux":
        return f"The lab needs Linux (network namespaces); this is {sys.platform}."
    absent = [f"`{tool}`" for tool in ("ip", "tc") if find(tool) is None]
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        return f"{' and '.join(absent)} {verb} not installed: install the package iproute2."
    lacking = _lacking()
    if lacking:
        return (
            f"The lab needs root: this process has no {' and no '.join(lacking)}. Try sudo, or "
            "`laconic lab run`, which makes a user namespace where the kernel allows it."
        )
    refusal = _refusal()
    return refusal and f"The kernel refuses what the lab needs: {refusal}"


def _lacking() -> list[str]:
    """Capabilities that this process does not have."""
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
    effective = int(lines["CapEff"], 16)
    return [name for name, bit in _NEEDED.items() if not effective >> bit & 1]


def _refusal() -> str | None:
    """What `ip` or `tc` says when a smallest lab is made; None if nothing."""
    name = f"laconic-{secrets.token_hex(4)}-probe"
    host = Host(index=0, namespace=name, switch=name, address="10.77.0.1")
    with postponed():
        try:
            ip("netns", "add", name)
            ip("-n", name, "link", "add", SWITCH, "type", "bridge")
            host.connect()
            host.shape(100)
        except LabError as error:
            return str(error)
        finally:
            with suppress(LabError):
                ip("netns", "del", name)
    return None
