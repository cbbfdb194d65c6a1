"""Handles hear of every step of an optimizer in this process."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from laconic.codecs import Codec
from laconic.exchanges._preconditioner import amplifying
from laconic.integrations._common import own_rank

_log = logging.getLogger("laconic")


class Listener(Protocol):
    """What hears of steps."""

    def stepped(self, optimizer: Any) -> None:
        """Called behind each step of any optimizer, of other models, too."""
        ...


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_registered = False


def hear_of_steps(listener: Listener) -> None:
    """Have its `stepped` called as long as it lives."""
    global _registered
    _listeners.add(listener)
    if not _registered:  # for good: torch cannot take a hook away while it calls it
        _registered = True
        register_optimizer_step_post_hook(_tell)


# A compiled step would trace all listeners, anew for each number of passes. torch.compiler.disable
# does the same, and imports all of torch's compiler.
@torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
def _tell(optimizer: Any, *_: Any) -> None:
    for listener in list(_listeners):
        listener.stepped(optimizer)


def warn_of_noise(optimizer: Any, codec: Codec, advice: str) -> None:
    """Say what is better if an optimizer that has made a step amplifies the noise of a codec."""
    why = amplifying(optimizer, codec, advice)
    if why and own_rank() == 0:
        _log.warning(why)
