"""Accelerate: torchrun --nproc-per-node 2 examples/train_accelerate.py."""

from typing import Any

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laconic as lc

digits: Any = load_digits()  # 1797 digits of 8 x 8 pixels
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
loader = DataLoader(TensorDataset(x[360:], y[360:]), 32, shuffle=True)  # 360 are for testing

cpu = not torch.cuda.is_available()  # without it, Accelerate leaves CPU ranks alone
accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2)
torch.manual_seed(0)
model: Any = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
handle = lc.compress(model, "ecdq:error=0.08")
accelerator.register_for_checkpointing(lc.AllRanks(handle))

for _ in range(10):
    for pixels, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(pixels), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

with torch.no_grad():
    test, wanted = x[:360].to(accelerator.device), y[:360].to(accelerator.device)
    accuracy = (model(test).argmax(1) == wanted).float().mean().item()
accelerator.print(f"{accuracy:.1%} right, {handle.stats().ratio:.1f} times fewer bytes")
accelerator.end_training()
