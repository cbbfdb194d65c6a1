"""The ranks that take part; without torch.distributed, a world of one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic._key import Key
from laconic.codecs import Codec, Place
from laconic.codecs._memory import Scratch
from laconic.errors import ConfigError
from laconic.exchanges import Call, Exchange, Traffic
from laconic.exchanges._agree import agree
from laconic.exchanges._lane import Lane, own_group
from laconic.exchanges._transport import sum_in_place
from laconic.schedules._module import same_start


class World:
    """What ranks do together in a method without overlap: every call waits, on all of them.

    Alone, nothing is sent, but values are encoded and decoded as they would be.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, timeout_s: float, device: torch.device, seed: int
    ) -> None:
        if group is not None and not dist.is_initialized():
            raise ConfigError("start torch.distributed first: torchrun, then init_process_group()")
        self._lane = Lane(own_group(group, timeout_s)) if dist.is_initialized() else None
        self.rank = self._group.rank() if self._group else 0
        self.size = self._group.size() if self._group else 1
        self._device, self._seed = device, seed
        self.scratch, self.traffic = Scratch(), Traffic()
        self._known: set[Hashable] = set()
        self.memory: dict[Hashable, Any] = {}  # of exchanges

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._lane and self._lane.group

    def close(self) -> None:
        """Give the group back."""
        if self._lane is not None:
            self._lane.close()

    def join(self, settings: dict[str, str], exchange: Exchange) -> None:
        """ConfigError on all ranks unless all have the same settings."""
        if self._group is not None:
            agree(settings, self._group, self._device)
            exchange.prepare(self._group)

    def gather(self, number: int) -> list[int]:
        """Every rank's number."""
        if self._group is None:
            return [number]
        numbers = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        dist.all_gather(numbers, torch.tensor([number], device=self._device), group=self._group)
        return [int(one) for one in numbers]

    def same_start(self, model: nn.Module) -> None:
        """All begin with the first rank's parameters and buffers."""
        if self._group is not None:
            same_start(model, self._group)

    def sum(self, x: Tensor) -> None:
        """x becomes its sum over ranks, in its own precision."""
        if self._group is not None:
            sum_in_place(x, self._call(self._group, 0, ()))

    def mean(
        self, x: Tensor, codec: Codec, exchange: Exchange, step: int, places: Sequence[Place]
    ) -> None:
        """x becomes the mean of what all ranks' encoded x decode to."""
        if self._group is not None:
            exchange.mean(x, codec, self._call(self._group, step, places))
            return
        room = self.scratch.take("wire", codec.nbytes(x.numel()), self._device, torch.uint8)
        wire = codec.encode(x, Key(seed=self._seed, step=step), out=room)
        codec.decode(wire, out=x)

    def _call(self, group: dist.ProcessGroup, step: int, places: Sequence[Place]) -> Call:
        return Call(
            group=group,
            seed=self._seed,
            step=step,
            places=tuple(places),
            known=self._known,
            scratch=self.scratch,
            traffic=self.traffic,
            memory=self.memory,
        )
