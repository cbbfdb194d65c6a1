"""Master weights, cut among ranks: gradients go in, weights come out, in a thread."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from laconic.codecs import Codec, Uncompressed
from laconic.codecs._memory import Scratch
from laconic.exchanges import Call
from laconic.exchanges._lane import Lane
from laconic.schedules._behind import Behind, Ticket
from laconic.schedules._flat import Flat
from laconic.schedules._push_pull import pull, pull_difference, push
from laconic.schedules._shard import Settings, Shard

PLAIN = Uncompressed()


@dataclass(frozen=True, kw_only=True)
class Round:
    """One step's gradient, and where the weights after it should go, if anywhere."""

    step: int
    g: Tensor
    spoilt: Tensor  # 1 if all ranks must throw their gradients away, else 0
    settings: Settings
    codec: Codec
    pull_codec: Codec | None  # None: no pull
    before: Tensor  # what all ranks pulled last
    out: Tensor


class Masters:
    """Rounds run one after another, behind the main thread; the last two can be waited for."""

    def __init__(
        self, flat: Flat, optimizer: Optimizer, weights: Tensor, lane: Lane, seed: int
    ) -> None:
        self.flat, self._lane, self._seed = flat, lane, seed
        rank = lane.group.rank()
        self.shard = Shard(optimizer, flat.chunks(weights)[rank], flat.parts(rank))
        self._behind = Behind(lane, flat.device)
        self._tickets: list[Ticket | None] = [None, None]  # of the last even and odd step
        self._scratch = Scratch()
        self._known: set[Hashable] = set()

    def start(self, one: Round) -> None:
        """Push, step of the owners, and pull."""
        size = self._lane.group.size()
        self._lane.plain_bytes += round(2 * (size - 1) / size * 4 * self.flat.numel)
        self._tickets[one.step % 2] = self._behind.give(partial(self._run, one))

    def wait(self, step: int) -> None:
        """Until the last round of even, or odd, steps is done."""
        ticket = self._tickets[step % 2]
        if ticket is not None:
            ticket.wait()

    def wait_for_all(self) -> None:
        """Until nothing is on its way."""
        self.wait(0)
        self.wait(1)

    def raise_errors(self) -> None:
        """Those that have happened so far."""
        for ticket in self._tickets:
            if ticket is not None and ticket.failed:
                ticket.wait()

    def gather(self, step: int, out: Tensor) -> None:
        """out = all master weights, exactly, on all ranks."""
        job = partial(pull, self.flat, self.shard.weights, PLAIN, self._call(step), out)
        self._behind.give(job).wait()

    def _run(self, one: Round) -> None:
        call, weights = self._call(one.step), self.shard.weights
        spoilt = push(self.flat, one.g, one.spoilt, one.codec, call, self.shard.mean)
        self.shard.step(one.settings, spoilt)
        if one.pull_codec is None:
            return
        if one.pull_codec.name == "none":
            pull(self.flat, weights, one.pull_codec, call, one.out)
        else:
            pull_difference(self.flat, weights, one.pull_codec, call, one.before, one.out)

    def _call(self, step: int) -> Call:
        return Call(
            group=self._lane.group,
            seed=self._seed,
            step=step,
            places=self.flat.places,
            known=self._known,
            scratch=self._scratch,
            traffic=self._lane.traffic,
        )
