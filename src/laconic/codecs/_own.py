"""For codecs of one's own: a name that `laconic.codec` knows, draws that both sides can make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass

import torch
from torch import Tensor

from laconic._key import Key
from laconic.codecs._base import Codec
from laconic.errors import ConfigError
from laconic.kernels._reference.random import draws

_FIRST_ID, _LAST_ID = 128, 255  # smaller numbers are laconic's own
_IN_TEXTS = set(":,=()@ ")  # mean something in texts such as "rotate(dqsg:bits=4)@allgather"


def check_kind(kind: type[Codec], others: Iterable[type[Codec]]) -> None:
    """ConfigError unless a codec of this class can be named, and its wires told from others'."""
    if not (isinstance(kind, type) and issubclass(kind, Codec) and is_dataclass(kind)):
        raise ConfigError(
            f"register_codec takes a dataclass that is a subclass of laconic.Codec, not {kind!r}"
        )
    name, number = getattr(kind, "name", None), getattr(kind, "id", None)
    if not isinstance(name, str) or not name or _IN_TEXTS & set(name) or name == "auto":
        raise ConfigError(
            f"{kind.__name__}.name is the word that texts name it by, without any of "
            f"': , = ( ) @' and spaces; not {name!r}"
        )
    if not isinstance(number, int) or not _FIRST_ID <= number <= _LAST_ID:
        raise ConfigError(
            f"{kind.__name__}.id marks its wires: an integer from {_FIRST_ID} to {_LAST_ID}, not "
            f"{number!r}"
        )
    for other in others:
        # a module that is imported anew, in a notebook say, replaces its own codec
        same = (other.__module__, other.__qualname__) == (kind.__module__, kind.__qualname__)
        if same:
            continue
        if other.name == name:
            raise ConfigError(f"{name} is {other.__name__}'s name: choose another one")
        if other.id == number:
            raise ConfigError(f"{other.name} has id {number}: choose another one")


def uniform(key: Key, numel: int, device: torch.device | str = "cpu") -> Tensor:
    """Draws on [0, 1) that a key names, one for each value: the same wherever they are made.

    24 bits each, in fp32; in plain torch, so on any device.
    """
    return (draws(key.stream(), numel, torch.device(device)) >> 8).float() * 2.0**-24
