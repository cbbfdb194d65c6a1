"""Nested: scatter-reduce for ndqsg. Owners of chunks know enough to resolve what others send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic._cost import Cluster, EncodingError, Task, TensorLoad
from laconic._key import Key
from laconic._settings import between, check_settings, described, one_of, refused
from laconic._wire import Wire
from laconic.codecs import NDQSG, Codec
from laconic.comm._context import ExchangeContext, ExchangeMemory, Sizes, chunks_of, encode
from laconic.comm._transport import Message, all_to_all, no_values
from laconic.errors import ConfigError, WireError
from laconic.exchanges._base import Exchange
from laconic.exchanges._scatter_reduce import PLAIN_GRAIN, ScatterReduce, gather
from laconic.exchanges._side_information import (
    TOLERANCE,
    RatioController,
    SideInformation,
    at_ratio,
    check_nesting,
    in_first_group,
    plain_codec,
    ratios_of,
)


@dataclass(frozen=True, kw_only=True)
class Nested(Exchange):
    """`nested`: ndqsg without a server, at a ratio that follows how alike gradients are.

    x is cut into n chunks; rank j owns chunk j. Its owner is a server: only it needs side
    information, y, and it has its own exact values to begin with.

    1. Rank i encodes chunk j and sends it to its owner (all-to-all): plainly (dqsg, log2(2M+1)
       bits) if (i - j) mod n < ⌈n/2⌉, else as ndqsg at the owner's ratio ρ (log2 ρ bits).
    2. The owner decodes its followers in order of (i - j) mod n. y is the mean of everything so
       far, so the plain ones come first, and each later one refines it.
    3. It encodes the mean over n, in fp32, as dqsg, and sends it to all; all decode that.
    4. With it travels, as one plain fp32 value, the ratio for the next step, which the owner's
       `RatioController` chooses from the failures it has seen: all ranks hold all ratios, without a
       collective of their own. At every `every`-th step all send plainly, so that owners see what
       each ratio would have done.

    Groups turn with the owner: it is the first of P1 itself, at no bytes, and all ranks send
    equally much. Fixed groups would let P2 wait for P1's longer messages. With b = log2(2M+1) and
    h = ⌈n/2⌉, a rank sends for each value of x

        out: ((h-1)·b + (n-h)·log2 ρ)/n        back: (n-1)/n·b        bits

    between calibrations (codes of fixed width round b and log2 ρ up). The other form without a
    server, adding up P1, freezing y and gathering P2, spreads y to all ranks and sends each wire of
    P2 whole to n - 1 ranks: 2·(n-1)/n·b + (n-1)/2·log2 ρ on average.

    `side` is where y comes from: "group" (above); "own", P1 being the owner alone, so that all
    messages are short; "previous", the mean of the step before, of which the owner keeps its chunk
    (the last finite value of each element: after NaN it is older, not gone).
    `tolerance` is the variance that failures may add, relative to the quantizer's. The codec's
    `ratio` is the narrowest ever taken; where nothing is safe all is dqsg, and so is a first step.

    A ratio narrows after four calibrations. On the CPU failures are seen, and ratios read, at every
    step; on CUDA at calibrations only (two waits for the device): until then ratios stay the same.
    The context's `memory` keeps ratios and side information from step to step; without it all is
    dqsg.

    Abdi and Fekri, 2019, arXiv 1904.01197, section IV. Differs from the paper: no server, groups by
    owner, the owner's own gradient, the ratio.
    """

    name: ClassVar[str] = "nested"

    side: str = field(default="group", metadata=one_of("group", "own", "previous"))
    tolerance: float = field(default=TOLERANCE, metadata=described("a positive number"))
    every: int = field(default=16, metadata=between(2))

    def __post_init__(self) -> None:
        check_settings(self)
        tolerance = self.tolerance
        if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or tolerance <= 0:
            raise refused(self, "tolerance")

    def check(self, codec: Codec) -> None:
        check_nesting(_ndqsg(codec))

    def check_units(self, codec: Codec) -> None:
        if self.side == "previous":
            raise ConfigError(
                "side=previous compares values with those of the step before, and an optimizer's "
                "units change between steps: leave optimizer= out, or use side=group"
            )

    def mean(
        self, x: Tensor, codec: Codec, context: ExchangeContext, uncompressed: Tensor | None = None
    ) -> None:
        own, n, rank = _ndqsg(codec), context.size, context.rank
        chunks = chunks_of(x, n)
        plain = chunks_of(no_values(x) if uncompressed is None else uncompressed, n, PLAIN_GRAIN)
        kept, calibrates = self._kept(own, context, x.numel()), context.step % self.every == 0
        total = context.scratch.take("sum", chunks[rank].numel(), x.device, torch.float32)
        # the ratio follows an owner's plain values
        sizes = [part.numel() + 1 for part in plain]
        after = context.scratch.take("plain and ratio", sum(sizes), x.device).split(sizes)
        self._scatter(chunks, own, context, kept, total, plain, after[rank][:-1], calibrates)
        reading = calibrates or not x.is_cuda
        after[rank][-1] = kept.control.decide() if reading else kept.control.ratio
        gather(total, plain_codec(own), context, chunks, places=[()] * n, uncompressed=after)
        for part, found in zip(plain, after, strict=True):
            part.copy_(found[:-1])
        if reading:
            kept.ratios = _ratios(after, own)
        if self.side == "previous":
            kept.remember(chunks[rank])

    def cost(self, load: TensorLoad, cluster: Cluster) -> list[Task]:
        """Tasks of a bucket, as scatter-reduce's; b is the mean over plain and nested wires."""
        return ScatterReduce().cost(load, cluster)

    def mean_error(self, one: EncodingError, codec: Codec | None = None) -> float:
        """NMSE of the mean, as scatter-reduce's."""
        return ScatterReduce().mean_error(one)

    def encodes_mean(self, codec: Codec) -> bool:
        return True

    def _first(self, rank: int, owner: int, n: int) -> bool:
        """Whether a rank sends plainly to an owner, whatever the ratio is."""
        turned = (rank - owner) % n
        return self.side == "group" and in_first_group(turned, n)

    def _scatter(
        self,
        chunks: Sequence[Tensor],
        codec: NDQSG,
        context: ExchangeContext,
        kept: Kept,
        out: Tensor,
        uncompressed: Sequence[Tensor],
        uncompressed_out: Tensor,
        calibrates: bool,
    ) -> None:
        """out = the mean over ranks of chunk `rank`, in fp32; uncompressed_out of plain values."""
        n, rank, dtype = context.size, context.rank, chunks[0].dtype
        plain = plain_codec(codec)
        messages = []
        for j, chunk in enumerate(chunks):
            wire = None
            if j != rank and chunk.numel():
                first = calibrates or self._first(rank, j, n)
                sent = plain if first else at_ratio(codec, kept.ratios[j])
                wire = encode(sent, chunk, context.key(rank, j), (), context)
            messages.append(Message.of(wire, uncompressed[j] if j != rank else uncompressed[j][:0]))
        nested = plain if calibrates else at_ratio(codec, kept.ratios[rank])
        expected = [plain if self._first(i, rank, n) else nested for i in range(n)]
        here = [int(i != rank) for i in range(n)]
        room = [
            expected[i].nbytes(out.numel(), dtype) if here[i] and out.numel() else 0
            for i in range(n)
        ]
        sizes = Sizes(tuple(room), known=not codec.varies)
        arriving = all_to_all(
            messages, context, sizes, [uncompressed_out.numel() * other for other in here]
        )
        torch.mul(uncompressed[rank], 1 / n, out=uncompressed_out)
        side = kept.side(out.device)
        side_information = SideInformation(
            codec,
            out,
            workers=n,
            control=kept.control,
            side=side,
            calibrates=calibrates and (side is not None or self.side != "previous"),
            scratch=context.scratch,
        )
        side_information.start(chunks[rank])
        for i in (*range(rank + 1, n), *range(rank)):  # P1 first
            if out.numel():
                wire = _arrived(
                    expected[i], arriving[i].wire, out, context.key(i, rank), dtype, context
                )
                side_information.add(wire, first=self._first(i, rank, n))
            uncompressed_out.add_(arriving[i].uncompressed, alpha=1 / n)
        side_information.finish()

    def _kept(self, codec: NDQSG, context: ExchangeContext, numel: int) -> Kept:
        """What is remembered of this tensor, cut like this.

        DDP rebuilds its buckets after the first step of a run, also of a resumed one: what is known
        of the earlier ones is kept for when they return.
        """
        places = tuple((p.parameter, p.start, p.numel) for p in context.places)
        key = (self.name, context.tensor, context.first_chunk, context.size, numel, places)
        found = context.memory.kept.get(key)
        if found is None:
            control = RatioController(codec, self.tolerance)
            found = Kept(control, [control.ratio] * context.size)
        elif isinstance(found, Mapping):  # of a state_dict
            found = Kept.of(codec, self.tolerance, found)
        found.step = context.step
        context.memory.kept[key] = found
        return found


@dataclass
class Kept:
    """What one rank remembers of one tensor from step to step."""

    control: RatioController  # of the own chunk
    ratios: list[int]  # of all owners, the same on all ranks
    previous: Tensor | None = None  # the mean of the own chunk, where it is side information
    step: int = 0  # when it was last used

    def side(self, device: torch.device) -> Tensor | None:
        """The mean of the step before, if it is kept."""
        if self.previous is not None and self.previous.device != device:  # saved on another one
            self.previous = self.previous.to(device)
        return self.previous

    def remember(self, mean: Tensor) -> None:
        """Keep what is finite of the mean, without waiting for the device."""
        if self.previous is None:
            self.previous = torch.zeros_like(mean, dtype=torch.float32)
        self.previous.copy_(torch.where(mean.isfinite(), mean, self.previous))

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to resume exactly."""
        return {
            "control": self.control.state_dict(),
            "ratios": list(self.ratios),
            "previous": None if self.previous is None else self.previous.clone(),
            "step": self.step,
        }

    @staticmethod
    def of(codec: NDQSG, tolerance: float, state: Mapping[str, Any]) -> Kept:
        """From a state_dict."""
        control = RatioController(codec, tolerance)
        control.load_state_dict(state["control"])
        previous = state["previous"]
        return Kept(
            control=control,
            ratios=list(state["ratios"]),
            previous=None if previous is None else previous.clone(),
            step=int(state["step"]),
        )


@dataclass(frozen=True, kw_only=True)
class Nesting:
    """Statistics of nesting: the mean ratio in use, and what this rank has seen as an owner."""

    ratio: float
    failures: float
    correlation: float | None


def nesting(memory: ExchangeMemory) -> Nesting | None:
    """Of all tensors that a memory is of; None if none was exchanged nested."""
    found = [one for one in list(memory.kept.values()) if isinstance(one, Kept)]
    if not found:
        return None
    # buckets that DDP has rebuilt are used no more
    newest = max(one.step for one in found)
    used = [one for one in found if one.step >= newest - 1]
    ratios = [ratio for one in used for ratio in one.ratios]
    alike = [one.control.correlation for one in used if one.control.correlation is not None]
    wrong, values = (sum(part) for part in zip(*(one.control.seen for one in found), strict=True))
    return Nesting(
        ratio=sum(ratios) / len(ratios),
        failures=wrong / values if values else 0.0,
        correlation=sum(alike) / len(alike) if alike else None,
    )


def _ndqsg(codec: Codec) -> NDQSG:
    if codec.nested is not None:
        return codec.nested
    raise ConfigError(
        f"nested carries ndqsg alone, which decodes with what an owner knows, not {codec.name}; "
        f"use ndqsg, or {codec.name} on another exchange, such as scatter-reduce"
    )


def _arrived(
    codec: Codec,
    message: Tensor,
    out: Tensor,
    key: Key,
    dtype: torch.dtype,
    context: ExchangeContext,
) -> Wire:
    """A wire of the codec that was agreed upon; decoding raises WireError if it is another's.

    On CUDA a header is read once for each codec, because reading it waits for the device.
    """
    same = (codec, key.tensor, key.rank, key.phase, out.numel(), dtype)
    what: dict[str, Any] = {"key": key, "shape": out.shape, "dtype": dtype}
    if same in context.trusted_headers:
        return codec.trust(message, **what)
    wire = Wire.parse(message, **what)
    if message.is_cuda:
        context.trusted_headers.add(same)
    return wire


def _ratios(after: Sequence[Tensor], codec: NDQSG) -> list[int]:
    """The ratios that owners have announced, checked."""
    ratios, found = ratios_of(codec), torch.stack([part[-1] for part in after]).tolist()
    for owner, ratio in enumerate(found):
        if ratio not in ratios:
            raise WireError(f"rank {owner} announced the ratio {ratio}, which is none of {ratios}")
    return [int(ratio) for ratio in found]
