"""The example in nanoGPT's manner: killed, started again, it ends as a run that went through."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import torch
from helpers import equal
from programs import Programs

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_nanogpt_style.py"

SCRIPT = f"""
import os, runpy, signal, sys
import laconic as lc

taken = lc.SSD.step

def step(self, closure=None):
    taken(self, closure)
    if str(self.stats().steps) == os.environ.get("KILLED_AT"):
        os.kill(os.getpid(), signal.SIGKILL)

lc.SSD.step = step
sys.argv = ["train", "--steps", "20", "--every", "5", "--out", os.environ["OUT"]]
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def test_a_killed_run_resumes_from_rank_0s_file(programs: Programs, tmp_path: Path) -> None:
    through = programs.run(SCRIPT, 2, folder=tmp_path, OUT="through.pt")
    (killed,) = programs.ends(SCRIPT, 2, folder=tmp_path, OUT="killed.pt", KILLED_AT="18")
    codes = [end.code for end in killed]  # one may have seen the other go before its own end
    assert -signal.SIGKILL in codes and 0 not in codes, killed
    at = torch.load(tmp_path / "killed.pt", weights_only=True)["step"]
    again = programs.run(SCRIPT, 2, folder=tmp_path, OUT="killed.pt")
    assert at == 15
    assert again[0].splitlines()[:2] == through[0].splitlines()[3:5]  # steps 15 and 20
    assert not again[1] and not through[1]  # rank 1 says nothing, and writes nothing
    ends = [
        torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("through", "killed")
    ]
    assert ends[0]["step"] == ends[1]["step"] == 20
    assert equal(ends[0]["model"], ends[1]["model"])
    for one, other in zip(*(end["optimizer"]["states"] for end in ends), strict=True):
        assert torch.equal(one["replica"]["own"], other["replica"]["own"])
        assert torch.equal(one["shard"]["weights"], other["shard"]["weights"])
    assert sorted(file.name for file in tmp_path.glob("*.pt")) == ["killed.pt", "through.pt"]
    assert not list(tmp_path.glob(".laconic*"))


def test_it_learns(programs: Programs, tmp_path: Path) -> None:
    script = SCRIPT.replace('"20"', '"60"').replace('"5"', '"60"')
    told = programs.run(script, 2, folder=tmp_path, OUT="x.pt")[0]
    losses = [float(one) for one in re.findall(r"loss (\S+)", told)]
    assert len(losses) == 2 and losses[1] < losses[0] - 1
