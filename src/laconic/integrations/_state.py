"""What the DDP hook knows and remembers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic._version import __version__
from laconic.codecs import Codec, Place
from laconic.codecs._memory import Scratch
from laconic.errors import ConfigError
from laconic.exchanges import Exchange
from laconic.exchanges._agree import agree
from laconic.exchanges._lane import Lane
from laconic.exchanges._lane import lanes as make_lanes
from laconic.exchanges._nested import nesting
from laconic.exchanges._policy import Chooser, Policy
from laconic.integrations._choices import Choices, check_warmup, line
from laconic.integrations._common import Stats
from laconic.integrations._kappa import Kappa

_MOST_FILLED = 1 / 64  # of a load, zeros that are encoded to save copying


@dataclass(frozen=True)
class Piece:
    """A parameter inside a bucket."""

    number: int
    start: int
    numel: int


@dataclass(frozen=True)
class Load:
    """The pieces of a bucket that travel under one codec.

    `fillers` are among them, zeroed: small plain pieces that lie between encoded ones. Encoding
    zeros costs less than copying all the others together and back.
    """

    codec: Codec
    exchange: Exchange
    pieces: tuple[Piece, ...]
    fillers: tuple[Piece, ...] = ()

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The pieces, for codecs with a step or a memory for each."""
        return tuple(
            Place(parameter=piece.number, start=0, numel=piece.numel, total=piece.numel)
            for piece in self.pieces
        )


@dataclass(frozen=True)
class Plan:
    """What a bucket is made of: encoded loads, and values that travel as they are."""

    loads: tuple[Load, ...]
    plain: tuple[Piece, ...]


class HookState:
    """What the hook needs to know, and what it remembers; `lc.compress` makes and registers one.

    Make it on all ranks of the group at once: they compare settings, and end together if those
    differ. For Lightning and Accelerate, which register hooks themselves:
    `HookState(model, "ecdq:error=0.08")` and `lc.comm_hook`. States of one model that take turns
    may share `lanes`, threads and process groups.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: str | Codec,
        *,
        exchange: str | Exchange | None = None,
        policy: Chooser | None = None,
        warmup_steps: int = 0,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        lanes: tuple[Lane, ...] | None = None,
    ) -> None:
        self._pairs = Choices(spec, exchange)
        self.codec, self.exchange = self._pairs[""]
        check_warmup(warmup_steps)
        if not dist.is_initialized():
            raise ConfigError("start torch.distributed first: torchrun, then init_process_group()")
        self.warmup_steps, self.seed, self.step = warmup_steps, seed, 0
        self.scratch, self.kappa = Scratch(), Kappa()
        self.known: set[Hashable] = set()
        self.memory: dict[Hashable, Any] = {}  # of exchanges
        self._parameters: dict[int, tuple[int, str | None]] = {}  # number, and text if encoded
        self._plans: dict[tuple[int, ...], Plan] = {}
        self.turns: dict[int, int] = {}  # of parameters that come one by one
        layout = self._choose(module, policy or Policy())
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.lanes = lanes or make_lanes(group, device, timeout_s)
        settings = {
            "laconic": __version__,
            "codec": str(self.codec),
            "exchange": str(self.exchange),
            "warmup_steps": str(warmup_steps),
            "seed": str(seed),
            "parameters": "\n".join(layout),
        }
        agree(settings, self.lanes[0].group, device)
        for lane in self.lanes:
            for _, way in self._pairs.values():
                way.prepare(lane.group)

    def _choose(self, module: nn.Module, policy: Chooser) -> list[str]:
        """Ask the policy about every parameter; a line for each, to be compared between ranks."""
        lines = []
        for number, (name, parameter) in enumerate(module.named_parameters()):
            text = self._pairs.text(policy(name, parameter)) if parameter.requires_grad else None
            self._parameters[id(parameter)] = number, text
            lines.append(line(name, parameter, text))
        return lines

    def stats(self) -> Stats:
        """Bytes and times so far."""
        nested = nesting(self.memory)
        return Stats(
            steps=self.step,
            sent_bytes=sum(lane.traffic.sent_bytes for lane in self.lanes),
            plain_bytes=sum(lane.plain_bytes for lane in self.lanes),
            exchange_seconds=sum(lane.seconds for lane in self.lanes),
            wire_seconds=sum(lane.traffic.wire_seconds for lane in self.lanes),
            local_bytes=sum(lane.traffic.local_bytes for lane in self.lanes),
            kappa=self.kappa.mean(),
            nesting_ratio=nested and nested.ratio,
            decode_failures=nested and nested.failures,
            correlation=nested and nested.correlation,
        )

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, on every rank, to go on exactly: steps, κ, and all memories."""
        memories = {text: codec.state_dict() for text, codec in self._remembering()}
        return {
            "step": self.step,
            "turns": dict(self.turns),
            "codec": str(self.codec),
            "kappa": self.kappa.state_dict(),
            "memory": memories,
            "exchange memory": {key: _saved(kept) for key, kept in self.memory.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state_dict."""
        if state["codec"] != str(self.codec):
            raise ConfigError(f"this state is of {state['codec']}, not of {self.codec}")
        self.step, self.turns = int(state["step"]), dict(state["turns"])
        self.kappa.load_state_dict(state["kappa"])
        for text, codec in self._remembering():
            codec.load_state_dict(state["memory"][text])
        self.memory = dict(state.get("exchange memory", {}))  # exchanges take up what is theirs

    def _remembering(self) -> list[tuple[str, Any]]:
        return [(text, codec) for text, (codec, _) in self._pairs.items() if codec.remembers]

    def plan(self, parameters: Sequence[Tensor]) -> Plan:
        """What a bucket is made of; known by its parameters, because buckets are rebuilt."""
        key = tuple(map(id, parameters))
        if key not in self._plans:
            self._plans[key] = self._planned(parameters)
        return self._plans[key]

    def _planned(self, parameters: Sequence[Tensor]) -> Plan:
        by_text: dict[str | None, list[Piece]] = {}
        start = 0
        for parameter in parameters:
            number, text = self._parameters[id(parameter)]
            by_text.setdefault(text, []).append(Piece(number, start, parameter.numel()))
            start += parameter.numel()
        plain = tuple(by_text.pop(None, []))
        loads = [
            Load(*self._pairs[text], *_filled(pieces, plain))
            for text, pieces in by_text.items()
            if text is not None
        ]
        return Plan(tuple(loads), plain)


def _saved(kept: Any) -> Mapping[str, Any]:
    """What an exchange remembers; as it was loaded, if it was not used since."""
    return kept if isinstance(kept, Mapping) else kept.state_dict()


def _filled(
    pieces: Sequence[Piece], plain: Sequence[Piece]
) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The pieces, with plain ones between them if these are few and make one run of all."""
    first, last = pieces[0].start, pieces[-1].start + pieces[-1].numel
    between = tuple(piece for piece in plain if first < piece.start < last)
    added, total = (sum(piece.numel for piece in some) for some in (between, pieces))
    if added + total != last - first or added > _MOST_FILLED * total:
        return tuple(pieces), ()
    return tuple(sorted((*pieces, *between), key=lambda piece: piece.start)), between
