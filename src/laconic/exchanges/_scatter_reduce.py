"""Scatter-reduce: every rank owns a chunk, adds it up exactly, and sends its mean to all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic._wire import Wire
from laconic.codecs import Codec, Place
from laconic.errors import ConfigError
from laconic.exchanges._base import Call, Exchange
from laconic.exchanges._transport import Message, no_values, share, swap
from laconic.exchanges._wires import Sizes, chunk_edges, chunks_of, decode, encode

REST_GRAIN = 4  # plain values: chunks start on 16-byte boundaries


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
    `error=` E is the budget of the mean, half for each encoding: e1 = n·κ·E/2 and e2 = E/2. Each
    rank takes its own κ_i = ‖mean‖²/‖x_i‖² as measured before (`Call.kappa`; steps travel in the
    wires, so ranks need not agree): Σ_i e1_i‖x_i‖²/n² = ‖mean‖²·E/2 exactly. Until it is measured,
    κ = 1/n, the worst.
    Bytes a rank sends: 2·(n-1)/n of the encoded tensor.
    """

    name: ClassVar[str] = "scatter-reduce"

    def check(self, codec: Codec) -> None:
        if codec.name == "ndqsg":
            raise ConfigError(
                "ndqsg decodes with side information, which scatter-reduce (FSDP's, too) does not "
                "have: ndqsg@nested has it, under DDP; or use dqsg"
            )

    def mean(self, x: Tensor, codec: Codec, call: Call, rest: Tensor | None = None) -> None:
        n, rank, half = call.size, call.rank, codec.at_share(0.5)
        first = codec.at_share(0.5 * gain(n * call.kappa))
        edges = chunk_edges(x.numel(), n)
        chunks = [x[edges[j] : edges[j + 1]] for j in range(n)]
        places = [call.inside(edges[j], edges[j + 1]) for j in range(n)]
        plain = chunks_of(no_values(x) if rest is None else rest, n, REST_GRAIN)
        total = call.scratch.take("sum", chunks[rank].numel(), x.device, torch.float32)
        scatter(chunks, first, call, total, places=places, rest=plain, rest_out=plain[rank])
        gather(total, half, call, chunks, places=places, rest=plain)


def kappa(own: float, mean: float, error: float) -> float:
    """κ = ‖mean‖²/‖own‖², at most 1, from two-norms; 0 if they do not tell.

    The decoded mean's error adds error·‖mean‖² to its squared norm, which is taken off.
    """
    value = (mean / own) ** 2 / (1 + error) if own > 0 else 0.0
    return min(value, 1.0) if value > 0 else 0.0  # NaN is no value


def gain(nk: float) -> float:
    """n·κ as the factor of the first encoding's error: 1 to 16, rounded down to quarter octaves.

    Few different values, because codecs with different settings have caches of their own; above 16
    a first encoding would save little more.
    """
    if not nk > 1:  # not measured, or NaN
        return 1.0
    return 2.0 ** (math.floor(4 * math.log2(min(nk, 16.0))) / 4)


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
    messages = []
    for j, chunk in enumerate(chunks):
        wire = None
        if j != rank and chunk.numel():
            wire = encode(codec, chunk, call.key(rank, j), places[j], call)
        messages.append(Message.of(wire, rest[j] if j != rank else rest[j][:0]))
    here = [0 if i == rank else out.numel() for i in range(n)]
    rest_here = [0 if i == rank else rest_out.numel() for i in range(n)]
    sizes = Sizes.of(codec, here, [places[rank]] * n, dtype)
    arriving = swap(messages, call, sizes, rest_here)
    out.copy_(chunks[rank]).mul_(1 / n)  # in fp32 before it is weighed
    torch.mul(rest[rank], 1 / n, out=rest_out)
    for i, message in enumerate(arriving):
        if here[i]:
            key = call.key(i, rank)
            decode(codec, message.wire, out, key, places[rank], dtype, call, add=True, weight=1 / n)
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
    wire: Wire | None = None,
) -> None:
    """Every rank's `mine`, encoded once, becomes its chunk on all ranks; plain values likewise.

    `wire` is that of `mine`, where the caller has needed it before.
    """
    rank, counts = call.rank, [chunk.numel() for chunk in chunks]
    if wire is None and counts[rank]:
        wire = encode(codec, mine, call.key(rank, rank, 1), places[rank], call)
    sizes = Sizes.of(codec, counts, places, mine.dtype)
    plain = [part.numel() for part in rest]
    for j, message in enumerate(share(Message.of(wire, rest[rank]), call, sizes, plain)):
        if counts[j]:
            decode(codec, message.wire, chunks[j], call.key(j, j, 1), places[j], mine.dtype, call)
        if plain[j] and j != rank:
            rest[j].copy_(message.rest)
