"""A vector that becomes its mean over ranks, in a thread, while the caller does something else."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.codecs import Codec, Place
from laconic.codecs._memory import Scratch
from laconic.exchanges import Call, Exchange
from laconic.exchanges._lane import Lane
from laconic.exchanges._scatter_reduce import kappa
from laconic.exchanges._transport import plain_mean
from laconic.schedules._behind import Behind, Ticket


class _Norms(NamedTuple):
    """Two-norms of what was sent and of its mean, and the mean's largest magnitude."""

    own: float
    mean: float
    largest: float


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

    κ = ‖mean‖²/‖own‖² of the last message is what the next one of a codec with a budget counts on.
    """

    def __init__(self, message: Tensor, route: Route, lane: Lane) -> None:
        self.message, self.route, self.kappa = message, route, 0.0
        self.under_way = False  # a message was started that nobody has waited for
        self._lane, self._behind = lane, Behind(lane, message.device)
        self._ticket: Ticket | None = None
        self._norms = _Norms(0.0, 0.0, 0.0)
        self._known: set[Hashable] = set()
        self._scratch = Scratch()
        self._memory: dict[Hashable, Any] = {}

    def start(self, step: int, *, plain: bool = False) -> None:
        """Returns at once; do not touch the message until wait(). `step` names its draws."""
        call = Call(
            group=self._lane.group,
            seed=self.route.seed,
            step=step,
            places=self.route.places,
            kappa=self.kappa,
            known=self._known,
            scratch=self._scratch,
            traffic=self._lane.traffic,
            memory=self._memory,
        )
        self._ticket = self._behind.give(partial(self._mean, call, plain))
        self.under_way = True

    def wait(self) -> bool:
        """Whether the mean is finite, the same on all ranks. The thread's errors come out here."""
        norms, budget = self._arrived(), self.route.codec.budget
        self.under_way = False
        if budget is not None:
            self.kappa = kappa(norms.own, norms.mean, budget) or self.kappa
        return math.isfinite(norms.largest)

    def _arrived(self) -> _Norms:
        if self._ticket is not None:
            self._ticket.wait()
        return self._norms

    def state_dict(self) -> dict[str, Any]:
        """Waits for a message that is under way, and takes its mean along."""
        norms = tuple(self._arrived()) if self.under_way else None
        codec: Any = self.route.codec
        return {
            "kappa": self.kappa,
            "norms": norms,
            "message": None if norms is None else self.message.clone(),
            "memory": codec.state_dict() if codec.remembers else None,
            "exchange memory": saved(self._memory),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        self._arrived()  # nobody needs it any more, but all ranks have begun it
        codec: Any = self.route.codec
        self.kappa, self._ticket = float(state["kappa"]), None
        self.under_way = state["norms"] is not None
        if self.under_way:
            self.message.copy_(state["message"])
            self._norms = _Norms(*state["norms"])
        if codec.remembers:
            codec.load_state_dict(state["memory"])
        self._memory = dict(state["exchange memory"])  # exchanges take up what is theirs

    def _mean(self, call: Call, plain: bool) -> None:
        """In the thread. It waits for the device: norms are read when the mean is there."""
        route = self.route
        x, rest = self.message.tensor_split([route.encoded])
        measured = not plain and route.codec.budget is not None
        own = torch.linalg.vector_norm(x) if measured else None  # read once the mean is there
        if plain or not x.numel():
            plain_mean(self.message, call)
        else:
            route.exchange.mean(x, route.codec, call, rest if rest.numel() else None)
        largest = torch.linalg.vector_norm(self.message, math.inf)  # NaN if any value is
        before, after = (0.0, 0.0) if own is None else (own.item(), _norm(x))
        self._norms = _Norms(before, after, largest.item())


def saved(memory: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """What exchanges remember; as it was loaded, where it was not used since."""
    return {
        key: kept if isinstance(kept, Mapping) else kept.state_dict()
        for key, kept in memory.items()
    }


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
