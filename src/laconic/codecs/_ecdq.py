"""ECDQ: one step for a whole tensor, chosen by its error, and a lossless code."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from laconic._key import Key
from laconic._wire import Header, Wire
from laconic.codecs._base import Codec, ErrorBudget, Into
from laconic.codecs._linear import check_choice, is_integer, no_norm
from laconic.coders import coder
from laconic.errors import ConfigError
from laconic.kernels import backend
from laconic.kernels._coding import BLOCK, LANES, LARGEST, Budgets, Section, Subtract, table

_SUBTRACT = {"auto": Subtract.AUTO, "always": Subtract.ALWAYS, "never": Subtract.NEVER}
_DEFAULT_ERROR = 0.08


@dataclass(frozen=True, kw_only=True)
class ECDQ(Codec):
    """`ecdq`: say how much error is allowed; the bits follow the information in the gradient.

    Per segment (a tensor, or a parameter's part of a bucket) of d values v, Δ = f·rms(v), r
    uniform on [0, 1), u = r - ½:

        q_i = floor(v_i/Δ + r_i)           v̂_i = Δ·(q_i - u_i) or Δ·q_i, chosen per block of 512

    1. Both are unbiased. Subtracting u costs Δ²/12 a value, zeros included; not subtracting costs
       Δ²·φ_i(1-φ_i) with φ_i = v_i/Δ mod 1, nothing on zeros. A block takes what is cheaper for
       its v (one bit), before r is drawn: E over r of the chosen form is v, and the error is
           E‖v̂-v‖² = Δ²·Σ_blocks min(n/12, Σ φ_i(1-φ_i)).
       A choice that looks at q is biased: with φ small, q ≠ 0 tells that r was large, and a rule
       that takes one form then and the other one otherwise keeps only part of either mean.
    2. `error=` is the most that E‖v̂-v‖²/‖v‖² may be after that choice, of every segment and
       for all v. f = √(12·error) would keep to it without the choice; with it f is larger,
       found on 256 blocks or fewer, sampled by what they may cost, that are tried with a few
       steps (no second pass). Quantizing adds up the exact error; in the rare case that the
       sample was misled, the segment takes a smaller step that needs no sample
       (`kernels/_reference/steps.py`). None of this looks at r. `step=` gives f itself. Integers
       stay within 32001: Δ is at least max|v|/32000, even if that is more error than asked for.
    3. q is coded losslessly (`coder=`): zeros and small integers cost little. The code length may
       depend on anything, the value may not.
    4. `max_bits=` is a ceiling on the coded bits of a value (2 or more, averaged over a segment;
       check sums and tables come on top, `nbytes` counts all). Every |q| in a chunk is at most
       K = floor(max|v|/Δ) + 1 whatever r is, and no coder is longer than bit planes of
       1 + bit_length(K) bits: Δ grows until these fit, before r is drawn. Redrawing or coarsening
       after seeing the length would keep draws that came out short, and shrink the mean.

    5. `encode(shares=...)` multiplies `error` segment by segment, and `encode(spent=...)` gets the
       exact E‖v̂-v‖² of 1. for each.

    Ziv 1985; Zamir and Feder 1992 (entropy-coded dithered quantization). r has 16 bits, which
    biases a value by at most 2^-17 of Δ.

    >>> import torch, laconic as lc
    >>> x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    >>> codec, key = lc.codec("ecdq:error=0.08"), lc.Key(step=1)
    >>> wire = codec.encode(x, key)
    >>> y = codec.decode(wire)
    >>> round(float((y - x).square().sum() / x.square().sum()), 2), 8 * wire.nbytes / 10_000 < 2.7
    (0.08, True)
    """

    name: ClassVar[str] = "ecdq"
    id: ClassVar[int] = 9
    unbiased: ClassVar[bool] = True
    segmented: ClassVar[bool] = True
    knows_error: ClassVar[bool] = True

    error: float | None = None
    step: float | None = None
    coder: str = "bitmap"
    subtract: str = "auto"
    max_bits: float | None = None

    def __post_init__(self) -> None:
        if self.error is not None and self.step is not None:
            raise ConfigError("ecdq: give one of error= and step=")
        if self.error is None and self.step is None:
            object.__setattr__(self, "error", _DEFAULT_ERROR)
        for name, low, high in (("error", 1e-8, 1e4), ("step", 1e-4, 1e3), ("max_bits", 2, 16)):
            value = getattr(self, name)
            if value is None:
                continue
            if not (is_integer(value) or isinstance(value, float)) or not low <= value <= high:
                raise ConfigError(f"ecdq: {name} must be from {low:g} to {high:g}, not {value!r}")
            object.__setattr__(self, name, float(value))
        check_choice(self.name, "subtract", self.subtract, tuple(_SUBTRACT))
        coder(self.coder)

    @property
    def budget(self) -> float | None:
        return self.error

    def at_share(self, share: float) -> ECDQ:
        return self if self.error is None else replace(self, error=share * self.error)

    def variance_bound(self, d: int) -> float | None:
        """`error`, or what steps of max|v|/32000 cost if that is more; f²/12 under `step`.

        max_bits may ask for larger steps, and under `step` Δ²·φ(1-φ) is not bounded by Δ²/12.
        """
        if self.max_bits is not None:
            return None
        most = 4 if self.subtract == "never" else 12  # no value costs more than Δ²/most
        if self.error is not None:
            return max(self.error, d / (most * LARGEST**2))
        return None if self.step is None or most == 4 else self.step**2 / most

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        own = coder(self.coder)
        parts = segments or ((numel,) if numel else ())
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            block=BLOCK,
            coder=own.id,
            form=own.form,
            segments=segments,
            body_bytes=4 * len(parts) + 8 * table(parts).chunks,
        )

    def _room(self, header: Header) -> int:
        if self.max_bits is None:
            return 4 * len(header.parts) + coder(self.coder).room(header.parts)
        planes = sum(
            math.floor(LANES * -(-length // BLOCK) * self.max_bits) for length in header.parts
        )
        return header.body_bytes + 4 * (table(header.parts).chunks + planes)

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
        no_norm(self.name, norm)
        steps, section = _sections(body, header)
        parts, kernels, subtract = header.parts, backend(x.device), _SUBTRACT[self.subtract]
        error, shares = self.error or 0.0, budget.shares
        if not isinstance(shares, Tensor):
            shares = shares or (1.0,) * len(parts)
        searched = self.error is not None and subtract is not Subtract.ALWAYS
        budgets = Budgets.of(len(parts), x.device) if searched else None
        kernels.ecdq_steps(
            x,
            steps,
            parts,
            errors=_times(error, shares),
            step=self.step or 0.0,
            max_bits=self.max_bits or 0.0,
            subtract=subtract,
            budgets=budgets,
        )
        kernels.ecdq_encode(
            x,
            steps,
            section,
            parts,
            stream=key.stream(),
            coder=int(coder(self.coder).kind),
            form=header.form,
            subtract=subtract,
            budgets=budgets,
            spent=budget.spent,
        )

    def _read(self, wire: Wire, body: Tensor, into: Into) -> None:
        steps, section = _sections(body, wire.header)
        backend(body.device).ecdq_decode(
            section,
            steps,
            into.out,
            wire.header.parts,
            stream=wire.key.stream(),
            coder=int(coder(self.coder).kind),
            weight=into.weight,
            add=into.add,
        )


def _times(error: float, shares: tuple[float, ...] | Tensor) -> tuple[float, ...] | Tensor:
    if isinstance(shares, Tensor):
        return error * shares
    return tuple(error * share for share in shares)


def _sections(body: Tensor, header: Header) -> tuple[Tensor, Section]:
    """Steps (fp32), and the coded section behind them."""
    size = 4 * len(header.parts)
    return body[:size].view(torch.float32), Section.of(body[size:], table(header.parts).chunks)
