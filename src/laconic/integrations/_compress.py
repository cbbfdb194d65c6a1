"""`lc.compress` for every kind of data-parallel model, now or when a framework wraps it."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges import Exchange, pair
from laconic.exchanges._policy import Chooser
from laconic.integrations._ddp import comm_hook
from laconic.integrations._fsdp import FSDPHandle, is_fsdp
from laconic.integrations._handle import Handle
from laconic.integrations._state import HookState

_WRAPPERS = ("_orig_mod", "_forward_module")  # of torch.compile, and of Lightning's Fabric
_log = logging.getLogger("laconic")


def compress(
    model: nn.Module,
    spec: str | Codec,
    *,
    exchange: str | Exchange | None = None,
    policy: Chooser | None = None,
    warmup_steps: int = 0,
    seed: int = 0,
    timeout_s: float | None = None,
    even_alone: bool = False,
    verify: str = "auto",
    weights: str | Codec | None = None,
    between: str | None = None,
    optimizer: Any = None,
) -> Handle:
    """`lc.compress`, for everything but "auto"; the arguments are explained there."""
    common: dict[str, Any] = {
        "exchange": exchange,
        "policy": policy,
        "warmup_steps": warmup_steps,
        "seed": seed,
        "verify": verify,
    }
    model = unwrapped(model)
    if isinstance(model, DistributedDataParallel):
        if weights is not None or between is not None:
            raise ConfigError("weights= and between= are for FSDP2: DDP sends gradients only")
        check_free(model)
        state = HookState(
            model.module,
            spec,
            group=model.process_group,
            timeout_s=timeout_s or 300.0,
            even_alone=even_alone,
            optimizer=optimizer,
            static_graph=model.static_graph,
            **common,
        )
        model.register_comm_hook(state, comm_hook)
        if not state.encodes and not state.codec.lossless and dist.get_rank() == 0:
            _log.warning(
                "nothing of this model is compressed: by default only matrices of 10,000 values "
                "or more are, or smaller ones that have as many together; "
                "policy=lc.Policy(min_numel=0) takes all"
            )
        return state
    if is_fsdp(model):
        if optimizer is not None:
            raise ConfigError(
                "optimizer= is for DDP: under FSDP2 a rank knows second moments of its own shard "
                "only, and encodes gradients of all; 'ecdq:error=0.08,block=4096' has a step for "
                "every 4096 values, which serves Adam nearly as well"
            )
        if timeout_s is not None:
            raise ConfigError(
                f"timeout_s={timeout_s} is for DDP: messages of FSDP2 travel in its own process "
                "groups, so give init_process_group a timeout"
            )
        return FSDPHandle(model, spec, weights=weights, between=between, **common)
    raise ConfigError(not_parallel(model))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of what torch.compile and Fabric put around it."""
    for name in _WRAPPERS:
        model = getattr(model, name, model)
    return model


def check_free(model: DistributedDataParallel) -> None:
    """ConfigError if the model has a hook: DDP takes one, and would raise only later."""
    if any(hasattr(one, "_in_backward_optimizers") for one in model.parameters()):
        raise ConfigError(  # DDP registers that hook at the first forward pass
            "this model's optimizers step inside backward (_apply_optimizer_in_backward), in DDP's "
            "one communication hook: use an ordinary optimizer, and call its step()"
        )
    for hook, _ in getattr(model, "_comm_hooks", ()):
        if getattr(hook, "__module__", "").startswith("laconic."):
            raise ConfigError(
                "this model is compressed already: call compress once, before the first step, and "
                "keep the handle that it returned"
            )
        name = getattr(hook, "__name__", hook)
        if getattr(model, "mixed_precision", None) is not None:
            raise ConfigError(
                "DDP(mixed_precision=..) uses DDP's one communication hook: use torch.autocast, or "
                "a model in bfloat16, instead"
            )
        raise ConfigError(
            f"this model has a communication hook already, {name}, and DDP takes one: leave that "
            "out (fp16 compression is lc.compress(model, 'fp16'))"
        )


def not_parallel(model: nn.Module) -> str:
    """Why a model cannot be compressed, and what to do."""
    kind = type(model).__name__
    if kind == "FullyShardedDataParallel":
        return "compress is for FSDP2: call fully_shard on the model instead of wrapping it"
    if kind == "DataParallel":
        return (
            "nn.DataParallel is one process, in which nothing is compressed: start one process per "
            "device with torchrun, and use DistributedDataParallel"
        )
    said = (
        "compress takes a DistributedDataParallel model, or one that fully_shard was called on, "
        f"not {kind}: "
    )
    size = dist.get_world_size() if dist.is_initialized() else 1
    if "accelerate" in sys.modules and size == 1:
        return said + (
            "a single process sends nothing, so start several with torchrun (accelerate launch "
            "starts one on CPUs), or compress only if accelerator.num_processes > 1"
        )
    if not dist.is_initialized():
        return said + (
            "start ranks with torchrun, call torch.distributed.init_process_group(), then model = "
            "DistributedDataParallel(model), then compress it"
        )
    if size == 1:
        return said + ("and a single process sends nothing; wrap the model, or leave compress out")
    if "accelerate" in sys.modules and not torch.cuda.is_available():
        return said + (
            "compress what accelerator.prepare returned; on CPUs it wraps models with "
            "Accelerator(cpu=True) only"
        )
    return said + "wrap it first, model = DistributedDataParallel(model), then compress that"


class Compression:
    """`lc.compress` for a model that a framework wraps later; the settings are checked now."""

    def __init__(self, spec: str | Codec, settings: dict[str, Any]) -> None:
        _check(spec, settings)
        self.spec, self._settings = spec, settings
        self.handle: Handle | None = None
        self._reported: str | None = None
        self._wrapped: Any = None  # weak: a wrapper has buffers as large as the model
        self._inside: Any = None

    def start(self, model: nn.Module, advice: str, optimizers: Sequence[Any] = ()) -> bool:
        """Compress a wrapped model, once; False in a single process, which has nothing to send.

        Under DDP gradients have the units of the framework's optimizers, unless settings differ.
        """
        model = unwrapped(model)
        if self._wrapped is not None and self._wrapped() is model:
            return True
        before, self.handle = self.handle, None
        if not isinstance(model, DistributedDataParallel) and not is_fsdp(model):
            if _processes() == 1:
                return False
            raise ConfigError(
                f"this trains a {type(model).__name__}, and only gradients of models in "
                f"DistributedDataParallel, or of FSDP2, can be compressed: {advice}"
            )
        # the package and not this layer knows "auto"
        turn_on = sys.modules["laconic"].compress
        settings = self._settings
        if isinstance(model, DistributedDataParallel) and optimizers:
            settings = {"optimizer": list(optimizers), **settings}
        self.handle = handle = turn_on(model, self.spec, **settings)
        inside = model.module if isinstance(model, DistributedDataParallel) else model
        if before is not None and self._inside() is inside:  # wrapped again, for a second fit
            handle.load_state_dict(before.state_dict())
        if before is not None:
            before.close()
        self._wrapped, self._inside = weakref.ref(model), weakref.ref(inside)
        return True

    @property
    def adds_up_shards(self) -> bool:
        """Whether gradients of several backwards can be added up at the cost of a shard."""
        return isinstance(self.handle, FSDPHandle) and self.handle.between == "replicas"

    def accumulating(self) -> AbstractContextManager[None]:
        """For backward of a micro-batch that is not the last one of a step."""
        if isinstance(self.handle, FSDPHandle):
            return self.handle.accumulate(last=False)
        return nullcontext()

    def close(self) -> None:
        """Give threads, connections and process groups back."""
        if self.handle is not None:
            self.handle.close()

    def news(self) -> str | None:
        """What "auto" has decided since the last call, in a sentence."""
        report = getattr(self.handle, "report", lambda: None)()
        if report is None or str(report) == self._reported:
            return None
        self._reported = str(report)
        return self._reported

    def scalars(self) -> dict[str, float]:
        """Scalars for loggers; for "auto", also whether its choice is to compress."""
        if self.handle is None:
            return {}
        scalars = self.handle.stats().scalars()
        choice = getattr(self.handle, "choice", None)
        if choice is not None:
            scalars["laconic/compressing"] = float(choice != "none")
        return scalars


def _check(spec: str | Codec, settings: dict[str, Any]) -> None:
    """ConfigError for what is wrong without knowing the model."""
    known = [*inspect.signature(compress).parameters, "error", "candidates"]
    known = [name for name in known if name not in ("model", "spec")]
    for name in settings:
        if name not in known:
            raise ConfigError(f"there is no setting {name!r}; there are {', '.join(known)}")
    if spec != "auto":
        pair(spec, settings.get("exchange"))


def _processes() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
