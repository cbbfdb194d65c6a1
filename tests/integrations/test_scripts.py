"""Training scripts in the style of well-known ones work with at most two lines added.

A line that ends with "# +" is added; without these the script is plain DDP.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import Programs

BEGIN = """
import copy, contextlib, hashlib, json, math, os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
master = rank == 0
torch.manual_seed(0)
handle = None
"""

END = """
values = b"".join(p.detach().numpy().tobytes() for p in raw.parameters())
found = {"weights": hashlib.sha256(values).hexdigest(), "losses": losses}
if handle is not None:
    found["ratio"] = handle.stats().ratio
with open(f"{rank}.json", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""

# nanoGPT's train.py: tied embedding, AdamW in two groups, accumulation by hand,
# clipping, evaluation and checkpoints on rank 0 alone
NANOGPT = """
block_size, batch_size, accumulation, vocabulary, width = 16, 8, 2, 64, 64
data = torch.arange(4000) * 7 % 61
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight
    def forward(self, idx, targets):
        t = idx.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        x = self.block(self.wte(idx) + self.wpe(torch.arange(t)), mask, is_causal=True)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())
def get_batch(generator):
    ix = torch.randint(len(data) - block_size - 1, (batch_size,), generator=generator)
    x = torch.stack([data[i : i + block_size] for i in ix])
    return x, torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
model = DDP(model)
import laconic as lc  # +
handle = lc.compress(model, "ecdq:error=0.08", optimizer=optimizer)  # +
raw, losses, generator = model.module, [], torch.Generator().manual_seed(1337 + rank)
for iteration in range(24):
    if iteration % 8 == 0 and master:
        model.eval()
        with torch.no_grad():
            raw(*get_batch(torch.Generator().manual_seed(1)))
        model.train()
        checkpoint = {"model": raw.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(checkpoint, "ckpt.pt")
    for micro_step in range(accumulation):
        model.require_backward_grad_sync = micro_step == accumulation - 1
        loss = model(*get_batch(generator)) / accumulation
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item() * accumulation)
"""

# timm's train.py: convolutions, SGD with Nesterov, an EMA copy of the model, no_sync, autocast with
# a scaler, synchronised batch statistics, checkpoints
TIMM = """
images = torch.randn(256, 3, 16, 16, generator=torch.Generator().manual_seed(5))
labels = (images.mean((1, 2, 3)) * 40).long().clamp(-2, 2) + 2
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
    nn.Flatten(), nn.Linear(1024, 5),
).to(memory_format=torch.channels_last)
groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 2e-5},
          {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu")
model = DDP(model, broadcast_buffers=True)
import laconic as lc  # +
handle = lc.compress(model, "dqsg:bits=4")  # +
ema = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b)
raw, losses, generator = model.module, [], torch.Generator().manual_seed(rank)
for update in range(20):
    for micro in range(2):
        index = torch.randint(256, (16,), generator=generator)
        with model.no_sync() if micro == 0 else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16):
                output = model(images[index].to(memory_format=torch.channels_last))
                loss = nn.functional.cross_entropy(output.float(), labels[index]) / 2
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    ema.update_parameters(model)
    losses.append(2 * loss.item())
for buffer in raw.buffers():
    if buffer.is_floating_point():
        dist.all_reduce(buffer)
        buffer /= world
if master:
    torch.save({"state_dict": raw.state_dict(), "ema": ema.module.module.state_dict()}, "last.pth")
"""


def run(script: str, ranks: int, folder: Path, programs: Programs) -> list[dict[str, Any]]:
    folder.mkdir()
    programs.run(BEGIN + script + END, ranks, folder=folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(("script", "fewer"), [(NANOGPT, 3), (TIMM, 2.5)], ids=["nanogpt", "timm"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_two_lines_are_enough(
    script: str, fewer: float, ranks: int, tmp_path: Path, programs: Programs
) -> None:
    lines = script.splitlines(keepends=True)
    before = [line for line in lines if not line.endswith("# +\n")]
    assert len(lines) - len(before) <= 2
    plain = run("".join(before), ranks, tmp_path / "plain", programs)
    found = run(script, ranks, tmp_path / "encoded", programs)
    assert len({one["weights"] for one in found}) == 1
    for one, other in zip(found, plain, strict=True):
        assert one["ratio"] > fewer
        assert one["losses"][-1] < one["losses"][0]
        tail, own = (sum(some["losses"][-5:]) / 5 for some in (one, other))
        assert abs(tail - own) < 0.15 * own
