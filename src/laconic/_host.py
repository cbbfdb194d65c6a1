"""This machine's processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """As it calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
