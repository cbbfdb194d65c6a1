"""Buffers that are made once, and copies into them: the hot path allocates nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Scratch:
    """Buffers that are made once and grow; one set for each thread, device and CUDA stream.

    Copies and pickles of it are empty.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def take(
        self, name: str, numel: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The buffer of that name, uninitialised; valid until it is taken again."""
        key = (name, dtype, threading.get_ident(), device, _stream(device))
        kept = self._kept.get(key)
        if kept is None or kept.numel() < numel:
            kept = self._kept[key] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()


@contextmanager
def borrowed(
    numel: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[Tensor]:
    """An uninitialised buffer until the block ends, from those that this thread keeps.

    Blocks may lie inside each other: every one has a buffer of its own.
    """
    key = (dtype, device, _stream(device))
    free = _OWN.free.setdefault(key, [])
    kept = free.pop() if free else None
    if kept is None or kept.numel() < numel:
        kept = torch.empty(numel, dtype=dtype, device=device)
    try:
        yield kept[:numel]
    finally:
        free.append(kept)


class _PerThread(threading.local):
    """Buffers that are not borrowed now."""

    def __init__(self) -> None:
        self.free: dict[tuple[object, ...], list[Tensor]] = {}


_OWN = _PerThread()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors; one launch for many on a GPU."""
    if targets:
        copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
        copy(list(targets), list(sources))
