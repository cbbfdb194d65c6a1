"""Rotation: a codec sees nearly Gaussian values, whatever it is given."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from laconic._key import Key, Stream
from laconic._scratch import borrowed
from laconic._settings import described, refused
from laconic._wire import HEADER_BYTES, Header, Wire, header_tensor
from laconic.codecs._base import DecodeTarget, EncodeRequest, no_norm
from laconic.codecs._dqsg import DQSG
from laconic.codecs._linear import is_integer, lattice_of, sections
from laconic.codecs._qsgd import QSGD
from laconic.codecs._wrapper import Wrapper
from laconic.errors import ConfigError
from laconic.kernels import Rotation, ScaleKind, backend

_LEAST, _MOST = 128, 4096
_FUSED = {QSGD.id: False, DQSG.id: True}  # codecs that kernels rotate for; is u subtracted?
_OTHER_PHASE = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Rotate(Wrapper):
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
    forwards: ClassVar[tuple[str, ...]] = (*Wrapper.forwards, "unbiased", "knows_error")

    block: int = field(default=1024, metadata=described(f"a power of two from {_LEAST} to {_MOST}"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.inner, Rotate):
            raise ConfigError(f"rotate cannot wrap {self.inner}: once is enough")
        if self.inner.shared_norm:
            raise ConfigError(
                f"rotate cannot wrap {self.inner.name}: its workers share one scale and add what "
                f"they encoded, but every rank turns another way; use {self.inner.name} as it is, "
                "or rotate(dqsg:bits=8)"
            )
        if self.inner.residuals:
            raise ConfigError(
                f"rotate cannot wrap {self.inner}: every step turns another way, and its residuals "
                f"would be added turned wrongly; write {self.inner.name}(rotate(...)), which "
                "keeps them as gradients are"
            )
        block = self.block
        if not is_integer(block) or not _LEAST <= block <= _MOST or block & (block - 1):
            raise refused(self, "block")

    @property
    def budget(self) -> float | None:
        return self.inner.budget

    def at_share(self, share: float) -> Rotate:
        return replace(self, inner=self.inner.at_share(share))

    def variance_bound(self, d: int) -> float | None:
        return self.inner.variance_bound(d)

    def _header_fields(self) -> dict[str, Any]:
        return {"block": self.block}

    def _encode(self, request: EncodeRequest) -> None:
        """Shares and errors are those of the codec inside: every segment is turned by itself."""
        x, key, body, segments = request.x, request.key, request.body, request.header.segments
        no_norm(self.name, request.norm)
        inside, head = self._inside(x.numel(), segments)
        kernels, signs = backend(x.device), _signs(key)
        if _is_fused(inside) and _is_row(inside.block):
            body[:HEADER_BYTES].copy_(header_tensor(head, x.device))
            scales, codes = sections(body[HEADER_BYTES:], inside)
            kernels.rotate_quantize(
                x,
                scales,
                codes,
                Rotation(signs, self.block),
                lattice_of(inside),
                stream=key.stream(),
                kind=ScaleKind(inside.norm),
            )
            return
        with borrowed(x.numel(), x.device) as y:
            kernels.rotate_into(x, y, Rotation(signs, self.block, segments))
            self.inner.encode(
                y,
                key,
                out=body,
                segments=segments or None,
                shares=request.shares if len(request.shares) else None,
                spent=request.spent,
            )

    def _read(self, wire: Wire, body: Tensor, into: DecodeTarget) -> None:
        header, key = wire.header, wire.key
        inside, _ = self._inside(header.numel, header.segments)
        kernels, signs = backend(body.device), _signs(key)
        if _is_fused(inside):
            lattice = lattice_of(inside)
            scales, codes = sections(body[HEADER_BYTES:], inside)
            kernels.dequantize_rotate(
                codes,
                scales,
                into.output,
                Rotation(signs, self.block),
                lattice,
                stream=key.stream() if _FUSED[inside.codec] else None,
                offset=lattice.offset,
            )
            return
        turn = Rotation(signs, self.block, header.segments)
        within = self._wire_inside(wire, body)
        with ExitStack() as stack:
            side = into.side
            if side is not None:
                side = stack.enter_context(borrowed(header.numel, body.device))
                kernels.rotate_into(into.flat_side(), side, turn)
            y = stack.enter_context(borrowed(header.numel, body.device))
            self.inner.decode(within, side=side, out=y, failed=into.failed)
            kernels.rotate_back(y, into.output, turn)


def _signs(key: Key) -> Stream:
    """A stream that no codec draws its dither from."""
    return replace(key, phase=key.phase ^ _OTHER_PHASE).stream()


def _is_fused(inside: Header) -> bool:
    """Kernels rotate and quantize at once for codecs of block scales and packed codes."""
    return inside.codec in _FUSED and not inside.coder


def _is_row(block: int) -> bool:
    """Scales of such blocks are found where rotation happens."""
    return _LEAST <= block <= _MOST and block & (block - 1) == 0
