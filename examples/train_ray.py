"""Ray Train: pip install 'ray[train]', then python examples/train_ray.py."""

from typing import Any

import torch
from ray.train import ScalingConfig, get_context  # pyright: ignore[reportMissingImports]
from ray.train.torch import (  # pyright: ignore[reportMissingImports]
    TorchTrainer,
    get_device,
    prepare_model,
)
from sklearn.datasets import load_digits
from torch import nn

import laconic as lc


def train() -> None:
    """One rank: Ray has made the process group, and prepare_model wraps in DDP."""
    device = get_device()
    rank, size = get_context().get_world_rank(), get_context().get_world_size()
    digits: Any = load_digits()  # 1797 digits of 8 x 8 pixels
    x = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
    y = torch.tensor(digits.target, device=device)
    mine = slice(360 + rank, None, size)  # the first 360 are for testing

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    model = prepare_model(model)
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
    handle.close()  # before Ray destroys the process group


if __name__ == "__main__":
    workers = ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
    TorchTrainer(train, scaling_config=workers).fit()
