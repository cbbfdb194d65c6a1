"""States of all ranks in checkpoints: a value for each rank, or all of them on one."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm._threads import device_of
from laconic.errors import ConfigError
from laconic.integrations._handle import HasState, own_rank, remembers
from laconic.schedules import Call, Schedule

_log = logging.getLogger("laconic")
_LENGTH = struct.Struct("<Q")  # of the JSON, before it
DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


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
        rank, size = rank_and_size(self.group)
        return {"ranks": size, _name(rank): packed(self.handle.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Resume from what `state_dict` returned on this rank."""
        rank, size = rank_and_size(self.group)
        if state_dict["ranks"] != size:
            raise ConfigError(
                f"this state was saved on {state_dict['ranks']} ranks, and these are {size}: "
                "resume on as many, or leave it out and load the weights alone"
            )
        if _name(rank) not in state_dict:
            raise ConfigError(f"this state is of {sorted(state_dict)}, and not of rank {rank}")
        self.handle.load_state_dict(unpacked(state_dict[_name(rank)]))


class AllRanks:
    """A handle's or a schedule's `state_dict` for programs that save on one rank; frameworks do.

    What a handle remembers (error feedback, mostly) is each rank's own, and most of a schedule's
    state is. `state_dict()`, which all ranks must call, brings all of it to rank 0, tensors on the
    CPU; other ranks get {}. Every rank picks its own part in `load_state_dict`.

        torch.save({"model": .., "laconic": lc.AllRanks(handle).state_dict()}, path)  # rank 0
        accelerator.register_for_checkpointing(lc.AllRanks(handle))

    On another number of ranks counters continue, and a state that remembers something, or a
    schedule's, is refused. With another codec a run starts without what was remembered, and warns.
    Where every rank saves, `lc.PerRank` is the form.
    """

    def __init__(self, handle: HasState, group: dist.ProcessGroup | None = None) -> None:
        self.handle, self.group = handle, group

    def state_dict(self) -> dict[str, Any]:
        """All ranks' states on rank 0, {} on the others."""
        if isinstance(self.handle, Schedule):
            self.handle.barrier(Call.SAVE)
        states = gathered_states(self.handle.state_dict(), self.group)
        return {"states": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict of rank 0, which all ranks have read."""
        if "states" not in state:
            raise ConfigError(
                "this is not the state that rank 0 got: all ranks load what rank 0 has saved of "
                "lc.AllRanks(..).state_dict()"
            )
        states, (rank, size) = state["states"], rank_and_size(self.group)
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
            if own_rank() == 0:
                _log.warning("compression starts afresh, without what was remembered: %s", problem)


def _remembers(state: Mapping[str, Any]) -> bool:
    """Whether something in a state is a rank's own: memories of a handle, any tensor of others'."""
    handle = state.get("hook", state)  # of auto's
    if "identity" not in state and "codec" in handle:
        return remembers(handle)  # budgets and units are alike on all ranks
    tensors: list[Tensor] = []
    as_tree(state, tensors)
    return bool(tensors)


def _name(rank: int) -> str:
    return f"rank {rank}"


def packed(state: Any) -> bytes:
    """A state as bytes: the length of its JSON, the JSON, then the values of its tensors."""
    tensors: list[Tensor] = []
    text = json.dumps(as_tree(state, tensors)).encode()
    values = [as_bytes(tensor.cpu()).numpy().tobytes() for tensor in tensors]
    return b"".join([_LENGTH.pack(len(text)), text, *values])


def unpacked(data: bytes) -> Any:
    """What `packed` was given, tensors on the CPU."""
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    tree = json.loads(data[_LENGTH.size : start].decode())
    tensors = []
    for dtype, shape in tensor_forms(tree):
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        raw, end = as_bytes(tensor), start + tensor.numel() * tensor.element_size()
        if raw.numel():
            raw.copy_(torch.frombuffer(bytearray(data[start:end]), dtype=torch.uint8))
        tensors.append(tensor)
        start = end
    return from_tree(tree, tensors)


def as_tree(value: Any, tensors: list[Tensor]) -> Any:
    """As JSON: every container is [kind, items], because keys may be numbers or tuples."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().resolve_conj().resolve_neg())
        return ["tensor", [len(tensors) - 1, str(value.dtype), list(value.shape)]]
    if isinstance(value, Mapping):
        return ["dict", [[as_tree(k, tensors), as_tree(v, tensors)] for k, v in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [as_tree(one, tensors) for one in value]]
    return value


def from_tree(tree: Any, tensors: list[Tensor]) -> Any:
    """The value that `as_tree` made this of."""
    if not isinstance(tree, list):
        return tree
    kind, items = tree
    if kind == "tensor":
        return tensors[items[0]]
    if kind == "dict":
        return {from_tree(k, tensors): from_tree(v, tensors) for k, v in items}
    values = [from_tree(one, tensors) for one in items]
    return tuple(values) if kind == "tuple" else values


def tensor_forms(tree: Any) -> list[tuple[str, list[int]]]:
    """Dtypes and shapes of the tensors, in the order in which they are sent."""
    if not isinstance(tree, list):
        return []
    kind, items = tree
    if kind == "tensor":
        return [(items[1], items[2])]
    if kind == "dict":
        return [form for pair in items for one in pair for form in tensor_forms(one)]
    return [form for one in items for form in tensor_forms(one)]


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory, if it is in one piece."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank, and how many there are."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gathered_states(state: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's state on rank 0, [] on the others; nothing is unpickled.

    One rank after another, so that rank 0's device holds one state more than before.
    """
    rank, size = rank_and_size(group)
    tensors: list[Tensor] = []
    text = json.dumps(as_tree(state, tensors))
    if rank == 0:
        return [from_tree(json.loads(text), [t.cpu() for t in tensors])] + [
            _received(source, group) for source in range(1, size)
        ]
    device = device_of(group)
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    for data in (torch.tensor([encoded.numel()], device=device), encoded):
        dist.send(data, group=group, group_dst=0)
    for tensor in filter(Tensor.numel, tensors):
        dist.send(as_bytes(tensor.to(device)), group=group, group_dst=0)
    return []


def _received(source: int, group: dist.ProcessGroup | None) -> Any:
    device = device_of(group)
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, group=group, group_src=source)
    encoded = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(encoded, group=group, group_src=source)
    tree = json.loads(bytes(encoded.tolist()).decode())
    tensors = []
    for dtype, shape in tensor_forms(tree):
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device=device)
        if tensor.numel():
            dist.recv(as_bytes(tensor), group=group, group_src=source)
        tensors.append(tensor.cpu())
    return from_tree(tree, tensors)
