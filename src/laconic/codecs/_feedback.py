"""Error feedback: what a codec loses at one step is added to the next."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic._scratch import borrowed, copy_all
from laconic._wire import Wire
from laconic.codecs._base import DecodeTarget, EncodeRequest, Place
from laconic.codecs._residuals import tiling
from laconic.codecs._wrapper import Wrapper
from laconic.kernels import Output, backend, scratch_device

_LARGEST = 2.0**102  # of ‖λQ‖: too little to move the largest float32, so c - λQ is finite if c is
_CPU_CHUNK, _CHUNK = 1 << 18, 1 << 24  # values whose products are added up at a time
_SAFE = 2.0**-60, 2.0**100  # sums of fp32 products between these have lost nothing that counts


@dataclass(frozen=True, kw_only=True)
class Feedback(Wrapper):
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

    m is the caller's: `encode(residuals=)` with one `lc.Residuals` for each rank and model, which
    keeps it by parameter (`Key.tensor`) and phase; encode with `places=` where x holds parts of
    several parameters, such as a chunk of a DDP bucket. Without residuals m is 0 and is not kept.
    Integrations and schedules do this for you, and save them in their `state_dict`.

    - Where c, Q or ‖λQ‖ (above 2^102) is not finite, λ is NaN: all decodes to NaN, and the
      memory stays as it was before, since GradScaler skips that step. (Ranks whose own gradient
      was finite have then sent their part in vain, as without feedback.)
    - The memory has the units of x: a changed loss scale finds it in the old one.
    - Biased at every step, so `variance_bound` is None: with a memory, not even x = 0 decodes to 0.
    - Under another feedback, each has residuals of its own: what is lost is then added twice.
    - Factors differ between workers, so wires cannot be summed, and `workers` is not looked at.
      global and global-exp take each wire's own scale; a `norm=` must cover x + m, or all is NaN.
    - ndqsg's sender assumes that the receiver finds the right cells, and α = 1.

    Seide et al. 2014; Stich et al. 2018; Karimireddy et al. 2019, arXiv 1901.09847, whose scaled
    sign, ‖c‖₁/d·sign(c), is the projection on sign(c). Scaling an unbiased codec by 1/(1+w):
    Beznosikov et al. 2020, arXiv 2002.12410.

    >>> import torch, laconic as lc
    >>> codec, x = lc.codec("feedback(qsgd-topk)"), torch.tensor([3.0, 0.5, -4.0, 0.25])
    >>> residuals = lc.Residuals()
    >>> codec.decode(codec.encode(x, lc.Key(tensor=7), residuals=residuals))
    tensor([ 3.5000,  0.0000, -3.5000,  0.0000])
    >>> residuals.state_dict()
    {'7,0': tensor([-0.5000,  0.5000, -0.5000,  0.2500])}
    """

    name: ClassVar[str] = "feedback"
    id: ClassVar[int] = 11
    unbiased: ClassVar[bool] = False
    residuals: ClassVar[bool] = True
    own_bytes: ClassVar[int] = 4  # λ

    def contraction(self, d: int) -> float:
        """Bound on E‖c - λQ‖² / ‖c‖² over all c of d values; below 1 if the codec's is known."""
        bound = self.inner.variance_bound(d)
        if bound is None:
            return 1.0
        return bound / (1 + bound) if self.inner.unbiased else min(bound, 1.0)

    def variance_bound(self, d: int) -> float | None:
        return None

    def _encode(self, request: EncodeRequest) -> None:
        x, homes = request.x, _homes(request)
        room = x.numel(), x.device
        if not homes:
            with borrowed(*room) as sent:
                self._project(x.float(), request, out=sent)
        elif len(homes) == 1:
            self._move_on(homes[0], request)
        else:
            with borrowed(*room) as m:
                parts = list(m.split([home.numel() for home in homes]))
                copy_all(parts, homes)
                self._move_on(m, request)
                copy_all(homes, parts)

    def _move_on(self, m: Tensor, request: EncodeRequest) -> None:
        """Encode c = x + m; m = c - λ·Q."""
        room = request.x.numel(), request.x.device
        with borrowed(*room) as c, borrowed(*room) as sent:
            torch.add(request.x, m, out=c)
            self._project(c, request, out=sent)
            fine = torch.isfinite(_factor(request.body))
            if not _readable(c):
                torch.where(fine, c.sub_(sent), m, out=m)
            elif fine:
                torch.sub(c, sent, out=m)

    def _project(self, c: Tensor, request: EncodeRequest, out: Tensor) -> None:
        """Encode c; out = λ·Q, what will be decoded."""
        body, kept = request.body, request.residuals
        wire = self.inner.encode(
            c,
            request.key,
            request.norm,
            out=body[self._start :],
            segments=request.header.segments or None,
            places=request.places,
            residuals=kept.inside if kept is not None and self.inner.residuals else None,
        )
        q = self.inner.decode(wire, side=c, out=out)
        body[: self._start].zero_()
        q.mul_(_factor(body).copy_(_optimal(q, c)))

    def _read(self, wire: Wire, body: Tensor, into: DecodeTarget) -> None:
        inside, out = self._wire_inside(wire, body), into.out
        direct = out.dtype == torch.float32 and not into.add
        with nullcontext(out) if direct else borrowed(out.numel(), out.device) as value:
            self.inner.decode(inside, side=into.side, out=value, failed=into.failed)
            nan = torch.nan  # also where the factor is infinite
            value.mul_((_factor(body) * into.weight).nan_to_num_(nan, nan, nan))
            if out.dtype == torch.float16:  # x + m, and so the value, may be larger than any half
                largest = torch.finfo(torch.float16).max
                value.clamp_(-largest, largest)
            if not direct:
                backend(out.device).accumulate(value, Output(out, add=into.add))


def _homes(request: EncodeRequest) -> list[Tensor]:
    """The residuals of x's places; none if the caller keeps none."""
    key, numel, kept = request.key, request.x.numel(), request.residuals
    places = request.places
    if places is None:
        places = (Place(parameter=key.tensor, start=0, numel=numel, total=numel),)
    places = tiling(places, numel)
    if kept is None:
        return []
    kept.claim(key.rank)
    return [kept.of(place, key.phase, request.x.device) for place in places]


def _factor(body: Tensor) -> Tensor:
    """λ, one fp32 value in the body."""
    return body[:4].view(torch.float32)


def _readable(x: Tensor) -> bool:
    """Whether Python may look at values without waiting for a device."""
    return x.device.type == "cpu"


def _optimal(q: Tensor, c: Tensor) -> Tensor:
    """⟨q, c⟩/⟨q, q⟩ in fp64, on the device; NaN if anything is not finite.

    ⟨q, c⟩ is finite just where all values are: an infinite q_i comes of a c_i that is not 0.
    """
    place = scratch_device(c.device)
    q, c = q.to(place), c.to(place)
    sums = _host_products(q, c) if _readable(c) else _products(q, c)
    qq, qc = sums.unbind()
    factor = torch.where(qq > 0, qc / qq, 0 * qc)
    return torch.where(qc.abs() <= _LARGEST * qq.sqrt(), factor, torch.nan)


def _products(q: Tensor, c: Tensor) -> Tensor:
    """⟨q, q⟩ and ⟨q, c⟩ in fp64, in which no square of a float32 is too large or too small."""
    size = min(_CHUNK, c.numel())
    chunks = -(-c.numel() // size)
    kind = torch.float64
    with borrowed(2 * size, c.device, kind) as pair, borrowed(2 * chunks, c.device, kind) as sums:
        u, v, sums = pair[:size], pair[size:], sums.view(2, chunks)
        for i, (a, b) in enumerate(zip(q.split(size), c.split(size), strict=True)):
            one, other = u[: a.numel()].copy_(a), v[: a.numel()].copy_(b)
            torch.dot(one, one, out=sums[0, i])
            torch.dot(one, other, out=sums[1, i])
        return sums.sum(1)


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
