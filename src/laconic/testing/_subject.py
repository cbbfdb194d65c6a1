"""The codec that is checked, for all rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import DTYPES, Wire
from laconic.codecs import Codec

SHAPES = ((0,), (), (1,), (3,), (127,), (513,), (5, 7, 11))


class RuleError(AssertionError):
    """A rule that was broken: which, by what, and how to fix it."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Makes codecs, and gives decode the side information it needs."""

    make: Callable[[], Codec]
    side: Callable[[Tensor], Tensor] | None
    device: torch.device
    draws: int

    def fresh(self) -> Codec:
        """One that has not encoded anything."""
        return self.make()

    def decode(self, own: Codec, wire: Wire, x: Tensor, **options: Any) -> Tensor:
        """What becomes of x."""
        if self.side is not None:
            options["side"] = self.side(x)
        return own.decode(wire, **options)

    def round_trip(self, x: Tensor, key: Key, own: Codec | None = None) -> Tensor:
        """Encoded and decoded by a codec without memory of anything else."""
        own = own or self.fresh()
        return self.decode(own, own.encode(x, key), x)

    def gaussian(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values with nothing special about them."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device, dtype)

    @property
    def lossless(self) -> bool:
        """Whether a Gaussian comes back as it was."""
        x = self.gaussian(1000)
        return torch.equal(self.round_trip(x, Key()), x)


def broken(own: object, rule: str, what: str, advice: str) -> NoReturn:
    """Raise RuleError: which rule a codec, exchange or schedule breaks, how to fix it."""
    name = str(own) if isinstance(getattr(own, "name", None), str) else type(own).__name__
    raise RuleError(f"{name} breaks the rule that {rule}: {what}. {advice}".strip())


def inputs(subject: Subject) -> dict[str, Tensor]:
    """Tensors of all dtypes and of odd shapes, with words for them."""
    found = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            label = f"{str(dtype).removeprefix('torch.')} values of shape {shape}"
            found[label] = subject.gaussian(*shape, seed=len(found), dtype=dtype)
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, NaN where the other is NaN."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and bool(((a == b) | a.isnan()).all())
    )
