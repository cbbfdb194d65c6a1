"""The contract that every codec keeps: tensor → one uint8 wire → tensor."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import ALIGN, DTYPES, HEADER_BYTES, Header, Wire, header_tensor
from laconic.errors import ConfigError, WireError
from laconic.kernels import Output, backend

if TYPE_CHECKING:
    from laconic.codecs._dqsg import NDQSG
    from laconic.codecs._residuals import Residuals

MAX_NUMEL = (1 << 32) - 1  # draws are counted in 32 bits
MAX_SEGMENTS = (1 << 16) - 1
_OLD_NAMES = {"needs_side": "side_information", "remembers": "residuals"}


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
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"Place.{name} must be an integer from 0, not {value!r}")
        if not self.start < self.start + self.numel <= self.total:
            raise ValueError(
                f"a place holds at least one value of its parameter and none after its end: {self}"
            )


@dataclass(frozen=True)
class DecodeTarget:
    """Where and how a decode ends: out (+)= weight · value."""

    out: Tensor
    add: bool = False
    weight: float = 1.0
    side: Tensor | None = None
    failed: Tensor | None = None

    @property
    def output(self) -> Output:
        """As kernels take it."""
        return Output(self.out, self.weight, self.add)

    def put(self, value: Tensor) -> None:
        """End it so, with decoded values of any of the three dtypes."""
        if value.numel():
            backend(value.device).accumulate(value, self.output)

    def flat_side(self) -> Tensor:
        """The side information as a vector, checked."""
        if self.side is None:
            raise TypeError("this codec decodes with side information: give side=, near the input")
        side, out = flat_input(self.side), self.out
        if side.numel() != out.numel() or side.device != out.device:
            raise ValueError(f"side must be on {out.device} and hold {out.numel()} values")
        return side


class EncodeRequest(NamedTuple):
    """One encode: flat, non-empty x into the body; the last four are for some codecs only."""

    x: Tensor
    key: Key
    body: Tensor
    header: Header
    norm: Tensor | float | None
    shares: tuple[float, ...] | Tensor = ()  # a tensor where only a device knows them
    spent: Tensor | None = None
    places: Sequence[Place] | None = None
    residuals: Residuals | None = None


class Codec(ABC):
    """How few bits represent a tensor. Subclasses are frozen dataclasses: settings, no state.

    A codec declares what it offers and what it needs, in the attributes below. Exchanges,
    schedules and the planner read these; they never ask for a codec's name or class.

    `unbiased`: the mean of decode(encode(x)) over keys is x. `summable`: wires of several
    workers may be added while encoded (`wire.payload`, `decode_sum`).
    """

    name: ClassVar[str]
    id: ClassVar[int]
    unbiased: ClassVar[bool]
    summable: ClassVar[bool] = False
    lossless: ClassVar[bool] = False  # the wire holds the values themselves, as they are
    shared_norm: ClassVar[bool] = False  # workers share a scale: local_norm, global_norm, norm=
    pairwise: ClassVar[bool] = False  # two wires add up to one: reduce
    integer_sum: ClassVar[bool] = False  # sums are plain integers, of any width: levels_for
    sparse_sum: ClassVar[bool] = False  # coded integers of one shared two-norm, most of them 0
    side_information: ClassVar[bool] = False  # decoding needs side=
    segmented: ClassVar[bool] = False  # has one step per tensor: encode takes segments=
    residuals: ClassVar[bool] = False  # has a residual of each parameter: encode takes places=
    knows_error: ClassVar[bool] = False  # knows the error of an encoding: encode takes spent=

    def __init_subclass__(cls) -> None:
        for old, new in _OLD_NAMES.items():
            if old in cls.__dict__:
                setattr(cls, new, cls.__dict__[old])
                _warn_of(old)

    @property
    def even_noise(self) -> bool:
        """Whether the error is spread evenly over a whole parameter, however its values differ."""
        return False

    @property
    def varies(self) -> bool:
        """Whether the length of a wire depends on the values."""
        return self._header(1, torch.float32, 1, ()).coder != 0

    @property
    def nested(self) -> NDQSG | None:
        """The codec itself, if it nests: then what receivers know decides its ratio."""
        return None

    @property
    def wrapped(self) -> Codec | None:
        """The codec inside, of a wrapper."""
        return None

    @property
    def needs_side(self) -> bool:
        """Old name of `side_information`."""
        _warn_of("needs_side")
        return self.side_information

    @property
    def remembers(self) -> bool:
        """Old name of `residuals`."""
        _warn_of("remembers")
        return self.residuals

    def encode(
        self,
        x: Tensor,
        key: Key,
        norm: Tensor | float | None = None,
        workers: int | None = None,
        out: Tensor | Wire | None = None,
        segments: Sequence[int] | None = None,
        shares: Sequence[float] | Tensor | None = None,
        spent: Tensor | None = None,
        places: Sequence[Place] | None = None,
        residuals: Residuals | None = None,
    ) -> Wire:
        """Encode x into one uint8 tensor on its device, `out` if given.

        `norm` (for global codecs) is the scale that all workers share. `workers` is the number of
        wires that will be added; give it to every wire of a sum, because `decode_sum` counts on
        it and the sum does not contain it. `out` may be the wire of an earlier encode: its header,
        if equal, is not written again. `segments` are the lengths of the tensors that x is made
        of, where a codec has one step per tensor (ecdq); others ignore it. Encoding never
        waits for the device.

        `shares`, for codecs with a `budget`, are factors of it, one per segment: 0.25 asks for a
        quarter of the error; they may be a float64 tensor on x's CUDA device. `spent`, for
        codecs with `knows_error`, is a float32 or float64 tensor on x's device with an entry per
        segment (one without segments). It gets the exact expected squared error E‖Q(v) - v‖² of
        each, over the dither, given x.

        `residuals`, for codecs that have some, are what the caller keeps of earlier steps: they
        are added to x, and what is lost is stored in them. Without them nothing is added or kept.
        `places` name the parts of parameters that x consists of, in order; by default x is the
        whole of parameter `key.tensor`. Other codecs ignore both.
        """
        flat = flat_input(x)
        workers = 1 if workers is None else workers
        if not isinstance(workers, int) or workers < 1:
            raise ConfigError(f"workers must be a positive integer, not {workers!r}")
        parts = self._parts(flat.numel(), segments)
        factors = self._budget_shares(shares, spent, max(len(parts), 1), flat.device)
        header, head = _header_of(self, flat.numel(), x.dtype, workers, parts)
        kept = isinstance(out, Wire) and out.header == header
        size = HEADER_BYTES + self._room(header)
        data = buffer(out.buffer if isinstance(out, Wire) else out, size, flat.device)
        if not kept:
            data[:HEADER_BYTES].copy_(header_tensor(head, flat.device))
        if flat.numel():
            body = data[HEADER_BYTES:]
            self._encode(
                EncodeRequest(flat, key, body, header, norm, factors, spent, places, residuals)
            )
        elif spent is not None:
            spent.zero_()
        return Wire(buffer=data, key=key, shape=x.shape, dtype=x.dtype, header=header)

    def decode(
        self,
        wire: Wire,
        side: Tensor | None = None,
        out: Tensor | None = None,
        add: bool = False,
        weight: float = 1.0,
        failed: Tensor | None = None,
    ) -> Tensor:
        """Decode, times `weight`, into `out`; with `add`, onto it.

        `out` may have any of the three dtypes; without it the result has the encoded tensor's
        shape and dtype. `side` and `failed` are NDQSG's: side information, and a uint8 tensor
        that gets 1 for each check that disagrees. Decoding never waits for the device.
        """
        self._check(wire)
        target = output(out, wire.shape, wire.dtype, wire.buffer.device, add)
        if target.numel():
            end = None if wire.header.coder else wire.header.nbytes
            body = wire.buffer[HEADER_BYTES:end]
            into = DecodeTarget(target.view(-1), add, float(weight), side, failed)
            self._read(wire, body, into)
        return target

    def trust(
        self,
        data: Tensor,
        *,
        key: Key,
        shape: Sequence[int],
        dtype: torch.dtype,
        workers: int = 1,
        segments: Sequence[int] | None = None,
    ) -> Wire:
        """Wrap bytes that this codec is known to have written, without reading their header.

        `Wire.parse` waits for a CUDA device. Where a protocol fixes lengths and settings, and the
        header was seen to be right before, that wait buys nothing.
        """
        parts = self._parts(math.prod(shape), segments)
        header, _ = _header_of(self, math.prod(shape), dtype, workers, parts)
        if data.numel() < header.nbytes or (data.numel() > header.nbytes and not header.coder):
            raise WireError(f"the wire should have {header.nbytes} bytes, but has {data.numel()}")
        return Wire(buffer=data, key=key, shape=torch.Size(shape), dtype=dtype, header=header)

    def _check(self, wire: Wire) -> None:
        """WireError unless this codec could have written the wire's header."""
        try:
            header = wire.header
            expected, _ = _header_of(
                self, header.numel, wire.dtype, header.workers, header.segments
            )
        except ConfigError:  # more workers than this codec can serve
            expected = None
        if wire.header != expected:
            raise WireError(
                f"this wire was not written by {self}: decode it with the codec, settings and "
                "shape that encoded it"
            )
        if wire.buffer.numel() < wire.header.nbytes:
            raise WireError(
                f"the wire should have {wire.header.nbytes} bytes, but has {wire.buffer.numel()}"
            )

    def decode_sum(
        self,
        payload: Tensor,
        keys: Sequence[Key],
        *,
        norm: Tensor | float | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
        add: bool = False,
        weight: float = 1.0,
    ) -> Tensor:
        """The mean over workers, decoded from the sum of their payloads.

        `keys` are the workers' keys, one each, as they encoded with workers=len(keys); `norm` is
        the shared scale.
        """
        if not self.summable:
            raise TypeError(f"wires of {self} cannot be summed; decode each and add")
        if shape is None:
            shape = self._sum_shape(payload) if out is None else out.shape
        target = output(out, torch.Size(shape), dtype, payload.device, add)
        if not len(keys):
            raise ValueError(f"{self.name}: a sum has workers: give their keys, one each")
        self._read_sum(payload, keys, norm, DecodeTarget(target.view(-1), add, float(weight)))
        return target

    def nbytes(
        self,
        numel: int,
        dtype: torch.dtype = torch.float32,
        segments: Sequence[int] | None = None,
    ) -> int:
        """Length of the wire of `numel` values; with a coder, what it never exceeds."""
        parts = self._parts(numel, segments)
        return HEADER_BYTES + self._room(_header_of(self, numel, dtype, 1, parts)[0])

    def check_workers(self, workers: int) -> None:  # noqa: B027 (most add up any number)
        """ConfigError, with what works, if wires of this many workers cannot be added."""

    def least_nbytes(
        self,
        numel: int,
        dtype: torch.dtype = torch.float32,
        segments: Sequence[int] | None = None,
    ) -> int:
        """No wire of `numel` values is shorter: header, scales and tables."""
        return _header_of(self, numel, dtype, 1, self._parts(numel, segments))[0].nbytes

    def local_norm(self, x: Tensor) -> Tensor:
        """This worker's part of a shared scale, one fp32 value on x's device; NaN if x is so."""
        raise TypeError(f"{self.name} has no shared scale: shared_norm is False")

    def global_norm(self, norms: Tensor) -> Tensor:
        """The scale that workers share, from all their local norms; `encode` takes it as norm=."""
        raise TypeError(f"{self.name} has no shared scale: shared_norm is False")

    def levels_for(self, workers: int) -> int:
        """Levels under a shared scale that leave room for the sum of this many workers."""
        raise TypeError(f"{self.name} has no levels that workers share: shared_norm is False")

    def reduce(self, a: Wire, b: Wire, key: Key, out: Tensor | None = None) -> Wire:
        """The sum of two wires, encoded again; `key` must be fresh."""
        raise TypeError(f"{self.name} cannot add wires in pairs: pairwise is False")

    @property
    def budget(self) -> float | None:
        """E‖Q(v) - v‖² / ‖v‖² that the codec may spend; None if its settings are bits instead."""
        return None

    def at_share(self, share: float) -> Codec:
        """The codec at a share of its error budget; itself if it has none."""
        return self

    @abstractmethod
    def variance_bound(self, d: int) -> float | None:
        """Bound on E‖Q(v) - v‖² / ‖v‖² over all v of d values, or None if there is none."""

    @abstractmethod
    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        """The header of a wire: its lengths and settings."""

    def _room(self, header: Header) -> int:
        """Bytes that the body may need."""
        return header.body_bytes

    def _parts(self, numel: int, segments: Sequence[int] | None) -> tuple[int, ...]:
        """The segments that the header keeps: none, unless the codec is segmented."""
        if not self.segmented or segments is None or len(segments) < 2:
            return ()
        parts = tuple(segments)
        if sum(parts) != numel or min(parts) < 1:
            raise ValueError(f"segments must be positive and add up to {numel}, not {parts}")
        if len(parts) > MAX_SEGMENTS:
            raise ValueError(f"a wire may have {MAX_SEGMENTS} segments, not {len(parts)}: split")
        return parts

    def _budget_shares(
        self,
        shares: Sequence[float] | Tensor | None,
        spent: Tensor | None,
        segments: int,
        device: torch.device,
    ) -> tuple[float, ...] | Tensor:
        """The shares; ConfigError or ValueError unless the codec takes these arguments."""
        if shares is None and spent is None:
            return ()
        if shares is not None and self.budget is None:
            raise ConfigError(
                f"{self} has no error budget to take shares of: leave shares= out, or use a codec "
                "with error=, as ecdq:error=0.08"
            )
        if spent is not None and not self.knows_error:
            raise ConfigError(
                f"{self} does not know the error that it makes: leave spent= out, or use ecdq"
            )
        if spent is not None and (
            spent.dtype not in (torch.float32, torch.float64)
            or spent.shape != (segments,)
            or spent.device != device
        ):
            raise ValueError(
                f"spent must be float32 or float64 of shape ({segments},) on {device}, not "
                f"{spent.dtype} of shape {tuple(spent.shape)} on {spent.device}"
            )
        return _factors(shares, segments, device)

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        """Encode flat, non-empty x into the body; implement this one, or `_encode`."""
        raise NotImplementedError(f"{type(self).__name__} has no _write")

    def _sum_shape(self, payload: Tensor) -> Sequence[int]:
        """The shape of what a sum of payloads decodes to."""
        return payload.shape

    def _read_sum(
        self,
        payload: Tensor,
        keys: Sequence[Key],
        norm: Tensor | float | None,
        into: DecodeTarget,
    ) -> None:
        """Decode a sum of payloads into flat into.out, which may be empty."""
        raise NotImplementedError(f"{type(self).__name__} has no _read_sum")

    def _encode(self, request: EncodeRequest) -> None:
        """`_write`, for codecs that look at all of a request."""
        self._write(request.x, request.key, request.body, request.header, request.norm)

    @abstractmethod
    def _read(self, wire: Wire, body: Tensor, into: DecodeTarget) -> None:
        """Decode the body into flat, non-empty into.out."""

    def __str__(self) -> str:
        """The spec string that `laconic.codec` turns into this codec."""
        settings = []
        for item in fields(self):  # pyright: ignore[reportArgumentType] (subclasses are dataclasses)
            value = getattr(self, item.name)
            if isinstance(value, bool):
                value = str(value).lower()
            elif isinstance(value, float):
                value = repr(value)
            elif value is None:
                value = "tensor" if item.name == "block" else None
            if value is not None:
                settings.append(f"{item.name}={value}")
        return f"{self.name}:{','.join(settings)}" if settings else self.name


def _factors(
    shares: Sequence[float] | Tensor | None, segments: int, device: torch.device
) -> tuple[float, ...] | Tensor:
    """Shares, checked; on a CUDA device only their number is."""
    if shares is None:
        return ()
    if len(shares) != segments:
        raise ValueError(f"shares has {len(shares)} entries: give one per segment, {segments}")
    if isinstance(shares, Tensor) and shares.is_cuda:
        if shares.dtype != torch.float64 or shares.device != device:
            raise ValueError(
                f"shares must be float64 on {device}, not {shares.dtype} on {shares.device}"
            )
        return shares
    factors = tuple(map(float, shares))
    if not all(0 < share < math.inf for share in factors):
        raise ValueError(f"shares must be positive and finite, not {factors}")
    return factors


def _warn_of(old: str) -> None:
    """DeprecationWarning where an attribute is asked for or declared by its old name."""
    text = f"a codec's {old} is now called {_OLD_NAMES[old]}: use that name"
    warnings.warn(text, DeprecationWarning, stacklevel=3)


@lru_cache(maxsize=4096)
def _header_of(
    codec: Codec, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
) -> tuple[Header, bytes]:
    header = codec._header(numel, dtype, workers, segments)
    return header, header.pack()


def flat_input(x: Tensor) -> Tensor:
    """x as a contiguous vector without gradient history; TypeError if it is no gradient."""
    if x.dtype not in DTYPES:
        raise TypeError(
            f"codecs take float32, float16 or bfloat16 tensors, not {x.dtype}; "
            "convert it, or send it uncompressed"
        )
    if x.layout != torch.strided:
        raise TypeError("codecs take dense tensors; send sparse gradients uncompressed")
    if x.numel() > MAX_NUMEL:
        raise ValueError(f"a tensor may hold {MAX_NUMEL} values, not {x.numel()}: split it")
    return x.detach().contiguous().view(-1)


def output(
    out: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device, add: bool
) -> Tensor:
    """Check `out`, or make one."""
    if out is None:
        if add:
            raise ValueError("add=True adds onto out: give out=")
        return torch.empty(shape, dtype=dtype, device=device)
    if out.dtype not in DTYPES:
        raise TypeError(f"out must be float32, float16 or bfloat16, not {out.dtype}")
    if out.numel() != math.prod(shape) or not out.is_contiguous() or out.device != device:
        raise ValueError(f"out must be contiguous, on {device}, and hold {math.prod(shape)} values")
    return out.detach()


def check_sum(name: str, payload: Tensor, count: int) -> None:
    """ValueError unless payload can be a sum of payloads of `count` entries."""
    if payload.numel() != count or not payload.is_contiguous():
        raise ValueError(
            f"{name}: the sum is a contiguous tensor of {count} entries, not {payload.numel()}"
        )


def buffer(out: Tensor | None, size: int, device: torch.device) -> Tensor:
    """`out`, checked, or a new buffer of `size` bytes."""
    if out is None:
        return torch.empty(size, dtype=torch.uint8, device=device)
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous():
        raise ValueError("out must be a contiguous uint8 tensor of one dimension")
    if out.device != device or out.numel() < size or out.data_ptr() % ALIGN:
        raise ValueError(
            f"out must be on {device}, hold {size} bytes and start on a {ALIGN}-byte boundary"
        )
    return out[:size]


def no_norm(name: str, norm: object) -> None:
    """Codecs with scales of their own refuse a shared one."""
    if norm is not None:
        raise TypeError(f"{name} finds its own scales; norm= is for global and global-exp")
