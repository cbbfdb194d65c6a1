"""A loop like nanoGPT's, with SSD: torchrun --nproc-per-node 2 examples/train_nanogpt_style.py.

Rank 0 evaluates and writes one checkpoint; started again, all ranks resume from it.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic as lc

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--every", type=int, default=100, help="evaluate and save")
parser.add_argument("--out", default="checkpoint.pt")
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()

CONTEXT, BATCH, RATE, WARMUP = 64, 16, 3e-3, 12
pages = sorted((Path(__file__).resolve().parents[1] / "docs").glob("*.md"))
text = "".join(page.read_text() for page in pages)
symbols = {symbol: number for number, symbol in enumerate(sorted(set(text)))}
data = torch.tensor([symbols[symbol] for symbol in text])
train, test = data[: -len(data) // 10], data[-len(data) // 10 :]


class Characters(nn.Module):
    """A small transformer that predicts the next character."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        """Two layers of 64 learn something in a minute on a CPU."""
        super().__init__()
        self.symbol = nn.Embedding(len(symbols), width)
        self.place = nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(symbols))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the characters after each of x."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        return self.head(self.blocks(self.symbol(x) + self.place.weight, mask=mask))


def loss(source: Tensor, seed: int) -> Tensor:
    """Of a batch that the seed alone determines: a run that resumes sees the same ones."""
    starts = torch.randint(
        len(source) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(seed)
    )
    rows = torch.stack([source[start : start + CONTEXT + 1] for start in starts]).to(device)
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def evaluate() -> float:
    """The mean loss of 20 batches of the test text."""
    return sum(loss(test, seed).item() for seed in range(20)) / 20


torch.manual_seed(0)
model = Characters().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
optimizer = lc.SSD(
    optimizer, model, period=4, warmup_steps=WARMUP, codec="ecdq:error=0.08,block=4096"
)
first = 0
if os.path.exists(args.out):
    first = lc.load({"optimizer": optimizer}, args.out)["step"]

for step in range(first, args.steps + 1):
    if step % args.every == 0:
        with torch.no_grad(), optimizer.latest_weights():
            if rank == 0:
                print(f"step {step}: loss {evaluate():.3f}")
            lc.save({"model": model.state_dict(), "optimizer": optimizer, "step": step}, args.out)
    if step == args.steps:
        break
    for group in optimizer.param_groups:
        group["lr"] = RATE * min((step + 1) / WARMUP, 1.0)  # and down again, if you like
    optimizer.zero_grad()
    loss(train, 1_000_000 + step * size + rank).backward()
    optimizer.step()

if rank == 0:
    print(f"{optimizer.stats().ratio:.1f} times fewer bytes")
optimizer.close()
dist.destroy_process_group()
