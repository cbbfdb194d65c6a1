"""Error feedback: what a codec loses at one step is added to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import HEADER_BYTES, Header, Wire, header_tensor
from laconic.codecs._base import Codec, Into, _header_of, buffer, flat_input
from laconic.codecs._memory import Memory, Place, Scratch, tiling
from laconic.codecs._spec import check_inner
from laconic.errors import ConfigError, WireError
from laconic.kernels import backend

_PREFIX = 16  # λ and twelve zero bytes: the wire inside starts on a 16-byte boundary
_LARGEST = 2.0**102  # of ‖λQ‖: too little to move the largest float32, so c - λQ is finite if c is
_CPU_CHUNK, _CHUNK = 1 << 18, 1 << 24  # values whose products are added up at a time
_SAFE = 2.0**-60, 2.0**100  # sums of fp32 products between these have lost nothing that counts


@dataclass(frozen=True, kw_only=True)
class Feedback(Codec):
    """`feedback(codec)`: remember what was lost, send it next time; any codec will do.

    Per tensor x with memory m (zero at first) and Q = decode(encode(x + m)) of the codec inside:

        c = x + m        λ = ⟨Q, c⟩/⟨Q, Q⟩, 0 if Q = 0        decoded: λ·Q        m ← c - λ·Q

    1. Σ decoded + m = Σ x: nothing is lost, some of it comes late.
    2. λ·Q is the orthogonal projection of c on Q. With φ the angle between them,
           ‖c - λQ‖² = ‖c‖² - ⟨Q, c⟩²/⟨Q, Q⟩ = (1 - cos²φ)·‖c‖² ≤ ‖c‖²,
       so that any codec contracts, however large its NMSE (unless Q is orthogonal to c). Feedback
       needs that: with λ = 1 and an NMSE above 1 the memory can grow without end.
    3. For an unbiased codec of relative variance w, E⟨Q, c⟩ = ‖c‖² and E‖Q‖² = (1+w)·‖c‖², so
       λ is about 1/(1+w). The projection is at least as near as the fixed factor 1/(1+w):
           E‖c - λQ‖² ≤ E‖c - Q/(1+w)‖² = (w² + w)/(1+w)²·‖c‖² = w/(1+w)·‖c‖².
       `contraction(d)` is this bound with the codec's worst w; 1 where none is known.
    4. For qsgd-topk, Q = ‖c‖₂·sign(c_i) on a set I: λ·‖c‖₂ = Σ_I|c_i|/|I|, the mean magnitude of
       what is kept. (The norm itself, up to √d times too large, diverges.)

    λ travels (fp32), receivers have no memory. The wire is that of c in fp32, whatever x is.

    The memory belongs to the codec object: one for each rank and model. It is kept by parameter
    (`Key.tensor`) and phase; encode with `places=` where x holds parts of several parameters, such
    as a chunk of a DDP bucket. `state_dict`, `load_state_dict` and `reset` do what they say.

    - Where c, Q or ‖λQ‖ (above 2^102) is not finite, λ is NaN: all decodes to NaN, and the
      memory stays as it was before, since GradScaler skips that step. (Ranks whose own gradient
      was finite have then sent their part in vain, as without feedback.)
    - The memory has the units of x: a changed loss scale finds it in the old one.
    - Biased at every step, so `variance_bound` is None: with a memory, not even x = 0 decodes to 0.
    - Factors differ between workers, so wires cannot be summed, and `workers` is not looked at.
      global and global-exp take each wire's own scale; a `norm=` must cover x + m, or all is NaN.
    - ndqsg's sender assumes that the receiver finds the right cells, and α = 1.

    Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019, arXiv 1901.09847, whose scaled
    sign, ‖c‖₁/d·sign(c), is the projection on sign(c). Scaling an unbiased codec by 1/(1+w):
    Beznosikov et al. 2020, arXiv 2002.12410.

    >>> import torch, laconic as lc
    >>> codec, x = lc.codec("feedback(qsgd-topk)"), torch.tensor([3.0, 0.5, -4.0, 0.25])
    >>> codec.decode(codec.encode(x, lc.Key(tensor=7)))
    tensor([ 3.5000,  0.0000, -3.5000,  0.0000])
    >>> codec.state_dict()
    {'7,0': tensor([-0.5000,  0.5000, -0.5000,  0.2500])}
    """

    name: ClassVar[str] = "feedback"
    id: ClassVar[int] = 11
    unbiased: ClassVar[bool] = False
    remembers: ClassVar[bool] = True

    inner: Codec
    memory: Memory = field(default_factory=Memory, init=False, repr=False, compare=False)
    _scratch: Scratch = field(default_factory=Scratch, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_inner(self.name, self.inner)
        object.__setattr__(self, "segmented", self.inner.segmented)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all residuals, by "parameter,phase"."""
        return self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state_dict; its tensors may be on any device."""
        self.memory.load_state_dict(state)

    def reset(self) -> None:
        """Forget what was not sent."""
        self.memory.reset()

    def change_units(self, parameter: int, growth: Tensor) -> None:
        """What is remembered of a parameter, divided by 2^growth: its gradients will be, too."""
        self.memory.change_units(parameter, growth)

    def contraction(self, d: int) -> float:
        """Bound on E‖c - λQ‖² / ‖c‖² over all c of d values; below 1 if the codec's is known."""
        bound = self.inner.variance_bound(d)
        if bound is None:
            return 1.0
        return bound / (1 + bound) if self.inner.unbiased else min(bound, 1.0)

    @property
    def even_noise(self) -> bool:
        return self.inner.even_noise

    @property
    def needs_side(self) -> bool:
        return self.inner.needs_side

    def variance_bound(self, d: int) -> float | None:
        return None

    def nbytes(
        self,
        numel: int,
        dtype: torch.dtype = torch.float32,
        segments: Sequence[int] | None = None,
    ) -> int:
        parts = self.inner._parts(numel, segments)
        return HEADER_BYTES + self._room(_form(self.inner, numel, dtype, parts).outer)

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
    ) -> Wire:
        """Encode x + memory, and remember the error: once for each step.

        `places` say which parts of which parameters x consists of, in order; without them x is
        the whole of parameter `key.tensor`. The rest is as in any codec.
        """
        flat = flat_input(x)
        if workers is not None and (not isinstance(workers, int) or workers < 1):
            raise ConfigError(f"workers must be a positive integer, not {workers!r}")
        parts = self.inner._parts(flat.numel(), segments)
        self._error_budget(shares, spent, max(len(parts), 1), flat.device)  # it has none
        header, head, _, _ = _form(self.inner, flat.numel(), x.dtype, parts)
        size = HEADER_BYTES + self._room(header)
        data = buffer(out.buffer if isinstance(out, Wire) else out, size, flat.device)
        if not (isinstance(out, Wire) and out.header == header):
            data[:HEADER_BYTES].copy_(header_tensor(head, flat.device))
        if places is None and flat.numel():
            count = flat.numel()
            places = [Place(parameter=key.tensor, start=0, numel=count, total=count)]
        tiles = tiling(places or (), flat.numel())
        if tiles:
            self._step(flat, key, data[HEADER_BYTES:], header, norm, tiles)
        return Wire(buffer=data, key=key, shape=x.shape, dtype=x.dtype, header=header)

    def _step(
        self,
        x: Tensor,
        key: Key,
        body: Tensor,
        header: Header,
        norm: Tensor | float | None,
        places: tuple[Place, ...],
    ) -> None:
        """Encode flat x into the body, and move the memory on."""
        self.memory.claim(key.rank)
        homes = [self.memory.of(place, key.phase, x.device) for place in places]
        scattered = len(homes) > 1
        m = self._buffer("memory", x) if scattered else homes[0]
        parts = list(m.split([place.numel for place in places]))
        if scattered:
            _copy(homes, parts)
        c = torch.add(x, m, out=self._buffer("corrected", x))
        self._write(c, key, body, header, norm)
        value, fine = self._buffer("decoded", x), torch.isfinite(_factor(body))
        if not _readable(x):
            torch.where(fine, c.sub_(value), m, out=m)
        elif fine:
            torch.sub(c, value, out=m)
        if scattered:
            _copy(parts, homes)

    def _write(
        self, x: Tensor, key: Key, body: Tensor, header: Header, norm: Tensor | float | None
    ) -> None:
        """Encode x, which is c here, without the memory; λ·Q stays in the buffer "decoded"."""
        segments = header.segments or None
        wire = self.inner.encode(x, key, norm, out=body[_PREFIX:], segments=segments)
        q = self.inner.decode(wire, side=x, out=self._buffer("decoded", x))
        body[:_PREFIX].zero_()
        q.mul_(_factor(body).copy_(self._optimal(q, x)))

    def _optimal(self, q: Tensor, c: Tensor) -> Tensor:
        """⟨q, c⟩/⟨q, q⟩ in fp64, on the device; NaN if anything is not finite.

        ⟨q, c⟩ is finite just where all values are: an infinite q_i comes of a c_i that is not 0.
        """
        sums = _host_products(q, c) if _readable(c) else self._products(q, c)
        qq, qc = sums.unbind()
        factor = torch.where(qq > 0, qc / qq, 0 * qc)
        return torch.where(qc.abs() <= _LARGEST * qq.sqrt(), factor, torch.nan)

    def _products(self, q: Tensor, c: Tensor) -> Tensor:
        """⟨q, q⟩ and ⟨q, c⟩ in fp64, in which no square of a float32 is too large or too small."""
        size = min(_CHUNK, c.numel())
        chunks = -(-c.numel() // size)
        pair = self._scratch.take("pair", 2 * size, c.device, torch.float64).view(2, size)
        sums = self._scratch.take("sums", 2 * chunks, c.device, torch.float64).view(2, chunks)
        for i, (a, b) in enumerate(zip(q.split(size), c.split(size), strict=True)):
            u, v = pair[0, : a.numel()].copy_(a), pair[1, : a.numel()].copy_(b)
            torch.dot(u, u, out=sums[0, i])
            torch.dot(u, v, out=sums[1, i])
        return sums.sum(1)

    def _check(self, wire: Wire) -> None:
        """As in any codec; where that needs no waiting, the header inside is looked at, too."""
        form = _form(self.inner, wire.header.numel, wire.dtype, wire.header.segments)
        if wire.header != form.outer:
            raise WireError(
                f"this wire was not written by {self}: decode it with the codec, settings and "
                "shape that encoded it"
            )
        if wire.buffer.numel() < form.outer.nbytes:
            raise WireError(
                f"the wire should have {form.outer.nbytes} bytes, but has {wire.buffer.numel()}"
            )
        if wire.header.numel and _readable(wire.buffer):
            start, end = HEADER_BYTES + 4, HEADER_BYTES + _PREFIX + HEADER_BYTES
            if bytes(wire.buffer[start:end].tolist()) != bytes(_PREFIX - 4) + form.inner_head:
                raise WireError(f"the header inside this wire of {self} is damaged")

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        return _form(self.inner, numel, dtype, segments).outer

    def _room(self, header: Header) -> int:
        if not header.numel:
            return 0
        form = _form(self.inner, header.numel, header.dtype, header.segments)
        return _PREFIX + HEADER_BYTES + self.inner._room(form.inner)

    def _read(self, wire: Wire, body: Tensor, into: Into) -> None:
        numel, out = wire.header.numel, into.out
        inside = Wire(
            buffer=body[_PREFIX:],
            key=wire.key,
            shape=torch.Size((numel,)),
            dtype=torch.float32,
            header=_form(self.inner, numel, wire.dtype, wire.header.segments).inner,
        )
        direct = out.dtype == torch.float32 and not into.add
        value = out if direct else self._buffer("decoded", out)
        self.inner.decode(inside, side=into.side, out=value, failed=into.failed)
        factor = _factor(body) * into.weight
        value.mul_(torch.where(torch.isfinite(factor), factor, torch.nan))
        if out.dtype == torch.float16:  # x + m, and so the value, may be larger than any half
            largest = torch.finfo(torch.float16).max
            value.clamp_(-largest, largest)
        if not direct:
            backend(out.device).accumulate(value, out, weight=1.0, add=into.add)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """An fp32 scratch buffer as long as `like`, on its device."""
        return self._scratch.take(name, like.numel(), like.device)

    def __str__(self) -> str:
        return f"{self.name}({self.inner})"


class _Form(NamedTuple):
    outer: Header
    outer_head: bytes
    inner: Header
    inner_head: bytes


@lru_cache(maxsize=4096)
def _form(inner: Codec, numel: int, dtype: torch.dtype, segments: tuple[int, ...]) -> _Form:
    """The headers of a wire and of the wire inside it.

    The outer header's `levels` are the check sum of the inner one, so that a wire of another codec
    inside is known without waiting for the device. Cached by the codec inside: a cache by the
    wrapper would keep a memory alive that nobody uses any more.
    """
    inside, inner_head = _header_of(inner, numel, torch.float32, 1, segments)
    outer = Header(
        codec=Feedback.id,
        dtype=dtype,
        numel=numel,
        body_bytes=_PREFIX + inside.nbytes if numel else 0,
        levels=int.from_bytes(inner_head[-4:], "little"),
        coder=inside.coder,
        run=inside.run,
        segments=inside.segments,
    )
    return _Form(outer, outer.pack(), inside, inner_head)


def _factor(body: Tensor) -> Tensor:
    """λ, one fp32 value in the body."""
    return body[:4].view(torch.float32)


def _readable(x: Tensor) -> bool:
    """Whether Python may look at values without waiting for a device."""
    return x.device.type == "cpu"


def _host_products(q: Tensor, c: Tensor) -> Tensor:
    """⟨q, q⟩ and ⟨q, c⟩ on the CPU: from fp32 products, or fp64 ones where those are no good."""
    sums = [0.0, 0.0]
    for kind in (torch.float32, torch.float64):
        sums = [0.0, 0.0]
        for a, b in zip(q.split(_CPU_CHUNK), c.split(_CPU_CHUNK), strict=True):
            a, b = a.to(kind), b.to(kind)
            sums[0] += float(torch.dot(a, a))
            sums[1] += float(torch.dot(a, b))
        if all(_SAFE[0] < abs(value) < _SAFE[1] for value in sums):
            break
    return torch.tensor(sums, dtype=torch.float64)


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy many tensors; one launch for many on a GPU."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
