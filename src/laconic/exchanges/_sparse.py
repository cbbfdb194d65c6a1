"""Sparse: one two-norm of all gradients makes most integers zero; only the others travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges._base import Call, Exchange
from laconic.exchanges._transport import Message, gather_numbers, no_values, share
from laconic.exchanges._wires import Sizes, decode

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
    Bytes a rank sends: n - 1 times its coded integers.

    Xin et al., Global-QSGD, 2025, arXiv 2305.18627, section 4: described there, not released.
    """

    name: ClassVar[str] = "sparse"

    def check(self, codec: Codec) -> None:
        own: Any = codec
        if codec.name != "global" or codec.summable or own.norm not in ("l2", "2/2"):
            way = "allreduce" if codec.summable else "scatter-reduce"
            raise ConfigError(
                f"sparse codes integers under one two-norm, which {codec} does not make; use "
                f"'{_TEXT}@sparse' (on CUDA coder=bitmap), or '{codec}@{way}'"
            )

    def mean(self, x: Tensor, codec: Codec, call: Call, rest: Tensor | None = None) -> None:
        own: Any = codec  # with local_norm and global_norm
        n, count = call.size, x.numel()
        norm = own.global_norm(gather_numbers(own.local_norm(x), call, rest))
        if not count:
            return
        sizes = Sizes((codec.nbytes(count, x.dtype),) * n, known=False)
        room = call.scratch.take("sparse wire", sizes.bytes[0], x.device, torch.uint8)
        wire = codec.encode(x, call.key(call.rank), norm=norm, workers=1, out=room)
        total = call.scratch.take("sparse sum", count, x.device, torch.float32)
        arrived = share(Message.of(wire, no_values(x)), call, sizes, [0] * n)
        for i, message in enumerate(arrived):
            key = call.key(i)
            decode(codec, message.wire, total, key, (), x.dtype, call, add=i > 0, weight=1 / n)
        x.copy_(total)
