"""Several labs: at once, and one after another, with nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE_S

from laconic import lab

LACKING = lab.missing()
pytestmark = pytest.mark.skipif(LACKING is not None, reason=LACKING or "")

TIMES = 50
GREET = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print("sum", int(x), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


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


def test_fifty_starts_and_stops_leave_nothing() -> None:
    before = namespaces(), links(), children()
    for _ in range(TIMES):
        with lab.Lab(hosts=3, rate_mbit=100) as net:
            net.start(["sleep", "600"])
            assert len(namespaces()) == 4
    assert (namespaces(), links(), children()) == before


def test_two_labs_at_once() -> None:
    """The same addresses and ports in both, and neither sees the other."""
    with lab.Lab(hosts=2, rate_mbit=50) as one, lab.Lab(hosts=3, rate_mbit=200) as other:
        lines: dict[str, list[str]] = {"one": [], "other": []}
        runs = [
            net.start(
                [sys.executable, "-c", GREET], echo=lambda _, line, n=name: lines[n].append(line)
            )
            for name, net in (("one", one), ("other", other))
        ]
        for run in runs:
            run.wait(timeout_s=PATIENCE_S)
        sums = {name: [line for line in seen if "sum" in line] for name, seen in lines.items()}
        assert sums == {"one": ["sum 2"] * 2, "other": ["sum 3"] * 3}
        used = [sum(c.sent_bytes for c in net.counters()) for net in (one, other)]
        assert all(used)
    assert not namespaces()
