"""What a machine lacks to run a lab, and a user namespace for those who are not root."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from laconic.lab._hosts import SWITCH, Host, LabError, find, ip
from laconic.lab._signals import postponed

_STATUS = Path("/proc/self/status")
_INSIDE = "LACONIC_LAB_INSIDE"  # set for the process that was started inside
_SPACES = ("--user", "--map-root-user", "--net", "--mount")
# names of network namespaces are kept under /run, which belongs to the real root
_OWN_RUN = 'mount -t tmpfs laconic /run && exec "$@"'
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


def can_enter() -> bool:
    """Whether this user may make namespaces in which it has root's rights."""
    if os.environ.get(_INSIDE) or find("unshare") is None:
        return False
    try:
        done = subprocess.run(command(["true"]), capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def missing_or_enter() -> str | None:
    """What is missing; where a user namespace has all that is needed, run this program inside."""
    lacking = missing()
    if lacking and can_enter():
        enter()
    return lacking


def command(words: Sequence[str]) -> list[str]:
    """The same words, run inside."""
    return [find("unshare") or "unshare", *_SPACES, "sh", "-c", _OWN_RUN, "sh", *words]


def enter() -> None:
    """Replace this process by the same program inside; does not return."""
    words = command([sys.executable, "-m", "laconic", *sys.argv[1:]])
    environment: Mapping[str, str] = {**os.environ, _INSIDE: "1"}
    os.execve(words[0], words, dict(environment))
