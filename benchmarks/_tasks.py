"""What simulated workers learn: ResNet-20 on CIFAR-10, and a small transformer on characters."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks._cifar import Part
from benchmarks._simulated import Packed

PAD, SIDE = 4, 32
MEAN, DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


class Block(nn.Module):
    """Two convolutions around a shortcut without parameters (He et al. 2015, option A)."""

    def __init__(self, before: int, after: int, statistics: bool) -> None:
        super().__init__()
        self.stride = after // before
        self.first = nn.Conv2d(before, after, 3, self.stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after, momentum=None, track_running_stats=statistics)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after, momentum=None, track_running_stats=statistics)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.first_norm(self.first(x)), inplace=True)
        out = self.second_norm(self.second(out))
        if self.stride > 1:
            more = (self.second.out_channels - x.shape[1]) // 2
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, more, more))
        return F.relu(out + x, inplace=True)


def resnet20(statistics: bool, widths: Sequence[int] = (16, 32, 64), blocks: int = 3) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0], momentum=None, track_running_stats=statistics),
        nn.ReLU(inplace=True),
    ]
    before = widths[0]
    for width in widths:
        for _ in range(blocks):
            layers.append(Block(before, width, statistics))
            before = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))
    for one in model.modules():
        if isinstance(one, nn.Conv2d):
            nn.init.kaiming_normal_(one.weight)
    return model


class Pictures:
    """Crops and flips of CIFAR-10, made on the device; bfloat16 on a GPU.

    Workers have no running statistics: in training nobody looks at them. For a score they are
    estimated anew, with the weights that are scored.
    """

    name, measure = "resnet20", "accuracy"

    def __init__(
        self,
        train: Part,
        test: Part,
        device: torch.device,
        *,
        workers: int = 4,
        batch: int = 128,
        epochs: int = 12,
        small: bool = False,
    ) -> None:
        self.device, self.workers, self._batch, self._epochs = device, workers, batch, epochs
        self.epoch = len(train.labels) // (workers * batch)
        self.steps = epochs * self.epoch
        self._shape = ((4, 8), 1) if small else ((16, 32, 64), 3)
        around = ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0))
        self._padded = torch.from_numpy(np.pad(train.pictures, around)).to(device)
        self._labels = torch.from_numpy(train.labels).to(device)
        self._test = torch.from_numpy(test.pictures).to(device), torch.from_numpy(test.labels)
        self._mean = torch.tensor(MEAN, device=device)
        self._scale = 1 / torch.tensor(DEVIATION, device=device)
        self._side = torch.arange(SIDE, device=device)
        self._judge = self._network(True)
        self._judge_flat = Packed(self._judge, 1)
        self.plan, self.start = lru_cache(self._plan), lru_cache(self._start)

    def model(self) -> nn.Module:
        return self._network(False)

    def _network(self, statistics: bool) -> nn.Module:
        own = resnet20(statistics, *self._shape).to(self.device)
        return own.to(memory_format=torch.channels_last)  # pyright: ignore

    def _start(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return Packed(self.model(), 1).weights

    def _plan(self, seed: int) -> Tensor:
        """(steps, 4, workers · batch): number, row and column of the crop, flipped or not."""
        draw, every = torch.Generator().manual_seed(seed), self.workers * self._batch
        orders = [
            torch.randperm(len(self._labels), generator=draw)[: self.epoch * every]
            for _ in range(self._epochs)
        ]
        order = torch.cat(orders).view(self.steps, 1, every)
        shift = torch.randint(0, 2 * PAD + 1, (self.steps, 2, every), generator=draw)
        flip = torch.randint(0, 2, (self.steps, 1, every), generator=draw)
        return torch.cat([order, shift, flip], 1).to(self.device)

    def _pictures(self, now: Tensor) -> Tensor:
        number, row, column, flip = now[..., None]
        rows = row + self._side
        columns = column + torch.where(flip > 0, SIDE - 1 - self._side, self._side)
        return self._padded[number[..., None], rows[:, :, None], columns[:, None, :]]

    def _input(self, pictures: Tensor) -> Tensor:
        # (n, side, side, 3) in memory is (n, 3, side, side) in channels-last order
        return ((pictures - self._mean) * self._scale).permute(0, 3, 1, 2)

    def _mixed(self) -> torch.autocast:
        return mixed(self.device)

    def losses(self, models: Sequence[nn.Module], now: Tensor) -> Iterator[Tensor]:
        inputs = self._input(self._pictures(now)).split(self._batch)
        labels = self._labels[now[0]].split(self._batch)
        for model, x, y in zip(models, inputs, labels, strict=True):
            with self._mixed():
                out = model(x)
            yield F.cross_entropy(out.float(), y)

    @torch.no_grad()
    def score(self, weights: Tensor) -> float:
        """Accuracy on the test part, statistics from 16 steps' training pictures."""
        self._judge_flat.write(weights)
        for one in self._judge.modules():
            if isinstance(one, nn.BatchNorm2d):
                one.reset_running_stats()
        self._judge.train()
        with self._mixed():
            for now in self.plan(0)[:16]:
                self._judge(self._input(self._pictures(now)))
            self._judge.eval()
            pictures, labels = self._test
            found = [self._judge(self._input(x)).argmax(1) for x in pictures.split(2000)]
        return float((torch.cat(found).cpu() == labels).float().mean())


class Attention(nn.Module):
    """A layer of a transformer: causal attention, then two linear maps, both after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        return x + self.narrow(F.gelu(self.wide(self.second_norm(x))))


class Transformer(nn.Module):
    """The next byte, from those before it."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Attention(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for one in self.modules():
            if isinstance(one, nn.Linear | nn.Embedding):
                nn.init.normal_(one.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.bytes(x) + self.places.weight)))


class Characters:
    """Sources of Python's standard library, in order of names; the last 5% are held out."""

    name, measure = "transformer", "bits_per_character"

    def __init__(
        self,
        device: torch.device,
        *,
        workers: int = 4,
        batch: int = 24,  # up to 3072 bytes an embedding's gradient needs no sort
        steps: int = 1500,
        length: int = 5_000_000,
        small: bool = False,
    ) -> None:
        self.device, self.workers, self.steps, self._batch = device, workers, steps, batch
        self.epoch = steps // 10  # of warm-up; the text is longer
        self._size = (16, 16, 1, 2) if small else (128, 160, 4, 5)
        text = library_text(length)
        cut = len(text) * 19 // 20
        self._text = text[:cut].long().to(device)
        self._held_out = text[cut:].long().to(device)
        self._ahead = torch.arange(self._size[0] + 1, device=device)
        self._judge = self.model()
        self._judge_flat = Packed(self._judge, 1)
        self.plan, self.start = lru_cache(self._plan), lru_cache(self._start)

    def model(self) -> nn.Module:
        return Transformer(*self._size).to(self.device)

    def _start(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        return Packed(self.model(), 1).weights

    def _plan(self, seed: int) -> Tensor:
        draw, last = torch.Generator().manual_seed(seed), len(self._text) - len(self._ahead)
        starts = torch.randint(
            0, last + 1, (self.steps, self.workers * self._batch), generator=draw
        )
        return starts.to(self.device)

    def _loss(self, model: nn.Module, text: Tensor) -> Tensor:
        with mixed(self.device):
            out = model(text[:, :-1])
        return F.cross_entropy(out.float().flatten(0, 1), text[:, 1:].flatten())

    def losses(self, models: Sequence[nn.Module], now: Tensor) -> Iterator[Tensor]:
        text = self._text[now[:, None] + self._ahead].split(self._batch)
        for model, own in zip(models, text, strict=True):
            yield self._loss(model, own)

    @torch.no_grad()
    def score(self, weights: Tensor) -> float:
        """Bits for a character that was held out."""
        self._judge_flat.write(weights)
        rows = self._held_out[: len(self._held_out) // len(self._ahead) * len(self._ahead)]
        parts = rows.view(-1, len(self._ahead)).split(256)
        losses = torch.stack([self._loss(self._judge, part) * len(part) for part in parts])
        return float(losses.sum() / sum(map(len, parts)) / np.log(2))


def library_text(length: int) -> Tensor:
    """So many bytes of Python's own sources."""
    found = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("**/*.py")):
        if "-packages" in str(path):  # what others have installed
            continue
        found += path.read_bytes()
        if len(found) >= length:
            break
    return torch.frombuffer(found[:length], dtype=torch.uint8)


def mixed(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU; casts of weights are not kept, because a graph would keep them, too."""
    return torch.autocast(
        device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
    )
