"""What every backend offers: the kernels, and the small bundles of arguments that they take.

The equations are in the modules of `_reference`, which are the definition: all backends make the
same bytes, and decode to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from laconic._key import Stream
from laconic.kernels._coding import Budgets, Kind, Section, Subtract
from laconic.kernels._layout import ScaleKind, code_offset, fraction_bits


class Lattice(NamedTuple):
    """How values become codes: `levels` on either side of zero, each code of `bits` bits.

    A scale belongs to `block` values; 0 means one scale for all. Codes of 32 bits are integers,
    narrower ones are packed in groups (`_layout.py`).
    """

    block: int
    levels: int
    bits: int

    @property
    def fraction(self) -> int:
        """F, the bits of fixed point below a level."""
        return fraction_bits(self.levels)

    @property
    def limit(self) -> int:
        """The largest t in fixed point."""
        return self.levels << self.fraction

    @property
    def offset(self) -> int:
        """What is added to q to make a code."""
        return code_offset(self.levels, self.bits)


class Dither(NamedTuple):
    """Draws: those of a stream, moved by `shift` units of 2^-F, a worker's stratum.

    At decoding a sum, the sum of the strata of so many `workers`.
    """

    stream: Stream
    shift: int = 0
    workers: int = 1


class Output(NamedTuple):
    """Where decoded values end: tensor = weight·values, or with `add`, tensor += weight·values."""

    tensor: Tensor
    weight: float = 1.0
    add: bool = False


class Modulo(NamedTuple):
    """Coarse cells of `ratio` fine steps, and the factor `alpha` of NDQSG."""

    ratio: int
    alpha: float


class Rotation(NamedTuple):
    """H·D in blocks of `size` values, the signs of D from a stream.

    Blocks do not cross segments; without segments the tensor is one.
    """

    signs: Stream
    size: int
    segments: Sequence[int] = ()


class StepRule(NamedTuple):
    """How ecdq finds a step: `step` times a segment's rms or, if that is 0, the one for its error.

    With max_bits, the step grows until bit planes of floor(max|x|/Δ) + 1 take no more bits per
    value: a bound on every coder's length that holds whatever the dither will be.
    """

    errors: Sequence[float] | Tensor
    step: float = 0.0
    max_bits: float = 0.0
    subtract: Subtract = Subtract.AUTO


class Coding(NamedTuple):
    """A lossless coder: its kind, the draws it may use, and its form."""

    kind: Kind
    stream: Stream
    form: int = 0


class Kernels(Protocol):
    """The kernels of one backend.

    A tensor is one-dimensional, contiguous and on the backend's device, and is read as fp32 or one
    of its 16-bit floats. Results go into the caller's tensors; `Output` may be any of the floats.
    """

    # --- linear codes ---

    def scales(self, x: Tensor, out: Tensor, *, block: int, kind: ScaleKind) -> None:
        """Scale of every block: the largest magnitude, or the 2-norm (never below the largest).

        A block that holds NaN or infinity gets the scale NaN.
        """

    def quantize(
        self,
        x: Tensor,
        scale: Tensor,
        codes: Tensor,
        lattice: Lattice,
        *,
        dither: Dither,
        kind: ScaleKind,
    ) -> None:
        """Round x to the lattice scale/levels·Z with stochastic rounding; pack into `codes`.

        Scales are found first, unless they are given; a value above a given scale makes it NaN.
        """

    def dequantize(
        self,
        codes: Tensor,
        scale: Tensor,
        output: Output,
        lattice: Lattice,
        *,
        dither: Dither | None,
        offset: int,
    ) -> None:
        """Decode codes, or sums of them; with a dither, subtract it. `offset` is in the codes."""

    def accumulate(self, source: Tensor, output: Output) -> None:
        """Output of values as they are: computed in fp32, rounded once to the output's dtype."""

    def add_codes(
        self,
        own: Tensor,
        sums: Tensor | None,
        out: Tensor,
        lattice: Lattice,
        *,
        numel: int,
        width: int,
        wider: int,
    ) -> None:
        """out = sums + own codes, packed at `wider` bits; without `sums` the own codes alone.

        `own` is what `quantize` wrote in 4, 8 or 32 bits for `numel` values; `sums` has `width`
        bits.
        """

    def read_sums(self, sums: Tensor, out: Tensor, *, width: int, offset: int) -> None:
        """out (int32) = sums of `width` bits, less `offset`."""

    # --- powers of two ---

    def exponential_quantize(
        self, x: Tensor, scale: Tensor, codes: Tensor, lattice: Lattice, *, stream: Stream
    ) -> None:
        """Round x to signed powers of two below `scale` (one for the whole tensor)."""

    def exponential_dequantize(
        self, codes: Tensor, scale: Tensor, output: Output, lattice: Lattice
    ) -> None:
        """Decode powers of two."""

    def exponential_reduce(
        self, a: Tensor, b: Tensor, out: Tensor, *, stream: Stream, bits: int
    ) -> None:
        """out = a + b on packed codes, rounded to powers of two without bias."""

    def times_powers(
        self, source: Tensor, exponents: Tensor, out: Tensor, *, inverse: bool
    ) -> None:
        """out = source·2^±e in fp32, rounded once to out's dtype; `out` may be `source`."""

    def row_exponents(
        self,
        v: Tensor,
        out: Tensor,
        *,
        factor: float | Tensor,
        share: float | Tensor,
        epsilon: float,
    ) -> Tensor:
        """Exponents of what an optimizer divides by, and whether any of it is known (a bool).

            out = round(log2(√u + epsilon)),    u = v̂ + share·(mean of v̂'s row - v̂),  v̂ = factor·v

        `out` is int8, of the shape of v, (rows, columns).
        """
        ...

    # --- nested codes ---

    def nested_quantize(
        self,
        x: Tensor,
        scale: Tensor,
        checks: Tensor,
        codes: Tensor,
        lattice: Lattice,
        modulo: Modulo,
        *,
        stream: Stream,
        kind: ScaleKind,
    ) -> None:
        """Encode x modulo `ratio` fine steps of scale/levels, with a check of the cells."""

    def nested_dequantize(
        self,
        codes: Tensor,
        scale: Tensor,
        checks: Tensor,
        side: Tensor,
        failed: Tensor,
        output: Output,
        lattice: Lattice,
        modulo: Modulo,
        *,
        stream: Stream,
    ) -> None:
        """Decode with side information; `failed` gets 1 per check block whose cells are wrong."""

    # --- rotation ---

    def rotate_into(self, x: Tensor, out: Tensor, rotation: Rotation) -> None:
        """out (fp32) = H·D·x."""

    def rotate_back(self, y: Tensor, output: Output, rotation: Rotation) -> None:
        """Output of D·H·y, beyond what its dtype can hold only if not finite. y is overwritten."""

    def rotate_quantize(
        self,
        x: Tensor,
        scale: Tensor,
        codes: Tensor,
        rotation: Rotation,
        lattice: Lattice,
        *,
        stream: Stream,
        kind: ScaleKind,
    ) -> None:
        """`quantize` of the rotated x, all of it one segment."""

    def dequantize_rotate(
        self,
        codes: Tensor,
        scale: Tensor,
        output: Output,
        rotation: Rotation,
        lattice: Lattice,
        *,
        stream: Stream | None,
        offset: int,
    ) -> None:
        """`dequantize`, rotated back."""

    # --- coded integers ---

    def encode_integers(self, q: Tensor, section: Section, coding: Coding) -> None:
        """Code int8 or int16 integers into a section."""

    def decode_integers(
        self, section: Section, q: Tensor, coding: Coding, *, limit: int
    ) -> Tensor | None:
        """The integers of a section; WireError if a chunk is damaged, malformed or beyond ±limit.

        Where that would mean waiting for a device, nothing is raised, a bad chunk is zeros, and
        the result is a float32 of no dimension: 1, or NaN if there was one. Multiply scales by it.
        """

    def ecdq_steps(
        self,
        x: Tensor,
        steps: Tensor,
        parts: tuple[int, ...],
        rule: StepRule,
        budgets: Budgets | None = None,
    ) -> None:
        """The step of every segment.

        `budgets` gets what encoding checks: the squared error that each may spend, infinite where
        there is no check, and the safe step. Steps of two backends may differ in the last bits.
        """

    def ecdq_encode(
        self,
        x: Tensor,
        steps: Tensor,
        section: Section,
        parts: tuple[int, ...],
        coding: Coding,
        *,
        subtract: Subtract,
        budgets: Budgets | None = None,
        spent: Tensor | None = None,
    ) -> None:
        """Quantize every segment with its step, or its safe one, and code the integers.

        `budgets` are those of the call of `ecdq_steps` just before; `spent` gets the expected
        squared error of every segment.
        """

    def ecdq_decode(
        self,
        section: Section,
        steps: Tensor,
        output: Output,
        parts: tuple[int, ...],
        coding: Coding,
    ) -> None:
        """Decode a section; WireError if a chunk is damaged or malformed.

        Where that would mean waiting for a device, such a chunk decodes to NaN instead.
        """

    # --- others ---

    def topk(self, x: Tensor, count: int) -> Tensor:
        """Indices (int64) of the `count` largest magnitudes, largest first, ties by index."""
        ...

    def words_check(self, words: Tensor, salt: int) -> Tensor:
        """The check of 32-bit words (int32), in their order: an int64 of no dimension."""
        ...

    def message_check(self, data: Tensor, salt: int) -> Tensor:
        """`words_check` of all words of a message (uint8, multiples of 16) but word 3, its own."""
        ...

    def payload_check(self, payload: Tensor, salt: int) -> Tensor:
        """A linear check of integers that a collective will add: an int64 of no dimension."""
        ...
