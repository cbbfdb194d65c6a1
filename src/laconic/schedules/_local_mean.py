"""A vector that becomes its mean over ranks, in a thread, while the caller does something else."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.codecs import Codec, Place
from laconic.codecs._memory import Scratch
from laconic.exchanges import Call, Exchange
from laconic.exchanges._lane import Lane
from laconic.exchanges._transport import plain_mean


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
        self.message, self.route, self.lane, self.kappa = message, route, lane, 0.0
        self._flight: Future[_Norms] | None = None
        self._known: set[Hashable] = set()
        self._scratch = Scratch()
        self._stream = torch.cuda.Stream(message.device) if message.is_cuda else None

    @property
    def under_way(self) -> bool:
        """Whether a message was started that nobody has waited for."""
        return self._flight is not None

    def start(self, step: int, *, plain: bool = False) -> None:
        """Returns at once; do not touch the message until wait(). `step` names its draws."""
        call = Call(
            group=self.lane.group,
            seed=self.route.seed,
            step=step,
            places=self.route.places,
            kappa=self.kappa,
            known=self._known,
            scratch=self._scratch,
            traffic=self.lane.traffic,
        )
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream(self._stream.device).record_event()
        self._flight = self.lane.thread.submit(self._fly, call, plain, ready)

    def wait(self) -> bool:
        """Whether the mean is finite, the same on all ranks. The thread's errors come out here."""
        assert self._flight is not None
        norms, self._flight = self._flight.result(), None
        self.kappa = _kappa(norms, self.route.codec.budget) or self.kappa
        return math.isfinite(norms.largest)

    def state_dict(self) -> dict[str, Any]:
        """Waits for a message that is under way, and takes its mean along."""
        norms = None if self._flight is None else tuple(self._flight.result())
        codec: Any = self.route.codec
        return {
            "kappa": self.kappa,
            "norms": norms,
            "message": None if norms is None else self.message.clone(),
            "memory": codec.state_dict() if codec.remembers else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        if self._flight is not None:  # nobody needs it any more, but all ranks have begun it
            self._flight.result()
        codec: Any = self.route.codec
        self.kappa, self._flight = float(state["kappa"]), None
        if state["norms"] is not None:
            self.message.copy_(state["message"])
            self._flight = Future()
            self._flight.set_result(_Norms(*state["norms"]))
        if codec.remembers:
            codec.load_state_dict(state["memory"])

    def _fly(self, call: Call, plain: bool, ready: Any) -> _Norms:
        """In the thread. It waits for the device: norms are read when the mean is there."""
        if self._stream is None:
            return self._mean(call, plain)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            return self._mean(call, plain)

    def _mean(self, call: Call, plain: bool) -> _Norms:
        route = self.route
        x, rest = self.message.tensor_split([route.encoded])
        measured = not plain and route.codec.budget is not None
        own = torch.linalg.vector_norm(x) if measured else None
        if plain or not x.numel():
            plain_mean(self.message, call)
        else:
            route.exchange.mean(x, route.codec, call, rest if rest.numel() else None)
        largest = torch.linalg.vector_norm(self.message, math.inf)  # NaN if any value is
        if own is None:
            return _Norms(0.0, 0.0, largest.item())
        return _Norms(own.item(), torch.linalg.vector_norm(x).item(), largest.item())


def _kappa(norms: _Norms, budget: float | None) -> float:
    """‖mean‖²/‖own‖² without the codec's error, to 1; 0 if it cannot be known."""
    if budget is None or not norms.own > 0:
        return 0.0
    value = (norms.mean / norms.own) ** 2 / (1 + budget)
    return min(value, 1.0) if value > 0 else 0.0
