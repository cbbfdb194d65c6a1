"""The contract of an exchange: a tensor on each rank → their mean, the same bits on all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from laconic._cost import (
    Cluster,
    EncodingError,
    Links,
    Task,
    TensorLoad,
    Work,
    sent_bytes,
)
from laconic._spec import to_spec
from laconic._wire import HEADER_BYTES
from laconic.codecs import Codec
from laconic.comm._context import ExchangeContext
from laconic.comm._frame import FRAME_BYTES
from laconic.comm._sums import checked_sum_bytes, sums_at_once
from laconic.errors import ConfigError

MESSAGE_BYTES = HEADER_BYTES + FRAME_BYTES  # of a message, around a wire's body


class Exchange(ABC):
    """How encoded tensors travel and add up. Subclasses are frozen dataclasses: settings only.

    What an exchange costs is in `cost`, `mean_error` and `memory`, for the planner. In their
    equations there are n ranks, d values to encode, c = d/n in a chunk, p plain values of 4 bytes;
    b and b' bits per value out and back, h = 64 + 16 bytes for a header and a message's frame,
    f = 16 for a frame alone. E(v, k) and D(v, k) encode and decode v values in k calls; A(s), X(s)
    and H(s) are all-reduce, all-to-all and sendrecv in which a rank sends s bytes; S is a sum of
    4(n+p) bytes in our own messages, at once or in two all-to-alls (4p where there is no norm).
    In brackets: where there is a shared norm; where lengths vary.
    """

    name: ClassVar[str]
    sums_wires: ClassVar[bool] = False  # as they are, encoded with the number of ranks

    @abstractmethod
    def check(self, codec: Codec) -> None:
        """ConfigError, with a pair that works, if this exchange cannot carry the codec."""

    def prepare(self, group: dist.ProcessGroup) -> None:  # noqa: B027 (most have nothing to do)
        """Make what `mean` needs beside the group itself, such as sub-groups; once, on all ranks.

        Call it where all ranks of the group make groups in the same order, before the first mean:
        process groups made later, in a communication thread, may be made in another order on
        another rank, and hang. `mean` calls it if it was not called.
        """

    def check_group(self, codec: Codec, group: dist.ProcessGroup) -> None:
        """ConfigError if the codec cannot serve this many ranks; after `prepare`."""
        codec.check_workers(1)

    def check_units(self, codec: Codec) -> None:  # noqa: B027 (most remember no values)
        """ConfigError, with what works, if units of values must not change between steps."""

    @abstractmethod
    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        """Replace flat x by the mean over the group: the same bits on every rank.

        `uncompressed`, flat and fp32, holds the values that are not worth encoding: they become
        their mean too, exact up to fp32 rounding, and travel in x's messages where the exchange
        can. All ranks call with equal codec settings, lengths, dtypes and contexts, in the same
        order. Waits for other ranks on the host where the backend does (Gloo).
        """

    def cost(self, load: TensorLoad, cluster: Cluster) -> list[Task]:
        """What a rank does with a bucket, one thing after another."""
        raise ConfigError(
            f"the planner cannot predict {self}: write {type(self).__name__}.cost(load, cluster), "
            "which lists what a rank does as Work and Move tasks"
        )

    def sent_bytes(self, load: TensorLoad, cluster: Cluster) -> float:
        """What a rank sends to ranks of other nodes."""
        return sent_bytes(self.cost(load, cluster))

    def mean_error(self, one: EncodingError, codec: Codec | None = None) -> float:
        """NMSE of the mean that all ranks end with: e/(n·κ), of one encoding.

        Draws of ranks are independent, so Σ_i e·‖x_i‖²/n² = e/(n·κ)·‖mean‖².
        """
        return one.averaged

    def memory(self, load: TensorLoad, cluster: Cluster) -> float:
        """Bytes that a rank holds while it exchanges: two wires, and the fp32 sum of a chunk."""
        return buffers(load, cluster.workers, 1)

    def planned(self, codec: Codec, cluster: Cluster) -> bool:
        """Whether a plan tries it with a codec whose own exchange is another one."""
        return False

    def encodes_mean(self, codec: Codec) -> bool:
        """Whether the mean is encoded once more, and so shares a codec's error budget."""
        return False

    def workers_added(self, codec: Codec, cluster: Cluster) -> int:
        """How many workers' integers are added at the width of one, and so share its levels."""
        return cluster.workers

    def __str__(self) -> str:
        """The spec that names this exchange, with settings that are not the defaults."""
        return to_spec(self)


def norm_and_plain(load: TensorLoad, links: Links) -> list[Task]:
    """[norm(d),] S: the shared scale and plain values in one message, or plain values alone."""
    if load.codec.shared_norm:
        norm = Work(load.cost.norm.seconds(load.encoded))
        return [norm, *_checked_sum(4 * (links.ranks + load.plain), links)]
    return _checked_sum(4 * load.plain, links) if load.plain else []


def _checked_sum(nbytes: float, links: Links) -> list[Task]:
    sent = checked_sum_bytes(nbytes, links.ranks)
    if sums_at_once(nbytes, links.ranks):
        return [links.all_to_all.move(sent)]
    return [links.all_to_all.move(sent / 2)] * 2


def lengths(load: TensorLoad, links: Links) -> list[Task]:
    """[X(f(n-1)),]: lengths travel before wires, where they vary."""
    sent = FRAME_BYTES * (links.ranks - 1)
    return [links.all_to_all.move(sent)] if load.codec.varies else []


def buffers(load: TensorLoad, workers: int, arriving: int) -> float:
    """A wire out, `arriving` wires in, and the fp32 sum of a chunk."""
    return ((1 + arriving) * load.cost.bits_out / 8 + 4 / workers) * load.values
