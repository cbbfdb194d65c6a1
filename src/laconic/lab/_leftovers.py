"""Namespaces of labs whose process was killed: their names say whose they were."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

NAMESPACES = Path("/run/netns")  # where `ip netns` keeps their names


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
