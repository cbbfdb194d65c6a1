"""laconic: data-parallel PyTorch training over thin wires."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

from laconic._version import __version__
from laconic.errors import ConfigError, LaconicError, LostError, ReplicaError, WireError

if TYPE_CHECKING:  # all of these are imported when first used: see __getattr__
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from laconic import server
    from laconic._key import Key
    from laconic._wire import Wire
    from laconic.codecs import (
        BF16,
        DQSG,
        ECDQ,
        FP16,
        NDQSG,
        QSGD,
        Codec,
        Feedback,
        Global,
        GlobalExp,
        Place,
        QSGDTopK,
        Rotate,
        Uncompressed,
        codec,
        codecs,
        register_codec,
        wrappers,
    )
    from laconic.exchanges import (
        AllGather,
        AllReduce,
        Exchange,
        Hierarchical,
        Nested,
        Ring,
        ScatterReduce,
        Sparse,
        Tree,
        exchanges,
        pair,
    )
    from laconic.exchanges._policy import Chooser
    from laconic.integrations import (
        AllRanks,
        FSDPHandle,
        Handle,
        HookState,
        PerRank,
        Policy,
        Stats,
        comm_hook,
        log_stats,
    )
    from laconic.planner._auto import Auto
    from laconic.schedules import (
        DCASGD,
        GLU,
        QSVRG,
        SSD,
        AdamRule,
        AsyncSGD,
        HeavyBall,
        LocalSGD,
        LocalSGDRule,
        MomentumRule,
        Nesterov,
    )

__all__ = [
    "BF16",
    "DCASGD",
    "DQSG",
    "ECDQ",
    "FP16",
    "GLU",
    "NDQSG",
    "QSGD",
    "QSVRG",
    "SSD",
    "AdamRule",
    "AllGather",
    "AllRanks",
    "AllReduce",
    "AsyncSGD",
    "Codec",
    "ConfigError",
    "Exchange",
    "FSDPHandle",
    "Feedback",
    "Global",
    "GlobalExp",
    "Handle",
    "HeavyBall",
    "Hierarchical",
    "HookState",
    "Key",
    "LaconicError",
    "LocalSGD",
    "LocalSGDRule",
    "LostError",
    "MomentumRule",
    "Nested",
    "Nesterov",
    "PerRank",
    "Place",
    "Policy",
    "QSGDTopK",
    "ReplicaError",
    "Ring",
    "Rotate",
    "ScatterReduce",
    "Sparse",
    "Stats",
    "Tree",
    "Uncompressed",
    "Wire",
    "WireError",
    "__version__",
    "codec",
    "codecs",
    "comm_hook",
    "compress",
    "exchanges",
    "log_stats",
    "pair",
    "register_codec",
    "server",
    "wrappers",
]

# where public names live, in the order of layers; the first that has a name is asked
_HOMES = ("_key", "_wire", "codecs", "exchanges", "integrations", "schedules")
_FUNCTIONS = ("codecs", "exchanges")  # that share their name with a package of laconic


def __getattr__(name: str) -> Any:
    """A public name, imported when first used: `laconic --help` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "server":
        return import_module("laconic.server")
    homes = (import_module(f"{__name__}.{home}") for home in _HOMES)
    value = next(getattr(home, name) for home in homes if hasattr(home, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # importing laconic.codecs would put the package in the place of the function
        if name not in _FUNCTIONS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


@overload
def compress(
    model: nn.Module,
    spec: Literal["auto"],
    *,
    error: float | None = None,
    candidates: Sequence[str] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    policy: Chooser | None = None,
    warmup_steps: int = 0,
    seed: int = 0,
    timeout_s: float | None = None,
) -> Auto: ...


@overload
def compress(
    model: nn.Module,
    spec: str | Codec,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    exchange: str | Exchange | None = None,
    policy: Chooser | None = None,
    warmup_steps: int = 0,
    seed: int = 0,
    timeout_s: float | None = None,
    even_alone: bool = False,
    verify: str = "auto",
    weights: str | Codec | None = None,
    between: str | None = None,
    error: float | None = None,
    candidates: Sequence[str] | None = None,
) -> Handle: ...


def compress(
    model: nn.Module,
    spec: str | Codec,
    *,
    error: float | None = None,
    candidates: Sequence[str] | None = None,
    exchange: str | Exchange | None = None,
    weights: str | Codec | None = None,
    between: str | None = None,
    **common: Any,
) -> Handle:
    """Let a model's gradients travel encoded; call it on all ranks, before the first step.

    `model` is a DistributedDataParallel one, or one that `fully_shard` (FSDP2) was called on.
    `spec` names codec and, behind an @, the exchange ("dqsg:bits=4", "global:bits=8@allreduce").
    `optimizer` (DDP) is the one that steps the model's parameters, or a list of several: where it
    divides gradients by a second moment, as Adam does, they are encoded in its own units, and
    `error=` is that of what it will see. Others, SGD among them, change nothing.
    `policy(name, parameter)` says what to compress, `warmup_steps` how many steps stay plain,
    `verify` whether messages carry check sums: "sum", "none", or "auto", "sum" on the CPU.
    For DDP, `timeout_s` (300) ends the wait for a lost peer, and `even_alone` encodes in a world of
    one rank, too, whose gradients stay exact otherwise. For FSDP2, `weights` names a codec for
    gathered parameters, and on a 2-D mesh `between` is "replicas", "shards" or "both".

    "auto" (DDP) tries strategies in the first steps and keeps the fastest whose error is at most
    `error` (0.08), plain DDP among them; `candidates` are texts to try instead of the usual ones.
    """
    others = {"exchange": exchange, "weights": weights, "between": between}
    if not (isinstance(spec, str) and spec.partition(":")[0].partition("@")[0].strip() == "auto"):
        if error is not None or candidates is not None:
            raise ConfigError(
                'error= and candidates= are for "auto"; a codec has its own, as in '
                '"ecdq:error=0.08"'
            )
        from laconic.integrations import compress as turn_on

        return turn_on(model, spec, **others, **common)
    if spec.strip() != "auto":
        raise ConfigError(
            f'{spec!r}: "auto" stands alone; its settings are arguments, as in '
            'compress(model, "auto", error=0.08)'
        )
    for name, value in others.items():
        if value is not None:
            raise ConfigError(f'{name}= is not for "auto", which chooses by itself: leave it out')
    from laconic.planner._auto import auto

    return auto(model, error=error, candidates=candidates, **common)
