"""What all integrations share: what they tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from laconic.errors import ConfigError
from laconic.exchanges._ratio import HasRatio


@dataclass(frozen=True, kw_only=True)
class Stats(HasRatio):
    """What one rank has done so far."""

    steps: int
    sent_bytes: int
    plain_bytes: int  # what would have been sent without us, in a ring
    exchange_seconds: float  # in the communication thread: codec, copies and wire
    wire_seconds: float  # of these, in collectives, waiting for other ranks included
    local_bytes: int = 0  # inside nodes, where the exchange knows them; not in sent_bytes
    # of codecs with a budget: expected relative squared error of the mean gradient, of parameters
    error_budget: float | None = None  # what was asked for
    error_mean: float | None = None  # over parameters and steps
    error_largest: float | None = None  # of any parameter at any step
    # where that is in an optimizer's units (optimizer=): the same of the gradient itself, estimated
    gradient_error_mean: float | None = None
    gradient_error_largest: float | None = None
    exact_means: int | None = None  # how often only a parameter's exact mean could keep the budget
    kappa: float | None = None  # ‖mean‖²/average ‖gradient‖², where a codec has a budget
    # of the nested exchange, where it is used
    nesting_ratio: float | None = None  # ρ in use, mean over owners of chunks; dqsg counts as 2M+1
    decode_failures: float | None = None  # share of values that this rank decoded wrongly
    correlation: float | None = None  # of what this rank decodes with what it knew, at last look


class Handle(Protocol):
    """What `lc.compress` returns, whatever the model."""

    def stats(self) -> Stats:
        """Bytes and times so far."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to go on exactly."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        ...

    def close(self) -> None:
        """Give threads, connections and process groups back."""
        ...


def own_rank() -> int:
    """This process's number, for states that are each rank's own."""
    return dist.get_rank() if dist.is_initialized() else 0


OWN = "memory", "exchange memory"  # in a handle's state: what only one rank remembers


def check_own(state: Mapping[str, Any], *memories: str) -> None:
    """ConfigError if the state remembers something, and another rank does."""
    owner = state.get("rank", own_rank())
    if owner != own_rank() and any(state.get(name) for name in memories):
        raise ConfigError(
            f"this is the state of rank {owner}, loaded by rank {own_rank()}, and what a rank "
            "remembers is its own: save one file a rank, or lc.AllRanks(handle).state_dict()"
        )


def check_ranks(state: Mapping[str, Any], ranks: int | None, *memories: str) -> None:
    """ConfigError if the state remembers something, and was saved by another number of ranks."""
    before = state.get("ranks")
    if None not in (before, ranks) and before != ranks and any(state.get(m) for m in memories):
        raise ConfigError(
            f"this state was saved by {before} ranks, and these are {ranks}: what each rank "
            "remembers cannot be dealt out again. Resume on as many, or leave this state out: "
            "weights and optimizer are complete without it"
        )
