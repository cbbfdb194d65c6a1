"""Master weights, cut among ranks: gradients go in, weights come out, in a thread."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from laconic.codecs import Codec, Uncompressed
from laconic.codecs._memory import Scratch
from laconic.exchanges import Call, Traffic
from laconic.exchanges._lane import Lane
from laconic.exchanges._ledger import error_stats, load_budget, saved_budget
from laconic.schedules._behind import Behind, Turns
from laconic.schedules._push_pull import pull, pull_difference, push
from laconic.server._flat import Flat
from laconic.server._shard import Settings, Shard

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
    """Every rank owns a chunk of them. Rounds run behind the main thread."""

    def __init__(
        self, flat: Flat, optimizer: Optimizer, weights: Tensor, lane: Lane, seed: int
    ) -> None:
        self.flat, self._lane, self._seed = flat, lane, seed
        rank = lane.group.rank()
        self.shard = Shard(optimizer, flat.chunks(weights)[rank], flat.parts(rank))
        self.turns = Turns(Behind(lane, flat.device))
        self._scratch = Scratch()
        self._known: set[Hashable] = set()
        self._memory: dict[Hashable, Any] = {}  # of codecs' budgets

    def start(self, one: Round) -> None:
        """Push, step of the owners, and pull."""
        self._lane.plain_bytes += self.flat.ring_bytes(self._lane.group.size())
        self.turns.start(one.step, partial(self._run, one))

    def gather(self, step: int, out: Tensor) -> None:
        """out = all master weights, exactly, on all ranks."""
        call = self._call(step)
        self.turns.now(partial(pull, self.flat, self.shard.weights, PLAIN, call, out))

    @property
    def skipped(self) -> tuple[int, int]:
        """Steps that all ranks threw away, and those that this chunk did."""
        return self.shard.skipped_steps, self.shard.skipped_shards

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent."""
        return self._lane.traffic

    @property
    def error(self) -> dict[str, Any]:
        """Statistics of the error that pushes have made."""
        return error_stats(self._memory)

    def state_dict(self) -> dict[str, Any]:
        """Of this rank's chunk."""
        return {**self.shard.state_dict(), "budget": saved_budget(self._memory)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        self.shard.load_state_dict(state)
        load_budget(self._memory, state.get("budget"))

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
            memory=self._memory,
            scratch=self._scratch,
            traffic=self._lane.traffic,
        )
