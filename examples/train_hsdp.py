"""HSDP: torchrun --nproc-per-node 4 examples/train_hsdp.py, two nodes of two ranks each."""

import os
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
# shards inside a node, replicas on different nodes
mesh = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("replicate", "shard"))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
handle: Any = lc.compress(model, "ecdq:error=0.08")

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(20):
    for pixels, labels in zip(x[mine].split(32), y[mine].split(32), strict=True):
        optimizer.zero_grad()
        parts = list(zip(pixels.split(16), labels.split(16), strict=True))
        for i, (some, wanted) in enumerate(parts):
            with handle.accumulate(last=i == len(parts) - 1):  # replicas exchange once per step
                (nn.functional.cross_entropy(model(some), wanted) / len(parts)).backward()
        optimizer.step()

with torch.no_grad():
    accuracy = (model(x[:360]).argmax(1) == y[:360]).float().mean().item()
if rank == 0:
    print(f"{accuracy:.1%} right, {handle.stats().ratio:.1f} times fewer bytes")
dist.destroy_process_group()
