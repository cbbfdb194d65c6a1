"""All-reduce: integers or floats are added while encoded, inside one collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges._base import Call, Exchange
from laconic.exchanges._transport import gather_numbers, plain_mean, sum_in_place


@dataclass(frozen=True, kw_only=True)
class AllReduce(Exchange):
    """`allreduce`: codecs whose wires add up (none, fp16, bf16, global).

    1. Where the codec has a shared scale: every rank's local norm to all, as plain numbers, so that
       NaN stays NaN (Gloo's MAX loses it), in one message with the values that are not encoded.
    2. payload = encode(x, workers=n); all-reduce(payload, SUM); x = decode_sum(payload).

    Bytes a rank sends: those of the backend's all-reduce, 2·(n-1)/n of the payload for a ring.
    """

    name: ClassVar[str] = "allreduce"

    def check(self, codec: Codec) -> None:
        if not codec.summable:
            raise ConfigError(
                f"{codec.name}'s wires do not add up in an all-reduce; use "
                f"'{codec}@scatter-reduce', or a codec that sums: none, fp16, bf16, global "
                "(global:bits=8,subtract=true is dqsg with one scale for all ranks)"
            )

    def check_group(self, codec: Codec, group: dist.ProcessGroup) -> None:
        codec.check_workers(group.size())

    def mean(self, x: Tensor, codec: Codec, call: Call, rest: Tensor | None = None) -> None:
        own: Any = codec
        keys = [call.key(rank) for rank in range(call.size)]
        norm = None
        if hasattr(codec, "local_norm"):
            norm = own.global_norm(gather_numbers(own.local_norm(x), call, rest))
        else:
            plain_mean(rest, call)
        room = codec.nbytes(x.numel(), x.dtype)
        buffer = call.scratch.take("wire", room, x.device, torch.uint8)
        wire = codec.encode(x, keys[call.rank], norm=norm, workers=call.size, out=buffer)
        payload = wire.payload
        sum_in_place(payload, call)
        codec.decode_sum(payload, keys, norm=norm, shape=x.shape, dtype=x.dtype, out=x)
