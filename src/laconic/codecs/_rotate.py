"""Rotation: a codec sees nearly Gaussian values, whatever it is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic._key import Key, Stream
from laconic._wire import HEADER_BYTES, Header, Wire, header_tensor
from laconic.codecs._base import Codec, ErrorBudget, Into, _header_of, flat_input
from laconic.codecs._dqsg import DQSG
from laconic.codecs._linear import is_integer, no_norm, sections
from laconic.codecs._qsgd import QSGD
from laconic.codecs._spec import check_inner
from laconic.errors import ConfigError, WireError
from laconic.kernels import ScaleKind, backend
from laconic.kernels._layout import code_offset

_LEAST, _MOST = 128, 4096
_FUSED = {QSGD.id: False, DQSG.id: True}  # codecs that kernels rotate for; is u subtracted?
_OTHER_PHASE = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Rotate(Codec):
    """`rotate(codec)`: turn the tensor at random, encode that, and turn back what was decoded.

    Per block of B values (a power of two), H the orthonormal Walsh-Hadamard matrix, D a diagonal
    of random signs, Q the codec inside:

        y = H·D·x        sent: Q(y)        x̂ = D·H·ŷ

    1. H·D is orthonormal: ‖x̂-x‖ = ‖ŷ-y‖ for every draw. So the variance bound is that of Q, and
       x̂ is unbiased if ŷ is: E[x̂] = D·H·E[ŷ] = x.
    2. Every y_i is (1/√B)·Σ ±x_j with random signs: mean 0, variance ‖x‖²/B, sub-Gaussian,
           P(|y_i| ≥ t·‖x‖/√B) ≤ 2·exp(-t²/2),
       whatever x is. So the largest of 512 values is 3.2 times their root mean square (squared,
       10.7 on average), or less: under dqsg with M levels the NMSE is 10.7/(12·M²), which is
       0.018, 0.1 and 0.9 at 4, 3 and 2 bits. Unrotated, one large value ruins its block.
    3. Zeros do not stay zeros. Where most of x is zero, codecs that profit from it (qsgd, ecdq
       with a coder) are better off without.

    D is a hash of the key, from a stream of its own; it is not sent. What does not fill a block
    is cut into pieces of descending powers of two. Segments are rotated one by one.

    - Values above 3.4e38/√B may have no finite y; the block then decodes to NaN.
    - global and global-exp are refused: their workers share a scale and add what is encoded, but
      every rank turns another way.
    - ndqsg's `side=` is turned, too; its checks count rotated values.

    Suresh et al. 2017, arXiv 1611.00429. The order of adding is part of the format
    (`kernels/_reference/rotate.py`): all backends make the same bytes.

    >>> import torch, laconic as lc
    >>> codec, x = lc.codec("rotate(qsgd:bits=2)"), torch.zeros(1024)
    >>> x[3] = 32.0  # a part of ±1 in every rotated value: the scale itself, so nothing is lost
    >>> torch.equal(codec.decode(codec.encode(x, lc.Key())), x)
    True
    """

    name: ClassVar[str] = "rotate"
    id: ClassVar[int] = 10
    unbiased: ClassVar[bool] = False  # that of the codec inside, on every object

    inner: Codec
    block: int = 1024

    def __post_init__(self) -> None:
        check_inner(self.name, self.inner)
        if self.inner.name == self.name:
            raise ConfigError(f"rotate cannot wrap {self.inner}: once is enough")
        if hasattr(self.inner, "local_norm"):
            raise ConfigError(
                f"rotate cannot wrap {self.inner.name}: its workers share one scale and add what "
                f"they encoded, but every rank turns another way; use {self.inner.name} as it is, "
                "or rotate(dqsg:bits=8)"
            )
        block = self.block
        if not is_integer(block) or not _LEAST <= block <= _MOST or block & (block - 1):
            raise ConfigError(
                f"rotate: block must be a power of two from {_LEAST} to {_MOST}, not {block!r}"
            )
        object.__setattr__(self, "unbiased", self.inner.unbiased)
        object.__setattr__(self, "segmented", self.inner.segmented)
        object.__setattr__(self, "knows_error", self.inner.knows_error)

    @property
    def budget(self) -> float | None:
        return self.inner.budget

    def at_share(self, share: float) -> Rotate:
        return replace(self, inner=self.inner.at_share(share))

    @property
    def even_noise(self) -> bool:
        return self.inner.even_noise

    @property
    def needs_side(self) -> bool:
        return self.inner.needs_side

    def variance_bound(self, d: int) -> float | None:
        return self.inner.variance_bound(d)

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        inside, head = _inside(self.inner, numel, segments)
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            block=self.block,
            levels=int.from_bytes(head[-4:], "little"),  # another codec's wire is found out
            coder=inside.coder,
            run=inside.run,
            segments=inside.segments,
            body_bytes=inside.nbytes if numel else 0,
        )

    def _room(self, header: Header) -> int:
        if not header.numel:
            return 0
        return HEADER_BYTES + self.inner._room(
            _inside(self.inner, header.numel, header.segments)[0]
        )

    def _check(self, wire: Wire) -> None:
        """As in any codec; where that needs no waiting, the header inside is looked at, too."""
        super()._check(wire)
        if wire.header.numel and wire.buffer.device.type == "cpu":
            head = bytes(wire.buffer[HEADER_BYTES : 2 * HEADER_BYTES].tolist())
            if head != _inside(self.inner, wire.header.numel, wire.header.segments)[1]:
                raise WireError(f"the header inside this wire of {self} is damaged")

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        self._write_within(ErrorBudget(), x, key, body, header, norm)

    def _write_within(
        self,
        budget: ErrorBudget,
        x: Tensor,
        key: Key,
        body: Tensor,
        header: Header,
        norm: Tensor | float | None,
    ) -> None:
        """Shares and errors are those of the codec inside: every segment is turned by itself."""
        no_norm(self.name, norm)
        inside, head = _inside(self.inner, header.numel, header.segments)
        kernels, signs = backend(x.device), _signs(key)
        if _is_fused(inside) and _is_row(inside.block):
            body[:HEADER_BYTES].copy_(header_tensor(head, x.device))
            scales, codes = sections(body[HEADER_BYTES:], inside)
            kernels.rotate_quantize(
                x,
                scales,
                codes,
                signs=signs,
                size=self.block,
                stream=key.stream(),
                kind=ScaleKind(inside.norm),
                **_settings(inside),
            )
            return
        segments = header.segments
        with _scratch(x) as y:
            kernels.rotate_into(x, y, stream=signs, size=self.block, segments=segments)
            self.inner.encode(
                y,
                key,
                out=body,
                segments=segments or None,
                shares=budget.shares if len(budget.shares) else None,
                spent=budget.spent,
            )

    def _read(self, wire: Wire, body: Tensor, into: Into) -> None:
        header, key = wire.header, wire.key
        inside, _ = _inside(self.inner, header.numel, header.segments)
        kernels, signs = backend(body.device), _signs(key)
        worth = {"weight": into.weight, "add": into.add}
        if _is_fused(inside):
            scales, codes = sections(body[HEADER_BYTES:], inside)
            kernels.dequantize_rotate(
                codes,
                scales,
                into.out,
                signs=signs,
                size=self.block,
                stream=key.stream() if _FUSED[inside.codec] else None,
                offset=code_offset(inside.levels, inside.bits),
                **_settings(inside),
                **worth,
            )
            return
        turn: dict[str, Any] = {"stream": signs, "size": self.block, "segments": header.segments}
        shape = torch.Size((header.numel,))
        within = Wire(buffer=body, key=key, shape=shape, dtype=torch.float32, header=inside)
        with ExitStack() as stack:
            side = into.side
            if side is not None:
                given = self._side(side, header, body.device)
                side = stack.enter_context(_scratch(into.out))
                kernels.rotate_into(given, side, **turn)
            y = stack.enter_context(_scratch(into.out))
            self.inner.decode(within, side=side, out=y, failed=into.failed)
            kernels.rotate_back(y, into.out, **turn, **worth)

    def _side(self, side: Tensor, header: Header, device: torch.device) -> Tensor:
        side = flat_input(side)
        if side.numel() != header.numel or side.device != device:
            raise ValueError(f"side must be on {device} and hold {header.numel} values")
        return side

    def __str__(self) -> str:
        return f"{self.name}({self.inner}):block={self.block}"


def _inside(inner: Codec, numel: int, segments: tuple[int, ...]) -> tuple[Header, bytes]:
    """The header of the wire inside, which always holds fp32 values."""
    return _header_of(inner, numel, torch.float32, 1, segments)


def _signs(key: Key) -> Stream:
    """A stream that no codec draws its dither from."""
    return replace(key, phase=key.phase ^ _OTHER_PHASE).stream()


def _is_fused(inside: Header) -> bool:
    """Kernels rotate and quantize at once for codecs of block scales and packed codes."""
    return inside.codec in _FUSED and not inside.coder


def _is_row(block: int) -> bool:
    """Scales of such blocks are found where rotation happens."""
    return _LEAST <= block <= _MOST and block & (block - 1) == 0


def _settings(inside: Header) -> dict[str, Any]:
    return {"block": inside.block, "levels": inside.levels, "bits": inside.bits}


_free: list[Tensor] = []  # the CPU's allocator would fetch a large buffer's pages anew every time


@contextmanager
def _scratch(like: Tensor) -> Iterator[Tensor]:
    """As many fp32 values as `like` has, on its device."""
    if like.device.type != "cpu":
        yield torch.empty(like.numel(), device=like.device)
        return
    try:
        kept = _free.pop()
    except IndexError:
        kept = torch.empty(0)
    if kept.numel() < like.numel():
        kept = torch.empty(like.numel())
    try:
        yield kept[: like.numel()]
    finally:
        _free.append(kept)
