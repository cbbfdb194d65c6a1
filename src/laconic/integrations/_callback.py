"""What callbacks of frameworks share: when to compress, what to tell."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import Codec
from laconic.errors import ConfigError
from laconic.exchanges import pair
from laconic.integrations._common import Handle
from laconic.integrations._compress import compress as turn_on
from laconic.integrations._compress import unwrapped
from laconic.integrations._fsdp import is_fsdp


class Compression:
    """`lc.compress` for a model that a framework wraps later; the settings are checked now."""

    def __init__(self, spec: str | Codec, settings: dict[str, Any]) -> None:
        _check(spec, settings)
        self.spec, self._settings = spec, settings
        self.handle: Handle | None = None
        self._told: str | None = None
        self._wrapped: Any = None  # weak: a wrapper has buffers as large as the model
        self._inside: Any = None

    def start(self, model: nn.Module, advice: str, optimizers: Sequence[Any] = ()) -> bool:
        """Compress a wrapped model, once; False in a single process, which has nothing to send.

        Under DDP gradients have the units of the framework's optimizers, unless settings say.
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
        compress = sys.modules["laconic"].compress
        settings = self._settings
        if isinstance(model, DistributedDataParallel) and optimizers:
            settings = {"optimizer": list(optimizers), **settings}
        self.handle = handle = compress(model, self.spec, **settings)
        inside = model.module if isinstance(model, DistributedDataParallel) else model
        if before is not None and self._inside() is inside:  # wrapped again, for a second fit
            handle.load_state_dict(before.state_dict())
        if before is not None:
            before.close()
        self._wrapped, self._inside = weakref.ref(model), weakref.ref(inside)
        return True

    def close(self) -> None:
        """Give threads, connections and process groups back."""
        if self.handle is not None:
            self.handle.close()

    def news(self) -> str | None:
        """What "auto" has decided since the last call, in a sentence."""
        report = getattr(self.handle, "report", lambda: None)()
        if report is None or str(report) == self._told:
            return None
        self._told = str(report)
        return self._told

    def scalars(self) -> dict[str, float]:
        """What a logger is told; for "auto", also whether its choice is to compress."""
        if self.handle is None:
            return {}
        scalars = self.handle.stats().scalars()
        choice = getattr(self.handle, "choice", None)
        if choice is not None:
            scalars["laconic/compressing"] = float(choice != "none")
        return scalars


def _check(spec: str | Codec, settings: dict[str, Any]) -> None:
    """What can be known to be wrong before there is a model."""
    known = [*inspect.signature(turn_on).parameters, "error", "candidates"]
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
