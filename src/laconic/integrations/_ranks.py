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
from laconic.integrations._common import Handle

_log = logging.getLogger("laconic")
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
_DTYPES |= {str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool)}


class AllRanks:
    """A handle's `state_dict` for programs that save on one rank; frameworks do.

    What a handle remembers (error feedback, mostly) is each rank's own. `state_dict()`, which all
    ranks must call, brings all of it to rank 0, tensors on the CPU; other ranks get {}. Every rank
    picks its own part in `load_state_dict`.

        torch.save({"model": .., "laconic": lc.AllRanks(handle).state_dict()}, path)  # rank 0
        accelerator.register_for_checkpointing(lc.AllRanks(handle))

    With another number of ranks, or another codec, a run goes on without what was remembered.
    """

    def __init__(self, handle: Handle, group: dist.ProcessGroup | None = None) -> None:
        self.handle, self.group = handle, group

    def state_dict(self) -> dict[str, Any]:
        """All ranks' states on rank 0, {} on the others."""
        states = gathered(self.handle.state_dict(), self.group)
        return {"states": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict of rank 0, which all ranks have read."""
        states, (rank, size) = state["states"], _seat(self.group)
        if len(states) != size:
            return _anew(f"the state is of {len(states)} ranks, and these are {size}")
        try:
            self.handle.load_state_dict(states[rank])
        except ConfigError as problem:  # on all ranks: settings are the same on all
            _anew(str(problem))


def _anew(why: str) -> None:
    if _seat(None)[0] == 0:
        _log.warning("compression starts anew, without what was remembered: %s", why)


def gathered(state: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's state on rank 0, [] on the others; nothing is unpickled.

    One rank after another, so that rank 0's device holds one state more than before.
    """
    rank, size = _seat(group)
    tensors: list[Tensor] = []
    text = json.dumps(_plain(state, tensors))
    if rank == 0:
        return [_built(json.loads(text), [t.cpu() for t in tensors])] + [
            _received(source, group) for source in range(1, size)
        ]
    device = _device(group)
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    for data in (torch.tensor([encoded.numel()], device=device), encoded):
        dist.send(data, group=group, group_dst=0)
    for tensor in filter(Tensor.numel, tensors):
        dist.send(_as_bytes(tensor.to(device)), group=group, group_dst=0)
    return []


def _received(source: int, group: dist.ProcessGroup | None) -> Any:
    device = _device(group)
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, group=group, group_src=source)
    encoded = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(encoded, group=group, group_src=source)
    tree = json.loads(bytes(encoded.tolist()).decode())
    tensors = []
    for dtype, shape in _forms(tree):
        tensor = torch.empty(shape, dtype=_DTYPES[dtype], device=device)
        if tensor.numel():
            dist.recv(_as_bytes(tensor), group=group, group_src=source)
        tensors.append(tensor.cpu())
    return _built(tree, tensors)


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """As JSON: every container is [kind, items], because keys may be numbers or tuples."""
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return ["tensor", [len(tensors) - 1, str(value.dtype), list(value.shape)]]
    if isinstance(value, Mapping):
        return ["dict", [[_plain(k, tensors), _plain(v, tensors)] for k, v in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_plain(one, tensors) for one in value]]
    return value


def _built(tree: Any, tensors: list[Tensor]) -> Any:
    """The value that `_plain` made this of."""
    if not isinstance(tree, list):
        return tree
    kind, items = tree
    if kind == "tensor":
        return tensors[items[0]]
    if kind == "dict":
        return {_built(k, tensors): _built(v, tensors) for k, v in items}
    values = [_built(one, tensors) for one in items]
    return tuple(values) if kind == "tuple" else values


def _forms(tree: Any) -> list[tuple[str, list[int]]]:
    """Dtypes and shapes of the tensors, in the order in which they are sent."""
    if not isinstance(tree, list):
        return []
    kind, items = tree
    if kind == "tensor":
        return [(items[1], items[2])]
    if kind == "dict":
        return [form for pair in items for one in pair for form in _forms(one)]
    return [form for one in items for form in _forms(one)]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _seat(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors must be to travel."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
