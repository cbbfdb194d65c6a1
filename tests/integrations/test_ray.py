"""The example of Ray Train: by Ray where it is installed, and always with what Ray does to it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from programs import Programs
from test_frameworks import EXAMPLES, needs, start

SCRIPT = EXAMPLES / "train_ray.py"
SAID = re.compile(r"([0-9.]+)% right, ([0-9.]+) times fewer bytes")
# Ray's own part: a process group, DDP around the model, and the group destroyed at the end
STAND_IN = f"""
import runpy, sys, types
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Trainer:
    def __init__(self, train_loop_per_worker, *, scaling_config):
        self.train = train_loop_per_worker
    def fit(self):
        dist.init_process_group("gloo")
        self.train()
        dist.destroy_process_group()

class Context:
    def get_world_rank(self): return dist.get_rank()
    def get_world_size(self): return dist.get_world_size()

def config(*, num_workers, use_gpu): pass

train, inner = types.ModuleType("ray.train"), types.ModuleType("ray.train.torch")
vars(train).update(ScalingConfig=config, get_context=Context)
vars(inner).update(
    TorchTrainer=Trainer,
    prepare_model=DistributedDataParallel,
    get_device=lambda: torch.device("cpu"),
)
sys.modules |= {{"ray": types.ModuleType("ray"), "ray.train": train, "ray.train.torch": inner}}
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def check(output: str) -> None:
    [(right, fewer)] = set(SAID.findall(output))  # Ray shows what workers print in its log, too
    assert float(right) > 80 and float(fewer) > 6


def test_the_example_learns_in_processes_like_those_of_ray(
    programs: Programs, tmp_path: Path
) -> None:
    needs("sklearn")
    check("".join(programs.run(STAND_IN, 2, folder=tmp_path)))


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'"
)
def test_ray_runs_the_example(tmp_path: Path) -> None:
    needs("sklearn")
    check(start([sys.executable, str(SCRIPT)], tmp_path, HOME=str(tmp_path)))
