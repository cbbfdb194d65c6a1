"""A backend's errors about other ranks become LostErrors that say which one, where it is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from laconic.errors import LostError
from laconic.exchanges._base import Call

_OF_TRANSPORT = ("gloo", "nccl", "ucc", "connection", "timed out", "timeout", "socket")


@contextmanager
def talking(call: Call, peer: int | None = None) -> Iterator[None]:
    """Around what waits for rank `peer` of the group, or for all of it.

    When a rank ends, Gloo closes connections of the ranks that waited for it, and these close
    theirs: the rank that is named is the one that this rank saw go.
    """
    try:
        yield
    except RuntimeError as error:
        if not _about_ranks(error):
            raise
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        who = "another rank" if peer is None else call.name_of(peer)
        raise LostError(
            f"{who} {'did not answer in time' if late else 'is gone'} at step {call.step}: look "
            f"into the log of the rank that failed first ({_first_line(error)})"
        ) from error


def _about_ranks(error: RuntimeError) -> bool:
    """Whether a backend says that it could not send or receive."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(part in text for part in _OF_TRANSPORT)


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]
