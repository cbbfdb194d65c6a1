"""Checkpoints in one file: written on rank 0 with the states of all ranks, read on all ranks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.serialization import get_unsafe_globals_in_checkpoint

from laconic._files import replacing
from laconic.comm._agreement import gather_texts
from laconic.comm._threads import device_of
from laconic.errors import ConfigError, LaconicError
from laconic.integrations._checkpoint import AllRanks, rank_and_size
from laconic.integrations._handle import Handle


def save(
    content: Mapping[str, Any], path: str | Path, *, group: dist.ProcessGroup | None = None
) -> None:
    """`torch.save` of a dictionary with schedules or handles in it: one file. Call it on all ranks.

        lc.save({"model": model.state_dict(), "optimizer": opt, "step": step}, "checkpoint.pt")

    Of schedules and handles the file has the states of all ranks (`lc.AllRanks`), of other objects
    with a `state_dict` that of rank 0, and of all else rank 0's value: numbers, strings, tensors
    and containers of these, as `torch.load(path, weights_only=True)` reads them. Rank 0 writes the
    file, whole or not at all: one that was there before stays as it was until then. If that fails,
    all ranks get an error.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(
            f'save a dictionary, such as {{"optimizer": opt, "step": step}}, not {type(content)}'
        )
    whole = {name: _state(one, group) for name, one in content.items()}
    error: Exception | None = None
    if rank_and_size(group)[0] == 0:
        try:
            _write(whole, path)
        except Exception as found:
            error = found
    _raise_everywhere(error, path, group)


def load(
    content: Mapping[str, Any], path: str | Path, *, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Resume from the file of `save`, on all ranks: objects get their states, all else is returned.

        step = lc.load({"optimizer": opt}, "checkpoint.pt")["step"]

    Every rank reads the file, of schedules and handles its own part only; tensors that are returned
    are on the CPU. As many ranks must load it as have saved it, if the state is each rank's own.
    """
    found = _read(path)
    missing = [name for name in content if name not in found]
    if missing:
        raise ConfigError(f"{path} has {', '.join(found) or 'nothing'}, and no {missing[0]!r}")
    # schedules after modules: they give these the weights that they continue with
    for name in sorted(content, key=lambda name: isinstance(content[name], Handle)):
        one = content[name]
        target = AllRanks(one, group) if isinstance(one, Handle) else one
        target.load_state_dict(found.pop(name))
    return found


def _state(one: Any, group: dist.ProcessGroup | None) -> Any:
    if isinstance(one, Handle):
        return AllRanks(one, group).state_dict()
    return one.state_dict() if hasattr(one, "state_dict") else one


def _write(whole: dict[str, Any], path: str | Path) -> None:
    with replacing(path) as stream:
        torch.save(whole, stream)
        stream.seek(0)
        refused = get_unsafe_globals_in_checkpoint(stream)
        if refused:
            raise ConfigError(
                f"{refused[0]} would not be loaded again (torch.load, weights_only=True): save "
                "numbers, strings, tensors, and dictionaries and lists of these"
            )


def _read(path: str | Path) -> dict[str, Any]:
    with open(path, "rb"):  # errors of the file system are what they are
        pass
    try:
        # mapped: a rank reads its own part of the file
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, OSError) as error:
        raise ConfigError(f"{path} is not a file that lc.save wrote: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a file that lc.save wrote: it has a {type(found)}")
    return found


def _raise_everywhere(
    error: Exception | None, path: str | Path, group: dist.ProcessGroup | None
) -> None:
    """Rank 0's error, on all ranks; also a sign that the file is there."""
    if rank_and_size(group)[1] > 1:
        own = json.dumps({} if error is None else {"error": str(error)})
        first = json.loads(gather_texts(own, group, device_of(group))[0])
        if first and error is None:
            raise LaconicError(f"rank 0 has not saved {path}: {first['error']}")
    if error is not None:
        raise error
