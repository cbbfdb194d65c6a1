"""`lc.compress`: a codec or "auto", for DDP or FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from laconic.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from laconic.codecs import Codec
    from laconic.exchanges import Chooser, Exchange
    from laconic.integrations import Handle
    from laconic.planner import Auto


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
    """Compress the gradients of a model; call it on all ranks, before the first step.

    `model` is a DistributedDataParallel one, or one that `fully_shard` (FSDP2) was called on.
    `spec` names the codec and, after an @, the exchange ("dqsg:bits=4", "global:bits=8@allreduce").
    `optimizer` (DDP) is the one that steps the model's parameters, or a list of several: where it
    divides gradients by a second moment, as Adam does, they are encoded in its own units, and
    `error=` bounds the error of what it sees. Others, SGD among them, change nothing.
    `policy(name, parameter)` decides what is compressed, `warmup_steps` is the number of steps
    that stay uncompressed, `verify` says whether messages carry check sums: "sum", "none", or
    "auto", which is "sum" on the CPU. For DDP, `timeout_s` (300) limits the wait for a lost peer,
    and `even_alone` encodes with a single rank, too, whose gradients stay exact otherwise. For
    FSDP2, `weights` names a codec for gathered parameters, and on a 2-D mesh `between` is
    "replicas", "shards" or "both".

    "auto" (DDP) tries strategies in the first steps and keeps the fastest whose error is at most
    `error` (0.08), plain DDP among them; `candidates` are spec strings to try instead of the
    default ones.
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
            f'{spec!r}: "auto" takes no settings in its spec; pass them as arguments, as in '
            'compress(model, "auto", error=0.08)'
        )
    for name, value in others.items():
        if value is not None:
            raise ConfigError(f'{name}= is not for "auto", which chooses it: leave it out')
    from laconic.planner._auto import auto

    return auto(model, error=error, candidates=candidates, **common)
