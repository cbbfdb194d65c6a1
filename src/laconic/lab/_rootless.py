"""The lab without root: inside a user namespace, where the kernel lets users make one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from laconic.lab._tools import find

_INSIDE = "LACONIC_LAB_INSIDE"  # set for the process that was started inside
_SPACES = ("--user", "--map-root-user", "--net", "--mount")
# names of network namespaces are kept under /run, which belongs to the real root
_OWN_RUN = 'mount -t tmpfs laconic /run && exec "$@"'


def can_enter() -> bool:
    """Whether this user may make namespaces in which it has root's rights."""
    if os.environ.get(_INSIDE) or find("unshare") is None:
        return False
    try:
        done = subprocess.run(command(["true"]), capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def command(words: Sequence[str]) -> list[str]:
    """The same words, run inside."""
    return [find("unshare") or "unshare", *_SPACES, "sh", "-c", _OWN_RUN, "sh", *words]


def enter() -> None:
    """Become this program, run anew inside; does not return."""
    words = command([sys.executable, "-m", "laconic", *sys.argv[1:]])
    environment: Mapping[str, str] = {**os.environ, _INSIDE: "1"}
    os.execve(words[0], words, dict(environment))
