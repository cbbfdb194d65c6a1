"""One dither for n workers, each in a stratum of its own: shared-scale DQSG's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from laconic._key import Key, _mix64
from laconic.kernels._layout import fraction_bits


class Draw(NamedTuple):
    """Whose draws an encoding takes, and by how much they are moved, in 2^-F of a level."""

    key: Key
    shift: int = 0


def stratum(key: Key, workers: int, levels: int) -> Draw:
    """The draws of one of n workers whose wires will be added.

    All share the draws of rank n, which nobody else has. Places are dealt anew for every key: the
    ranks stand in the order of a hash (a bijection, so there are no ties).
    """
    if key.rank >= workers:
        raise ValueError(
            f"{workers} workers are added: their ranks are 0 to {workers - 1}, "
            f"not {key.rank}; give every key its place in the sum as rank="
        )
    shared = replace(key, rank=workers)
    k0, k1 = shared.stream()
    order = [_mix64((k1 << 32 | k0) ^ rank) for rank in range(workers)]
    place = sum(other < order[key.rank] for other in order)
    return Draw(shared, (place << fraction_bits(levels)) // workers)


def shared_key(keys: Sequence[Key]) -> Key:
    """The key of the draws that the workers with these keys share."""
    workers = len(keys)
    if workers == 1:
        return keys[0]
    calls = {(key.seed, key.step, key.tensor, key.phase) for key in keys}
    if len(calls) > 1 or sorted(key.rank for key in keys) != list(range(workers)):
        raise ValueError(
            f"the dithers of {workers} workers are subtracted together: give the keys they encoded "
            f"with, which differ in rank= only, from 0 to {workers - 1}"
        )
    return replace(keys[0], rank=workers)
