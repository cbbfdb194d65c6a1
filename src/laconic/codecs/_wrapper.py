"""What wrappers have in common: a codec inside, and its wire inside their own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic._wire import ALIGN, HEADER_BYTES, Header, Wire
from laconic.codecs._base import Codec, _header_of
from laconic.errors import ConfigError, WireError


@dataclass(frozen=True, kw_only=True)
class Wrapper(Codec):
    """A codec around another one, which encodes fp32 values for one worker. Abstract.

    The body is  bytes of its own, padded with zeros to 16 | the wire inside, header and all.  The
    header's `levels` are the check sum of the header inside, so that a wire of another codec
    inside is known without waiting for the device.
    """

    own_bytes: ClassVar[int] = 0  # in front of the wire inside
    forwards: ClassVar[tuple[str, ...]] = "segmented", "side_information"

    inner: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Codec):
            raise ConfigError(
                f"{self.name} wraps a codec, not {self.inner!r}: give inner=lc.codec(...)"
            )
        for name in self.forwards:
            object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def wrapped(self) -> Codec:
        return self.inner

    @property
    def even_noise(self) -> bool:
        return self.inner.even_noise

    @property
    def _start(self) -> int:
        """Where the wire inside starts in the body."""
        return -(-self.own_bytes // ALIGN) * ALIGN

    def _inside(self, numel: int, segments: tuple[int, ...]) -> tuple[Header, bytes]:
        """The header of the wire inside."""
        return _header_of(self.inner, numel, torch.float32, 1, segments)

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        inside, head = self._inside(numel, segments)
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            body_bytes=self._start + inside.nbytes if numel else 0,
            levels=int.from_bytes(head[-4:], "little"),
            coder=inside.coder,
            run=inside.run,
            segments=inside.segments,
            **self._header_fields(),
        )

    def _header_fields(self) -> dict[str, Any]:
        """What the header says of the wrapper's own settings."""
        return {}

    def _room(self, header: Header) -> int:
        if not header.numel:
            return 0
        inside, _ = self._inside(header.numel, header.segments)
        return self._start + HEADER_BYTES + self.inner._room(inside)

    def _wire_inside(self, wire: Wire, body: Tensor) -> Wire:
        """The wire inside, as the codec inside decodes it."""
        numel = wire.header.numel
        return Wire(
            buffer=body[self._start :],
            key=wire.key,
            shape=torch.Size((numel,)),
            dtype=torch.float32,
            header=self._inside(numel, wire.header.segments)[0],
        )

    def _check(self, wire: Wire) -> None:
        """As in any codec; where that needs no waiting, the header inside is looked at, too."""
        super()._check(wire)
        if not wire.header.numel or wire.buffer.device.type != "cpu":
            return
        _, head = self._inside(wire.header.numel, wire.header.segments)
        head = bytes(self._start - self.own_bytes) + head
        start = HEADER_BYTES + self.own_bytes
        if bytes(wire.buffer[start : start + len(head)].tolist()) != head:
            raise WireError(f"the header inside this wire of {self} is damaged")

    def __str__(self) -> str:
        own = [one.name for one in fields(self) if one.name != "inner"]
        settings = ",".join(f"{name}={getattr(self, name)}" for name in own)
        return f"{self.name}({self.inner})" + (f":{settings}" if settings else "")
