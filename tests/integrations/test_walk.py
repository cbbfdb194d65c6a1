"""docs/design.md says which files a bucket passes from DDP's hook to the wire and back."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import ranks
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

ROOT = Path(lc.__file__).parent
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
SUPPORT = ("_key.py", "_scratch.py", "coders.py")  # of codecs, counted apart, as kernels
MOST = 12
WARM, STEPS = 4, 2  # DDP rebuilds its buckets after the first step


class Walk:
    """Counts how often functions of laconic run, in all threads started after it."""

    def __init__(self) -> None:
        self.active, self.calls = False, Counter[tuple[str, str]]()
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)

    def _seen(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self.active and event == "call" and code.co_filename.startswith(str(ROOT)):
            self.calls[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] += 1

    def files(self, buckets: int) -> list[str]:
        """Those with a function that runs for each of so many buckets."""
        return sorted({file for (file, _), count in self.calls.items() if count >= buckets})


def files_of_a_bucket(rank: int) -> list[str]:
    """With the default codec, on Gloo; without what runs once per step."""
    del rank  # equal gradients on all ranks: no budget is broken
    walk = Walk()
    torch.manual_seed(0)
    sizes = (nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 200))
    model = DistributedDataParallel(nn.Sequential(*sizes), bucket_cap_mb=0.1)
    handle = lc.compress(model, "ecdq:error=0.08")
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(WARM + STEPS):
        loss = model(torch.randn(8, 200)).square().mean()
        optimizer.zero_grad()
        walk.active = step >= WARM
        loss.backward()
        walk.active = False
        optimizer.step()
    sys.setprofile(None)
    buckets = walk.calls["integrations/_ddp.py", "comm_hook"]
    assert buckets >= 2 * STEPS
    handle.close()
    return walk.files(buckets)


def test_a_bucket_passes_the_files_that_the_design_names(tmp_path: Path) -> None:
    section = DESIGN.read_text().split("## A bucket's walk")[1].split("\n## ")[0]
    named = sorted(set(re.findall(r"`(?!tests/)([\w/]+\.py)`", section)))
    found = ranks.run([files_of_a_bucket], 2, tmp_path)[0, "files_of_a_bucket"]
    assert found == named, "name the files that run in docs/design.md"
    above = [file for file in found if file not in SUPPORT and not file.startswith("kernels/")]
    assert len(above) <= MOST
