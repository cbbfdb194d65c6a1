"""What all handles share: settings by parameter, statistics, and checks of loaded states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from laconic.codecs import Codec
from laconic.comm._statistics import CompressionStats
from laconic.errors import ConfigError
from laconic.exchanges import Exchange, pair
from laconic.exchanges._policy import Choice


class CodecPairs(dict[str, tuple[Codec, Exchange]]):
    """Codec and exchange by spec string; "" is that of parameters without a codec of their own."""

    def __init__(self, spec: str | Codec, exchange: str | Exchange | None) -> None:
        super().__init__({"": pair(spec, exchange)})
        self.exchange_named = exchange is not None or _names_exchange(spec)

    def spec(self, choice: Choice) -> str | None:
        """The spec for a policy's answer; None for values that travel as they are."""
        if isinstance(choice, bool) or choice == "none":
            return "" if choice is True else None
        spec = str(choice)
        if spec not in self:
            self[spec] = pair(choice)
            self.exchange_named |= _names_exchange(choice)
        return spec


def described(path: str, tensor: Tensor, spec: str | None) -> str:
    """A parameter and what happens to it, as ranks compare it."""
    shape = tuple(tensor.shape)
    return f"{path} {shape} {tensor.dtype} {'plain' if spec is None else spec or 'encoded'}"


def _names_exchange(spec: str | Codec) -> bool:
    return isinstance(spec, str) and "@" in spec


@dataclass(frozen=True, kw_only=True)
class Stats(CompressionStats):
    """What one rank has done so far."""

    steps: int
    sent_bytes: int
    plain_bytes: int  # what would have been sent without us, in a ring
    exchange_seconds: float  # in the communication thread: codec, copies and wire
    wire_seconds: float  # of these, in collectives, waiting for other ranks included
    local_bytes: int = 0  # inside nodes, where the exchange knows them; not in sent_bytes
    # of codecs with a budget: expected relative squared error of the mean gradient, of parameters
    error_budget: float | None = None  # error= of the codec
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
    correlation: float | None = None  # of decoded values and side information, when last measured


class HasState(Protocol):
    """Handles of `lc.compress`, and schedules."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to resume exactly."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Resume from a state_dict."""
        ...


@runtime_checkable
class Handle(HasState, Protocol):
    """What `lc.compress` returns, whatever the model."""

    def stats(self) -> Stats:
        """Bytes and times so far."""
        ...

    def close(self) -> None:
        """Give threads, connections and process groups back."""
        ...


def own_rank() -> int:
    """This process's number, for states that are each rank's own."""
    return dist.get_rank() if dist.is_initialized() else 0


def remembers(state: Mapping[str, Any]) -> bool:
    """Whether a handle's state holds what only its own rank remembers."""
    # "memory" in states of earlier versions; the two parts are FSDP's
    names = "residuals", "exchange memory", "memory"
    parts = state, state.get("shards", {}), state.get("replicas", {})
    return any(part.get(name) for part in parts for name in names)


def check_own(state: Mapping[str, Any]) -> None:
    """ConfigError if the state has memory, and it is another rank's."""
    owner = state.get("rank", own_rank())
    if owner != own_rank() and remembers(state):
        raise ConfigError(
            f"this is the state of rank {owner}, loaded by rank {own_rank()}, and what a rank "
            "remembers is its own: save one file per rank, or lc.AllRanks(handle).state_dict()"
        )


def check_ranks(state: Mapping[str, Any], ranks: int | None) -> None:
    """ConfigError if the state has memory, and was saved by another number of ranks."""
    before = state.get("ranks")
    if None not in (before, ranks) and before != ranks and remembers(state):
        raise ConfigError(
            f"this state was saved by {before} ranks, and these are {ranks}: what each rank "
            "remembers cannot be dealt out again. Resume on as many, or leave this state out: "
            "weights and optimizer are complete without it"
        )


class HasStats(Protocol):
    """A handle of `lc.compress`, or a schedule such as `lc.SSD`."""

    def stats(self) -> CompressionStats:
        """What was done so far."""
        ...


class ScalarLogger(Protocol):
    """Takes one number at a time, as TensorBoard's SummaryWriter."""

    def add_scalar(self, name: str, value: float, step: int, /) -> Any:
        """Log one number."""
        ...


class DictLogger(Protocol):
    """Takes all at once and counts steps itself, as wandb and its runs."""

    def log(self, values: dict[str, float], /, *, step: int | None) -> Any:
        """Log all numbers."""
        ...


class MetricsLogger(Protocol):
    """Takes all at once, as mlflow and the loggers of Lightning."""

    def log_metrics(self, values: dict[str, float], /, *, step: int) -> Any:
        """Log all numbers."""
        ...


def log_stats(
    handle: HasStats,
    target: ScalarLogger | DictLogger | MetricsLogger | Callable[[str, float, int], Any],
    step: int | None = None,
) -> None:
    """Log `handle.stats()` by TensorBoard, Weights & Biases, MLflow, or a function.

    `target` is a SummaryWriter, a run of wandb (or the module), mlflow, any other object with
    `add_scalar(name, value, step)`, `log_metrics(values, step=)` or `log(values, step=)`, or a
    function of name, value and step. Without `step` the count of the statistics is used; what has
    `log` counts itself.
    """
    stats = handle.stats()
    values = stats.scalars()
    at = int(stats.scalars(prefix="").get("steps", 0)) if step is None else step
    # getattr, not isinstance of a protocol: loggers of ranks that log nothing make up attributes
    if add_scalar := getattr(target, "add_scalar", None):
        _one_by_one(add_scalar, values, at)
    elif log_metrics := getattr(target, "log_metrics", None):
        log_metrics(values, step=at)
    elif log := getattr(target, "log", None):
        log(values, step=step)
    elif callable(target):
        _one_by_one(target, values, at)
    else:
        raise ConfigError(
            "log_stats takes an object with add_scalar (TensorBoard), log (wandb) or log_metrics "
            f"(mlflow), or a function of name, value and step, not {target!r}"
        )


def _one_by_one(add_scalar: Callable[..., Any], values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        add_scalar(name, value, step)
