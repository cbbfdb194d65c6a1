"""The two programs of iproute2 that make a lab: `ip` and `tc`."""

from __future__ import annotations

import os
import shutil
import subprocess

from laconic.lab._errors import LabError

_SBIN = ("/usr/sbin", "/sbin")  # where they are, and where a user's PATH often does not lead


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
