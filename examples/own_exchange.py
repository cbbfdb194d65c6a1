"""An exchange of one's own: ranks broadcast in turn. It is checked, then planned.

    python examples/own_exchange.py

docs/contributing-an-exchange.md explains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import laconic as lc
from laconic.planner import Cluster, Paper, Task, TensorLoad, Work, machine, paper_workload, plan
from laconic.testing import check_exchange


@lc.register_exchange
@dataclass(frozen=True, kw_only=True)
class Broadcast(lc.Exchange):
    """`broadcast`: every rank sends its wire to all, in turn; all decode and add in that order."""

    name: ClassVar[str] = "broadcast"  # "dqsg:bits=4@broadcast"

    def check(self, codec: lc.Codec) -> None:
        if codec.side_information or codec.residuals or codec.varies:
            raise lc.ConfigError(f"broadcast carries wires of one length, not {codec}'s: use dqsg")

    def mean(
        self,
        x: Tensor,
        codec: lc.Codec,
        context: lc.ExchangeContext,
        uncompressed: Tensor | None = None,
    ) -> None:
        n, total = context.size, torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        wire = codec.encode(x, context.key(context.rank))
        for rank in range(n if x.numel() else 0):
            data = wire.data.clone() if rank == context.rank else torch.empty_like(wire.data)
            with context.traffic.sending(data.numel() * (n - 1) / n):
                dist.broadcast(data, dist.get_global_rank(context.group, rank), context.group)
            arrived = lc.Wire.parse(data, key=context.key(rank), shape=x.shape, dtype=x.dtype)
            codec.decode(arrived, out=total, add=True, weight=1 / n)
        x.copy_(total)
        if uncompressed is not None:
            with context.traffic.sending(4 * uncompressed.numel() * 2 * (n - 1) / n):
                dist.all_reduce(uncompressed.div_(n), group=context.group)

    def cost(self, load: TensorLoad, cluster: Cluster) -> list[Task]:
        """Tasks of a bucket: E(d, 1), H((n-1)/n·b·d/8) n times, A(2(n-1)/n·4p), D(n·d, n)."""
        n, d, links = cluster.flat.ranks, load.encoded, cluster.flat
        turn = links.sendrecv.move((n - 1) / n * load.cost.bits_out / 8 * d)
        encode, decode = load.cost.encode.seconds(d), load.cost.decode.seconds(n * d, n)
        return [Work(encode), *[turn] * n, links.sum(4 * load.plain), Work(decode)]

    def planned(self, codec: lc.Codec, cluster: Cluster) -> bool:
        return cluster.workers <= 8 and not (codec.varies or codec.lossless)


if __name__ == "__main__":
    check_exchange("broadcast")  # starts processes; says which rule is broken, and how to fix it
    found = plan(Paper(machine=machine("home"), workers=4).cluster(), paper_workload(10**7, 0.1))
    row = next(one for one in found.choices if one.name == "dqsg:bits=4@broadcast")
    print(f"every rule is kept; {row.code} is predicted {row.speedup:.1f} x faster than plain DDP")
