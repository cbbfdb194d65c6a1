"""Learning rates and the like, as a text that a server can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.errors import ConfigError, WireError
from laconic.server._shard import Settings

MOST_BYTES = 1 << 16


def as_bytes(settings: Settings) -> Tensor:
    """JSON, which keeps every bit of a float."""
    try:
        text = json.dumps(settings, default=_number, separators=(",", ":"))
    except TypeError as error:
        raise ConfigError(
            f"servers take numbers, texts and lists of them as optimizer settings: {error}"
        ) from None
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    if data.numel() > MOST_BYTES:
        raise ConfigError(
            f"the settings of {len(settings)} parameter groups take {data.numel()} bytes, and "
            f"{MOST_BYTES} are the most: use fewer groups"
        )
    return data


def from_bytes(data: Tensor, like: Settings) -> Settings:
    """WireError unless they have the groups and names of `like`.

    Other names are left out: schedulers keep notes in groups (`initial_lr`), on workers alone.
    """
    try:
        found = json.loads(bytes(data.numpy()))
    except ValueError as error:
        raise WireError(f"settings came that are no JSON: {error}") from None
    if not _fits(found, like):
        raise WireError("settings came with other groups or names than the optimizer's here")
    return [
        {name: _tuple(group[name]) for name in own} for group, own in zip(found, like, strict=True)
    ]


def _fits(found: Any, like: Settings) -> bool:
    if not isinstance(found, list) or len(found) != len(like):
        return False
    pairs = zip(found, like, strict=True)
    return all(isinstance(group, dict) and group.keys() >= own.keys() for group, own in pairs)


def _number(value: object) -> object:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"{value!r} is none")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
