"""This machine's processor, and files that are written whole or not at all."""

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


def write_whole(path: str | Path, text: str) -> None:
    """Whoever reads it meanwhile finds what was there before."""
    path = Path(path)
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
