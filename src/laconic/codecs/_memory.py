"""What error feedback remembers: for each parameter, the part that was not sent yet."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from laconic.kernels import backend


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """A run of values in a tensor that is encoded, and where it lies in its parameter.

    The tensor holds `numel` values of `parameter` (any number that is the same at every step),
    from its value `start` on; the whole parameter has `total` values.
    """

    parameter: int
    start: int
    numel: int
    total: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"Place.{field.name} must be an integer from 0, not {value!r}")
        if not self.start < self.start + self.numel <= self.total:
            raise ValueError(
                f"a place holds at least one value of its parameter and none behind its end: {self}"
            )


class Memory:
    """One fp32 residual for each (parameter, phase), as long as the parameter, zero at first.

    Keyed by parameter and never by bucket, because buckets are rebuilt: a tensor that holds (parts
    of) several parameters names them by places. A first encoding and an owner's re-encoding
    (`Key.phase`) have residuals of their own. Owning a part of a parameter costs a whole residual;
    what an owner remembers of a part that moves to another rank waits until it comes back.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._loaded: set[tuple[int, int]] = set()  # may still move to the parameter's device
        self._rank: int | None = None

    def claim(self, rank: int) -> None:
        """ValueError if another rank has used this memory: residuals would mix."""
        if self._rank not in (None, rank):
            raise ValueError(
                f"this codec holds the memory of rank {self._rank}, but rank {rank} encodes: make "
                "one codec for each rank, simulated ones too (lc.codec(str(codec)))"
            )
        self._rank = rank

    def of(self, place: Place, phase: int, device: torch.device) -> Tensor:
        """The residual of a place, a view."""
        key = (place.parameter, phase)
        kept = self._kept.get(key)
        if kept is None:
            kept = torch.zeros(place.total, dtype=torch.float32, device=device)
        elif key in self._loaded:
            kept = kept.to(device)
        if kept.numel() != place.total:
            raise ValueError(
                f"tensor {place.parameter} has {place.total} values, but had {kept.numel()} when "
                "feedback last encoded it: give each parameter its own Key.tensor, say by places= "
                "which part of it a chunk holds, or call reset() if the model has changed"
            )
        if kept.device != device:
            raise ValueError(
                f"tensor {place.parameter} is on {device}, but its memory is on {kept.device}: "
                "load_state_dict(state_dict()) moves it, reset() forgets it"
            )
        self._kept[key] = kept
        self._loaded.discard(key)
        return kept[place.start : place.start + place.numel]

    def change_units(self, parameter: int, growth: Tensor) -> None:
        """Divide a parameter's residuals by 2^growth, an int8 per value."""
        for (number, _), kept in self._kept.items():
            if number == parameter:
                factors = growth.to(kept.device)
                backend(kept.device).times_powers(kept, factors, kept, inverse=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all residuals, by "parameter,phase"."""
        return {f"{number},{phase}": kept.clone() for (number, phase), kept in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over copies of a state_dict's residuals in place of all own ones."""
        kept = {_key(text): _residual(text, value) for text, value in state.items()}
        for key, value in kept.items():
            own = self._kept.get(key)
            if own is not None and own.numel() != value.numel():
                raise ValueError(
                    f"feedback's state has {value.numel()} values for '{key[0]},{key[1]}', where "
                    f"{own.numel()} are in use: it is of another model (reset() first if not)"
                )
        self._kept, self._loaded, self._rank = kept, set(kept), None

    def reset(self) -> None:
        """Forget everything."""
        self._kept, self._loaded, self._rank = {}, set(), None


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
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (name, dtype, threading.get_ident(), device, stream)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < numel:
            kept = self._kept[key] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]

    def __reduce__(self) -> tuple[type[Scratch], tuple[()]]:
        return Scratch, ()


def tiling(places: Sequence[Place], numel: int) -> tuple[Place, ...]:
    """The places as a tuple; ValueError unless they make up `numel` values without overlap."""
    return _checked(tuple(places), numel)


@lru_cache(maxsize=1024)  # the same places come at every step
def _checked(places: tuple[Place, ...], numel: int) -> tuple[Place, ...]:
    if sum(place.numel for place in places) != numel:
        raise ValueError(
            f"places must hold {numel} values together, not {sum(p.numel for p in places)}"
        )
    for a, b in pairwise(sorted(places)):
        if a.parameter == b.parameter and a.start + a.numel > b.start:
            raise ValueError(f"places overlap: {a} and {b}")
    return places


def _key(text: str) -> tuple[int, int]:
    number, comma, phase = str(text).partition(",")
    if not (comma and number.isdecimal() and phase.isdecimal()):
        raise ValueError(
            f"feedback's state has keys such as '3,0' (parameter, phase), not {text!r}: load what "
            "state_dict() of a feedback codec returned"
        )
    return int(number), int(phase)


def _residual(text: str, value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != 1:
        raise ValueError(f"feedback's state holds a float32 vector for {text!r}, not {value!r:.60}")
    if not value.isfinite().all():
        raise ValueError(f"feedback's state holds values that are not finite for {text!r}")
    return value.detach().clone()
