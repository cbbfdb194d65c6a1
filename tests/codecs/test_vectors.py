"""The wires printed in docs/wire.md, byte for byte, on every backend."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import device_of

import laconic as lc
from laconic.kernels import using

DOC = Path(__file__).parents[2] / "docs" / "wire.md"
X = torch.tensor([0.5, -1.0, 0.25, 3.0])
KEY = lc.Key(seed=1, step=2, tensor=3, rank=4, phase=5)
SPECS = (
    "none",
    "fp16",
    "bf16",
    "qsgd:bits=2,block=128",
    "qsgd:bits=3,norm=l2,block=tensor",
    "dqsg:bits=4,block=2",
    "dqsg:bits=8,block=512",
    "ndqsg:levels=3,ratio=3",
    "global:bits=4",
    "global:bits=32",
    "global:bits=8,subtract=true",
    "global-exp:bits=4",
    "qsgd-topk",
    "ecdq:error=0.08",
    "ecdq:step=0.25,coder=fixed",
    "ecdq:step=1,coder=elias",
    "ecdq:step=1,coder=rans",
    "qsgd:bits=4,block=512,coder=elias-dense",
    "rotate(dqsg:bits=4,block=512)",
    "feedback(qsgd-topk)",
)


def vectors() -> dict[str, str]:
    block = re.search(r"```vectors\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert block is not None
    return dict(line.split(" ", 1) for line in block[1].strip().splitlines())


def wire_of(spec: str, name: str = "reference") -> str:
    return bytes(lc.codec(spec).encode(X.to(device_of(name)), KEY).data.tolist()).hex()


@pytest.mark.parametrize("spec", SPECS)
def test_wires_are_those_of_the_document(spec: str, backend: str) -> None:
    if backend == "triton" and ("elias" in spec or "rans" in spec):
        pytest.skip("these coders run on the CPU")
    assert wire_of(spec, backend) == vectors()[spec]


def test_the_document_names_the_stream_and_lists_no_other_codec() -> None:
    k0, k1 = KEY.stream()
    assert f"k0 = 0x{k0:08x}, k1 = 0x{k1:08x}" in DOC.read_text()
    assert set(vectors()) == set(SPECS)


def test_the_documented_wires_decode() -> None:
    for spec, text in vectors().items():
        data = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
        wire = lc.Wire.parse(data, key=KEY, shape=(4,), dtype=torch.float32)
        y = lc.codec(spec).decode(wire, side=X)
        assert (y - X).abs().max() <= 3.25, spec  # qsgd-topk: the norm, 3.25, in place of 3


if __name__ == "__main__" and "--print" in sys.argv:
    with using("reference"):
        print("\n".join(f"{spec} {wire_of(spec)}" for spec in SPECS))
