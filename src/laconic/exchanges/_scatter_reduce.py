"""Scatter-reduce: every rank owns a chunk, adds it up exactly, and sends its mean to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import Codec, Place
from laconic.errors import ConfigError
from laconic.exchanges._base import Call, Exchange
from laconic.exchanges._transport import Message, no_values, share, swap
from laconic.exchanges._wires import Sizes, chunk_edges, chunks_of, decode, encode

_REST_GRAIN = 4  # plain values: chunks start on 16-byte boundaries


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

    def mean(self, x: Tensor, codec: Codec, call: Call, rest: Tensor | None = None) -> None:
        n, rank, half = call.size, call.rank, codec.at_share(0.5)
        edges = chunk_edges(x.numel(), n)
        chunks = [x[edges[j] : edges[j + 1]] for j in range(n)]
        places = [call.inside(edges[j], edges[j + 1]) for j in range(n)]
        plain = chunks_of(no_values(x) if rest is None else rest, n, _REST_GRAIN)
        total = call.scratch.take("sum", chunks[rank].numel(), x.device, torch.float32)
        scatter(chunks, half, call, total, places=places, rest=plain, rest_out=plain[rank])
        gather(total, half, call, chunks, places=places, rest=plain)


def scatter(
    chunks: Sequence[Tensor],
    codec: Codec,
    call: Call,
    out: Tensor,
    *,
    places: Sequence[Sequence[Place]],
    rest: Sequence[Tensor],
    rest_out: Tensor,
) -> None:
    """out = the mean over ranks of chunk `rank`, in fp32; rest_out likewise of plain values."""
    n, rank, dtype = call.size, call.rank, chunks[0].dtype
    nothing = torch.empty(0, dtype=torch.uint8, device=out.device)
    messages = []
    for j, chunk in enumerate(chunks):
        wire = nothing
        if j != rank and chunk.numel():
            wire = encode(codec, chunk, call.key(rank, j), places[j], call)
        messages.append(Message(wire, rest[j] if j != rank else rest[j][:0]))
    here = [0 if i == rank else out.numel() for i in range(n)]
    rest_here = [0 if i == rank else rest_out.numel() for i in range(n)]
    sizes = Sizes.of(codec, here, [places[rank]] * n, dtype)
    arriving = swap(messages, call, sizes, rest_here)
    torch.mul(chunks[rank], 1 / n, out=out)
    torch.mul(rest[rank], 1 / n, out=rest_out)
    for i, message in enumerate(arriving):
        if here[i]:
            key = call.key(i, rank)
            decode(codec, message.wire, out, key, places[rank], dtype, add=True, weight=1 / n)
        if rest_here[i]:
            rest_out.add_(message.rest, alpha=1 / n)


def gather(
    mine: Tensor,
    codec: Codec,
    call: Call,
    chunks: Sequence[Tensor],
    *,
    places: Sequence[Sequence[Place]],
    rest: Sequence[Tensor],
) -> None:
    """Every rank's `mine`, encoded once, becomes its chunk on all ranks; plain values likewise."""
    rank, counts = call.rank, [chunk.numel() for chunk in chunks]
    wire = torch.empty(0, dtype=torch.uint8, device=mine.device)
    if counts[rank]:
        wire = encode(codec, mine, call.key(rank, rank, 1), places[rank], call)
    sizes = Sizes.of(codec, counts, places, mine.dtype)
    plain = [part.numel() for part in rest]
    for j, message in enumerate(share(Message(wire, rest[rank]), call, sizes, plain)):
        if counts[j]:
            decode(codec, message.wire, chunks[j], call.key(j, j, 1), places[j], mine.dtype)
        if plain[j] and j != rank:
            rest[j].copy_(message.rest)
