"""DistributedDataParallel: torchrun --nproc-per-node 2 examples/train_ddp.py."""

import os
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic as lc

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()

digits: Any = load_digits()  # 1797 digits of 8 x 8 pixels
x = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
y = torch.tensor(digits.target, device=device)
mine = slice(360 + rank, None, size)  # the first 360 are for testing

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
).to(device)
model = DistributedDataParallel(model)
handle = lc.compress(model, "ecdq:error=0.08")

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(10):
    for pixels, labels in zip(x[mine].split(64), y[mine].split(64), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()

with torch.no_grad():
    accuracy = (model(x[:360]).argmax(1) == y[:360]).float().mean().item()
if rank == 0:
    print(f"{accuracy:.1%} right, {handle.stats().ratio:.1f} times fewer bytes")
dist.destroy_process_group()
