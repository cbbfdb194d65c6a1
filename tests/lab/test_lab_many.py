"""Many labs, one after another, with nothing left."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from laconic import lab

LACKING = lab.missing()
pytestmark = pytest.mark.skipif(LACKING is not None, reason=LACKING or "")

TIMES = 10


def namespaces() -> set[str]:
    """Of this process; others may have labs of their own."""
    return {path.name for path in Path("/run/netns").glob(f"laconic-{os.getpid()}-*")}


def links() -> set[str]:
    """Interfaces outside of all labs."""
    text = subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True).stdout
    return {link["ifname"] for link in json.loads(text)}


def children() -> set[str]:
    """Processes that this one has started and that have not ended."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {pid for path in found for pid in path.read_text().split()}


def test_many_starts_and_stops_leave_nothing() -> None:
    before = namespaces(), links(), children()
    for _ in range(TIMES):
        with lab.Lab(hosts=3, rate_mbit=100) as net:
            net.start(["sleep", "600"])
            assert len(namespaces()) == 4
    assert (namespaces(), links(), children()) == before
