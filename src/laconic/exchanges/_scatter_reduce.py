"""Scatter-reduce: every rank owns a chunk, adds it up exactly, and sends its mean to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges._base import Call, Exchange
from laconic.exchanges._transport import share, swap
from laconic.exchanges._wires import Sizes, chunk_edges, decode, encode


@dataclass(frozen=True, kw_only=True)
class ScatterReduce(Exchange):
    """`scatter-reduce`: any codec that decodes alone, any number of ranks.

    x is cut into n chunks; rank j owns chunk j.

    1. Every rank encodes each chunk but its own and sends it to its owner (all-to-all).
    2. The owner decodes and adds n - 1 of them, in order of ranks, to its own exact values, in
       fp32: S_j = Σ_i Q(x_i)_j / n.
    3. It encodes S_j once more and sends it to all; all, the owner too, decode that.

    Every rank decodes the same n wires, so all end with the same bits. The error of the mean is
    e1·Σ_{i≠j}‖x_i‖²/n² + e2·‖S‖²: relative to the mean about e1/(n·κ) + e2, with
    κ = ‖mean‖²/(average ‖x_i‖²) between 1/n (independent) and 1 (equal gradients). A codec's
    `error=` is the budget of the mean: half of it goes to each encoding, which is within the budget
    for the worst κ, 1/n.
    Bytes a rank sends: 2·(n-1)/n of the encoded tensor.
    """

    name: ClassVar[str] = "scatter-reduce"

    def check(self, codec: Codec) -> None:
        if codec.name == "ndqsg":
            raise ConfigError(
                "ndqsg decodes with side information, which scatter-reduce does not have; use dqsg"
            )

    def mean(self, x: Tensor, codec: Codec, call: Call) -> None:
        n, rank, half = call.size, call.rank, codec.at_share(0.5)
        edges = chunk_edges(x.numel(), n)
        chunks = [x[edges[j] : edges[j + 1]] for j in range(n)]
        counts = [chunk.numel() for chunk in chunks]
        places = [call.inside(edges[j], edges[j + 1]) for j in range(n)]
        own, nothing = chunks[rank], torch.empty(0, dtype=torch.uint8, device=x.device)

        outgoing = [nothing] * n
        for j, chunk in enumerate(chunks):
            if j != rank and counts[j]:
                outgoing[j] = encode(half, chunk, call.key(rank, j), places[j], call)
        here = [0 if i == rank else counts[rank] for i in range(n)]
        arriving = swap(outgoing, call, Sizes.of(codec, here, [places[rank]] * n, x.dtype))

        total = call.scratch.take("sum", counts[rank], x.device, torch.float32)
        torch.mul(own, 1 / n, out=total)
        for i, message in enumerate(arriving):
            if here[i]:
                key = call.key(i, rank)
                decode(codec, message, total, key, places[rank], x.dtype, add=True, weight=1 / n)

        mine = nothing
        if counts[rank]:
            mine = encode(half, total, call.key(rank, rank, 1), places[rank], call)
        means = share(mine, call, Sizes.of(codec, counts, places, torch.float32))
        for j, message in enumerate(means):
            if counts[j]:
                key = call.key(j, j, 1)
                decode(codec, message, chunks[j], key, places[j], torch.float32)
