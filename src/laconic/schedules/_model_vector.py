"""What ranks exchange of a model as one flat fp32 vector, and its mean, computed in a thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic._scratch import copy_all
from laconic._wire import DTYPES
from laconic.codecs import Codec
from laconic.comm._barrier import barrier, most_bytes
from laconic.comm._context import ExchangeContext, ExchangeSession
from laconic.comm._frame import Call
from laconic.comm._sums import plain_mean
from laconic.comm._threads import CommLane, CommStream, Work
from laconic.errors import ConfigError
from laconic.exchanges import Exchange
from laconic.exchanges._policy import Chooser, policy_for
from laconic.sharding._flat_parameters import FlatParameters
from laconic.sharding._fsdp_shards import fsdp_modules, own_values
from laconic.sharding._trained import Named, Trained


class ModelVector:
    """x = (weights, buffers): of the weights, the first `encoded` values travel through the codec.

    Weights are the parameters that the optimizer trains, in the model's order. Buffers are given by
    name, by `include`, and looked up at each use: a module may put new tensors in their place.
    """

    def __init__(self, trained: Trained, model: nn.Module, policy: Chooser | None) -> None:
        own = {id(p) for _, p in trained.named}
        every = [(name, p) for name, p in model.named_parameters() if id(p) in own]
        named = [(name, p) for name, p in every if own_values(p).numel()]
        encoded, plain = [], []
        policy = policy_for(policy, named)
        for one in named:
            (encoded if _choice(policy, one) else plain).append(one)
        self._model = model
        self.flat = FlatParameters([encoded, plain], owner="LocalSGD")
        self.encoded = self.flat.groups[0][1]
        self.places = self.flat.places[: len(encoded)]
        kinds = ["encoded"] * len(encoded) + ["plain"] * len(plain)
        self.lines = [f"{line} {kind}" for line, kind in zip(self.flat.lines(), kinds, strict=True)]
        self.include([])

    def include(self, buffers: Sequence[str]) -> None:
        """Which buffers are exchanged; vectors have another length from here on."""
        self.buffer_names = list(buffers)
        self.numel = self.flat.numel + sum(buffer.numel() for buffer in self._buffers())

    def empty(self) -> Tensor:
        """A vector, all zero."""
        return torch.zeros(self.numel, dtype=torch.float32, device=self.flat.device)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Its weights and its buffers."""
        return x[: self.flat.numel], x[self.flat.numel :]

    def read(self, x: Tensor) -> Tensor:
        """x = the model's values."""
        weights, buffers = self.split(x)
        self.flat.read(weights)
        self.read_buffers(buffers)
        return x

    def write(self, x: Tensor) -> None:
        """The model = x, rounded to its dtypes."""
        weights, buffers = self.split(x)
        self.write_weights(weights)
        self.write_buffers(buffers)

    def write_weights(self, x: Tensor) -> None:
        """The parameters = x; FSDP gathers them again, where a forward has left whole ones."""
        self.flat.write(x)
        for _, part in fsdp_modules(self._model):
            part.reshard()

    def read_buffers(self, x: Tensor) -> Tensor:
        """x = the buffers."""
        copy_all(self._buffer_views(x), self._buffers())
        return x

    def write_buffers(self, x: Tensor) -> None:
        """The buffers = x."""
        copy_all(self._buffers(), self._buffer_views(x))

    def _buffer_views(self, x: Tensor) -> list[Tensor]:
        own = self._buffers()
        parts = x.split([buffer.numel() for buffer in own])
        return [part.view(buffer.shape) for part, buffer in zip(parts, own, strict=True)]

    def _buffers(self) -> list[Tensor]:
        try:
            return [self._model.get_buffer(name).detach() for name in self.buffer_names]
        except AttributeError as error:
            raise ConfigError(
                f"this state has a buffer that the model has not ({error}): it is of another model"
            ) from None


def running_statistics(model: nn.Module) -> list[str]:
    """Names of buffers of floating point that are finite now.

    A mask of -inf, or an observer that has seen nothing yet, has no mean.
    """
    return [
        name
        for name, buffer in model.named_buffers()
        if buffer.dtype in DTYPES and buffer.numel() and bool(torch.isfinite(buffer).all())
    ]


def _choice(policy: Chooser, one: Named) -> bool:
    choice = policy(*one)
    if not isinstance(choice, bool):
        raise ConfigError(
            f"policy said {choice!r} for {one[0]}: LocalSGD has one codec, so it says True or False"
        )
    return choice


class MeanInFlight:
    """One message at a time: fill it, start(), do other things, wait(), read the mean in it.

    Its first `vector.encoded` values travel by codec and exchange, the rest plain.
    """

    def __init__(
        self, vector: ModelVector, codec: Codec, exchange: Exchange, lane: CommLane, seed: int
    ) -> None:
        self.message = message = vector.empty()
        self._codec, self._exchange = codec, exchange
        self._encoded, self._places = vector.encoded, vector.places
        self._plain_bytes = 4 * (vector.numel - vector.encoded)
        self.session = ExchangeSession(seed=seed, traffic=lane.traffic)
        self.in_flight = False  # a message was started and not waited for
        self._lane, self._stream = lane, CommStream(lane, message.device)
        self._work: Work | None = None
        self._largest = 0.0  # magnitude in the mean
        self._begins = True  # nothing tells yet that other ranks are at this step, too

    def start(self, step: int, *, made: int, plain: bool = False) -> None:
        """Returns at once; do not touch the message until wait(). `step` names its draws.

        `made` steps were taken by this rank.
        """
        context = self.session.context(self._lane.group, step=step, places=self._places)
        self._work = self._stream.submit(partial(self._mean, context, made, plain))
        self.in_flight = True

    def wait(self) -> bool:
        """Whether the mean is finite, on all ranks alike; the thread's errors are raised here."""
        largest = self.arrived()
        self.in_flight = False
        return math.isfinite(largest)

    def arrived(self) -> float:
        """Wait for the message, if one was started; the largest magnitude in its mean."""
        if self._work is not None:
            self._work.wait()
        return self._largest

    def barrier(self, call: Call, made: int) -> None:
        """After what is in flight; see `Schedule.barrier`."""
        self._stream.submit(partial(self._barrier, call, made)).wait()

    def _barrier(self, call: Call, made: int) -> None:
        context = self.session.context(self._lane.group, step=made, places=self._places)
        barrier(call, context, most_bytes(self._codec, self._encoded, context) + self._plain_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Waits for a message that is in flight, and includes its mean."""
        largest = self.arrived() if self.in_flight else None
        return {
            "largest": largest,
            "message": None if largest is None else self.message.clone(),
            **self.session.memory.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict."""
        self.arrived()  # it is not needed any more, but all ranks have started it
        self._work = None
        self.in_flight = state["largest"] is not None
        if self.in_flight:
            self.message.copy_(state["message"])
            self._largest = float(state["largest"])
        self.session.memory.load_state_dict(state)
        self._begins = True

    def _mean(self, context: ExchangeContext, made: int, plain: bool) -> None:
        """In the thread. It waits for the device: the largest value of the mean is read."""
        if self._begins:
            self._barrier(Call.FIRST_STEP, made)
            self._begins = False
        x, rest = self.message.tensor_split([self._encoded])
        if context.size == 1:  # its own mean; a codec would only add noise
            pass
        elif plain or not x.numel():
            plain_mean(self.message, context)
        else:
            self._exchange.mean(x, self._codec, context, rest if rest.numel() else None)
        largest = torch.linalg.vector_norm(self.message, math.inf)  # NaN if any value is
        self._largest = largest.item()
