"""laconic: data-parallel PyTorch training over thin wires."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from laconic import integrations, server
from laconic._key import Key
from laconic._version import __version__
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
    wrappers,
)
from laconic.errors import ConfigError, LaconicError, LostError, WireError
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
from laconic.integrations import FSDPHandle, Handle, HookState, Policy, Stats, comm_hook
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from laconic.exchanges._policy import Chooser
    from laconic.planner._auto import Auto

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
    "Place",
    "Policy",
    "QSGDTopK",
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
    "pair",
    "server",
    "wrappers",
]


@overload
def compress(
    model: nn.Module,
    spec: Literal["auto"],
    *,
    error: float | None = None,
    candidates: Sequence[str] | None = None,
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
    exchange: str | Exchange | None = None,
    policy: Chooser | None = None,
    warmup_steps: int = 0,
    seed: int = 0,
    timeout_s: float | None = None,
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
    `policy(name, parameter)` says what to compress, `warmup_steps` how many steps stay plain.
    For DDP, `timeout_s` (300) ends the wait for a lost peer. For FSDP2, `weights` names a codec for
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
        return integrations.compress(model, spec, **others, **common)
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
