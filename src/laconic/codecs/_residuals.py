"""The residuals of error feedback: for each parameter, the part that was not sent yet."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from laconic.codecs._base import Place
from laconic.kernels import backend


class Residuals:
    """One fp32 residual for each (parameter, phase), as long as the parameter, zero at first.

    The caller keeps it, one for each rank and model, and gives it to every `encode`: codecs have
    no state. Keyed by parameter and never by bucket, because buckets are rebuilt: a tensor that
    holds (parts of) several parameters names them by places. A first encoding and an owner's
    re-encoding (`Key.phase`) have residuals of their own. Owning a part of a parameter costs a
    whole residual; the residual of a part that moves to another rank waits until it comes back.

    >>> import torch, laconic as lc
    >>> residuals, codec = lc.Residuals(), lc.codec("feedback(qsgd-topk)")
    >>> wire = codec.encode(torch.tensor([3.0, 0.5]), lc.Key(tensor=7), residuals=residuals)
    >>> residuals.state_dict()
    {'7,0': tensor([ 1.2500, -1.2500])}
    """

    def __init__(self) -> None:
        self._kept: dict[_Name, Tensor] = {}
        self._loaded: set[_Name] = set()  # may still move to the parameter's device
        self._rank: int | None = None
        self._depth = 0

    @property
    def inside(self) -> Residuals:
        """Those of a codec inside the one that has these: kept here too, by names of their own."""
        found = copy.copy(self)  # shares what is kept
        found._depth += 1
        return found

    def claim(self, rank: int) -> None:
        """ValueError if another rank has used them: residuals would mix."""
        if self._rank not in (None, rank):
            raise ValueError(
                f"these residuals are those of rank {self._rank}, but rank {rank} encodes: make "
                "one lc.Residuals() for each rank, simulated ones too"
            )
        self._rank = rank

    def of(self, place: Place, phase: int, device: torch.device) -> Tensor:
        """The residual of a place, a view."""
        name = (place.parameter, phase, self._depth)
        kept = self._kept.get(name)
        if kept is None:
            kept = torch.zeros(place.total, dtype=torch.float32, device=device)
        elif name in self._loaded:
            kept = kept.to(device)
        if kept.numel() != place.total:
            raise ValueError(
                f"tensor {place.parameter} has {place.total} values, but had {kept.numel()} when "
                "it was encoded with these residuals before: give each parameter its own "
                "Key.tensor, say by places= which part of it a chunk holds, or call reset() if the "
                "model has changed"
            )
        if kept.device != device:
            raise ValueError(
                f"tensor {place.parameter} is on {device}, but its residual is on {kept.device}: "
                "load_state_dict(state_dict()) moves it, reset() forgets it"
            )
        self._kept[name] = kept
        self._loaded.discard(name)
        return kept[place.start : place.start + place.numel]

    def change_units(self, parameter: int, growth: Tensor) -> None:
        """Divide a parameter's residuals by 2^growth, an int8 per value: gradients will be, too."""
        for (number, _, _), kept in self._kept.items():
            if number == parameter:
                factors = growth.to(kept.device)
                backend(kept.device).times_powers(kept, factors, kept, inverse=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all residuals, by "parameter,phase", of nested codecs by a depth, too."""
        return {_text(name): kept.clone() for name, kept in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over copies of a state_dict's residuals, on any device, in place of all own ones."""
        kept = {_name(text): _residual(text, value) for text, value in state.items()}
        for name, value in kept.items():
            own = self._kept.get(name)
            if own is not None and own.numel() != value.numel():
                raise ValueError(
                    f"the state has {value.numel()} residuals for {_text(name)!r}, where "
                    f"{own.numel()} are in use: it is of another model (reset() first if not)"
                )
        self._kept, self._loaded, self._rank = kept, set(kept), None

    def reset(self) -> None:
        """Forget everything."""
        self._kept, self._loaded, self._rank = {}, set(), None


_Name = tuple[int, int, int]  # parameter, phase, number of codecs with residuals around


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


def _text(name: _Name) -> str:
    parameter, phase, depth = name
    return f"{parameter},{phase},{depth}" if depth else f"{parameter},{phase}"


def _name(text: str) -> _Name:
    parts = str(text).split(",")
    if len(parts) not in (2, 3) or not all(part.isdecimal() for part in parts):
        raise ValueError(
            f"residuals have keys such as '3,0' (parameter, phase), not {text!r}: load what "
            "state_dict() of lc.Residuals returned"
        )
    parameter, phase, *depth = map(int, parts)
    return parameter, phase, depth[0] if depth else 0


def _residual(text: str, value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != 1:
        raise ValueError(f"residuals are float32 vectors, and that of {text!r} is {value!r:.60}")
    if not value.isfinite().all():
        raise ValueError(f"the residual of {text!r} holds values that are not finite")
    return value.detach().clone()
