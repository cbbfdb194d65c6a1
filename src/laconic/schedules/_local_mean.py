"""A vector that becomes its mean over ranks, in a thread, while the caller does something else."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import Codec, Place
from laconic.codecs._memory import Scratch
from laconic.exchanges import Call, Exchange
from laconic.exchanges._base import saved_memory
from laconic.exchanges._lane import Lane
from laconic.exchanges._transport import plain_mean
from laconic.schedules._behind import Behind, Ticket


@dataclass(frozen=True)
class Route:
    """How a vector travels: its first `encoded` values by codec and exchange, the rest plain."""

    codec: Codec
    exchange: Exchange
    seed: int
    encoded: int
    places: tuple[Place, ...]


class Mean:
    """One message at a time: fill it, start(), do other things, wait(), read the mean in it.

    `memory` is what the exchange remembers from message to message.
    """

    def __init__(self, message: Tensor, route: Route, lane: Lane) -> None:
        self.message, self.route = message, route
        self.memory: dict[Hashable, Any] = {}
        self.under_way = False  # a message was started that nobody has waited for
        self._lane, self._behind = lane, Behind(lane, message.device)
        self._ticket: Ticket | None = None
        self._largest = 0.0  # magnitude in the mean
        self._known: set[Hashable] = set()
        self._scratch = Scratch()

    def start(self, step: int, *, plain: bool = False) -> None:
        """Returns at once; do not touch the message until wait(). `step` names its draws."""
        call = Call(
            group=self._lane.group,
            seed=self.route.seed,
            step=step,
            places=self.route.places,
            known=self._known,
            scratch=self._scratch,
            traffic=self._lane.traffic,
            memory=self.memory,
        )
        self._ticket = self._behind.give(partial(self._mean, call, plain))
        self.under_way = True

    def wait(self) -> bool:
        """Whether the mean is finite, the same on all ranks. The thread's errors come out here."""
        largest = self._arrived()
        self.under_way = False
        return math.isfinite(largest)

    def _arrived(self) -> float:
        if self._ticket is not None:
            self._ticket.wait()
        return self._largest

    def state_dict(self) -> dict[str, Any]:
        """Waits for a message that is under way, and takes its mean along."""
        largest = self._arrived() if self.under_way else None
        codec: Any = self.route.codec
        return {
            "largest": largest,
            "message": None if largest is None else self.message.clone(),
            "memory": codec.state_dict() if codec.remembers else None,
            "exchange memory": saved_memory(self.memory),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        self._arrived()  # nobody needs it any more, but all ranks have begun it
        codec: Any = self.route.codec
        self._ticket = None
        self.under_way = state["largest"] is not None
        if self.under_way:
            self.message.copy_(state["message"])
            self._largest = float(state["largest"])
        if codec.remembers:
            codec.load_state_dict(state["memory"])
        self.memory = dict(state["exchange memory"])  # exchanges take up what is theirs

    def _mean(self, call: Call, plain: bool) -> None:
        """In the thread. It waits for the device: the largest value of the mean is read."""
        route = self.route
        x, rest = self.message.tensor_split([route.encoded])
        if call.size == 1:  # its own mean; a codec would only add noise
            pass
        elif plain or not x.numel():
            plain_mean(self.message, call)
        else:
            route.exchange.mean(x, route.codec, call, rest if rest.numel() else None)
        largest = torch.linalg.vector_norm(self.message, math.inf)  # NaN if any value is
        self._largest = largest.item()
