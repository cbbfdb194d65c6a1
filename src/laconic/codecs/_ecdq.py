"""ECDQ: one step for a whole tensor, chosen by its error, and a lossless code."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic._settings import between, check_settings, described, one_of, refused
from laconic._wire import Header, Wire, cut
from laconic.codecs._base import Codec, DecodeTarget, EncodeRequest, no_norm
from laconic.codecs._linear import CODER, is_integer
from laconic.coders import coder
from laconic.errors import ConfigError
from laconic.kernels import Coding, StepRule, backend, scratch_device
from laconic.kernels._coding import BLOCK, LANES, LARGEST, Budgets, Section, Subtract, table

_SUBTRACT = {"auto": Subtract.AUTO, "always": Subtract.ALWAYS, "never": Subtract.NEVER}
_DEFAULT_ERROR = 0.08
_MOST_VALUES = 1 << 31  # of a run
_MOST_RUNS = 1 << 19  # then there are 2^20 chunks at most, whose 4096 draws each 32 bits count


@dataclass(frozen=True, kw_only=True)
class ECDQ(Codec):
    """`ecdq`: given an allowed error, the bits follow the information in the gradient.

    Per segment (a tensor, or a parameter's part of a bucket) of d values v, Δ = f·rms(v), r
    uniform on [0, 1), u = r - ½:

        q_i = floor(v_i/Δ + r_i)           v̂_i = Δ·(q_i - u_i) or Δ·q_i, chosen per block of 512

    1. Both are unbiased. Subtracting u costs Δ²/12 per value, zeros included; not subtracting costs
       Δ²·φ_i(1-φ_i) with φ_i = v_i/Δ mod 1, nothing on zeros. A block takes what is cheaper for
       its v (one bit), before r is drawn: E over r of the chosen form is v, and the error is
           E‖v̂-v‖² = Δ²·Σ_blocks min(n/12, Σ φ_i(1-φ_i)).
       A choice that looks at q is biased: with φ small, q ≠ 0 means that r was large, and a rule
       that takes one form then and the other one otherwise keeps only part of either mean.
    2. `error=` is the most that E‖v̂-v‖²/‖v‖² may be after that choice, of every segment and
       for all v. f = √(12·error) would keep to it without the choice; with it f is larger,
       found on 256 blocks or fewer, sampled by what they may cost, that are tried with a few
       steps (no second pass). Quantizing adds up the exact error; in the rare case that the
       sample was misled, the segment takes a smaller step that needs no sample
       (`kernels/_reference/ecdq_steps.py`). None of this looks at r. `step=` gives f itself.
       Integers stay within 32001: Δ is at least max|v|/32000, even if that exceeds the
       allowed error.
    3. q is coded losslessly (`coder=`): zeros and small integers cost little. The code length may
       depend on anything, the value may not.
    4. `max_bits=` is a ceiling on the coded bits of a value (2 or more, averaged over a segment;
       check sums and tables come on top, `nbytes` counts all). Every |q| in a chunk is at most
       K = floor(max|v|/Δ) + 1 whatever r is, and no coder is longer than bit planes of
       1 + bit_length(K) bits: Δ grows until these fit, before r is drawn. Redrawing or coarsening
       after seeing the length would keep draws that came out short, and shrink the mean.

    5. `encode(shares=...)` multiplies `error` segment by segment, and `encode(spent=...)` gets the
       exact E‖v̂-v‖² of 1. for each.
    6. `block=` cuts every segment into runs of at most so many values, each with a Δ of its own:
           E‖v̂_r-v_r‖² ≤ error·‖v_r‖² for every run r,  hence  E‖v̂-v‖² ≤ error·‖v‖².
       One Δ per segment spreads its error evenly: rows of small gradients drown in it, and one
       outlier sets the step of all its neighbours. Adam divides by √v, which amplifies
       that noise where gradients are small. Take block=4096 where such an optimizer follows and
       the codec does not know it (hooks of your own, FSDP2), and for embeddings. The cost is 4
       bytes per run for its step and, because no chunk crosses runs, 8 in the table, 4 for the
       first word and what the coder rounds up for every chunk more than without: 16 to 22 bytes
       for each short run. Encoders reserve memory for whole chunks of 8192, and GPUs work on
       whole ones: block=512 takes up to twelve times as long there as block=8192. `shares=` and
       `spent=` stay those of segments; `step=` and `max_bits=` are those of runs.

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

    error: float | None = field(default=None, metadata=between(1e-8, 1e4, integer=False))
    step: float | None = field(default=None, metadata=between(1e-4, 1e3, integer=False))
    coder: str = field(default="bitmap", metadata=CODER)
    subtract: str = field(default="auto", metadata=one_of(*_SUBTRACT))
    max_bits: float | None = field(default=None, metadata=between(2, 16, integer=False))
    block: int | None = field(
        default=None,
        metadata=described(
            f"a multiple of {BLOCK} from {BLOCK} to {_MOST_VALUES}, or tensor for one step"
        ),
    )

    def __post_init__(self) -> None:
        if self.error is not None and self.step is not None:
            raise ConfigError("ecdq: give one of error= and step=")
        if self.error is None and self.step is None:
            object.__setattr__(self, "error", _DEFAULT_ERROR)
        check_settings(self)
        for name in ("error", "step", "max_bits"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        block = BLOCK if self.block is None else self.block
        if not is_integer(block) or block % BLOCK or not BLOCK <= block <= _MOST_VALUES:
            raise refused(self, "block")

    @property
    def budget(self) -> float | None:
        return self.error

    def at_share(self, share: float) -> ECDQ:
        return self if self.error is None else replace(self, error=share * self.error)

    @property
    def even_noise(self) -> bool:
        return self.block is None

    def variance_bound(self, d: int) -> float | None:
        """`error`, or what steps of max|v|/32000 cost if that is more; f²/12 under `step`.

        max_bits may ask for larger steps, and under `step` Δ²·φ(1-φ) is not bounded by Δ²/12.
        """
        if self.max_bits is not None:
            return None
        most = 4 if self.subtract == "never" else 12  # no value costs more than Δ²/most
        if self.error is not None:
            return max(self.error, min(d, self.block or d) / (most * LARGEST**2))
        return None if self.step is None or most == 4 else self.step**2 / most

    def _header(
        self, numel: int, dtype: torch.dtype, workers: int, segments: tuple[int, ...]
    ) -> Header:
        own = coder(self.coder)
        whole, run = segments or ((numel,) if numel else ()), self.block or 0
        _check_runs(whole, run)
        parts = cut(whole, run) if run else whole
        return Header(
            codec=self.id,
            dtype=dtype,
            numel=numel,
            block=BLOCK,
            coder=own.id,
            form=own.form,
            run=run,
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

    def _encode(self, request: EncodeRequest) -> None:
        x, header, spent = request.x, request.header, request.spent
        no_norm(self.name, request.norm)
        steps, section = _sections(request.body, header)
        parts, kernels, subtract = header.parts, backend(x.device), _SUBTRACT[self.subtract]
        searched = self.error is not None and subtract is not Subtract.ALWAYS
        place = scratch_device(x.device)
        budgets = Budgets.of(len(parts), place) if searched else None
        if spent is not None and header.run:
            spent = torch.empty(len(parts), dtype=torch.float64, device=place)
        errors = _per_run(_times(self.error or 0.0, request.shares, header), header)
        rule = StepRule(errors, self.step or 0.0, self.max_bits or 0.0, subtract)
        kernels.ecdq_steps(x, steps, parts, rule, budgets)
        coding = Coding(coder(self.coder).kind, request.key.stream(), header.form)
        kernels.ecdq_encode(
            x, steps, section, parts, coding, subtract=subtract, budgets=budgets, spent=spent
        )
        if request.spent is not None and spent is not None and header.run:
            _add_up(spent, header, request.spent)

    def _read(self, wire: Wire, body: Tensor, into: DecodeTarget) -> None:
        steps, section = _sections(body, wire.header)
        coding = Coding(coder(self.coder).kind, wire.key.stream())
        backend(body.device).ecdq_decode(section, steps, into.output, wire.header.parts, coding)

    def __str__(self) -> str:
        """Without block=, where there is none."""
        return super().__str__().removesuffix(",block=tensor")


def _check_runs(segments: tuple[int, ...], run: int) -> None:
    """ConfigError where a wire would have more runs than there are draws for."""
    count = sum(-(-length // run) for length in segments) if run else 0
    if count > _MOST_RUNS:
        raise ConfigError(
            f"ecdq: block={run} cuts {sum(segments)} values into {count} runs, and a wire may have "
            f"{_MOST_RUNS}: take a larger block, or split the tensor"
        )


def _times(
    error: float, shares: tuple[float, ...] | Tensor, header: Header
) -> tuple[float, ...] | Tensor:
    """The error of every segment; no shares are 1 each."""
    if isinstance(shares, Tensor):
        return error * shares
    return tuple(error * share for share in shares or (1.0,) * max(len(header.segments), 1))


def _per_run(errors: tuple[float, ...] | Tensor, header: Header) -> tuple[float, ...] | Tensor:
    """The error of every run, given those of the segments."""
    if not header.run:
        return errors
    counts = _runs(header)
    if isinstance(errors, Tensor):
        repeats = _on_device(counts, errors.device)
        return errors.repeat_interleave(repeats, output_size=sum(counts))
    return tuple(error for error, count in zip(errors, counts, strict=True) for _ in range(count))


def _add_up(values: Tensor, header: Header, out: Tensor) -> None:
    """Sums over the runs of each segment, into out: in a fixed order, unlike index_add_."""
    lengths = _on_device(_runs(header), values.device)
    # unsafe= spares a check of the lengths on the host, for which it would wait
    out.copy_(torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True))


def _runs(header: Header) -> tuple[int, ...]:
    """How many runs each segment has."""
    return tuple(-(-length // header.run) for length in header.segments or (header.numel,))


@lru_cache(maxsize=256)
def _on_device(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts).to(device)


def _sections(body: Tensor, header: Header) -> tuple[Tensor, Section]:
    """Steps (fp32), and the coded section after them."""
    size = 4 * len(header.parts)
    return body[:size].view(torch.float32), Section.of(body[size:], table(header.parts).chunks)
