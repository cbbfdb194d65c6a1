"""The state of all ranks in one checkpoint, which one rank writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import ConfigError
from laconic.integrations._common import OWN
from laconic.integrations._per_rank import DTYPES, HasState, as_bytes, built, forms, plain, seat

_log = logging.getLogger("laconic")


class AllRanks:
    """A handle's or a schedule's `state_dict` for programs that save on one rank; frameworks do.

    What a handle remembers (error feedback, mostly) is each rank's own, and most of a schedule's
    state is. `state_dict()`, which all ranks must call, brings all of it to rank 0, tensors on the
    CPU; other ranks get {}. Every rank picks its own part in `load_state_dict`.

        torch.save({"model": .., "laconic": lc.AllRanks(handle).state_dict()}, path)  # rank 0
        accelerator.register_for_checkpointing(lc.AllRanks(handle))

    On another number of ranks counters go on, and a state that remembers something, or a
    schedule's, is refused. With another codec a run starts without what was remembered, and warns.
    Where every rank saves, `lc.PerRank` is the form.
    """

    def __init__(self, handle: HasState, group: dist.ProcessGroup | None = None) -> None:
        self.handle, self.group = handle, group

    def state_dict(self) -> dict[str, Any]:
        """All ranks' states on rank 0, {} on the others."""
        states = gathered(self.handle.state_dict(), self.group)
        return {"states": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict of rank 0, which all ranks have read."""
        if "states" not in state:
            raise ConfigError(
                "this is not the state that rank 0 got: all ranks load what rank 0 has saved of "
                "lc.AllRanks(..).state_dict()"
            )
        states, (rank, size) = state["states"], seat(self.group)
        if len(states) != size and any(map(_remembers, states)):
            saved = f"{len(states)} rank{'s' if len(states) > 1 else ''}"
            raise ConfigError(
                f"the state is of {saved}, and here are {size}; what it remembers is each rank's "
                f"own. Resume on {saved}, or leave this state out: what ranks remember, such as "
                "what error feedback has not yet sent, is then lost"
            )
        own = states[rank % len(states)]  # without memories they differ in nothing that counts
        if "identity" in own:  # a schedule's, which has weights
            self.handle.load_state_dict(own)
            return
        try:
            self.handle.load_state_dict(own)
        except ConfigError as problem:  # on all ranks: settings are the same on all
            _anew(str(problem))


def _remembers(state: Mapping[str, Any]) -> bool:
    """Whether something in a state is a rank's own: memories of a handle, any tensor of others'."""
    handle = state.get("hook", state)  # of auto's
    if "identity" not in state and "codec" in handle:
        return any(handle.get(name) for name in OWN)  # budgets and units are alike on all ranks
    tensors: list[Tensor] = []
    plain(state, tensors)
    return bool(tensors)


def _anew(why: str) -> None:
    if seat(None)[0] == 0:
        _log.warning("compression starts anew, without what was remembered: %s", why)


def gathered(state: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's state on rank 0, [] on the others; nothing is unpickled.

    One rank after another, so that rank 0's device holds one state more than before.
    """
    rank, size = seat(group)
    tensors: list[Tensor] = []
    text = json.dumps(plain(state, tensors))
    if rank == 0:
        return [built(json.loads(text), [t.cpu() for t in tensors])] + [
            _received(source, group) for source in range(1, size)
        ]
    device = _device(group)
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    for data in (torch.tensor([encoded.numel()], device=device), encoded):
        dist.send(data, group=group, group_dst=0)
    for tensor in filter(Tensor.numel, tensors):
        dist.send(as_bytes(tensor.to(device)), group=group, group_dst=0)
    return []


def _received(source: int, group: dist.ProcessGroup | None) -> Any:
    device = _device(group)
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, group=group, group_src=source)
    encoded = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(encoded, group=group, group_src=source)
    tree = json.loads(bytes(encoded.tolist()).decode())
    tensors = []
    for dtype, shape in forms(tree):
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        if tensor.numel():
            dist.recv(as_bytes(tensor), group=group, group_src=source)
        tensors.append(tensor.cpu())
    return built(tree, tensors)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must be to travel."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
