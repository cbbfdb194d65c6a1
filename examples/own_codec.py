"""A codec of one's own: ternary gradients, checked, then workers train with them.

    torchrun --nproc-per-node 2 examples/own_codec.py

docs/contributing-a-codec.md explains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss, pad
from torch.nn.parallel import DistributedDataParallel

import laconic as lc
from laconic.codecs import DecodeTarget, Header, uniform
from laconic.testing import check_codec


@lc.register_codec
@dataclass(frozen=True, kw_only=True)
class Ternary(lc.Codec):
    """`ternary`: every value becomes -s, 0 or s, at random; s is the largest magnitude.

        t_i = sign(v_i) with probability |v_i|/s, else 0          v̂_i = s·t_i

    E[v̂_i] = v_i, and E‖v̂-v‖² = s·‖v‖₁ - ‖v‖² ≤ (√d - 1)/2 · ‖v‖². Wen et al., TernGrad, 2017.
    """

    name: ClassVar[str] = "ternary"  # lc.codec("ternary")
    id: ClassVar[int] = 128  # marks its wires: 128 to 255
    unbiased: ClassVar[bool] = True

    def variance_bound(self, d: int) -> float | None:
        """For any d values; None where there is no bound."""
        return (d**0.5 - 1) / 2

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        size = 4 + -(-numel // 4) if numel else 0  # s, and four codes to a byte
        return Header(codec=self.id, dtype=dtype, numel=numel, bits=2, body_bytes=size)

    def _write(
        self, x: Tensor, key: lc.Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        size = x.float().abs()
        scale = size.max()  # NaN and infinity stay what they are: 0·s is NaN then
        sent = uniform(key, x.numel(), x.device) * scale < size
        codes = (torch.where(sent, x.sign(), 0) + 1).to(torch.uint8)
        fours = pad(codes, (0, -x.numel() % 4)).view(-1, 4)
        body[:4].view(torch.float32).copy_(scale)
        body[4:].copy_(fours[:, 0] | fours[:, 1] << 2 | fours[:, 2] << 4 | fours[:, 3] << 6)

    def _read(self, wire: lc.Wire, body: Tensor, into: DecodeTarget) -> None:
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=body.device)
        codes = (body[4:, None] >> shifts & 3).view(-1)[: wire.header.numel]
        into.put((codes.float() - 1) * body[:4].view(torch.float32))


def train(steps: int = 200) -> tuple[float, float]:
    """Loss before and after; every worker has data of its own."""
    torch.manual_seed(0)
    model, target = DistributedDataParallel(nn.Linear(200, 100)), nn.Linear(200, 100)
    lc.compress(model, "ternary")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        x = torch.randn(256, 200, generator=generator)
        loss = mse_loss(model(x), target(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    check_codec("ternary")  # on all ranks; says which rule is broken, and how to mend it
    before, after = train()
    if dist.get_rank() == 0:
        print(f"every rule is kept; loss {before:.3f} at first, {after:.3f} in the end")
    dist.destroy_process_group()
