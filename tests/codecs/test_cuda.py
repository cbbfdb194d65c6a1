"""What only a GPU can show: no waiting for the device, no allocation, two streams of launches."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same_bits, captured, gaussian

import laconic as lc

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPECS = (
    "none",
    "bf16",
    "qsgd:bits=4",
    "qsgd:bits=3,block=100",
    "qsgd:bits=8,norm=l2",
    "dqsg:bits=2,block=1024",
    "dqsg:bits=4,block=tensor",
    "ndqsg",
    "global:bits=8",
    "global:bits=32",
    "global:bits=8,subtract=true",
    "global:bits=32,subtract=true",
    "global-exp:bits=4",
)
COUNT = 100_003
KEY = lc.Key(seed=3, step=1)


class Work:
    """One codec with all buffers made: what a training step does."""

    def __init__(self, spec: str) -> None:
        self.codec = lc.codec(spec)
        self.x = gaussian(COUNT).cuda()
        self.norm = self.x.abs().max().view(1) if spec.startswith("global") else None
        self.side = self.x if spec == "ndqsg" else None
        self.out = torch.zeros(COUNT, device="cuda")
        self.failed = torch.zeros(-(-COUNT // 512), dtype=torch.uint8, device="cuda")
        self.wire = self.codec.encode(self.x, KEY, norm=self.norm)

    def __call__(self) -> None:
        wire = self.codec.encode(self.x, KEY, norm=self.norm, out=self.wire)
        self.codec.decode(wire, side=self.side, out=self.out, failed=self.failed)


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_never_waits_for_the_device(spec: str) -> None:
    """A captured graph cannot hold a synchronisation: capturing one raises."""
    work = Work(spec)
    work()
    expected = work.out.clone()
    graph = captured(work)
    work.out.zero_()
    graph.replay()
    assert_same_bits(work.out, expected, spec)


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_allocates_nothing_once_buffers_exist(spec: str) -> None:
    work = Work(spec)
    work()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        work()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("spec", SPECS)
def test_the_cpu_decodes_what_the_gpu_encoded(spec: str) -> None:
    work = Work(spec)
    work()
    data = work.wire.data.cpu()
    wire = lc.Wire.parse(data, key=KEY, shape=(COUNT,), dtype=torch.float32)
    side = None if work.side is None else work.side.cpu()
    assert_same_bits(work.codec.decode(wire, side=side), work.out.cpu(), spec)


def test_wire_parse_reads_a_header_on_the_device() -> None:
    wire = lc.codec("qsgd").encode(gaussian(1000).cuda(), KEY)
    lc.Wire.parse(wire.data, key=KEY, shape=(1000,), dtype=torch.float32)
    wire.data[9] ^= 1
    with pytest.raises(lc.WireError):
        lc.Wire.parse(wire.data, key=KEY, shape=(1000,), dtype=torch.float32)
