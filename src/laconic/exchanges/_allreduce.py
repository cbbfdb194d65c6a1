"""All-reduce: integers or floats are added while encoded, inside one collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic._cost import Cluster, Task, TensorLoad, Work
from laconic._wire import HEADER_BYTES
from laconic.codecs import Codec
from laconic.comm._context import ExchangeContext
from laconic.comm._sums import gather_numbers, plain_mean, sum_in_place
from laconic.errors import ConfigError, WireError
from laconic.exchanges._base import Exchange, norm_and_plain
from laconic.kernels import backend

CHECK_BYTES = 4  # per rank, after the integers


@dataclass(frozen=True, kw_only=True)
class AllReduce(Exchange):
    """`allreduce`: codecs whose wires add up (none, fp16, bf16, global).

    1. Where the codec has a shared scale: every rank's local norm to all, as plain numbers, so that
       NaN stays NaN (Gloo's MAX loses it), in one message with the values that are not encoded.
    2. payload = encode(x, workers=n); all-reduce(payload, SUM); x = decode_sum(payload).
    3. On the CPU the sum of integers is checked. After them travels every rank's
       h_i = Σ_k w_k·q_ik mod 2^32, with odd weights w_k, in 4 bytes of its own among zeros:

           Σ_k w_k·(Σ_i q_ik) = Σ_i h_i   mod 2^32

       Sums of floats have none: above 1 MiB the backend's result is taken, as plain DDP takes it.

    Bytes per rank: those of the backend's all-reduce, 2·(n-1)/n of the payload for a ring.
    """

    name: ClassVar[str] = "allreduce"
    sums_wires: ClassVar[bool] = True

    def check(self, codec: Codec) -> None:
        if not codec.summable:
            raise ConfigError(
                f"{codec.name}'s wires do not add up in an all-reduce; use "
                f"'{codec}@scatter-reduce', or a codec that sums: none, fp16, bf16, global "
                "(global:bits=8,subtract=true is dqsg with one scale for all ranks)"
            )

    def check_group(self, codec: Codec, group: dist.ProcessGroup) -> None:
        codec.check_workers(group.size())

    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        keys = [context.key(rank) for rank in range(context.size)]
        norm = None
        if codec.shared_norm:
            norm = codec.global_norm(gather_numbers(codec.local_norm(x), context, uncompressed))
        else:
            plain_mean(uncompressed, context)
        room = codec.nbytes(x.numel(), x.dtype) + CHECK_BYTES * context.size
        buffer = context.scratch.take("wire", room, x.device, torch.uint8)
        wire = codec.encode(x, keys[context.rank], norm=norm, workers=context.size, out=buffer)
        payload = wire.payload
        if payload.is_floating_point() or not context.sums(x.device):
            sum_in_place(payload, context)
        else:
            # the scale after the integers is not needed any more: all ranks hold it as `norm`
            finite = norm is None or bool(norm.isfinite())
            _sum_integers(payload, buffer[HEADER_BYTES:], context, finite)
        codec.decode_sum(payload, keys, norm=norm, shape=x.shape, dtype=x.dtype, out=x)

    def cost(self, load: TensorLoad, cluster: Cluster) -> list[Task]:
        """Tasks of a bucket; lossless codecs send w bytes per value, plain ones among them.

        [norm(d),] S, E(d, 1), A(2(n-1)/n·(b·d/8 + 4n)), reduce(d), D(d, 1)
        none: A(2(n-1)/n·w·(d + p)), copy(d + p)
        """
        links, cost, d = cluster.flat, load.cost, load.encoded
        if load.codec.lossless:
            copy = Work(cluster.device.copy.seconds(load.values))
            return [links.sum(load.value_bytes * load.values), copy]
        return [
            *norm_and_plain(load, links),
            Work(cost.encode.seconds(d)),
            links.sum(cost.bits_out / 8 * d + CHECK_BYTES * links.ranks),
            Work(cost.reduce.seconds(d) + cost.decode.seconds(d)),
        ]


def _sum_integers(payload: Tensor, body: Tensor, context: ExchangeContext, finite: bool) -> None:
    """The payload, where `body` starts, becomes its sum; WireError if that is not what was sent.

    Under a scale that is not finite integers mean nothing, and may overflow: the mean is NaN.
    """
    end, n, kernels = payload.nbytes, context.size, backend(payload.device)
    salt = context.key(0).stream().k0
    own = kernels.payload_check(payload, salt).to(torch.int32).view(1)
    checks = body[end : end + CHECK_BYTES * n]
    checks.zero_().view(n, CHECK_BYTES)[context.rank].copy_(own.view(torch.uint8))
    sum_in_place(body[: end + CHECK_BYTES * n].view(payload.dtype), context)
    every = int.from_bytes  # little-endian, as they were written
    want = sum(every(bytes(one.tolist()), "little") for one in checks.split(CHECK_BYTES))
    if finite and int(kernels.payload_check(payload, salt)) != want & 0xFFFFFFFF:
        raise WireError(
            f"the sum of all ranks' integers at step {context.step} is damaged, and was not used: "
            "it does not match the check sums of what they sent; if this happens again, look for a "
            "faulty link, switch or memory, or a rank with other settings"
        )
