"""One line for every kind of data-parallel model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges import Exchange
from laconic.exchanges._policy import Chooser
from laconic.integrations._common import Handle
from laconic.integrations._ddp import comm_hook
from laconic.integrations._fsdp import FSDPHandle, is_fsdp
from laconic.integrations._state import HookState


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
) -> Handle:
    """`lc.compress`, for everything but "auto"; the arguments are explained there."""
    common: dict[str, Any] = {
        "exchange": exchange,
        "policy": policy,
        "warmup_steps": warmup_steps,
        "seed": seed,
    }
    if isinstance(model, DistributedDataParallel):
        if weights is not None or between is not None:
            raise ConfigError("weights= and between= are for FSDP2: DDP sends gradients only")
        state = HookState(
            model.module,
            spec,
            group=model.process_group,
            timeout_s=timeout_s or 300.0,
            **common,
        )
        model.register_comm_hook(state, comm_hook)
        return state
    if is_fsdp(model):
        if timeout_s is not None:
            raise ConfigError(
                "FSDP2 talks on its own process groups: give init_process_group a timeout"
            )
        return FSDPHandle(model, spec, weights=weights, between=between, **common)
    raise ConfigError(
        "compress takes a DistributedDataParallel model, or one that fully_shard was called on, "
        f"not {type(model).__name__}"
    )
