"""NDQSG's receiving side: who sends plainly, how a chunk is decoded, which ratio is safe.

Used by what adds up a chunk, its owner (`nested`) or a server: `in_first_group`, `plain_codec` and
`at_ratio` define who encodes how, `SideInformation` decodes, and `RatioController` chooses the
ratio of the next step. At regular intervals all send plainly: that is a calibration, from which the
controller learns what every ratio would have done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from laconic._scratch import Scratch
from laconic._wire import HEADER_BYTES, Wire
from laconic.codecs import DQSG, NDQSG, Codec
from laconic.codecs._linear import PLAIN, sections
from laconic.errors import ConfigError
from laconic.kernels._layout import CHECK_GROUPS, GROUP, fixed_bits

TOLERANCE = 0.1
_CALIBRATIONS = 4  # that are taken together before a narrower ratio is chosen
_MARGIN = 4.0  # how many times fewer failures than allowed make it safe
_SAMPLE = 1 << 16  # values of a wire that a calibration compares
_CHECKED = CHECK_GROUPS * GROUP  # values that share a check byte
_VALUES, _CHECKS, _FLAGGED, _COMPARED, _DOT, _OWN, _SIDE, _WRONG = range(8)  # places in a tally


def in_first_group(rank: int, n: int) -> bool:
    """Whether a sender is in P1, the first ⌈n/2⌉: it sends dqsg, and is decoded first."""
    return rank < -(-n // 2)


def plain_codec(codec: NDQSG) -> DQSG:
    """What P1 sends: dqsg with the same levels, blocks and coder."""
    return DQSG(levels=codec.levels, block=codec.block, coder=codec.coder)


def ratios_of(codec: NDQSG) -> tuple[int, ...]:
    """The ratios to choose from, narrow to wide; the last is 2M+1, which means dqsg.

    None is below the codec's own `ratio`, and each saves bytes: codes of b bits hold 2^b symbols,
    so without a coder the widest odd ratio of each width, 2^b - 1, is as cheap as a narrower one.

    >>> ratios_of(NDQSG(levels=3)), ratios_of(NDQSG(levels=20))
    ((3, 7), (3, 7, 15, 31, 41))
    >>> ratios_of(NDQSG(levels=3, coder="rans"))
    (3, 5, 7)
    """
    end = 2 * codec.levels + 1
    if codec.coder == PLAIN:
        return (*((1 << b) - 1 for b in range(codec.bits, fixed_bits(codec.levels))), end)
    return (*range(codec.ratio, end, 2), end)


def at_ratio(codec: NDQSG, ratio: int) -> Codec:
    """What P2 sends: ndqsg at this one of its ratios, dqsg at the widest."""
    ratios = ratios_of(codec)
    if ratio not in ratios:
        raise ConfigError(f"{codec} nests at ratios {', '.join(map(str, ratios))}, not {ratio}")
    return plain_codec(codec) if ratio == ratios[-1] else replace(codec, ratio=ratio)


def check_nesting(codec: NDQSG) -> None:
    """ConfigError if nesting saves nothing with these settings, or cannot be watched."""
    if codec.alpha != 1:
        raise ConfigError(
            f"nesting needs alpha=1, not {codec.alpha}: other factors pull decoded values to the "
            "side information, and leave no distance to watch"
        )
    if len(ratios_of(codec)) == 1:
        plain = plain_codec(codec)
        raise ConfigError(
            f"{codec} sends no fewer bits than {plain}: lower ratio=, raise levels=, or use dqsg"
        )


class RatioController:
    """Chooses the ratio ρ: as narrow as failures allow, and wide again before they hurt.

    A wrong value is off by D2 = ρ·D1, a right one has the error D1²/12. So a share p of wrong
    values adds 12·ρ²·p of the quantizer's variance, and `tolerance` t allows

        p(ρ) ≤ t/(12·ρ²)

    1. At a calibration P2 sends dqsg, too. A value would have been wrong at ratio ρ exactly if
       |ĝ - y| ≥ ρ·D1/2: counted for every ρ, on up to 65,536 values of each wire.
    2. Between calibrations check bytes flag blocks of 512 values: p = -ln(1 - flagged share)/512.
       That is too low where some blocks fail more than others, and ends at about 0.01, when all do:
       good enough for an alarm, and calibrations correct it.
    3. Starts at the widest ratio, dqsg. p above what is allowed, at a calibration or between: back
       to the widest, at once. After four calibrations in a row each of which allowed a narrower
       ratio: the narrowest at which they saw, together, a quarter of what is allowed.

    A step whose result is not finite counts for nothing. Counts stay on the device: `add` waits
    for nothing, `decide` reads them. `correlation` is ⟨ĝ,y⟩/(‖ĝ‖‖y‖) as decoded at the last
    calibration: quantization's own noise lowers it.

    Differs from the paper, which has one ratio and does not calibrate.
    """

    def __init__(self, codec: NDQSG, tolerance: float = TOLERANCE) -> None:
        if not isinstance(tolerance, int | float) or not tolerance > 0:
            raise ConfigError(f"tolerance must be a positive number, not {tolerance!r}")
        self.ratios, self.tolerance = ratios_of(codec), float(tolerance)
        self.ratio = self.ratios[-1]
        self.correlation: float | None = None
        self._wrong = self._values = self._share = 0.0
        self._forget()
        self._tally: Tensor | None = None

    @property
    def failures(self) -> float:
        """The share of values that were decoded wrongly, of all that P2 has sent.

        Estimated: in each step the larger of what flags and the last calibration indicate.
        """
        return self._wrong / self._values if self._values else 0.0

    @property
    def seen(self) -> tuple[float, float]:
        """Of the values that P2 has sent, how many were wrong, as estimated; and all."""
        return self._wrong, self._values

    def allowed(self, ratio: int) -> float:
        """The share of wrong values that is tolerated."""
        return self.tolerance / (12 * ratio**2)

    def add(self, tally: Tensor, finite: Tensor) -> None:
        """Count what a `SideInformation` has seen, if its result is finite."""
        counted = torch.where(finite, tally, 0.0)  # not a product: 0·NaN
        if self._tally is None:
            self._tally = counted
        else:
            self._tally = self._tally.to(tally.device).add_(counted)

    def decide(self) -> int:
        """The ratio to use from now on. Waits for the device."""
        if self._tally is None:
            return self.ratio
        found, self._tally = self._tally.tolist(), None
        flagged, compared = wrong_values(found[_FLAGGED], found[_CHECKS]), found[_COMPARED]
        self._values += found[_VALUES]
        self._wrong += max(flagged, self._share) * found[_CHECKS] * _CHECKED
        if compared:
            norms = math.sqrt(found[_OWN] * found[_SIDE])
            self.correlation = found[_DOT] / norms if norms else 0.0
            would = dict(zip(self.ratios, found[_WRONG:], strict=False))
            self._share = would.get(self.ratio, 0.0) / compared
        if max(flagged, self._share) > self.allowed(self.ratio):
            self.ratio, self._share = self.ratios[-1], 0.0
            self._forget()
        elif compared:
            self._calibrate(found[_WRONG:], compared)
        return self.ratio

    def _calibrate(self, would: list[float], values: float) -> None:
        """After a calibration on `values` values, of which `would` be wrong at each ratio."""
        if self._narrowest(would, values) == self.ratio:
            self._forget()
            return
        self._calibrations, self._compared = self._calibrations + 1, self._compared + values
        self._would = [a + b for a, b in zip(self._would, would, strict=True)]
        if self._calibrations == _CALIBRATIONS:
            before = self.ratio
            self.ratio = self._narrowest([_MARGIN * count for count in self._would], self._compared)
            if self.ratio < before:
                self._share = self._would[self.ratios.index(self.ratio)] / self._compared
            self._forget()

    def _narrowest(self, would: list[float], values: float) -> int:
        """The narrowest ratio that is allowed; that in use if it is none below."""
        pairs = zip(self.ratios, would, strict=False)  # at the end nothing is wrong
        fits = (r for r, count in pairs if count <= self.allowed(r) * values)
        return min(self.ratio, next(fits, self.ratio))

    def _forget(self) -> None:
        """Restart the calibration."""
        self._calibrations, self._compared = 0, 0.0
        self._would = [0.0] * (len(self.ratios) - 1)  # wrong at each ratio

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to resume exactly."""
        return {
            "ratio": self.ratio,
            "looks": self._calibrations,
            "looked": self._compared,
            "would": list(self._would),
            "wrong": self._wrong,
            "values": self._values,
            "share": self._share,
            "correlation": self.correlation,
            "tally": None if self._tally is None else self._tally.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state_dict."""
        if state["ratio"] not in self.ratios or len(state["would"]) != len(self.ratios) - 1:
            raise ConfigError(f"this state is of another codec: its ratios are not {self.ratios}")
        self.ratio, self.correlation = int(state["ratio"]), state["correlation"]
        self._calibrations, self._compared = int(state["looks"]), float(state["looked"])
        self._would = [float(count) for count in state["would"]]
        self._wrong, self._values = float(state["wrong"]), float(state["values"])
        self._share = float(state["share"])
        self._tally = None if state["tally"] is None else state["tally"].clone()


def wrong_values(flagged: float, checks: float) -> float:
    """The share of wrong values, from the share of blocks of 512 that hold one: -ln(1 - f)/512.

    Too low where some blocks fail more than others: -ln is convex.
    """
    if not checks:
        return 0.0
    # all flagged is at least half a block short of certainty
    return -math.log1p(-min(flagged / checks, 1 - 0.5 / checks)) / _CHECKED


class SideInformation:
    """The receiving side of one chunk: wires in, the mean of all workers in `out` (fp32).

        out = Σ_i ĝ_i / n,   ĝ_i of P2 decoded with y = the mean of everything before it

    1. `start(own)` with the receiver's exact values, if it is a worker itself.
    2. `add(wire, first=True)` for every wire of P1, then `add(wire, first=False)` for P2, one after
       another: each refines y. With `side` (say, the mean of the step before) y is that throughout,
       and all are P2.
    3. `finish()` passes the counts to the control.

    P2's wires are of `at_ratio(codec, control.ratio)`, with `calibrates` of `plain_codec(codec)`;
    WireError if one is not. A calibration compares them with y, for a pass or two more. Buffers are
    `scratch`'s: objects that share one may be open at the same time, in one thread.

    >>> import laconic as lc
    >>> codec, g, out = lc.NDQSG(), torch.tensor([1.0, -0.4, 0.2]), torch.empty(3)
    >>> control = RatioController(codec)
    >>> control.ratio = 3
    >>> side_information = SideInformation(codec, out, workers=2, control=control)
    >>> side_information.start(g + 0.1)
    >>> side_information.add(at_ratio(codec, 3).encode(g, lc.Key()), first=False)
    >>> side_information.finish()
    >>> bool((out - (g + 0.05)).abs().max() <= 1 / 3 / 4)
    True
    """

    def __init__(
        self,
        codec: NDQSG,
        out: Tensor,
        *,
        workers: int,
        control: RatioController,
        side: Tensor | None = None,
        calibrates: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        self.codec, self.out, self.workers, self.control = codec, out, workers, control
        self._plain, self._nested = plain_codec(codec), at_ratio(codec, control.ratio)
        self._exact = calibrates or control.ratio == control.ratios[-1]  # P2 sends dqsg
        self._side, self._calibrates, self._scratch = side, calibrates, scratch or Scratch()
        self._count = self._later = 0
        self._tally: Tensor | None = None

    def start(self, own: Tensor | None) -> None:
        """Begin with the receiver's own values; None if it has none, as a server."""
        self._later, self._tally = 0, None
        if own is None:
            self.out.zero_()
            self._count = 0
        else:
            self.out.copy_(own).mul_(1 / self.workers)  # in fp32 before it is weighed
            self._count = 1

    def add(self, wire: Wire, *, first: bool) -> None:
        """Decode a worker's wire, and add it."""
        weight = 1 / self.workers
        if not first:
            self._later += 1
        if self._calibrates and not first:
            value = self._plain.decode(wire, out=self._take("value", torch.float32))
            self._compare(value, self._known(), wire)
            self.out.add_(value, alpha=weight)
        elif first or self._exact:
            self._plain.decode(wire, out=self.out, add=True, weight=weight)
        else:
            flags = self._take("failed", torch.uint8, self.codec.checks(self.out.numel()))
            options: dict[str, Any] = {"out": self.out, "add": True, "weight": weight}
            self._nested.decode(wire, side=self._known(), failed=flags, **options)
            self._counts()[_FLAGGED] += flags.sum()
        self._count += 1

    def finish(self) -> None:
        """Pass the counts to the control, without waiting for the device; `out` is the mean."""
        numel = self.out.numel()
        if not self._later or not numel:
            return
        tally = self._counts()
        tally[_VALUES] += self._later * numel
        if not self._exact:
            tally[_CHECKS] += self._later * self.codec.checks(numel)
        self.control.add(tally, self.out.sum().isfinite())

    def _known(self) -> Tensor:
        """y: the side that was given, or the mean of what has been added."""
        if self._side is not None:
            return self._side
        if not self._count:
            raise ValueError(
                "nothing is known yet: add a wire of the first group, start with own values, or "
                "give side="
            )
        known = self._take("known", torch.float32)
        return torch.mul(self.out, self.workers / self._count, out=known)

    def _compare(self, value: Tensor, side: Tensor, wire: Wire) -> None:
        """Count, on a sample, what would be wrong at each ratio, and how alike the two are."""
        ratios = self.control.ratios[:-1]
        at, blocks, limits = _sample(value.numel(), wire.header.block, ratios, value.device)
        scales, _ = sections(wire.buffer[HEADER_BYTES:], wire.header)
        own, known, scale = value[at], side[at].to(torch.float32), scales[blocks]
        # wrong if |ĝ - y| ≥ ρ·scale/(2M); all zeros decode rightly at any ratio
        distance = torch.where(scale > 0, (own - known).abs_().mul_(2 * self.codec.levels), -1.0)
        tally = self._counts()
        tally[_COMPARED] += at.numel()
        tally[_DOT] += own @ known
        tally[_OWN] += own @ own
        tally[_SIDE] += known @ known
        tally[_WRONG:] += (distance >= limits * scale).sum(1)

    def _counts(self) -> Tensor:
        if self._tally is None:
            size = _WRONG + len(self.control.ratios) - 1
            self._tally = torch.zeros(size, dtype=torch.float64, device=self.out.device)
        return self._tally

    def _take(self, name: str, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        size = self.out.numel() if numel is None else numel
        return self._scratch.take(f"side information {name}", size, self.out.device, dtype)


@lru_cache(maxsize=256)
def _sample(
    numel: int, block: int, ratios: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Which values to compare, whose scales they have, and the ratios as a column.

    All of a short tensor; of a long one always the same random ones, since a stride would see some
    columns of a matrix only.
    """
    at = torch.arange(numel)
    if numel > _SAMPLE:
        at = torch.randint(numel, (_SAMPLE,), generator=torch.Generator().manual_seed(0))
    blocks = at // block if block else torch.zeros_like(at)
    limits = torch.tensor(ratios, dtype=torch.float32).view(-1, 1)
    return at.to(device), blocks.to(device), limits.to(device)
