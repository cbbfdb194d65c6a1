"""Low-rank adapters with PEFT: torchrun --nproc-per-node 2 examples/train_lora.py."""

from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import ViTConfig, ViTForImageClassification

import laconic as lc

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

digits: Any = load_digits()  # 1797 digits of 8 x 8 pixels
x = torch.tensor(digits.images / 8 - 1, dtype=torch.float32).unsqueeze(1)
y = torch.tensor(digits.target)
mine = slice(360 + rank, None, size)  # the first 360 are for testing

torch.manual_seed(0)
shape: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 10}
config = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, hidden_size=128, intermediate_size=256, **shape
)
base: Any = ViTForImageClassification(config)  # yours has weights of an earlier training
lora = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["classifier"])
model = DistributedDataParallel(get_peft_model(base, lora))  # adapters first, then DDP
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
handle = lc.compress(model, "ecdq:error=0.08", optimizer=optimizer)

for _ in range(6):
    for images, labels in zip(x[mine].split(32), y[mine].split(32), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixel_values=images).logits, labels).backward()
        optimizer.step()

with torch.no_grad():
    accuracy = (model(pixel_values=x[:360]).logits.argmax(1) == y[:360]).float().mean().item()
if rank == 0:
    print(f"{accuracy:.1%} right, {handle.stats().ratio:.1f} times fewer bytes")
dist.destroy_process_group()
