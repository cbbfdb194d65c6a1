"""Sparse: one two-norm of all gradients makes most integers zero; only the others travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic._cost import Cluster, Task, TensorLoad, Work
from laconic.codecs import Codec
from laconic.comm._context import ExchangeContext, Sizes, decode
from laconic.comm._sums import gather_numbers
from laconic.comm._transport import Message, all_gather, no_values
from laconic.errors import ConfigError
from laconic.exchanges._base import MESSAGE_BYTES, Exchange, buffers, lengths, norm_and_plain

_TEXT = "global:levels=127,norm=l2,coder=elias"


@dataclass(frozen=True, kw_only=True)
class Sparse(Exchange):
    """`sparse`: `global` with norm=l2 and a coder: indices, signs and levels to all.

        N = (Σ_i ‖x_i‖₂²)^½,  Δ = N/s,   q_i = floor(x_i/Δ + r_i)      mean = Σ_i Δ·q_i / n

    1. Local norms to all, as plain numbers with the values that are not encoded: the shared N.
    2. Every rank codes its integers: gaps between non-zeros, signs and levels (coder=elias), or
       bitmaps (coder=bitmap, which runs on CUDA too). Lengths travel first, then the codes.
    3. All ranks decode all codes, in order of ranks, and add them in fp32: the same bits.

    Unbiased, with E‖mean^ - mean‖² ≤ (θ/n)·Σ‖x_i‖², θ = √(d/n)/s. A value is not zero with
    probability min(1, s·|x|/N), so all ranks together send s·√(n·d) non-zeros or fewer; with a norm
    for each rank it would be n·s·√d, √n times as many. levels=1 sends very few, and its error is
    large; without levels= it is s = 127, all that 8 bits hold.
    Bytes per rank: n - 1 times its coded integers.

    Xin et al., Global-QSGD, 2025, arXiv 2305.18627, section 4: described there, not released.
    """

    name: ClassVar[str] = "sparse"

    def check(self, codec: Codec) -> None:
        if not codec.sparse_sum:
            way = "allreduce" if codec.summable else "scatter-reduce"
            raise ConfigError(
                f"sparse codes integers under one two-norm, which {codec} does not make; use "
                f"'{_TEXT}@sparse' (on CUDA coder=bitmap), or '{codec}@{way}'"
            )

    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        n, count = context.size, x.numel()
        norm = codec.global_norm(gather_numbers(codec.local_norm(x), context, uncompressed))
        if not count:
            return
        sizes = Sizes((codec.nbytes(count, x.dtype),) * n, known=False)
        room = context.scratch.take("sparse wire", sizes.bytes[0], x.device, torch.uint8)
        wire = codec.encode(x, context.key(context.rank), norm=norm, workers=1, out=room)
        total = context.scratch.take("sparse sum", count, x.device, torch.float32)
        arrived = all_gather(Message.of(wire, no_values(x)), context, sizes, [0] * n)
        for i, message in enumerate(arrived):
            key = context.key(i)
            decode(codec, message.wire, total, key, (), x.dtype, context, add=i > 0, weight=1 / n)
        x.copy_(total)

    def cost(self, load: TensorLoad, cluster: Cluster) -> list[Task]:
        """Tasks of a bucket: norm(d), S, E(d, 1), X(f(n-1)), X((n-1)(b·d/8 + h)), D(n·d, n)."""
        links, cost, d = cluster.flat, load.cost, load.encoded
        n = links.ranks
        return [
            *norm_and_plain(load, links),
            Work(cost.encode.seconds(d)),
            *lengths(load, links),
            links.all_to_all.move((n - 1) * (cost.bits_out / 8 * d + MESSAGE_BYTES)),
            Work(cost.decode.seconds(n * d, n) + cluster.device.copy.seconds(d)),
        ]

    def memory(self, load: TensorLoad, cluster: Cluster) -> float:
        """Bytes that a rank holds while it exchanges: its wire, and those of all ranks."""
        return buffers(load, cluster.workers, cluster.workers)
