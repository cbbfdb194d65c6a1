"""NDQSG on a server: who sends how, and the mean of what they send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic._wire import Wire
from laconic.codecs import NDQSG
from laconic.codecs._memory import Scratch
from laconic.exchanges._nested import Nesting
from laconic.exchanges._nesting import Control, Nest, in_first_group
from laconic.server._chunk import Chunk
from laconic.server._desk import Request

_EVERY = 16  # steps between looks


class Nests:
    """The server decides everything: its answer to a push tells a worker the ratio of its next one.

    P1 are the first ⌈n/2⌉ of the members; they are told the end of the ladder, dqsg. P2 are told
    the ratio that `Control` has found, and at every 16th step the end, too: that is a look. P1 is
    decoded first, then P2 in order, y being the mean of everything before.
    """

    def __init__(self, codec: NDQSG, chunk: Chunk) -> None:
        self._codec, self._chunk, self._scratch = codec, chunk, Scratch()
        self.control = Control(codec)
        self.told: dict[int, int] = {}

    @property
    def _end(self) -> int:
        return self.control.ladder[-1]

    def tell(self, members: Sequence[int], step: int) -> None:
        """Every member's ratio for its push of a step."""
        look = step % _EVERY == 0
        self.told = {
            worker: self._end if look or in_first_group(place, len(members)) else self.control.ratio
            for place, worker in enumerate(members)
        }

    def ratio_of(self, worker: int) -> int:
        """What this worker was told; before that, the end."""
        return self.told.get(worker, self._end)

    def mean(self, requests: Sequence[Request], out: Tensor) -> None:
        """out = the mean of all that was pushed at a step; then decide about the next."""
        look = requests[0].frame.step % _EVERY == 0
        firsts = self._firsts(requests, look)
        nest = Nest(
            self._codec,
            out,
            workers=len(requests),
            control=self.control,
            side=None if firsts else torch.zeros_like(out),
            look=look,
            scratch=self._scratch,
        )
        nest.start(None)
        if out.numel():
            for first in (True, False):
                for request in requests:
                    if (request.worker in firsts) == first:
                        nest.add(self._wire(request, out), first=first)
        nest.finish()
        self.control.decide()

    def _firsts(self, requests: Sequence[Request], look: bool) -> set[int]:
        """P1: those who send plainly. If all of them have left, nothing is known: y = 0."""
        workers = [request.worker for request in requests]
        if look or self.control.ratio == self._end:  # all do; P2 is what a look compares
            return {w for place, w in enumerate(workers) if in_first_group(place, len(workers))}
        return {worker for worker in workers if self.ratio_of(worker) == self._end}

    def stats(self) -> Nesting:
        """How it goes on this server."""
        ratio = self.control.ratio
        return Nesting(
            ratio=ratio, failures=self.control.failures, correlation=self.control.correlation
        )

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on exactly."""
        return {"control": self.control.state_dict(), "told": dict(self.told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        self.control.load_state_dict(state["control"])
        self.told = {int(worker): int(ratio) for worker, ratio in state["told"].items()}

    def _wire(self, request: Request, out: Tensor) -> Wire:
        frame, chunk = request.frame, self._chunk
        key = chunk.call(frame.step).key(request.worker, chunk.number)
        data = chunk.on_device(request.body)
        return Wire.parse(data, key=key, shape=out.shape, dtype=torch.float32)
