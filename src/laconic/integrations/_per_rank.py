"""Every rank's own state under a name of its own, for torch.distributed.checkpoint."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import ConfigError

_LENGTH = struct.Struct("<Q")  # of the JSON, before it
DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


class HasState(Protocol):
    """Handles of `lc.compress`, and schedules."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to resume exactly."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Resume from a state_dict."""
        ...


class PerRank:
    """A handle's or a schedule's state for `torch.distributed.checkpoint` (DCP).

    DCP takes values of one name for copies of each other and writes one of them, and reads only
    names that are there before: under the names of their own state_dict, ranks would all get the
    first one's weights, and no memory that a new object does not have yet. Here the state of a rank
    is one value, under a name with the rank in it:

        dcp.save({"model": model.state_dict(), "laconic": lc.PerRank(opt)}, checkpoint_id=folder)
        dcp.load({"model": model.state_dict(), "laconic": lc.PerRank(opt)}, checkpoint_id=folder)

    on all ranks, and on as many as before. Nothing of the state itself is pickled.
    """

    def __init__(self, handle: HasState, group: dist.ProcessGroup | None = None) -> None:
        self.handle, self.group = handle, group

    def state_dict(self) -> dict[str, Any]:
        """The number of ranks, and this rank's state as bytes."""
        rank, size = seat(self.group)
        return {"ranks": size, _name(rank): packed(self.handle.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Resume from what `state_dict` returned on this rank."""
        rank, size = seat(self.group)
        if state_dict["ranks"] != size:
            raise ConfigError(
                f"this state was saved on {state_dict['ranks']} ranks, and these are {size}: "
                "resume on as many, or leave it out and load the weights alone"
            )
        if _name(rank) not in state_dict:
            raise ConfigError(f"this state is of {sorted(state_dict)}, and not of rank {rank}")
        self.handle.load_state_dict(unpacked(state_dict[_name(rank)]))


def _name(rank: int) -> str:
    return f"rank {rank}"


def packed(state: Any) -> bytes:
    """A state as bytes: the length of its JSON, the JSON, then the values of its tensors."""
    tensors: list[Tensor] = []
    text = json.dumps(plain(state, tensors)).encode()
    values = [as_bytes(tensor.cpu()).numpy().tobytes() for tensor in tensors]
    return b"".join([_LENGTH.pack(len(text)), text, *values])


def unpacked(data: bytes) -> Any:
    """What `packed` was given, tensors on the CPU."""
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    tree = json.loads(data[_LENGTH.size : start].decode())
    tensors = []
    for dtype, shape in forms(tree):
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        raw, end = as_bytes(tensor), start + tensor.numel() * tensor.element_size()
        if raw.numel():
            raw.copy_(torch.frombuffer(bytearray(data[start:end]), dtype=torch.uint8))
        tensors.append(tensor)
        start = end
    return built(tree, tensors)


def plain(value: Any, tensors: list[Tensor]) -> Any:
    """As JSON: every container is [kind, items], because keys may be numbers or tuples."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().resolve_conj().resolve_neg())
        return ["tensor", [len(tensors) - 1, str(value.dtype), list(value.shape)]]
    if isinstance(value, Mapping):
        return ["dict", [[plain(k, tensors), plain(v, tensors)] for k, v in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [plain(one, tensors) for one in value]]
    return value


def built(tree: Any, tensors: list[Tensor]) -> Any:
    """The value that `plain` made this of."""
    if not isinstance(tree, list):
        return tree
    kind, items = tree
    if kind == "tensor":
        return tensors[items[0]]
    if kind == "dict":
        return {built(k, tensors): built(v, tensors) for k, v in items}
    values = [built(one, tensors) for one in items]
    return tuple(values) if kind == "tuple" else values


def forms(tree: Any) -> list[tuple[str, list[int]]]:
    """Dtypes and shapes of the tensors, in the order in which they are sent."""
    if not isinstance(tree, list):
        return []
    kind, items = tree
    if kind == "tensor":
        return [(items[1], items[2])]
    if kind == "dict":
        return [form for pair in items for one in pair for form in forms(one)]
    return [form for one in items for form in forms(one)]


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory, if it is in one piece."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def seat(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank, and how many there are."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)
